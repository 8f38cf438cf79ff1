"""How much is let in at a time, whoever comes and goes in between."""

from __future__ import annotations

import asyncio
import random

import pytest

from routetrace.server import admission as module
from routetrace.server.admission import Admission
from routetrace.server.config import ServerConfig
from routetrace.server.metrics import Metrics
from routetrace.v1.errors import Overloaded


def limits(**settings) -> Admission:
    return Admission(ServerConfig(store="memory", **settings), Metrics())


def test_reads_over_the_limit_are_refused_and_told_when_to_come_again():
    admission = limits(max_reads=2)
    with admission.read(), admission.read():
        with pytest.raises(Overloaded, match="max_reads = 2") as caught, admission.read():
            pass
        assert caught.value.retry_after > 0
        assert admission.waiting == 2
    with admission.read():
        assert admission.reads == 1


def test_agents_over_the_limit_are_refused():
    admission = limits(max_agents=2)
    admission.check_agents(1)
    with pytest.raises(Overloaded, match="max_agents = 2"):
        admission.check_agents(2)


@pytest.mark.parametrize("seed", range(20))
async def test_turns_are_bounded_and_none_is_lost(seed, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LENT", 0)  # to whom a busy machine makes slow
    rng = random.Random(seed)
    turns = rng.randint(1, 4)
    admission = limits(max_sending_reads=turns)
    asked: list[int] = []
    had: list[int] = []
    gone: set[int] = set()

    async def read(number: int) -> None:
        asked.append(number)
        async with admission.turn():
            had.append(number)
            assert admission.sending <= turns
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)

    tasks = {}
    for number in range(60):
        tasks[number] = asyncio.create_task(read(number))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            victim = rng.randrange(number + 1)
            if tasks[victim].cancel():
                gone.add(victim)
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all(d is None or isinstance(d, asyncio.CancelledError) for d in done)
    assert set(had) | gone >= set(range(60)), "a turn was lost"
    if turns == 1:
        assert had == sorted(had), "first come, first served"
    assert (admission.sending, admission._turns) == (0, turns), "all turns are free again"


async def test_slow_readers_lend_their_turns_but_not_without_end(monkeypatch):
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.01)
    monkeypatch.setattr(module, "_MOST_LENT", 1)
    admission = limits(max_sending_reads=2)
    stuck, four = asyncio.Event(), asyncio.Event()
    entered: list[int] = []

    async def read(number: int) -> None:
        async with admission.turn():
            entered.append(number)
            if len(entered) == 4:
                four.set()
            await stuck.wait()

    tasks = [asyncio.create_task(read(i)) for i in range(6)]
    await four.wait()
    await asyncio.sleep(0.1)  # there would be time for more
    assert entered == [0, 1, 2, 3], "two turns, and one lent of each"
    assert admission.sending == 4
    stuck.set()
    await asyncio.gather(*tasks)
    assert entered == list(range(6))
    assert (admission.sending, admission._turns, admission._lent) == (0, 2, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_chunks_that_wait_are_bounded_in_bytes(seed):
    rng = random.Random(seed)
    most = 1000
    admission = limits(max_ingest_bytes=most)
    had: list[int] = []
    gone: set[int] = set()
    held: list[int] = []

    async def store(number: int) -> None:
        size = rng.choice((10, 300, 900, 5000))
        await admission.take_in(size)
        held.append(size)
        had.append(number)
        try:
            assert sum(held) <= most or len(held) == 1, "one alone may be larger"
            assert admission.ingest_bytes >= sum(held)
            await asyncio.sleep(0)
        finally:
            held.remove(size)
            admission.committed(size)

    tasks = {}
    for number in range(60):
        tasks[number] = asyncio.create_task(store(number))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            victim = rng.randrange(number + 1)
            if tasks[victim].cancel():
                gone.add(victim)
    done = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 10)
    assert all(d is None or isinstance(d, asyncio.CancelledError) for d in done)
    assert set(had) | gone >= set(range(60))
    assert admission.ingest_bytes == 0
