"""Hand-overs, nonces, models and weight versions in records and snapshots."""

from __future__ import annotations

import numpy as np

from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.snapshot import pieces, read_pieces, to_bytes
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import Source
from support.agents.recorder import LAYOUT, Recorder


def rows(count: int) -> np.ndarray:
    return np.tile(np.arange(2, dtype=np.uint8), (count, 2, 1))


def state_of(recorder: Recorder) -> State:
    recorder.flush()
    state = State(100)
    for number, record in enumerate(recorder.records, 1):
        apply_record(state, number, record)
    return state


def reloaded(state: State) -> State:
    other = State(100)
    other.load(state.dump())
    return other


def of_0_8(state: State) -> State:
    """Load the snapshot as a server of 0.8 wrote it: it did not say which versions are unknown."""
    old = []
    for piece in read_pieces(state.dump()):
        if piece.HasField("head"):
            piece.head.says_unknown_versions = False
        old.append(to_bytes(piece))
    other = State(100)
    other.load(pieces(old))
    return other


def sources(state: State) -> dict[str, Source]:
    return {t.key[1]: s for t in state.traces.traces.values() for s in t.sources}


def test_what_an_agent_is_given_is_in_records_and_snapshots() -> None:
    recorder = Recorder(model=77)
    first = recorder.begin("first", transfer_id="a", nonce=2**53 - 1, num_computed_tokens=4,
                           num_external_tokens=3, block_ids=(1, 2),
                           kv_weight_version=0)  # fmt: skip
    second, third = recorder.begin("second", kv_weight_version=-7), recorder.begin("third")
    recorder.finish(second, 3, transfer_id="b")
    recorder.finish(third, 3, reason="handoff", transfer_id="c")
    recorder.finish(first, 3)
    state = state_of(recorder)
    for loaded in (state, reloaded(state), reloaded(reloaded(state))):
        found = sources(loaded)
        assert {source.model for source in found.values()} == {77}
        given = {n: (s.received_by, s.handed_over_by, s.nonce) for n, s in found.items()}
        assert given == {
            "first": ("a", "", 2**53 - 1),
            "second": ("", "b", 0),
            "third": ("", "c", 0),
        }
        versions = {name: source.kv_version for name, source in found.items()}
        assert versions == {"first": 0, "second": -7, "third": UNKNOWN_VERSION}
        assert [writer.model for writer in loaded.writers.values()] == [77]


def versions(state: State) -> dict[str, list[int]]:
    return {n: [span.weight_version for span in s.attempts[0]] for n, s in sources(state).items()}


def record_versions(recorder: Recorder) -> None:
    """Rows of version 0, then of 7, in one request, in slots, and in slots of a mixed block."""
    handle = recorder.begin("r", block_ids=(1, 2, 3))
    recorder.step(rows(6), [(handle, 0, 6)])
    recorder.set_weight_version(7)
    recorder.step(rows(3), [(handle, 6, 3)])
    recorder.set_weight_version(0)
    recorder.step(rows(2), [(handle, 9, 2)], tentative=1)


def inherited(state: State) -> list[int]:
    [writer] = state.writers.values()
    return [run.weight_version for run in writer.slots.resolve([1, 2, 3], 0, 10)]


def test_version_0_is_unknown_in_chunks_of_agents_that_cannot_say_so() -> None:
    for says, zero in ((True, 0), (False, UNKNOWN_VERSION)):
        recorder = Recorder(says_unknown_versions=says)
        record_versions(recorder)
        state = state_of(recorder)
        for loaded in (state, reloaded(state)):
            assert versions(loaded) == {"r": [zero, 7, zero]}
            assert inherited(loaded) == [zero, 7, zero]
            [writer] = loaded.writers.values()
            assert writer.weight_version == (0 if says else None)
            assert writer.says_unknown_versions == says


def test_version_0_is_unknown_in_snapshots_of_0_8() -> None:
    recorder = Recorder()
    record_versions(recorder)
    state = of_0_8(state_of(recorder))
    for loaded in (state, reloaded(state)):
        assert versions(loaded) == {"r": [UNKNOWN_VERSION, 7, UNKNOWN_VERSION]}
        assert inherited(loaded) == [UNKNOWN_VERSION, 7, UNKNOWN_VERSION]
        [source] = sources(loaded).values()
        assert [span.weight_version for span in source.drafts] == [UNKNOWN_VERSION]
        [writer] = loaded.writers.values()
        assert writer.weight_version is None


def test_a_chunk_names_hand_overs_that_it_has() -> None:
    recorder = Recorder(LAYOUT)
    for name in ("a", "b"):
        handle = recorder.begin(name)
        recorder.finish(handle, 2, transfer_id=name)
        recorder.flush()  # each chunk has hand-overs of its own
    assert {n: s.handed_over_by for n, s in sources(state_of(recorder)).items()} == {
        "a": "a",
        "b": "b",
    }
