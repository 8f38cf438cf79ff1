"""Summaries stay right where other traces and agents change, and the trace itself does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from unittest.mock import patch

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient, TraceSummary
from routetrace.codec.records import OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.core import Core
from routetrace.server.index import state
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records import snapshot
from routetrace.server.index.records.snapshot import pieces, read_pieces, to_bytes
from routetrace.server.rows.summaries import Summaries
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.recorder import Recorder, records
from support.servers.client_server import rows_of

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)
PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 50_000, 128)]
ODD = ["rows", "gap", "more", "longer", "end", "reason", "name", "resumed", "tokens", "lost"]
LOADED = 120
"""Tokens of the prompt whose KV comes from elsewhere."""


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


def ask(agent: CaptureAgent, name: str, external: int, version: int = 0) -> None:
    """Make a request of the prompt, with KV of so many tokens from elsewhere."""
    agent.set_weight_version(version)
    handle = agent.begin(
        name,
        prompt_len=len(PROMPT),
        num_computed_tokens=external,
        num_external_tokens=external,
        prompt_token_ids=PROMPT,
    )
    computed = len(PROMPT) - external
    agent.step(rows_of(LAYOUT, computed), [(handle, external, computed)])
    agent.finish(handle, len(PROMPT) + 1)
    assert agent.flush(30)


def states(client: RouteClient) -> dict[str, str]:
    """The state of each trace, by filters; what was listed before is kept by the server."""
    return {
        stat.trace_id: state
        for state in ("running", "complete", "incomplete")
        for stat in client.find(states=[state])
    }


def test_rows_of_other_traces_make_no_difference(server):
    config = AgentConfig(
        target=server.target, run="given", engine_id="e0", layout=LAYOUT, background="thread",
        flush_interval_seconds=0.01,
    )  # fmt: skip
    with CaptureAgent(config) as agent, RouteClient(server.target, run="given") as client:
        ask(agent, "reader", LOADED)
        ask(agent, "other", 0)
        assert states(client) == {"reader": "incomplete", "other": "complete"}


def recorded(core: Core, *, ends: bool) -> None:
    """Apply the records of one request, which has two rows."""
    recorder = Recorder()
    handle = recorder.begin("t", prompt_len=1)
    recorder.step(rows_of(recorder.layout, 2), [(handle, 0, 2)])
    if ends:
        recorder.finish(handle, 4)
    recorder.flush()
    for record in recorder.records:
        apply_record(core.state, core.state.number + 1, record)


async def compared(core: Core, records: Iterable[bytes]) -> Counter[bool]:
    """Compare entries in lists with views; return how many were worked out without."""
    for record in records:
        apply_record(core.state, core.state.number + 1, record)
    summaries, kinds = Summaries(core.reader, core.agents), Counter[bool]()
    for trace in core.state.traces.traces.values():
        if not trace.sources:
            continue
        with patch.object(core.reader, "find", wraps=core.reader.find) as find:
            found = pb.TraceInfo.FromString(summaries.entry(trace))
        kinds[not find.called] += 1
        known = core.reader.find(*trace.key, trace=trace)
        expected = core.reader.describe(known, digests=False)
        expected.missing_cells.extend(core.reader.missing_cells(expected.state, known))
        assert found == expected, trace.key
    return kinds


async def test_plain_traces_have_the_entries_of_their_views():
    """Of simulated engines: preempted, rewound, cached, aborted, with several incarnations."""
    kinds = Counter[bool]()
    for seed in range(30):
        core = Core(MemoryStore(), ServerConfig())
        await core.start()
        kinds += await compared(core, records(seed))
        await core.stop()
    assert min(kinds[False], kinds[True]) > 40


async def test_plain_traces_of_several_shards():
    """Each shard may lack rows, layers, the end, or an attempt, or have other tokens."""
    kinds = Counter[bool]()
    layout = ModelLayout((0, 2, 3), 4, 16, 2)
    for seed in range(60):
        rng, made = random.Random(seed), []
        for shard, layers in (("pp0", (0, 2)), ("pp1", rng.choice([(3,), (3,), (2, 3)]))):
            recorder = Recorder(layout.select(layers), shard)
            for number in range(6):
                one = random.Random(f"{seed} {number}")  # the same of both shards
                tokens, reason = (
                    one.randint(1, 9),
                    one.choice(["stop", "length", "abort", "handoff"]),
                )
                ids = [one.randrange(9) for _ in range(tokens)] if one.random() < 0.5 else None
                odd = rng.choice([""] * 12 + ODD)
                name = f"r{number}" + shard * (odd == "name")
                labels = {shard: str(one.random())}
                handle = recorder.begin(name, trace_id=f"r{number}", prompt_len=1, labels=labels)
                tokens += odd == "longer"
                places = [*range(tokens - 1 + (odd == "more"))]
                if odd == "gap" and places:
                    places = [*places[1:], tokens - 1]
                for at in places[odd == "rows" :]:
                    recorder.set_weight_version(one.randrange(2))
                    recorder.step(rows_of(recorder.layout, 1), [(handle, at, 1)])
                if odd == "resumed":
                    recorder.preempt(handle, rng.randrange(tokens))
                    recorder.resume(handle, 0)
                    if places:
                        rows = rows_of(recorder.layout, len(places))
                        recorder.step(rows, [(handle, 0, len(places))])
                if odd == "lost":
                    lost = {"position": 0, "count": 1, "arg": pb.MISSING_REASON_QUEUE_FULL}
                    recorder.chunk.op(OpKind.LOST, name, **lost)
                if odd == "reason":
                    reason = "abort"
                if odd != "end":
                    told = ids if ids is None or len(ids) == tokens else [*ids, 0]
                    if odd == "tokens":
                        told = [9] * tokens
                    recorder.finish(handle, tokens, reason=reason, token_ids=told)
                if rng.random() < 0.5:
                    recorder.flush()
            recorder.flush()
            made += recorder.records
        core = Core(MemoryStore(), ServerConfig())
        await core.start()
        kinds += await compared(core, made)
        await core.stop()
    assert min(kinds[False], kinds[True]) > 40


@pytest.mark.parametrize("ends", [False, True])
async def test_an_agent_that_is_lost_and_comes_back(ends: bool):
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    summaries = Summaries(core.reader, core.agents)
    recorded(core, ends=ends)
    trace = core.state.traces.traces["run", "t"]

    def state() -> int:
        assert TraceSummary.from_proto(summaries.told(trace).message).trace_id == "t"
        return summaries.of(trace).state

    running, incomplete = pb.TRACE_STATE_RUNNING, pb.TRACE_STATE_INCOMPLETE
    assert state() == (incomplete if ends else running)
    core.journal.clock._offset += 2 * core.agents.timeout
    assert state() == incomplete
    core.agents.reachable()
    assert state() == (incomplete if ends else running)
    await core.stop()


# ---------------------------------------------------------------------------- over a restart


async def started() -> Core:
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    return core


async def restarted(core: Core, edit: Callable[[stored.Piece], object] = id) -> Core:
    """Return a server with the snapshot of another one, whose pieces may be edited before."""
    parts = []
    for piece in read_pieces(core.state.dump()):
        edit(piece)
        parts.append(to_bytes(piece))
    other = await started()
    other.state.load(pieces(parts))
    return other


def stored_entries(core: Core) -> list[bytes]:
    """Return the entries that a restart takes from a snapshot."""
    return [trace.entry for p in read_pieces(core.state.dump()) for trace in p.traces]


def look(core: Core) -> None:
    """Work out the entries of all traces."""
    summaries = Summaries(core.reader, core.agents)
    for trace in core.state.traces.traces.values():
        if trace.sources:
            summaries.entry(trace)


async def test_entries_are_those_of_the_views_after_a_restart_and_after_what_comes_then():
    for seed in range(12):
        made = records(seed)
        half = len(made) // 2
        core = await started()
        for record in made[:half]:
            apply_record(core.state, core.state.number + 1, record)
        look(core)
        other = await restarted(core)
        assert await compared(other, [])
        assert await compared(other, made[half:])
        await core.stop()
        await other.stop()


@pytest.mark.parametrize(("release", "taken"), [("this", True), ("0.1.0", False), ("", False)])
async def test_entries_of_another_release_are_worked_out_again(release, taken):
    core = await started()
    recorded(core, ends=True)
    for _ in core.state.pack():  # before the first look
        pass
    look(core)

    def edit(piece: stored.Piece) -> None:
        for trace in piece.traces:
            assert trace.entry
            info = pb.TraceInfo.FromString(trace.entry)
            info.labels["taken"] = "yes"
            trace.entry = info.SerializeToString()
        if piece.HasField("head") and release != "this":
            piece.head.release = release

    other = await restarted(core, edit)
    summaries = Summaries(other.reader, other.agents)
    (trace,) = other.state.traces.traces.values()
    assert ("taken" in pb.TraceInfo.FromString(summaries.entry(trace)).labels) is taken
    await core.stop()
    await other.stop()


@pytest.mark.parametrize("changed", [False, True])
async def test_an_entry_that_may_change_is_in_no_snapshot(changed):
    core = await started()
    recorded(core, ends=changed)
    look(core)
    if changed:
        for trace in core.state.traces.traces.values():
            core.state.touch(trace, trace.updated + 1)
    assert stored_entries(core) == [b""]
    await core.stop()


async def test_entries_of_releases_that_are_not_known_are_not_taken(monkeypatch):
    core = await started()
    recorded(core, ends=True)
    look(core)
    assert b"" not in stored_entries(core)
    for module in (snapshot, state):  # the one that reads, and the one that writes
        monkeypatch.setattr(module, "RELEASE", "unknown")
    assert stored_entries(core) == [b""]
    await core.stop()
