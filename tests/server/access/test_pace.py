"""The event loop's time, shared between the owners of calls."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from types import SimpleNamespace

import grpc
import pytest

from routetrace.common.errors import Overloaded
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.pace import (
    ACTIVE_SECONDS,
    ALONE_DEBT_SECONDS,
    CALL_SECONDS,
    LONG_STEP_SECONDS,
    SECONDS_PER_BYTE,
    UNKNOWN_OWNER,
    Pace,
)
from routetrace.server.access.tokens import new_token
from routetrace.server.common import slices
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import Unparsed, Unusable, limited
from routetrace.server.settings.config import ServerConfig
from routetrace.server.wire.pieces import PIECE_BYTES
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds of the loop that a step of the heavy owner takes, by the test's clock.
_COST = 0.01


class Busy:
    """Steps of owners, in their order; those of "heavy" take their time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pace = Pace(lambda: self.time, lambda: self.time)
        self.done: list[str] = []

    async def step(self, owner: str) -> None:
        await self.pace.step(owner)
        self.time += _COST if owner == "heavy" else 0.0
        self.done.append(owner)


@pytest.fixture
async def busy():
    return Busy()


@pytest.fixture
async def timed(busy, monkeypatch):
    """Busy whose time is that of the loop and of slices, too: a pause only advances it."""
    loop = asyncio.get_running_loop()
    select = loop._selector.select

    def advance(timeout: float | None):
        busy.time += max(0.0, timeout or 0.0)
        return select(0)

    monkeypatch.setattr(loop, "time", lambda: busy.time)
    monkeypatch.setattr(loop._selector, "select", advance)
    monkeypatch.setattr(slices, "time", SimpleNamespace(monotonic=lambda: busy.time))
    return busy


async def test_a_backlog_of_one_owner_does_not_delay_the_steps_of_another(busy):
    await busy.step("light")
    backlog = [asyncio.create_task(busy.step("heavy")) for _ in range(100)]
    for _ in range(10):
        await busy.step("light")
        await asyncio.sleep(0)
    # Each pass of the loop lets one of the backlog through at most.
    assert busy.done.count("light") == 11
    assert busy.done.count("heavy") <= 15
    assert busy.pace.waiting["heavy"] >= 99 - busy.done.count("heavy")  # one may have been woken
    for task in backlog:
        task.cancel()
    await asyncio.gather(*backlog, return_exceptions=True)
    assert busy.pace.waiting == {}


async def test_all_of_a_backlog_gets_through_in_order(busy):
    await busy.step("light")
    order: list[int] = []

    async def numbered(number: int) -> None:
        await busy.step("heavy")
        order.append(number)

    await asyncio.gather(*map(numbered, range(20)))
    assert order == [*range(20)]


async def test_one_owner_alone_never_waits(busy):
    for _ in range(100):
        step = busy.pace.step("heavy")
        with pytest.raises(StopIteration):
            step.send(None)
        busy.time += _COST


async def test_an_owner_that_was_alone_for_long_owes_little_to_the_next_one(busy):
    for _ in range(1000):
        await busy.step("heavy")
        await asyncio.sleep(0)  # it is counted
    await busy.step("light")
    assert busy.pace._accounts["heavy"].credit >= -ALONE_DEBT_SECONDS


async def test_an_owner_that_is_not_active_any_more_does_not_count(busy):
    await busy.step("light")
    busy.time += ACTIVE_SECONDS + 1
    for _ in range(100):
        step = busy.pace.step("heavy")
        with pytest.raises(StopIteration):
            step.send(None)


@pytest.mark.parametrize("kind", ["waiting", "granted"])
async def test_a_call_that_ends_while_it_waits_does_not_stop_the_others(busy, kind):
    for owner in ("light", "heavy"):
        await busy.step(owner)
        await asyncio.sleep(0)  # it is counted
    tasks = [asyncio.create_task(busy.step("heavy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert busy.pace.waiting == {"heavy": 3}
    if kind == "granted":
        [account] = [a for a in busy.pace._accounts.values() if a.waiting]
        account.timer.cancel()
        busy.pace._wake(account)
    tasks[0].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[0]
    await asyncio.gather(*tasks[1:])
    assert busy.done.count("heavy") == 3


async def test_long_messages_wait_unparsed_and_count_until_then():
    admission = Admission(ServerConfig(store="memory", max_ingest_bytes=1000), Metrics())
    await admission.pace.step("token other")
    admission.pace._account("token mine", admission.pace._now()).credit = -0.1
    request = pb.GetBlocksRequest(run="r", block_ids=[1] * 195)
    message = Unparsed(request.SerializeToString(), pb.GetBlocksRequest, 1000)
    assert len(message.data) == 201
    first = [asyncio.create_task(admission.parsed("token mine", message)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in first)
    assert admission.binding.held["token mine"] == 402
    third = [asyncio.create_task(admission.parsed("token mine", message))]
    await asyncio.sleep(0)
    assert admission.binding.held["token mine"] == 603
    with pytest.raises(Overloaded, match="max_ingest_bytes"):
        await admission.parsed("token mine", message)
    assert await asyncio.gather(*first, *third) == [request] * 3
    assert admission.binding.used == 0


async def test_unusable_long_messages_are_refused_and_charged():
    admission = Admission(ServerConfig(store="memory"), Metrics())
    await admission.pace.step("token other")
    long = Unparsed(bytes(20_000_000), pb.GetBlocksRequest, 1000)
    refused = await admission.parsed("token mine", long)
    assert isinstance(refused, Unusable)
    assert (refused.value, refused.expected) == ("20000000 bytes", "at most 1000 bytes")
    account = admission.pace._accounts["token mine"]
    assert account.credit < -0.03
    broken = Unparsed(b"\x1a\x09", pb.GetBlocksRequest, 1000)
    account.credit = 1.0
    refused = await admission.parsed("token mine", broken)
    assert isinstance(refused, Unusable)
    assert "do not parse" in refused.value
    assert admission.binding.used == 0


async def test_a_charge_delays_the_next_steps_of_its_owner(busy):
    await busy.step("light")
    busy.pace.charge("heavy", 0.03)
    step = asyncio.create_task(busy.step("heavy"))
    await asyncio.sleep(0)
    assert busy.pace.waiting == {"heavy": 1}
    await busy.step("light")
    assert busy.done == ["light", "light"]
    await step
    for _ in range(100):
        busy.pace.charge("heavy", 1.0)
    owed = -busy.pace._accounts["heavy"].credit
    assert ALONE_DEBT_SECONDS < owed <= 0.1


async def test_an_owner_alone_owes_no_more_than_a_bound(busy):
    for _ in range(100):
        busy.pace.charge("heavy", 1.0)
    assert busy.pace._accounts["heavy"].credit >= -ALONE_DEBT_SECONDS


async def test_a_step_that_holds_the_loop_for_long_counts_twice(busy):
    for owner in ("light", "heavy"):
        await busy.step(owner)
        await asyncio.sleep(0)  # it is counted
    used = {owner: account.used for owner, account in busy.pace._accounts.items()}
    assert used["heavy"] == pytest.approx(2 * _COST - LONG_STEP_SECONDS)


@pytest.mark.parametrize("others", [1, 16, 1000])
async def test_an_owner_may_use_what_others_leave_however_many_they_are(timed, others):
    async def use_little() -> None:
        while True:
            for number in range(others):
                timed.pace.charge(f"run {number}", 0.0008 / others)
            await asyncio.sleep(0.1)

    light = asyncio.create_task(use_little())
    await asyncio.sleep(0)
    while timed.time < 2.0:
        await timed.step("heavy")
    light.cancel()
    # They use 0.008 of the loop, 0.016 of the 0.8 for all is reserved. Long steps count twice: half
    # of the loop would let 49 through, a 17th 6, and a 1001st one.
    assert timed.done.count("heavy") == pytest.approx(77, abs=3)


async def test_a_call_that_has_not_waited_goes_on_in_the_same_step(busy):
    busy.pace.charge("light", 0.001)
    passed: list[bool] = []
    asyncio.get_running_loop().call_soon(passed.append, True)
    for _ in range(3):
        await busy.pace.step("medium")
        busy.time += LONG_STEP_SECONDS / 4
    assert not passed
    busy.time += LONG_STEP_SECONDS / 4
    await busy.pace.step("medium")  # a long step is over
    assert passed


async def test_one_of_a_backlog_of_short_steps_goes_on_in_a_round(busy):
    busy.pace.charge("light", 0.001)
    backlog = [asyncio.create_task(busy.step("medium")) for _ in range(100)]
    for round_number in range(1, 21):
        await asyncio.sleep(0)
        assert busy.done.count("medium") <= round_number
    for task in backlog:
        task.cancel()
    await asyncio.gather(*backlog, return_exceptions=True)


async def test_the_use_of_an_owner_that_stopped_does_not_reduce_that_of_others(busy):
    busy.pace.charge("light", 0.1)
    rates = []
    for _ in range(4):
        account = busy.pace._account("heavy", busy.time)
        busy.pace._refill(account, busy.time)
        rates.append(busy.pace._rate(account))
        busy.time += 0.24
    assert rates[0] == 0.4  # equal parts
    assert rates[1:] == pytest.approx([0.8 - 0.8 * 0.3829**n for n in (1, 2, 3)], abs=0.001)


async def test_the_use_of_all_owners_is_the_sum_of_theirs(busy):
    rng, used = random.Random(5), {}
    for _ in range(5000):
        owner, seconds = f"run {rng.randrange(10)}", rng.choice([0.0, 1e-6, 0.01, 1.0])
        busy.pace.charge(owner, seconds)
        used[owner] = used.get(owner, 0.0) + seconds
        account = busy.pace._accounts[owner]
        assert account.used == pytest.approx(used[owner])
        assert busy.pace._used == pytest.approx(sum(used.values()))
        passed = rng.choice([0.0, 0.001, 0.02])
        busy.time += passed
        used = {each: amount * math.exp(-4 * passed) for each, amount in used.items()}
    busy.time += ACTIVE_SECONDS
    busy.pace.charge("heavy", 0.01)
    assert [*busy.pace._accounts] == ["heavy"]
    assert busy.pace._used == 0.01


async def test_an_owner_waits_no_longer_than_others_use_the_loop(timed):
    """Its wait is reckoned again when they fall silent, though no other step comes then."""
    timed.pace.charge("heavy", 0.0)
    for number in range(100):
        timed.pace.charge(f"run {number}", 0.01)
    timed.pace.charge("heavy", 0.1)
    await timed.pace.step("heavy")
    # An equal part of the loop would pay the debt in 12 s.
    assert 0.5 < timed.time <= ACTIVE_SECONDS + 0.25
    assert timed.pace.waiting == {}


async def test_an_owner_that_waits_keeps_no_idle_ones(busy):
    await busy.step("light")
    busy.pace._account("heavy", busy.time).credit = -100.0
    step = asyncio.create_task(busy.step("heavy"))
    await asyncio.sleep(0)
    for number in range(100):
        busy.pace.charge(f"run {number}", 0.0)
    busy.time += ACTIVE_SECONDS + 1
    await busy.step("light")
    assert [*busy.pace._accounts] == ["heavy", "light"]
    assert busy.pace.waiting == {"heavy": 1}
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    busy.time += ACTIVE_SECONDS + 1
    await busy.step("light")
    assert [*busy.pace._accounts] == ["light"]


async def test_messages_of_a_lone_run_leave_it_alone(busy):
    """On a server without tokens, the owner of a long message is unknown until it is parsed."""
    config, metrics = ServerConfig(store="memory"), Metrics()
    admission, access = Admission(config, metrics), Access(config, metrics)
    admission.pace = pace = busy.pace
    mine = access.check(None, "read", "mine")
    turns = pace.turns(mine)
    request = pb.GetBlocksRequest(run="mine", block_ids=[1] * 100_000)
    message = limited(pb.GetBlocksRequest, 1 << 20)(request.SerializeToString())
    assert isinstance(message, Unparsed)
    assert await admission.parsed(access.owner_of(None), message) == request
    assert [*pace._accounts] == [mine, UNKNOWN_OWNER]
    for owner in (mine, UNKNOWN_OWNER):
        assert pace.turns(owner)._limited(0.5) == 0.5
        pace._accounts[owner].credit = -1.0
        with pytest.raises(StopIteration):  # it does not wait
            pace.step(owner).send(None)
        await asyncio.sleep(0)  # it is counted
    # Beside another run, they take their share as any owner does.
    await busy.step(access.check(None, "read", "other"))
    assert turns._limited(0.5) == slices.SHARE_BESIDE_OTHERS
    assert pace.turns(UNKNOWN_OWNER)._limited(0.5) == slices.SHARE_BESIDE_OTHERS
    steps = [asyncio.create_task(pace.step(owner)) for owner in (mine, UNKNOWN_OWNER)]
    await asyncio.sleep(0)
    assert pace.waiting == {mine: 1, UNKNOWN_OWNER: 1}
    for step in steps:
        step.cancel()
    await asyncio.gather(*steps, return_exceptions=True)


class Noting(Pace):
    """Notes the owners of steps, and charges."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []
        self.charged: list[tuple[str, float]] = []

    def charge(self, owner: str, seconds: float) -> None:
        self.charged.append((owner, seconds))
        super().charge(owner, seconds)

    async def step(self, owner: str) -> None:
        self.owners.append(owner)
        await super().step(owner)


async def test_calls_with_a_token_begin_in_its_time(tmp_path):
    text, digest = new_token()
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[[token]]\nname = "reader"\nsha256 = "{digest}"\nscopes = ["read"]\nruns = ["*"]\n'
    )
    pace = Noting()
    access = Access(ServerConfig(store="memory", tokens_file=tokens), Metrics())
    [gate] = access.interceptors(pace)

    async def unary(_, __):
        return "answer"

    async def stream(_, __):
        yield "answer"

    async def handler(details):
        if details.method.endswith("/GetTrace"):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    metadata = (("authorization", f"Bearer {text}"),)

    async def intercepted(method: str):
        details = SimpleNamespace(method=f"/{method}", invocation_metadata=metadata)
        return await gate.intercept_service(handler, details)

    # Once before the message is parsed, and once before the handler runs.
    stat = await intercepted("routetrace.v1.TraceService/StatTrace")
    assert pace.owners == ["token reader"]
    assert await stat.unary_unary(None, None) == "answer"
    assert pace.owners == ["token reader"] * 2
    read = await intercepted("routetrace.v1.TraceService/GetTrace")
    assert [answer async for answer in read.unary_stream(None, None)] == ["answer"]
    assert pace.owners == ["token reader"] * 4
    health = await intercepted("grpc.health.v1.Health/Check")
    assert await health.unary_unary(None, None) == "answer"
    assert pace.owners == ["token reader"] * 4
    assert pace.charged == [("token reader", CALL_SECONDS)] * 2


async def test_sent_messages_are_charged():
    admission = Admission(ServerConfig(store="memory"), Metrics())
    admission.pace = Noting()
    async with admission.turn("token mine") as turn:
        await turn.sending()
        assert turn.charged(b"12345678") == b"12345678"
    assert admission.pace.charged == [("token mine", 8 * SECONDS_PER_BYTE)]


async def test_long_messages_are_parsed_in_steps_of_their_owner(monkeypatch):
    monkeypatch.setattr(slices, "TURN_SECONDS", -1.0)  # each piece is a slice
    admission = Admission(ServerConfig(store="memory"), Metrics())
    admission.pace = pace = Noting()
    request = pb.GetBlocksRequest(run="r", block_ids=[1 << 31] * 100_000)
    data = request.SerializeToString()
    unparsed = limited(pb.GetBlocksRequest, len(data))(data)
    assert isinstance(unparsed, Unparsed)
    assert await admission.parsed("token mine", unparsed) == request
    assert pace.owners == ["token mine"] * len(pace.owners)
    assert len(pace.owners) > len(data) // PIECE_BYTES
    assert pace.charged == [("token mine", len(data) * SECONDS_PER_BYTE)]


async def test_slices_of_long_work_are_steps_of_their_owner(busy, monkeypatch):
    monkeypatch.setattr(slices, "TURN_SECONDS", -1.0)  # each item is a slice
    await busy.step("light")
    done: list[int] = []

    async def work() -> None:
        async for number in busy.pace.turns("heavy").over(range(100)):
            done.append(number)
            busy.time += _COST

    task = asyncio.create_task(work())
    for _ in range(50):
        await busy.step("light")
        await asyncio.sleep(0)
    assert len(done) < 100
    assert busy.done.count("light") == 51
    await task
    assert done == [*range(100)]


async def test_each_owner_has_its_own_half_of_the_loop_for_long_work(busy):
    turns = [busy.pace.turns(owner) for owner in ("light", "heavy", "light")]
    assert turns[0] is turns[2]
    assert turns[0] is not turns[1]
    begun, _ = await turns[0]._begin(0.5)
    assert turns[0]._free_at > begun
    assert turns[1]._free_at < begun


async def test_calls_of_one_owner_share_its_slices_after_a_pause(busy):
    """A watch keeps the object between its rounds, beyond the account of its owner."""
    before = busy.pace.turns("heavy")
    busy.time += ACTIVE_SECONDS + 1
    await busy.step("light")
    assert "heavy" not in busy.pace._accounts
    assert busy.pace.turns("heavy") is before


@pytest.mark.parametrize(("owners", "share"), [(["heavy"], 0.5), (["light", "heavy"], 0.15)])
async def test_long_work_leaves_more_of_the_loop_while_others_are_active(timed, owners, share):
    """A caller that waits for each answer uses less of the loop the slower it becomes."""
    for owner in owners:
        await timed.step(owner)
    timed.pace.turns("heavy")._step = None  # credit is another limit
    begun, worked = timed.time, 0.0
    async for _ in timed.pace.turns("heavy").over(range(1000)):
        worked += slices.TURN_SECONDS / 2 + 1e-6
        timed.time += slices.TURN_SECONDS / 2 + 1e-6
    assert worked / (timed.time - begun) == pytest.approx(share, rel=0.02)


async def test_calls_that_are_cancelled_keep_no_slices(timed):
    """Callers time out and come again; the next one waits no longer for that."""

    async def work(turns: slices.Turns) -> None:
        async for _ in turns.over(range(3), waits=True):
            timed.time += slices.TURN_SECONDS

    await timed.step("light")
    turns = timed.pace.turns("heavy")
    for _ in range(5):
        tasks = [asyncio.create_task(work(turns)) for _ in range(100)]
        await asyncio.sleep(0.01)
        await timed.step("light")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The rest of a slice that ran, and no more: none of the others did.
        assert turns._free_at - timed.time <= slices.TURN_SECONDS / slices.SHARE_BESIDE_OTHERS
    assert not turns._line


@pytest.mark.parametrize("waits", [False, True])
async def test_a_call_that_is_cancelled_before_its_slice_reserves_nothing(timed, waits):
    asked = asyncio.Event()

    async def step() -> None:
        asked.set()
        await asyncio.Event().wait()

    turns = slices.Turns(step)

    async def work() -> None:
        async for _ in turns.over(range(1), waits=waits):
            pass

    task = asyncio.create_task(work())
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert turns._free_at == 0.0


async def test_slices_of_one_owner_go_in_order_of_arrival(timed):
    """One that leaves the line, first or not, passes its place on."""
    turns, order, begun = slices.Turns(), [], asyncio.Event()

    async def work(number: int) -> None:
        async for _ in turns.over(range(1), waits=True):
            order.append(number)
            begun.set()
            timed.time += slices.TURN_SECONDS

    tasks = [asyncio.create_task(work(number)) for number in range(6)]
    await begun.wait()
    for number in (1, 3, 4):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2, 5]


async def test_the_rest_of_a_slice_is_given_back_at_the_share_that_it_took(timed):
    """Another owner may become active, or end to be, in the middle of it."""
    alone = True
    turns = slices.Turns(alone=lambda: alone)
    async for _ in turns.over(range(1)):
        alone = False
    assert turns._free_at == pytest.approx(timed.time)
