"""The campaign's share of `make test`; `make test-neighbours` has the rest, see neighbours/."""

from __future__ import annotations

import asyncio
import re
import time
from asyncio.events import Handle
from dataclasses import replace
from pathlib import Path

import pytest

from neighbours.campaign import groups, run
from neighbours.processors import Part, processors
from neighbours.shares import SCENARIOS, Share
from neighbours.stepping import note_steps, steps
from support.proxied import HAPROXY

SHARE = Share(calm_s=0.5, attack_s=1.0, small=True, alone=False)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_resets_and_half_calls_without_a_token_leave_a_tenant_whole() -> None:
    names = ["rapid reset", "unfinished calls", "half HTTP", "HPACK bomb"]
    rows, ran, broken = run(names, SHARE)
    assert not broken
    assert ran == len(rows) == len(names)
    # 13 kB for each of 40,000 streams, 500 MiB, if they could pile up.
    assert rows[0].peak_mib - rows[0].before_mib < 300


@pytest.mark.long
@pytest.mark.timeout(600)
def test_traces_that_fill_the_index_evict_those_of_their_owner_alone() -> None:
    [row], _, broken = run(["full index"], replace(SHARE, attack_s=120.0))
    assert not broken
    assert row.evicted > 1000


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAPROXY, reason="haproxy is not installed")
def test_a_tenant_writes_and_reads_through_the_proxy_beside_resets_and_a_bomb() -> None:
    names = ["rapid reset, proxied", "HPACK bomb, proxied"]
    rows, ran, broken = run(names, SHARE)
    assert not broken
    assert ran == len(rows) == len(names)
    # The proxy keeps them: none costs the server anything.
    assert all(row.peak_mib - row.before_mib < 30 for row in rows)
    assert rows[1].outcomes["connections closed by the server"] == 1


def test_scenarios_with_other_settings_have_another_server() -> None:
    for names in groups(SCENARIOS, SHARE):
        settings = [(SCENARIOS[name].settings, SCENARIOS[name].proxied) for name in names]
        assert all(each == settings[0] for each in settings)
    assert sum(map(len, groups(SCENARIOS, SHARE))) == len(SCENARIOS)


@pytest.mark.parametrize("count", range(1, 10))
def test_tenants_have_processors_of_their_own_where_there_are_enough(count: int) -> None:
    parts = processors(set(range(10, 10 + count)))
    assert all(parts.values())
    assert set().union(*parts.values()) == set(range(10, 10 + count))
    server, victim, neighbour = (parts[part] for part in Part)
    assert len(server) == max(1, count // 2)
    assert len(victim) == 1
    assert bool(server & victim) == (count < 2)
    assert bool(victim & neighbour) == (count < 3)


def test_long_steps_of_the_loop_are_noted_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps"
    assert steps(file) == []

    async def spin(milliseconds: float) -> None:
        until = time.thread_time() + milliseconds / 1000
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)

    async def outer() -> None:
        await asyncio.sleep(0)
        await spin(20)

    with file.open("w", buffering=1) as output:
        monkeypatch.setattr(Handle, "_run", Handle._run)  # to be put back
        note_steps(output)
        asyncio.run(outer())
    [long] = [step for step in steps(file) if step.computed >= 0.019]
    assert long.took >= long.computed
    assert re.search(r"outer\b.* .*spin:\d+$", long.place)
