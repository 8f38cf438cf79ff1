"""Traces of many requests are joined step by step: no call does it at once, whatever happens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

import grpc
import pytest

from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import at_once
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.index.traces import trace as trace_module
from routetrace.server.index.traces.joins import Join
from routetrace.server.index.traces.prefix_tree import STEP, sorted_in_steps
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read import watching
from routetrace.server.read.watching import Watch
from routetrace.server.rows.preparing import prepare, prepare_end, prepare_standing
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.recorder import Recorder
from support.servers.client_server import rows_of

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
TURNS = 300


class Chat:
    """A server's core with a trace of many requests.

    Args:
        turns: number of requests.
        branches: whether they branch off each other; else each goes on from the one before.
    """

    def __init__(self, turns: int = TURNS, *, branches: bool = True) -> None:
        self._branches = branches
        config = ServerConfig(metrics_listen="127.0.0.1:0", default_ttl_seconds=(1 << 32) - 1)
        self.core = Core(MemoryStore(), config)
        # Its records are of 1970: as if they were of this moment.
        self.core.reader.may_grow = lambda _: True  # type: ignore[method-assign]
        self._recorder = Recorder(LAYOUT)
        self._rng = random.Random(3)
        self._tokens = [1]
        self._turns = 0
        self._applied = 0
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """A request that begins as an earlier one did."""
        rng, recorder = self._rng, self._recorder
        prompt, drawn = self._tokens, []
        if self._branches:
            prompt, drawn = prompt[: rng.randint(1, len(prompt))], rng.choices((0, 1), k=2)
        tokens = [*prompt, *drawn, self._turns + 2]
        handle = recorder.begin(
            f"r{self._turns}", trace_id="chat", prompt_len=len(prompt), prompt_token_ids=prompt
        )
        recorder.step(rows_of(LAYOUT, len(tokens) - 1), [(handle, 0, len(tokens) - 1)])
        recorder.finish(handle, len(tokens), token_ids=tokens)
        recorder.flush()
        self._turns += 1
        self._tokens = tokens[:4] if self._branches and len(tokens) > 40 else tokens
        for record in recorder.records[self._applied :]:
            self._applied += 1
            apply_record(self.core.state, self._applied, record)
        self.core.journal.notify_touched()

    @property
    def trace(self) -> Trace:
        return self.core.state.traces.traces["run", "chat"]

    def found(self, number: int = 0) -> tuple[object, ...]:
        """Facts of the trace as they are now, from a join that is made at once."""
        self.trace.rejoin()
        self.core.reader._memory._found.clear()
        known = self.core.reader.find("run", "chat", number)
        return facts(self.core, known)


def facts(core: Core, known) -> tuple[object, ...]:
    parts = [(o.owner.number, o.stop, o.start) for o in known.incarnation.owned()]
    return known.incarnation.request.number, known.trace.join.standing, parts, known.rows.tolist()


@pytest.fixture
def in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to join, or to compare, the requests of a long trace at once."""
    made, related = Join.__init__, Join.incarnation

    def make(join: Join, sources, num_dropped: int = 0) -> None:
        assert len(sources) < 64, "joined at once"
        made(join, sources, num_dropped)

    def relate(join: Join, number: int):
        assert len(join.requests) < 64 or number in join._incarnations, "related at once"
        return related(join, number)

    monkeypatch.setattr(Join, "__init__", make)
    monkeypatch.setattr(Join, "incarnation", relate)


@asynccontextmanager
async def served(core: Core) -> AsyncIterator[pb_grpc.TraceServiceStub]:
    await core.start()
    server = grpc.aio.server()
    core.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.TraceServiceStub(channel)
    await core.stop()
    await server.stop(None)


@pytest.mark.parametrize("branches", [True, False])
async def test_no_call_joins_a_long_trace_at_once(branches: bool, in_steps_alone: None) -> None:
    chat = Chat(branches=branches)
    key = {"run": "run", "trace_id": "chat"}
    async with served(chat.core) as stub:

        async def changed() -> None:
            chat.turn()
            assert not chat.trace.is_joined

        await changed()
        info = (await stub.StatTrace(pb.StatTraceRequest(**key))).info
        assert (info.incarnation, info.state) == (TURNS + 1, pb.TRACE_STATE_COMPLETE)
        await changed()
        waited = await stub.StatTrace(pb.StatTraceRequest(**key, incarnation=7, wait=True))
        assert waited.info.incarnation == 7
        await changed()
        described = await stub.DescribeTrace(pb.DescribeTraceRequest(**key))
        assert described.incarnations[-1].number == TURNS + 3
        await changed()
        states = [pb.TRACE_STATE_COMPLETE]
        listed = await stub.ListTraces(pb.ListTracesRequest(run="run", states=states))
        assert [t.incarnation for t in listed.traces] == [TURNS + 4]
        await changed()
        watch = stub.WatchTraces(pb.WatchTracesRequest(run="run"))
        assert (await watch.read()).traces[0].num_incarnations
        await changed()
        while not (message := await watch.read()).traces:
            pass
        assert message.traces[0].trace_id == "chat"
        watch.cancel()
        await changed()
        await chat.core.census.count()
        assert chat.core.census.runs["run"].traces == {pb.TRACE_STATE_COMPLETE: 1}
        await changed()
        following = pb.GetTraceRequest(**key, follow=True)
        assert (await stub.GetTrace(following).read()).info.incarnation == TURNS + 8
        await changed()
        await chat.core.retention.sweep()
        every = [t async for t in chat.core.retention._finished(lambda _: True)]
        # Of more than 64 that stand, not each is looked at before the trace is old.
        assert every == [] if branches else [chat.trace]
        await changed()
        reads = [pb.GetTraceRequest(trace_id="chat", incarnation=3)]
        answers = stub.GetTraces(pb.GetTracesRequest(run="run", reads=reads))
        assert (await answers.read()).parts[0].message.info.incarnation == 3
        await changed()
        retired = await stub.RetireTraces(pb.RetireTracesRequest(run="run"))
        assert retired.num_retired == (not branches)


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("number", [0, 1, 77])
def test_what_is_prepared_is_what_is_found_at_once(number: int, branches: bool) -> None:
    chat = Chat(branches=branches)
    right = chat.found(number)
    chat.trace.rejoin()
    chat.core.reader._memory._found.clear()
    steps = sum(1 for _ in prepare(chat.core.reader, chat.trace, number))
    assert steps > 20
    assert chat.trace.is_joined
    assert facts(chat.core, chat.core.reader.find("run", "chat", number)) == right


@pytest.mark.parametrize("which", ["find", "standing", "end"])
def test_a_trace_may_change_between_any_two_steps(which: str) -> None:
    for at in range(0, 160, 7):
        chat = Chat(100, branches=at % 2 == 0)
        ways = {
            "find": lambda chat=chat: prepare(chat.core.reader, chat.trace),
            "standing": lambda chat=chat: prepare_standing(chat.trace),
            "end": lambda chat=chat: prepare_end(chat.core.reader, chat.trace),
        }
        for step, _ in enumerate(ways[which]()):
            if step == at:
                chat.turn()
            if step == at + 3:
                chat.trace.drop_oldest()
                chat.core.state.changed(chat.trace)
        known = chat.core.reader.find("run", "chat")
        assert facts(chat.core, known) == chat.found(), at
        assert known.trace.join.numbers[-1] == chat._turns


def test_a_trace_that_changes_at_every_step_is_prepared_no_more_than_a_few_times() -> None:
    chat = Chat(100)
    once = sum(1 for _ in prepare(chat.core.reader, chat.trace))
    chat.turn()
    steps = 0
    for _ in prepare(chat.core.reader, chat.trace):
        chat.turn()
        steps += 1
    assert once < steps < 20 * once
    assert facts(chat.core, chat.core.reader.find("run", "chat")) == chat.found()


class Changing:
    """Slices, after each of which a trace has changed; without one if it is calm."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.calm = False

    async def over(self, items, share: float = 0.5, *, waits: bool = False):
        for item in items:
            if item is None and not self.calm:
                self._chat.trace.rejoin()
                self._chat.core.state.changed(self._chat.trace)
            yield item


async def test_the_census_counts_what_changes_all_the_time_as_it_was(in_steps_alone: None) -> None:
    chat = Chat(100)
    turns = chat.core.census._turns = Changing(chat)  # type: ignore[assignment]
    await chat.core.census.count()
    assert not chat.core.census.runs  # it was never prepared so far
    turns.calm = True
    await chat.core.census.count()
    assert chat.core.census.runs["run"].traces == {pb.TRACE_STATE_COMPLETE: 1}
    cells = chat.core.census.runs["run"].cells
    turns.calm = False
    chat.turn()
    await chat.core.census.count()
    assert chat.core.census.runs["run"].cells == cells


async def test_a_watcher_hears_of_what_changes_all_the_time_once_it_is_calm(
    in_steps_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ROUND_SECONDS", 0.0)
    chat = Chat(100)
    await chat.core.start()
    turns = Changing(chat)
    with chat.core._traces._catalog("run").watched("run", turns) as watched:
        messages = Watch(watched, lambda: None).messages()
        for _ in range(3):
            message = await anext(messages)
            assert message.whole
            assert not message.traces
        turns.calm = True
        while not (message := await anext(messages)).traces:
            pass
        assert message.traces[0].trace_id == "chat"
        await messages.aclose()
    await chat.core.stop()


def test_a_step_is_short_whatever_a_trace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of steps grows with the requests, and with their digests."""
    monkeypatch.setattr(trace_module, "_MANY_SOURCES", 1)
    counts = []
    for turns in (100, 400):
        chat = Chat(turns)
        counts.append(sum(1 for _ in chat.trace.join_in_steps()))
    assert counts[1] > 3 * counts[0] > 30


@pytest.mark.parametrize("length", [0, 1, 1024, 1025, 5000])
def test_prefixes_are_sorted_in_steps(length: int) -> None:
    rng = random.Random(length)
    prefixes = {(rng.randrange(100), rng.randrange(1 << 60)) for _ in range(length)}
    steps = 0

    def counted() -> Generator[None, None, list[tuple[int, int]]]:
        nonlocal steps
        sorting = sorted_in_steps(prefixes)
        while True:
            try:
                next(sorting)
            except StopIteration as end:
                result: list[tuple[int, int]] = end.value
                return result
            steps += 1
            yield

    assert at_once(counted()) == sorted(prefixes)
    assert steps >= (length // STEP if length > 1024 else bool(length))
