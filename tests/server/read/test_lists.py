"""Lists say of each trace what a look at the trace itself says, whatever has happened since."""

from __future__ import annotations

import random
from typing import Any

import pytest

from oracle.cluster import Cluster, random_specs
from oracle.engine import Chances
from oracle.harness import AGENT_TIMEOUT_S, RUN, InlineWorld
from oracle.runs import LAYOUTS
from oracle.sharded import ShardedWorld
from routetrace.client import TraceStat, TraceState
from routetrace.server.common.slices import IN_TURNS
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.index.traces.lineage import Incarnation
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read import paging, parts
from routetrace.server.rows import served
from routetrace.server.rows.served import Known
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.recorder import records
from support.seeds import seeds

_OF_STAT = ("missing", "token_digests")

WORLDS: dict[str, type[InlineWorld]] = {"one worker": InlineWorld, "several": ShardedWorld}


def facts(stat: TraceStat) -> dict[str, Any]:
    """What both a list and `stat` have."""
    return {n: value for n, value in stat.to_dict().items() if n not in _OF_STAT}


def pages(world: InlineWorld, size: int) -> list[str]:
    """The ids of all traces, `size` at a time."""
    found, token = [], ""
    while True:
        request = pb.ListTracesRequest(run=RUN, page_size=size, page_token=token)
        page = world.asked(request, "").call("ListTraces", request)
        assert len(page.traces) <= size
        found += [info.trace_id for info in page.traces]
        if not page.next_page_token:
            return found
        token = page.next_page_token


def every(world: InlineWorld) -> dict[str, dict[str, Any]]:
    """What a list says of each trace."""
    stats = [*world.client.find()]
    listed = {stat.trace_id: facts(stat) for stat in stats}
    assert len(listed) == len(stats)
    return listed


def compare(world: InlineWorld, rng: random.Random) -> dict[str, dict[str, Any]]:
    """Compare lists with `stat` of each trace; return what they say."""
    world.rest()
    listed = every(world)
    assert pages(world, rng.randint(1, 9)) == [*listed]
    for trace_id, found in listed.items():
        assert found == facts(world.client.stat(trace_id))
    state = rng.choice([*TraceState])
    of_state = [stat.trace_id for stat in world.client.find(states=[state])]
    assert of_state == [i for i, found in listed.items() if found["state"] == state]
    labels = [found["labels"] for found in listed.values() if found["labels"]]
    if labels:
        name, text = rng.choice(sorted(rng.choice(labels).items()))
        with_label = [stat.trace_id for stat in world.client.find(labels={name: text})]
        assert with_label == [i for i, f in listed.items() if f["labels"].get(name) == text]
    return listed


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_a_list_says_what_stat_says(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are lost and come back, servers start again, traces are deleted, leases change."""
    rng = random.Random(f"lists {seed}")
    monkeypatch.setattr(paging, "MOST_LOOKED_AT", rng.choice((3, 10_000)))
    monkeypatch.setattr(parts, "LIST_SECONDS", rng.choice((0.0, 2.0)))
    layout = rng.choice(LAYOUTS)
    compared = again = 0
    lost = False
    with WORLDS[kind](layout, seed) as world:
        chances = Chances(branch=0.5 if seed % 3 == 0 else 0.0)
        cluster = Cluster(layout, seed, world, random_specs(rng, layout), chances)
        cluster.submit_workload(25)
        while cluster.step():
            world.disturb()
            if rng.random() < 0.03:
                listed = compare(world, rng)
                compared += len(listed)
                if listed and rng.random() < 0.2:
                    world.client.delete(rng.choice([*listed]))
                elif listed and rng.random() < 0.2:
                    seconds = rng.randrange(1 << 30, 1 << 31)
                    world.client.renew([rng.choice([*listed])], ttl_seconds=seconds)
            if not lost and rng.random() < 0.01:
                # Who is silent is lost, until it says something; no writer is forgotten.
                world.pass_time(1.5 * AGENT_TIMEOUT_S["inline"])
                lost = True
            if kind == "one worker" and rng.random() < 0.02:
                # A server that starts again knows of no loss, and has everything from its records.
                before = compare(world, rng)
                world.restart(snapshot=rng.random() < 0.5)
                after = compare(world, rng)
                assert [*after] == [*before]
                for trace_id, found in after.items():
                    if found["state"] == before[trace_id]["state"]:
                        assert found == before[trace_id]
                        again += 1
                    else:
                        assert found["state"] == TraceState.RUNNING
        cluster.barrier()
        compared += len(compare(world, rng))
        world.settle()
        compared += len(compare(world, rng))
    assert compared > 20
    assert again or kind != "one worker"


async def listed(core: Core, **asked: Any) -> tuple[list[str], str]:
    """Ids of a page of a core's run, and the token of the next one."""
    catalog = core._traces._catalog("run")
    data = await catalog.traces(pb.ListTracesRequest(run="run", **asked), IN_TURNS)
    page = pb.ListTracesResponse.FromString(data)
    return [info.trace_id for info in page.traces], page.next_page_token


async def filled(seed: int) -> Core:
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    for record in records(seed):
        apply_record(core.state, core.state.number + 1, record)
    return core


async def test_a_second_look_views_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[str] = []
    view = Known.__init__

    def counted(known: Known, trace: Trace, incarnation: Incarnation) -> None:
        views.append(trace.key[1])
        view(known, trace, incarnation)

    monkeypatch.setattr(Known, "__init__", counted)
    monkeypatch.setattr(served, "MAX_REMEMBERED", 0)  # of many traces, the views of few
    core = await filled(3)
    whole, _ = await listed(core)
    assert views, "of preempted requests, and of those that go on from others"
    views.clear()
    assert await listed(core) == (whole, "")
    assert not views
    await core.stop()


async def test_a_page_ends_where_few_traces_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ends in time; the next page begins where the last one ended, even an empty one."""
    core = await filled(5)
    whole, _ = await listed(core)
    assert len(whole) > 8
    monkeypatch.setattr(paging, "MOST_LOOKED_AT", 3)
    for asked in ({}, {"states": [pb.TRACE_STATE_COMPLETE]}, {"labels": {"none": ""}}):
        found, sizes, token = [], [], ""
        while True:
            some, token = await listed(core, page_token=token, **asked)
            found += some
            sizes.append(len(some))
            if not token:
                break
        assert len(sizes) == -(-len(whole) // 3)
        assert max(sizes) <= 3
        monkeypatch.setattr(paging, "MOST_LOOKED_AT", 10_000)
        assert (found, "") == await listed(core, **asked)
        monkeypatch.setattr(paging, "MOST_LOOKED_AT", 3)
    await core.stop()
