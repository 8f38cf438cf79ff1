"""A plan fetches the rows of each local token's request, or marks them as missing."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import (
    AsyncRouteClient,
    FetchPlan,
    FetchStats,
    MicroBatch,
    Progress,
    Rank,
    RouteClient,
    Rows,
    Sample,
    Segment,
    _memory,
)
from routetrace.client._core import fetch as _fetch
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.cells import PlacedCells
from routetrace.client._core.steps import Open
from routetrace.client._shells import aio_drive as _aio_drive
from routetrace.client._shells.drive import Driver
from routetrace.client.plan import Piece
from routetrace.codec.frame import copy_ids
from routetrace.common.errors import (
    Closed,
    Corrupt,
    Incomplete,
    InvalidArgument,
    MissingDependency,
    NotFound,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.ranks.planned import Drawn, drawn
from support.reads import Reads
from support.servers.client_server import LAYOUT, rows_of, truth

randoms = st.integers(0, 2**63).map(random.Random)

NUM_REQUESTS = 8
VERSIONS = 3


class Stored:
    """Requests that a server holds, and what is true of them."""

    def __init__(self, target: str) -> None:
        self.target = target
        rng = random.Random(5)
        self.tokens = [np.array([rng.randrange(999) for _ in range(rng.randint(2, 300))])
                       for _ in range(NUM_REQUESTS)]  # fmt: skip
        self.tokens[0] = self.tokens[0][:2]
        self.ids = [rows_of(LAYOUT, len(t) - 1, i) for i, t in enumerate(self.tokens)]
        self.valid = [np.ones(len(t) - 1, bool) for t in self.tokens]
        self.versions = [np.zeros(len(t) - 1, int) for t in self.tokens]
        self.prompts: list[int] = []
        config = AgentConfig(target=target, engine_id="e", layout=LAYOUT, background="thread")
        with CaptureAgent(config) as agent:
            for number, tokens in enumerate(self.tokens):
                self._run(agent, rng, number, tokens)
            assert agent.flush(30)

    def _run(self, agent: CaptureAgent, rng: random.Random, number: int, tokens) -> None:
        prompt = rng.randint(1, len(tokens) - 1)
        self.prompts.append(prompt)
        handle = agent.begin(f"r{number}", prompt_len=prompt, prompt_token_ids=tokens[:prompt])
        at, last = 0, len(tokens) - 1
        while at < last:
            stop = min(last, at + rng.randint(1, 60))
            agent.set_weight_version(version := at * VERSIONS // last)
            rows = self.ids[number][at:stop]
            if number % 4 == 3 and rng.random() < 0.3:
                agent.skip([(handle, at, stop - at)])
                self.valid[number][at:stop] = False
            else:
                agent.step(rows, [(handle, at, stop - at)])
            self.versions[number][at:stop] = version
            at = stop
        agent.finish(handle, len(tokens), token_ids=tokens)

    def proves(self, number: int, count: int) -> bool:
        """Whether a digest behind the prompt lies within the first tokens of a request."""
        every_64th = any(
            position % 64 == 0 for position in range(self.prompts[number] + 1, count + 1)
        )
        return every_64th or count == len(self.tokens[number])

    def sample(self, rng: random.Random, _: int) -> Sample:
        """A sample made of the requests."""
        number = rng.randrange(NUM_REQUESTS)
        tokens = self.tokens[number]
        kind = rng.choice(["of", "cut", "segments", "padding"])
        if kind == "of":
            ids = rng.choice([None, tokens])
            return Sample.of(f"r{number}", len(tokens), token_ids=ids)
        if kind == "cut":
            stop = rng.randint(1, len(tokens))
            return Sample(stop, (Segment(f"r{number}", 0, stop - 1),) if stop > 1 else ())
        segments, at = [], 0
        while kind == "segments" and rng.random() < 0.7:
            number = rng.randrange(NUM_REQUESTS)
            start = rng.randrange(len(self.ids[number]))
            stop = rng.randint(start + 1, len(self.ids[number]))
            at += rng.randrange(5)
            segments.append(Segment(f"r{number}", start, stop, at=at))
            at += stop - start
        return Sample(at + rng.randrange(5), tuple(segments))

    def check(self, case: Drawn, rows: Rows) -> int:
        """Compare every cell; return how many are there."""
        plan, columns = rows.plan, LAYOUT.columns(list(case.rank.layer_ids))
        serials = case.serials().tolist()
        assert rows.topk_ids.shape == plan.shape == (len(columns), len(serials), LAYOUT.top_k)
        assert rows.topk_ids.dtype == LAYOUT.dtype
        assert rows.layer_ids == tuple(case.rank.layer_ids)
        there, versions = 0, rows.weight_versions
        for token, serial in enumerate(serials):
            source = case.row_of(serial)
            number, position = (int(source[0][1:]), source[1]) if source else (0, 0)
            valid = source is not None and self.valid[number][position]
            assert (rows.valid[:, token] == valid).all()
            if valid:
                expected = self.ids[number][position, columns]
                assert (rows.topk_ids[:, token] == expected).all()
                assert versions[token] == self.versions[number][position]
                there += len(columns)
        assert rows.stats.cells == plan.num_rows * len(columns)
        assert rows.stats.valid_cells == there
        if plan.num_rows:
            assert rows.coverage == there / rows.stats.cells
        told = sum((m.stop - m.start) * len(m.layer_ids) for _, m in rows.missing)
        assert told == rows.stats.cells - there
        return there


@pytest.fixture(scope="module")
def stored():
    with run_server() as server:
        yield Stored(server.target)


@pytest.fixture(scope="module")
def client(stored):
    with RouteClient(stored.target) as client:
        yield client


def whole(number: int, stored: Stored) -> FetchPlan:
    """A plan for all rows of one request."""
    batch = MicroBatch.packed([Sample.of(f"r{number}", len(stored.tokens[number]))])
    return FetchPlan.make(LAYOUT, batch, Rank(LAYOUT.layer_ids))


# ------------------------------------------------------------------ rows


@settings(max_examples=120)
@given(randoms)
def test_every_rank_of_every_layout_gets_its_rows(stored, client, rng):
    case = drawn(rng, LAYOUT.layer_ids, stored.sample)
    plan = FetchPlan.make(LAYOUT, case.batch, case.rank)
    stored.check(case, client.fetch(plan, missing="mask"))


def test_many_plans_come_in_order_and_the_asyncio_client_gets_the_same(stored, client):
    rng = random.Random(3)
    cases = [drawn(rng, LAYOUT.layer_ids, stored.sample) for _ in range(12)]
    plans = [FetchPlan.make(LAYOUT, case.batch, case.rank) for case in cases]
    with client.prefetch(plans, missing="mask", max_bytes=20_000) as fetched:
        got = list(fetched)
    there = [stored.check(case, rows) for case, rows in zip(cases, got, strict=True)]
    assert fetched.stats.valid_cells == sum(there) > 0
    assert fetched.stats.bytes_fetched == sum(rows.stats.bytes_fetched for rows in got) > 0

    async def fetch() -> None:
        async with AsyncRouteClient(stored.target) as other:
            async with other.prefetch(plans, missing="mask", max_bytes=20_000) as fetched:
                for case in cases:
                    stored.check(case, await anext(fetched))
                with pytest.raises(StopAsyncIteration):
                    await anext(fetched)
            rows = await other.fetch(plans[0], missing="mask")
            stored.check(cases[0], rows)

    asyncio.run(fetch())


def test_rows_are_decoded_into_the_callers_buffer(stored, client):
    plan = whole(1, stored)
    array = np.full(plan.shape, 255, plan.layout.dtype)
    tensor = torch.zeros(plan.shape, dtype=torch.uint8)
    for out in (array, tensor, array[:, ::-1][:, ::-1]):
        rows = client.fetch(plan, out=out)
        assert np.shares_memory(rows.topk_ids, np.asarray(out))
        assert (rows.topk_ids.transpose(1, 0, 2)[:-1] == stored.ids[1]).all()
    # Every second token of a wider one.
    wide = np.zeros((plan.shape[0], 2 * plan.shape[1], plan.shape[2]), plan.layout.dtype)
    client.fetch(plan, out=wide[:, ::2])
    assert (wide[:, ::2].transpose(1, 0, 2)[:-1] == stored.ids[1]).all()
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((5, 3, 3), np.uint8),
        np.zeros((5, 300, 3), np.uint16),
        torch.zeros((5, 300, 3), dtype=torch.int64),
        torch.zeros((5, 300, 3), requires_grad=True),
        torch.zeros((5, 300, 3), device="meta"),
        [[1]],
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(stored, client, out):
    with pytest.raises(InvalidArgument) as error:
        client.fetch(whole(1, stored), out=out)
    assert error.value.field == "out"


def test_a_read_only_buffer_is_refused(stored, client):
    plan = whole(1, stored)
    out = np.zeros(plan.shape, plan.layout.dtype)
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match="writeable"):
        client.fetch(plan, out=out)


def test_memory_cannot_be_pinned_without_cuda(stored, client):
    calls = [
        lambda: client.fetch(whole(1, stored), pin_memory=True).topk_ids,
        lambda: client.get("r1", pin_memory=True)._ids,
        lambda: next(client.get_many(["r1"], pin_memory=True))._ids,
    ]
    for call in calls:
        if torch.cuda.is_available():
            assert torch.from_numpy(call()).is_pinned()
        else:
            with pytest.raises(MissingDependency) as error:
                call()
            assert error.value.field == "pin_memory"


def test_rows_as_tensors(stored, client):
    rows = client.fetch(whole(1, stored))
    ids, valid = rows.to_torch()
    assert ids.dtype == torch.uint8
    assert ids.data_ptr() == torch.from_numpy(rows.topk_ids).data_ptr()
    wide, _ = rows.to_torch(dtype=torch.int64)
    assert wide.dtype == torch.int64
    assert (wide.numpy() == rows.topk_ids).all()
    assert valid.numpy().tolist() == rows.valid.tolist()


def test_virtual_stages_share_the_buffer(stored, client):
    rows = client.fetch(whole(1, stored))
    stage = rows.layers([2, 4])
    assert np.shares_memory(stage.topk_ids, rows.topk_ids)
    assert (stage.topk_ids == rows.topk_ids[1:3]).all()
    assert stage.coverage == rows.coverage == 1
    assert (rows.layers([1, 7]).topk_ids == rows.topk_ids[[0, 4]]).all()
    for wrong in ([3], [4, 2]):
        with pytest.raises(InvalidArgument) as error:
            rows.layers(wrong)
        assert error.value.field == "layer_ids"


def test_a_stage_without_moe_layers_asks_for_nothing(stored):
    batch = MicroBatch.packed([Sample.of("r1", len(stored.tokens[1]))])
    plan = FetchPlan.make(LAYOUT, batch, Rank(()))
    with RouteClient("127.0.0.1:1") as unreachable:
        rows = unreachable.fetch(plan)
    assert rows.topk_ids.shape == (0, len(stored.tokens[1]), LAYOUT.top_k)
    assert rows.coverage == 1
    assert rows.stats == FetchStats(wait_seconds=rows.stats.wait_seconds)


# ------------------------------------------------------------------ what crosses the wire


@pytest.mark.slow
def test_only_the_ranks_layers_and_tokens_cross_the_wire(tmp_path):
    layout = ModelLayout(tuple(range(3, 61)), 61, 256, 8)
    ids = rows_of(layout, 4096, 1)
    with run_server() as server, RouteClient(server.target) as client:
        config = AgentConfig(
            target=server.target, engine_id="e", layout=layout, background="thread"
        )
        with CaptureAgent(config) as agent:
            handle = agent.begin("r", prompt_len=100)
            for at in range(0, len(ids), 256):
                agent.step(ids[at : at + 256], [(handle, at, 256)])
            agent.finish(handle, len(ids) + 1)
        stored = client.stat("r").stored_bytes
        batch = MicroBatch.packed([Sample.of("r", len(ids) + 1)], align=16)
        total = FetchStats()
        for cp_rank in range(2):
            rank = Rank(layout.layer_ids[:29], cp_size=2, cp_rank=cp_rank)
            rows = client.fetch(FetchPlan.make(layout, batch, rank))
            total += rows.stats
            assert rows.stats.bytes_fetched + rows.stats.bytes_avoided == stored
        everything = client.fetch(FetchPlan.make(layout, batch, Rank(layout.layer_ids)))
    assert everything.stats.bytes_fetched == stored
    assert everything.stats.bytes_avoided == 0
    assert 0.45 < total.bytes_fetched / stored < 0.62  # frames at the seams come twice
    assert ids.nbytes * 0.5 < stored < ids.nbytes * 1.02


# ------------------------------------------------------------------ the budget


def test_no_more_is_held_than_the_budget_allows(stored, client):
    plans = [whole(1 + i % 6, stored) for i in range(20)]
    budget = 3 * max(plan.nbytes for plan in plans)
    taken = []

    def take():
        for plan in plans:
            taken.append(plan.nbytes)
            yield plan

    released = 0
    with client.prefetch(take(), max_bytes=budget, missing="mask") as fetched:
        for number, rows in enumerate(fetched):
            # All that was begun, without what was given back, and the one that waits for room.
            assert sum(taken[:-1]) - released <= budget
            released += plans[number].nbytes
            assert len(taken) < number + 2 + budget // min(plan.nbytes for plan in plans)
            del rows
    assert len(taken) == 20


def test_a_plan_larger_than_the_budget_is_read_alone(stored, client):
    plans = [whole(1, stored), whole(2, stored)]
    with client.prefetch(iter(plans), max_bytes=0) as fetched:
        assert [rows.plan for rows in fetched] == plans


def test_reading_begins_at_once(stored, client):
    begun = threading.Event()

    def plans():
        begun.set()
        yield whole(1, stored)

    with client.prefetch(plans()):
        assert begun.is_set()


def test_an_error_comes_at_its_turn_and_the_others_come_too(stored, client):
    lost = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("lost", 9)]), Rank(LAYOUT.layer_ids))
    with client.prefetch([whole(1, stored), lost, whole(2, stored)]) as fetched:
        assert next(fetched).coverage == 1
        with pytest.raises(NotFound):
            next(fetched)
        assert next(fetched).coverage == 1
        with pytest.raises(StopIteration):
            next(fetched)


class PlansRanOut(Exception):
    pass


def test_nothing_goes_on_if_the_plans_cannot_be_told(stored, client):
    """The iterator raises before anybody holds what was begun."""
    lost = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("lost", 9)]), Rank((1,)))

    def plans():
        yield lost
        raise PlansRanOut

    for _ in range(3):
        with pytest.raises(PlansRanOut):
            client.prefetch(plans(), wait_for="rows", timeout=600)
    assert not any(thread.name.startswith("routetrace-fetch") for thread in threading.enumerate())

    async def prefetch() -> None:
        async with AsyncRouteClient(stored.target) as other:
            with pytest.raises(PlansRanOut):
                other.prefetch(plans(), wait_for="rows", timeout=600)
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                _, going_on = await asyncio.wait(others, timeout=30)
                assert not going_on

    asyncio.run(prefetch())


def no_memory_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three buffers for rows."""
    empty, fails = _memory.empty, [False, True, False]

    def scarce(shape, dtype, pin):
        if dtype == LAYOUT.dtype and fails.pop(0):
            raise MemoryError
        return empty(shape, dtype, pin)

    monkeypatch.setattr(_memory, "empty", scarce)


def test_a_buffer_that_cannot_be_had_does_not_end_the_others(stored, client, monkeypatch):
    """No memory for one plan: its error is raised, and the plans behind it are read."""
    no_memory_for_the_second(monkeypatch)
    plans = [whole(number, stored) for number in (1, 2, 4)]
    with client.prefetch(plans, max_bytes=0) as fetched:
        assert next(fetched).plan is plans[0]
        with pytest.raises(MemoryError):
            next(fetched)
        assert next(fetched).plan is plans[2]
        with pytest.raises(StopIteration):
            next(fetched)


def test_progress_of_plans(stored, client, monkeypatch):
    lost = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("lost", 9)]), Rank(LAYOUT.layer_ids))
    plans = [whole(1, stored), lost, whole(2, stored)]
    expected, nbytes = [], 0
    for number, plan in enumerate(plans, 1):
        nbytes += 0 if plan is lost else int(np.prod(plan.shape)) * plan.layout.dtype.itemsize
        expected.append((number, 3, int(number > 1), nbytes))
    reported: list[Progress] = []
    with client.prefetch(plans, max_bytes=0, progress=reported.append) as fetched:
        assert not reported
        assert next(fetched).plan is plans[0]
        with pytest.raises(NotFound):
            next(fetched)
        assert next(fetched).plan is plans[2]
        assert list(fetched) == []
    assert [(p.done, p.total, p.failed, p.bytes) for p in reported] == expected

    async def fetch() -> None:
        reported.clear()
        async with (
            AsyncRouteClient(stored.target) as other,
            other.prefetch(plans, progress=reported.append) as fetched,
        ):
            await anext(fetched)
            with pytest.raises(NotFound):
                await anext(fetched)
            await anext(fetched)
            with pytest.raises(StopAsyncIteration):
                await anext(fetched)

    asyncio.run(fetch())
    assert [(p.done, p.total, p.failed, p.bytes) for p in reported] == expected

    # A plan for which there is no memory ends, too.
    no_memory_for_the_second(monkeypatch)
    reported.clear()
    with client.prefetch([plans[0]] * 3, max_bytes=0, progress=reported.append) as fetched:
        next(fetched)
        with pytest.raises(MemoryError):
            next(fetched)
        next(fetched)
    assert [(p.done, p.failed) for p in reported] == [(1, 0), (2, 1), (3, 1)]


def three(stored: Stored) -> FetchPlan:
    """A plan of three requests that lack nothing."""
    lengths = {number: len(stored.tokens[number]) for number in (1, 2, 4)}
    samples = [Sample.of(f"r{number}", length) for number, length in lengths.items()]
    batch = MicroBatch.padded(samples, max(lengths.values()), padding_side="right")
    return FetchPlan.make(LAYOUT, batch, Rank(layer_ids=LAYOUT.layer_ids))


def test_a_read_begins_while_the_last_message_before_is_worked_on(stored, client, monkeypatch):
    seen: list[str] = []
    feed, do = Assembler.feed, Driver._do

    def noted_feed(self, *message):
        seen.append("feed")
        feed(self, *message)

    def noted_do(self, step, *more):
        if isinstance(step, Open):
            seen.append("open")
        return do(self, step, *more)

    plain = client.fetch(three(stored))
    monkeypatch.setattr(Assembler, "feed", noted_feed)
    monkeypatch.setattr(Driver, "_do", noted_do)
    monkeypatch.setattr(_fetch, "MAX_READS", 1)
    rows = client.fetch(three(stored))
    assert seen == ["open", "open", "feed", "open", "feed", "feed"]
    assert (rows.valid == plain.valid).all()
    assert (rows.topk_ids[rows.valid] == plain.topk_ids[rows.valid]).all()


def test_an_error_gives_the_read_behind_it_up_too(stored, client, monkeypatch):
    def broken(*_):
        raise Corrupt("broken")

    monkeypatch.setattr(Assembler, "feed", broken)
    with pytest.raises(Corrupt, match="broken"):
        client.fetch(three(stored))
    assert not client._driver._scope._members


def test_the_asyncio_client_decodes_beside_its_loop(stored, client, monkeypatch):
    monkeypatch.setattr(_aio_drive, "_BESIDE_BYTES", 1)
    threads: set[int] = set()
    begun, going_on = threading.Event(), threading.Event()
    feed = Assembler.feed

    def noted_feed(self, *message):
        threads.add(threading.get_ident())
        begun.set()
        assert going_on.wait(30)
        feed(self, *message)

    plan = three(stored)
    plain = client.fetch(plan)
    monkeypatch.setattr(Assembler, "feed", noted_feed)

    async def reads() -> Rows:
        async with AsyncRouteClient(stored.target) as there:
            given_up = asyncio.create_task(there.fetch(plan))
            assert await asyncio.to_thread(begun.wait, 30)
            for _ in range(3):  # it does not end while something of the caller's is written to
                given_up.cancel()
                await asyncio.sleep(0.02)
            assert not given_up.done()
            going_on.set()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            return await there.fetch(plan)

    rows = asyncio.run(reads())
    assert threading.get_ident() not in threads
    assert (rows.valid == plain.valid).all()
    assert (rows.topk_ids[rows.valid] == plain.topk_ids[rows.valid]).all()


@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 12])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_ids_are_copied_between_any_strides(top_k, dtype):
    rng = np.random.default_rng(top_k)
    ids = rng.integers(0, 200, (3, 11, top_k)).astype(dtype)
    for place in (
        np.zeros((3, 11, top_k), dtype),
        np.zeros((3, 44, top_k), dtype)[:, 1::4],
        np.zeros((11, 3, top_k), dtype).transpose(1, 0, 2),
        np.zeros((3, 11, 2 * top_k), dtype)[:, :, ::2],
        np.zeros(3 * 11 * top_k * ids.itemsize + 1, np.uint8)[1:].view(dtype).reshape(ids.shape),
    ):
        copy_ids(ids, place)
        assert (place == ids).all()


def test_a_closed_client_ends_what_is_under_way(stored):
    waiting = FetchPlan.make(
        LAYOUT, MicroBatch.packed([Sample.of("lost", 9)]), Rank(LAYOUT.layer_ids)
    )
    client = RouteClient(stored.target)
    fetched = client.prefetch([waiting], wait_for="rows", timeout=600)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(Closed):
        next(fetched)
    fetched.close()


def test_closing_ends_the_threads(stored, client):
    lost = FetchPlan.make(LAYOUT, MicroBatch.packed([Sample.of("lost", 9)]), Rank((1,)))
    fetched = client.prefetch([lost] * 3, wait_for="rows", timeout=600)
    assert any(thread.name.startswith("routetrace-fetch") for thread in threading.enumerate())
    fetched.close()
    fetched.close()
    assert not any(thread.name.startswith("routetrace-fetch") for thread in threading.enumerate())
    with pytest.raises(Closed):
        next(fetched)


def test_a_prefetch_that_is_closed_before_its_end_says_so(stored):
    plans = [whole(1, stored)] * 4
    with RouteClient(stored.target) as own:
        fetched = own.prefetch(plans, max_bytes=0)
        assert next(fetched).plan is plans[0]
        own.close()
        with pytest.raises(Closed):
            list(fetched)

    async def fetch() -> None:
        async with AsyncRouteClient(stored.target) as other:
            fetched = other.prefetch(plans, max_bytes=0)
            assert (await anext(fetched)).plan is plans[0]
            await fetched.close()
            with pytest.raises(Closed):
                await anext(fetched)

    asyncio.run(fetch())


@pytest.mark.parametrize("max_bytes", [0, 20_000, 1 << 20])
@pytest.mark.parametrize("place", range(1, 6))
def test_a_wrong_plan_keeps_its_turn(stored, client, place, max_bytes):
    """Whatever is read ahead: the caller pairs rows with samples by their order."""
    plans: list[Any] = [whole(number, stored) for number in (1, 2, 4, 1, 2)]
    plans.insert(place, "no plan")
    expected = [*plans]

    found: list[Any] = []
    with client.prefetch(plans, missing="mask", max_bytes=max_bytes) as fetched:
        for _ in expected:
            with suppress(InvalidArgument):
                found.append("no plan")
                found[-1] = next(fetched).plan
        assert next(fetched, None) is None
    assert found == expected

    async def fetch() -> list[Any]:
        found: list[Any] = []
        async with (
            AsyncRouteClient(stored.target) as other,
            other.prefetch(plans, missing="mask", max_bytes=max_bytes) as fetched,
        ):
            for _ in expected:
                with suppress(InvalidArgument):
                    found.append("no plan")
                    found[-1] = (await anext(fetched)).plan
            assert await anext(fetched, None) is None
        return found

    assert asyncio.run(fetch()) == expected


@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration])
def test_an_error_of_the_progress_function_ends_the_prefetch(stored, client, error):
    def fails(progress: Progress) -> None:
        if progress.done == 2:
            raise error

    with client.prefetch([whole(1, stored)] * 4, progress=fails) as fetched:
        next(fetched)
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            next(fetched)
        assert list(fetched) == []

    async def later(progress: Progress) -> None:
        pass

    with pytest.raises(InvalidArgument, match="progress is a function"):
        client.prefetch([], progress=later)


# ------------------------------------------------------------------ what is missing


def test_missing_rows_are_an_error_that_names_them_unless_masked(stored, client):
    number = next(i for i, valid in enumerate(stored.valid) if not valid.all())
    with pytest.raises(Incomplete, match=f"'r{number}' is incomplete; missing positions"):
        client.fetch(whole(number, stored))
    rows = client.fetch(whole(number, stored), missing="mask")
    assert 0 < rows.coverage < 1
    assert {sample for sample, _ in rows.missing} == {0}


def test_only_rows_of_one_weight_version(stored, client):
    number = next(i for i, v in enumerate(stored.versions) if len(set(v)) > 1)
    rows = client.fetch(whole(number, stored), missing="mask", weight_version=1)
    wanted = (stored.versions[number] == 1) & stored.valid[number]
    assert rows.valid[:, :-1].tolist() == [wanted.tolist()] * len(LAYOUT.layer_ids)


# ------------------------------------------------------------------ what does not fit, in words


def fetch_sample(client, sample: Sample, layout: ModelLayout = LAYOUT) -> Rows:
    return client.fetch(
        FetchPlan.make(layout, MicroBatch.packed([sample]), Rank(layout.layer_ids[:1]))
    )


def test_tokens_prove_the_rows(stored, client):
    tokens = stored.tokens[1]
    assert fetch_sample(client, Sample.of("r1", token_ids=tokens)).verified[0] >= 2
    assert fetch_sample(client, Sample.of("r1", len(tokens))).verified == (0,)
    # The start of a request is enough, and is proven by a digest behind the prompt.
    proven = []
    for number in (1, 2, 4, 5, 6):
        tokens = stored.tokens[number][:-3]
        rows = fetch_sample(client, Sample.of(f"r{number}", token_ids=tokens))
        proven.append(rows.verified[0] > 0)
        assert proven[-1] == stored.proves(number, len(tokens))
        assert rows.coverage == 1
    assert {*proven} == {False, True}


def told(client, sample: Sample, layout: ModelLayout = LAYOUT) -> str:
    with pytest.raises(InvalidArgument) as error:
        fetch_sample(client, sample, layout)
    return str(error.value)


def test_another_number_of_tokens_is_said(stored, client):
    count = len(stored.tokens[1])
    words = told(client, Sample.of("r1", count - 1))
    assert "samples[0].num_tokens" in words
    assert f"{count}, the tokens of trace 'r1'" in words
    words = told(client, Sample.of("r1", count + 1))
    assert words.startswith(f"samples[0].num_tokens is {count + 1}; expected {count}, the tokens")
    # One of several reads alone, whatever becomes of the others.
    lengths = [len(tokens) + (number in (1, 3)) for number, tokens in enumerate(stored.tokens)]
    samples = [Sample.of(f"r{number}", length) for number, length in enumerate(lengths)]
    plan = FetchPlan.make(LAYOUT, MicroBatch.packed(samples), Rank(LAYOUT.layer_ids[:1]))
    with pytest.raises(InvalidArgument) as caught:
        client.fetch(plan)
    assert caught.value.field == "samples[1].num_tokens"


def test_shifted_tokens_are_said(stored, client):
    number = max(range(NUM_REQUESTS), key=lambda i: len(stored.tokens[i]))
    tokens = stored.tokens[number].tolist()
    words = told(client, Sample.of(f"r{number}", token_ids=[7, 7, 7, *tokens[:-3]]))
    assert "start 3 tokens late" in words
    # Also where the sample is longer by these tokens.
    words = told(client, Sample.of(f"r{number}", token_ids=[7, 7, 7, *tokens]))
    assert "start 3 tokens late" in words


def test_another_tokenization_is_said(stored, client):
    number = max(range(NUM_REQUESTS), key=lambda i: len(stored.tokens[i]))
    tokens = stored.tokens[number].copy()
    tokens[-10] += 1
    words = told(client, Sample.of(f"r{number}", token_ids=tokens))
    assert "they agree before position" in words
    tokens[0] += 1
    assert "another prompt, another tokenization" in told(
        client, Sample.of(f"r{number}", token_ids=tokens)
    )


def test_another_layer_numbering_is_said(stored, client):
    sample = Sample.of("r1", len(stored.tokens[1]))
    shifted = ModelLayout(tuple(i + 1 for i in LAYOUT.layer_ids), 9, 40, 3)
    words = told(client, sample, shifted)
    assert "plan has moe_layer_ids" in words
    assert "numbered 1 too high" in words
    assert "plan has num_experts" in told(client, sample, replace(LAYOUT, num_experts=64))
    assert "plan has top_k" in told(client, sample, replace(LAYOUT, top_k=2))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_tokens_of_each_turn_are_checked(stored, client, number):
    """A turn whose request has other tokens than it is said to have."""
    tokens = stored.tokens[number]
    count, first = len(tokens), f"r{number}"
    turn = Segment(first, 0, count - 2, num_tokens=count - 1)
    assert f"expected {count}, the tokens of trace '{first}'" in told(
        client, Sample(count + 9, (turn,))
    )
    # What the next turn's prompt dropped at the end of this one is no matter, if that is proven.
    edited = np.concatenate([tokens[: count - 1], [7] * 40])
    sample = Sample(len(edited), (turn,), token_ids=edited)
    if count > 64:
        proven = fetch_sample(client, sample).verified[0] > 0
        assert proven == stored.proves(number, count - 1)
    edited[10] += 1
    assert "another prompt" in told(client, sample) or "they agree" in told(client, sample)


# ------------------------------------------------------------------ the wire


@pytest.mark.parametrize(
    ("ranges", "more"),
    [
        ([(5, 5)], {}),
        ([(5, 9), (8, 10)], {}),
        ([(5, 9), (2, 3)], {}),
        ([(0, 1)], {"token_stop": 4}),
        ([(0, 1)], {"follow": True}),
        ([(2 * i, 2 * i + 1) for i in range(1025)], {}),
        ([(0, 10**6)], {}),
    ],
)
def test_the_server_refuses_ranges_that_make_no_sense(stored, ranges, more):
    import grpc

    reads = Reads(stored.target)
    token_ranges = [pb.TokenRange(start=a, stop=b) for a, b in ranges]
    with pytest.raises(grpc.RpcError) as error:
        reads.get("r1", token_ranges=token_ranges, **more)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    reads.close()


def ask(rng: random.Random, count: int, layer_ids) -> tuple[pb.GetTraceRequest, Want]:
    """Some ranges of a trace, and places for them."""
    edges = sorted(rng.sample(range(count + 1), min(2 * rng.randint(1, 3), count + 1) // 2 * 2))
    stride = rng.randint(1, 3)
    pieces, at = [], rng.randrange(3)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        pieces.append(Piece(start, stop, at, stride))
        at += (stop - start) * stride + rng.randrange(2)
    chosen = tuple(sorted(rng.sample(layer_ids, rng.randint(1, len(layer_ids)))))
    ids = np.full((len(chosen), at, LAYOUT.top_k), 99, LAYOUT.dtype)
    cells = PlacedCells(ids, np.ones(ids.shape[:2], bool), LAYOUT.select(chosen), pieces)
    ranges = [pb.TokenRange(start=a, stop=b) for a, b in cells.ranges]
    request = pb.GetTraceRequest(trace_id="req", layer_ids=chosen, token_ranges=ranges)
    return request, Want("req", chosen, edges[0], edges[-1], mask=True, into=cells)


@settings(max_examples=200)
@given(randoms)
def test_any_cut_is_placed(rng):
    source = truth(rng.randint(1, 40), rng=rng)
    request, want = ask(rng, len(source.ids), LAYOUT.layer_ids)
    assembler = Assembler(want)
    for message in source.responses(request, rng):
        assembler.feed(message)
    assembler.finish()
    columns = LAYOUT.columns(want.layer_ids)
    ids, valid = source.ids[:, columns], source.valid_for(request)[:, columns]
    untouched = np.ones(want.into.ids.shape[1], bool)
    for start, stop, at, stride in want.into.pieces:
        places = range(at, at + (stop - start) * stride, stride)
        for position, place in zip(range(start, stop), places, strict=True):
            assert (want.into.valid[:, place] == valid[position]).all()
            there = valid[position]
            assert (want.into.ids[there, place] == ids[position, there]).all()
            untouched[place] = False
    assert (want.into.ids[:, untouched] == 99).all()


@settings(max_examples=200)
@given(randoms)
def test_what_was_not_asked_for_is_never_placed(rng):
    """The answer to other ranges is refused, or gives the same cells."""
    source = truth(rng.randint(2, 40), rng=rng)
    request, want = ask(rng, len(source.ids), LAYOUT.layer_ids)
    other, _ = ask(rng, len(source.ids), LAYOUT.layer_ids)
    same = list(other.token_ranges) == list(request.token_ranges)
    assembler = Assembler(want)
    try:
        del other.layer_ids[:]
        other.layer_ids.extend(request.layer_ids)
        for message in source.responses(other, rng):
            assembler.feed(message)
        assembler.finish()
    except Corrupt:
        assert not same
        return
    columns = LAYOUT.columns(want.layer_ids)
    valid = source.valid_for(request)[:, columns]
    for start, stop, at, stride in want.into.pieces:
        places = range(at, at + (stop - start) * stride, stride)
        assert (want.into.valid[:, list(places)] == valid[start:stop].T).all()
