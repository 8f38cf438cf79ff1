"""Reads are woken by changes in other workers, whatever these have been through."""

from __future__ import annotations

import asyncio
from typing import Any

from routetrace.common.errors import Unavailable
from routetrace.server.access.partition import Partition
from routetrace.server.index.journal import Changes
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.spread import watching
from routetrace.server.spread.watching import Touched, Watching
from routetrace.stored import parts_pb2 as parts
from routetrace.v1 import routetrace_pb2 as pb

PARTITION = Partition(0, 2, spread=("a", "b"))


def asked(run: str, after: int, life: int, seconds: float = 0) -> parts.AwaitRequest:
    return parts.AwaitRequest(run=run, after=after, life=life, seconds=seconds)


async def test_changes_after_a_number_are_told_once():
    changes = Changes()
    touched = Touched(changes, PARTITION)
    first = await touched.since(asked("a", 0, 0))
    assert first.incomplete
    changes.notify_any({("a", "t0"), ("b", "t1"), ("c", "t2"), WriterKey("a", "e0", "")})
    found = await touched.since(asked("a", first.sequence, first.life))
    assert (list(found.trace_ids), found.incomplete) == (["t0"], False)
    again = await touched.since(asked("a", found.sequence, found.life))
    assert (list(again.trace_ids), again.incomplete) == ([], False)


async def test_a_worker_that_started_anew_does_not_know_what_changed():
    changes = Changes()
    old, new = Touched(changes, PARTITION), Touched(changes, PARTITION)
    for number in range(10):
        changes.notify_any({("a", f"t{number}")})
    seen = await old.since(asked("a", 0, 0))
    assert (await new.since(asked("a", seen.sequence, seen.life))).incomplete


async def test_what_is_forgotten_makes_an_answer_incomplete(monkeypatch):
    monkeypatch.setattr(watching, "_MAX_KNOWN", 3)
    changes = Changes()
    touched = Touched(changes, PARTITION)
    seen = await touched.since(asked("a", 0, 0))
    for number in range(3):
        changes.notify_any({("a", f"t{number}")})
    found = await touched.since(asked("a", seen.sequence, seen.life))
    assert (sorted(found.trace_ids), found.incomplete) == (["t0", "t1", "t2"], False)
    changes.notify_any({("a", "t3")})
    assert (await touched.since(asked("a", seen.sequence, seen.life))).incomplete


class Others:
    """One other worker, which is away at its first call."""

    numbers = (1,)

    def __init__(self, touched: Touched) -> None:
        self.touched = touched
        self.requests: list[parts.AwaitRequest] = []

    def address(self, _: int) -> str:
        return ""

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        assert (worker, method, response) == (1, "Await", parts.AwaitResponse)
        self.requests.append(request)
        if len(self.requests) == 1:
            raise Unavailable("away")
        return await self.touched.since(request)


async def test_a_read_wakes_when_its_trace_changes_elsewhere():
    here, there = Changes(), Changes()
    others = Others(Touched(there, PARTITION))
    watching_ = Watching(here, others)
    writer = WriterKey("a", "e0", "")
    with watching_.waiting(("a", "t0"), [writer], pb.AWAITED_ROWS):
        await here.wait(("a", "t0"), 60)  # the first answer: what changed before is not known
        while len(others.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        woken = asyncio.create_task(here.wait(("a", "t0"), 60))
        await asyncio.sleep(0)
        there.notify_any({("a", "t1")})
        there.notify_any({("a", "t0")})
        await woken
    demand = others.requests[-1].demands[0]
    assert (demand.writer.engine_id, demand.awaited) == ("e0", pb.AWAITED_ROWS)
    while watching_._calls:  # noqa: ASYNC110 - it ends by itself once no read waits
        await asyncio.sleep(0.01)
