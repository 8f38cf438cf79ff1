"""Limits of concurrent admission, under arrivals and departures."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.common.errors import Overloaded
from routetrace.server.access import admission as module
from routetrace.server.access.admission import Admission
from routetrace.server.access.budget import Budget
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.state import State
from routetrace.server.retention.room import Room
from routetrace.server.settings.config import ServerConfig

OWNER = "run default"


def limits(**settings) -> Admission:
    return Admission(ServerConfig(store="memory", **settings), Metrics())


def test_reads_over_the_limit_are_refused_and_told_when_to_come_again():
    admission = limits(max_reads=2)
    with admission.read(OWNER), admission.read(OWNER):
        with pytest.raises(Overloaded, match="max_reads = 2") as caught, admission.read(OWNER):
            pass
        assert caught.value.retry_after > 0
        assert admission.waiting == 2
    with admission.read(OWNER):
        assert admission.reads == 1


@pytest.mark.parametrize(
    ("memory_limit", "most"),
    [(0, 20_000), (1000, 64), (1 << 30, 13_107), (16 << 30, 20_000)],
)
def test_reads_take_at_most_a_quarter_of_the_memory_limit(memory_limit: int, most: int):
    """docs/operations.md: at 20 KiB each."""
    admission = limits(max_reads=20_000, memory_limit=memory_limit)
    [reads] = [budget for budget in admission.budgets if budget.name == "max_reads"]
    assert (reads.limit, admission.max_reads) == (most, most)


def test_a_refusal_names_the_memory_limit_if_it_lowers_the_number_of_reads():
    admission = limits(memory_limit=1000)
    with ExitStack() as held:
        for _ in range(admission.budgets[0].share(OWNER)):
            held.enter_context(admission.read(OWNER))
        with pytest.raises(Overloaded, match="memory_limit allows no more"):
            held.enter_context(admission.read(OWNER))


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_share_is_what_an_owner_gets_by_taking_one_at_a_time(limit, others, held):
    budget = Budget("max_reads", limit, held=Counter({"others": others, OWNER: held}))
    share = budget.share(OWNER)
    while budget.fits(OWNER):
        budget.take(OWNER)
    assert budget.held[OWNER] == share


@given(
    st.integers(10, 10**6),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    st.integers(-1, 1),
)
def test_a_store_takes_chunks_up_to_the_share_of_their_owner(capacity, others, step):
    state = State(3600.0)
    state.owner_bytes.update({f"run {i}": part for i, part in enumerate(others)})
    config = ServerConfig(store="memory", store_capacity=capacity, memory_limit=0)
    room = Room(config, state, Metrics(), lambda: 0, lambda: None)
    held = max(0, room.stored_share(OWNER) + step)
    state.owner_bytes[OWNER] = held
    # docs/operations.md: above nine tenths of the capacity, an equal part.
    full = sum(others) + held > capacity * 9 // 10
    over = full and held * (len(others) + 1) > capacity
    assert over == (held > room.stored_share(OWNER))
    writer: Any = SimpleNamespace(key=SimpleNamespace(run="default"), token="")
    with pytest.raises(Overloaded, match="store_capacity") if over else nullcontext():
        room.check_chunk(writer)


HOLDS: dict[str, Callable[[Admission], AbstractContextManager[None]]] = {
    "a read": lambda admission: admission.read(OWNER),
    "a watch": lambda admission: admission.watch(OWNER),
    "a bind": lambda admission: admission.bind(OWNER, 100),
    "a stream of an agent": lambda admission: admission.agents.hold(OWNER),
}


@pytest.mark.parametrize("kind", HOLDS)
async def test_a_cancelled_call_releases_its_part(kind):
    admission = limits()
    held = asyncio.Event()

    async def call() -> None:
        with HOLDS[kind](admission):
            held.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await held.wait()
    assert sum(budget.used for budget in admission.budgets) > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [budget.used for budget in admission.budgets] == [0, 0, 0, 0]


def test_agents_over_the_limit_are_refused():
    admission = limits(max_agents=2)
    with (
        admission.agents.hold(OWNER),
        admission.agents.hold(OWNER),
        pytest.raises(Overloaded, match="max_agents = 2"),
    ):
        admission.agents.check(OWNER)
    admission.agents.check(OWNER)


@pytest.mark.parametrize("seed", range(20))
async def test_turns_are_bounded_and_none_is_lost(seed, monkeypatch):
    monkeypatch.setattr(module, "_MAX_SLOW", 0)  # on a busy machine any read may be slow
    rng = random.Random(seed)
    turns = rng.randint(1, 4)
    admission = limits(max_streaming_reads=turns)
    asked: list[int] = []
    had: list[int] = []
    gone: set[int] = set()

    async def read(number: int) -> None:
        asked.append(number)
        async with admission.turn(OWNER):
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
    assert (admission.sending, admission._turns.free) == (0, turns), "all turns are free again"


async def test_slow_readers_pass_on_their_turns_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.01)
    monkeypatch.setattr(module, "_MAX_SLOW", 1)
    admission = limits(max_streaming_reads=2)
    stuck, four = asyncio.Event(), asyncio.Event()
    entered: list[int] = []

    async def read(number: int) -> None:
        async with admission.turn(OWNER) as turn:
            await turn.sending()
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
    assert (admission.sending, admission._turns.free, admission._slow.used) == (0, 2, 0)


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


@pytest.mark.parametrize("seed", range(20))
def test_an_owner_holds_no_more_than_is_free(seed):
    rng = random.Random(seed)
    share = Budget("max_parts", rng.randint(4, 40))
    held: Counter[str] = Counter()
    for _ in range(500):
        owner = rng.choice("abcde")
        free = share.limit - sum(held.values())
        assert share.fits(owner) == (free > 0 and held[owner] <= free)
        if share.fits(owner) and rng.random() < 0.7:
            share.take(owner)
            held[owner] += 1
        elif held[owner]:
            share.release(owner)
            held[owner] -= 1
        assert (share.used, share.held) == (sum(held.values()), +held)
        assert max(held.values(), default=0) <= share.limit // 2 + 1


async def test_stuck_reads_of_one_owner_leave_turns_for_another(monkeypatch):
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.01)
    admission = limits(max_streaming_reads=4)
    stuck = asyncio.Event()

    async def hold() -> None:
        async with admission.turn("run a") as turn:
            await turn.sending()
            await stuck.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(100)]
    for _ in range(50):
        async with admission.turn("run b"):
            await asyncio.sleep(0.002)
    held = admission.sending
    assert 0 < held < 4 * (1 + module._MAX_SLOW), "the reads of one owner hold a share alone"
    stuck.set()
    await asyncio.gather(*tasks)
    assert admission.sending == 0


async def test_owners_take_turns():
    admission = limits(max_streaming_reads=1)
    entered: list[str] = []

    async def read(owner: str) -> None:
        async with admission.turn(owner):
            entered.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*(read(owner) for owner in "aaaaabbc"))
    assert "".join(entered) == "aabcabaa"


async def test_a_read_whose_message_is_not_taken_ends():
    admission = limits(stalled_read_seconds=0.01)

    async def hold() -> None:
        async with admission.turn(OWNER) as turn:
            await turn.sending()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(hold())
    assert admission.sending == 0


async def test_a_read_that_waits_for_its_share_of_the_loop_is_not_stalled():
    admission = limits(stalled_read_seconds=0.01)
    await admission.pace.step("run other")
    admission.pace._account(OWNER, admission.pace._now()).credit = -0.05

    async def send() -> str:
        async with admission.turn(OWNER) as turn:
            await turn.sending()
            return "sent"

    assert await asyncio.create_task(send()) == "sent"
