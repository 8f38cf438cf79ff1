"""Rows that are lost, and the attempts that they belong to."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from routetrace.codec.records import OpKind
from routetrace.server.index.apply import apply_record, leave_out
from routetrace.server.index.records.snapshot import pieces, read_pieces, to_bytes
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import Source
from routetrace.server.rows.gaps import missing
from routetrace.server.rows.view import Selection, view
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.recorder import LAYOUT, Recorder

QUEUE_FULL, CORRUPT = pb.MISSING_REASON_QUEUE_FULL, pb.MISSING_REASON_CORRUPT
NOT_CAPTURED, KV_UNKNOWN = pb.MISSING_REASON_NOT_CAPTURED, pb.MISSING_REASON_KV_UNKNOWN


def rows(count: int) -> np.ndarray:
    return np.tile(np.arange(2, dtype=np.uint8), (count, 2, 1))


def replay(recorder: Recorder, *left_out: int) -> State:
    """The state after all records, without the chunks of these numbers."""
    recorder.flush()
    state = State(100)
    for number, record in enumerate(recorder.records, 1):
        (leave_out if number in left_out else apply_record)(state, number, record)
    return state


def served(
    state: State, number: int = 1, policy: int = pb.READ_POLICY_AS_SAMPLED
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Positions of the trace "t" that have a row, and (start, stop, reason) of the others."""
    trace = state.traces.traces["run", "t"]
    whole = trace.join.incarnation(number)
    selection = Selection(0, whole.num_rows, LAYOUT.layer_ids, policy)
    segments = view(whole, selection)
    there = chain.from_iterable(range(s.span.position, s.span.stop) for s in segments)
    gaps = missing(trace.sources, whole, segments, [], selection, NOT_CAPTURED)
    return sorted(there), [(one.start, one.stop, one.reason) for one in gaps]


def reloaded(state: State) -> State:
    other = State(100)
    other.load(state.dump())
    return other


def source_of(state: State) -> Source:
    [source] = state.traces.traces["run", "t"].sources
    return source


def test_no_row_of_a_pass_that_a_lost_chunk_may_have_taken_back():
    """KV that did not arrive is computed again from the start: what was computed on it is void."""
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=6, block_ids=[1, 2])
    recorder.step(rows(1), [(handle, 4, 1)])
    recorder.flush()
    recorder.step(rows(5), [(handle, 0, 5)])
    recorder.flush()
    lost = len(recorder.records)
    recorder.step(rows(2), [(handle, 5, 2)])
    recorder.flush()
    recorder.begin("next", num_computed_tokens=7, block_ids=[1, 2])
    recorder.finish(handle, 8)
    assert served(replay(recorder)) == ([*range(7)], [])
    state = replay(recorder, lost)
    assert served(state) == served(reloaded(state)) == ([], [])
    assert not source_of(state).ended, "nothing says whose end it is"


def test_a_request_whose_begin_was_lost_has_no_rows_but_an_end():
    """Nothing proves which of its attempts its rows are of."""
    recorder = Recorder()
    recorder.flush()
    handle = recorder.begin("t", prompt_len=2, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.flush()
    lost = len(recorder.records)
    recorder.step(rows(2), [(handle, 4, 2)])
    recorder.preempt(handle, 6)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(7), [(handle, 0, 7)])
    recorder.finish(handle, 8)
    recorder.begin("hit", num_computed_tokens=7, block_ids=[3, 4])
    state = replay(recorder, lost)
    assert served(state) == ([], [(0, 7, CORRUPT)])
    [writer] = state.writers.values()
    assert [*writer.slots.resolve([1, 2, 3, 4], 0, 16)] == []


def test_a_row_that_is_computed_after_all_leaves_nothing_lost():
    """A server that has started again holds what it held before, to the byte."""
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=2, block_ids=[1, 2])
    recorder.chunk.op(OpKind.LOST, "r", position=0, count=2, arg=NOT_CAPTURED)
    recorder.step(rows(4), [(handle, 0, 4)])
    state = replay(recorder)
    assert served(state) == ([0, 1, 2, 3], [])
    assert [*state.dump()] == [*reloaded(state).dump()]


def test_a_row_that_comes_after_its_preemption_is_of_no_later_pass():
    """Its pass was counted, and sampled a token: no other one did."""
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=4, block_ids=[1, 2])
    recorder.step(rows(5), [(handle, 0, 5)])
    recorder.preempt(handle, 6)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(7), [(handle, 0, 7)])
    recorder.finish(handle, 8)
    state = replay(recorder)
    assert served(state) == served(reloaded(state)) == ([0, 1, 2, 3, 4, 6], [(5, 6, NOT_CAPTURED)])


@pytest.mark.parametrize("aborted", [True, False])
def test_an_attempt_that_no_token_was_sampled_from_gives_no_row(aborted):
    recorder = Recorder()
    handle = recorder.begin(
        "r",
        trace_id="t",
        prompt_len=6,
        num_computed_tokens=4,
        num_external_tokens=4,
        block_ids=[1, 2],
    )
    recorder.step(rows(3), [(handle, 4, 3)])
    recorder.preempt(handle, 7)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(5), [(handle, 0, 5)])
    if aborted:
        recorder.finish(handle, 8, reason="abort")
        assert served(replay(recorder)) == ([4, 5, 6], [(0, 4, KV_UNKNOWN)])
        return
    recorder.preempt(handle, 5)
    recorder.resume(handle, 0, block_ids=[5, 6])
    recorder.step(rows(7), [(handle, 0, 7)])
    assert served(replay(recorder)) == ([4, 5, 6], [(0, 4, KV_UNKNOWN)])
    recorder.step(rows(1), [(handle, 7, 1)])
    recorder.finish(handle, 9)
    state = replay(recorder)
    trace = state.traces.traces["run", "t"]
    segments = view(trace.join.incarnation(1), Selection(0, 8, LAYOUT.layer_ids))
    where = [(s.span.position, s.span.stop, s.attempt) for s in segments]
    assert where == [(0, 4, 2), (4, 7, 0), (7, 8, 2)]


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_that_were_accepted_after_a_preemption_count_as_sampled(sampled):
    """The engine preempts the request before it knows which drafts of the last pass stand."""
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=3, block_ids=[1, 2])
    recorder.step(rows(3), [(handle, 0, 3)])
    recorder.step(rows(3), [(handle, 3, 3)])
    recorder.preempt(handle, 4)  # position 4 was a draft; it stands, and the one behind it
    recorder.resume(handle, 0, block_ids=[3, 4], num_tokens=7)
    recorder.step(rows(7), [(handle, 0, 7)])
    recorder.finish(handle, 8 if sampled else 7, reason="abort")
    state = replay(recorder)
    assert served(state)[0] == ([0, 1, 2, 3, 4, 5, 6] if sampled else [0, 1, 2, 3])
    assert served(reloaded(state))[0] == served(state)[0]


def test_an_attempt_that_was_sampled_from_before_the_loss_stays():
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=2, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.preempt(handle, 4)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(6), [(handle, 0, 6)])
    recorder.flush()
    recorder.step(rows(1), [(handle, 6, 1)])
    recorder.flush()
    assert served(replay(recorder, len(recorder.records))) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize(
    ("prompt_len", "computed", "there", "gaps"),
    [
        # The first attempt sampled: what it lost stays lost.
        (3, 4, [0, 1, 3, 4, 5], [(2, 3, NOT_CAPTURED)]),
        # It sampled nothing: what it lost does not count.
        (5, 4, [0, 1, 2, 3, 4, 5], []),
        # vLLM dropped what it had sampled.
        (4, 3, [0, 1, 2, 3, 4, 5], []),
    ],
)
def test_a_lost_row_counts_in_the_attempt_that_sampled(prompt_len, computed, there, gaps):
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=prompt_len, block_ids=[1, 2])
    recorder.step(rows(2), [(handle, 0, 2)])
    recorder.chunk.op(OpKind.LOST, "r", position=2, count=1, arg=NOT_CAPTURED)
    recorder.step(rows(1), [(handle, 3, 1)])
    recorder.preempt(handle, computed)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(6), [(handle, 0, 6)])
    recorder.finish(handle, 7)
    state = replay(recorder)
    assert served(state) == (there, gaps)
    assert served(reloaded(state)) == (there, gaps)


def of_0_8(state: State, notes: list[tuple[int, int, int]]) -> State:
    """The state as a server of 0.8 stored it: it did not say which attempt had lost a row."""
    old = []
    for piece in read_pieces(state.dump()):
        if piece.HasField("head"):
            piece.head.says_unknown_versions = False
        for trace in piece.traces:
            for source in trace.sources:
                source.ClearField("stops")
                source.ClearField("lost_rows")
                source.lost = np.array(notes, "<i8").tobytes()
        old.append(to_bytes(piece))
    other = State(100)
    other.load(pieces(old))
    return other


@pytest.mark.parametrize(
    ("prompt_len", "notes", "there", "gaps"),
    [
        (4, [(5, 6, QUEUE_FULL)], [0, 1, 2, 3, 4, 6], [(5, 6, QUEUE_FULL)]),
        # The first attempt may have lost the row that sampled, or it was preempted before.
        (5, [(5, 6, QUEUE_FULL)], [], [(0, 7, NOT_CAPTURED)]),
        (5, [], [0, 1, 2, 3, 4, 5, 6], []),
        (4, [(6, 1 << 32, QUEUE_FULL), (4, 5, NOT_CAPTURED)], [0, 1, 2, 3, 5],
         [(4, 5, NOT_CAPTURED), (6, 7, QUEUE_FULL)]),
    ],
)  # fmt: skip
def test_losses_of_0_8_have_no_attempt(prompt_len, notes, there, gaps):
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=prompt_len, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.preempt(handle, 4)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(7), [(handle, 0, 7)])
    recorder.finish(handle, 8)
    assert served(of_0_8(replay(recorder), notes)) == (there, gaps)


def test_where_cached_tokens_end_comes_back():
    recorder = Recorder()
    recorder.begin("r", trace_id="t", prompt_len=8, num_computed_tokens=4, block_ids=[1, 2])
    state = replay(recorder)
    assert source_of(state).loaded == source_of(reloaded(state)).loaded == (4, 4)


@pytest.mark.parametrize("named", [True, False], ids=["no memory", "lost chunk"])
def test_a_rank_that_reports_no_more_attempts_has_lost_them(named):
    """The second attempt sampled, and position 4 was that rank's."""
    silent, other = (Recorder(shard=shard) for shard in ("cp0", "cp1"))
    handle = other.begin("r", trace_id="t", prompt_len=5, block_ids=[1, 2, 3])
    other.step(rows(2), [(handle, 0, 2)])
    other.preempt(handle, 2)
    other.resume(handle, 0, block_ids=[4, 5, 6])
    other.step(rows(4), [(handle, 0, 4)])
    other.step(rows(3), [(handle, 5, 3)])
    other.preempt(handle, 8)
    other.resume(handle, 0, block_ids=[7, 8, 9])
    other.step(rows(9), [(handle, 0, 9)])
    other.finish(handle, 10)
    other.flush()
    handle = silent.begin("r", trace_id="t", prompt_len=5, block_ids=[1, 2, 3])
    if named:
        silent.chunk.op(OpKind.LOST, "r", position=0, count=0, arg=QUEUE_FULL)
        silent.finish(handle, 10)
    silent.flush()
    lost = len(silent.records)
    silent.preempt(handle, 2)
    silent.flush()
    state = State(100)
    for number, record in enumerate([*silent.records, *other.records], 1):
        left_out = number == lost + 1 and not named
        (leave_out if left_out else apply_record)(state, number, record)
    there, gaps = served(state)
    assert there == [0, 1, 2, 3, 5, 6, 7]
    reason = QUEUE_FULL if named else CORRUPT
    assert gaps == [(4, 5, reason), (8, 9, reason)]


def test_an_attempt_of_0_8_that_lost_rows_proves_nothing_once_it_is_over():
    """It was preempted when 0.8 stored it; which tokens it had computed is not known."""
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=5, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.preempt(handle, 5)
    state = of_0_8(replay(recorder), [(4, 5, NOT_CAPTURED)])
    known = len(recorder.records)
    recorder.resume(handle, 0, block_ids=[3, 4])
    recorder.step(rows(7), [(handle, 0, 7)])
    recorder.finish(handle, 8)
    recorder.flush()
    for number, record in enumerate(recorder.records[known:], known + 1):
        apply_record(state, number, record)
    assert served(state) == ([], [(0, 7, QUEUE_FULL)])


def test_a_request_of_0_8_whose_begin_was_lost_has_no_drafts_either():
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=2, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)], tentative=2)
    state = replay(recorder)
    source_of(state).placed = False
    upgraded = of_0_8(state, [])
    assert (source_of(upgraded).end, source_of(upgraded).tentative) == (0, 0)
    assert served(upgraded) == ([], [])


def test_a_request_is_followed_for_256_attempts():
    recorder = Recorder()
    handle = recorder.begin("r", trace_id="t", prompt_len=3, block_ids=[1, 2])
    for _ in range(255):
        recorder.step(rows(2), [(handle, 0, 2)])
        recorder.preempt(handle, 2)
        recorder.resume(handle, 0, block_ids=[1, 2])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.preempt(handle, 4)
    recorder.resume(handle, 0, block_ids=[1, 2])
    recorder.step(rows(6), [(handle, 0, 6)])
    recorder.preempt(handle, 0)
    recorder.resume(handle, 0, block_ids=[1, 2])
    recorder.step(rows(6), [(handle, 0, 6)])
    recorder.finish(handle, 7)
    state = replay(recorder)
    for policy in (pb.READ_POLICY_AS_SAMPLED, pb.READ_POLICY_LATEST):
        assert served(state, policy=policy) == ([], [(0, 6, CORRUPT)])


FIRST = {
    "inherit": 8,
    "rewind": 2,
    "went back": 2,
    "lost": 2,
    "preempt": None,
    "resume": 0,
    "lost chunk": 12,
    "too many": 12,
}


@pytest.mark.parametrize("change", FIRST)
def test_an_answer_is_that_of_a_snapshot_after_a_change_of_slots(change, monkeypatch):
    """Slots decide which of two equal requests is continued."""
    recorder, tokens = Recorder(), np.arange(9)
    for i, blocks in enumerate(([1, 2, 3], [4, 5, 6])):
        prompt = {"prompt_len": 4, "prompt_token_ids": tokens[:4]}
        handle = recorder.begin(f"a{i}", trace_id="t", block_ids=blocks, **prompt)
        recorder.step(rows(8), [(handle, 0, 8)])
        recorder.finish(handle, 9, token_ids=tokens)
    prompt = {"prompt_len": 12, "prompt_token_ids": np.arange(12), "ends": (9,)}
    handle = recorder.begin("b", trace_id="t", num_computed_tokens=8, block_ids=[1, 2, 7], **prompt)
    if change == "inherit":
        del recorder.chunk.ops[-2]  # it comes with the first rows
    else:
        recorder.step(rows(4), [(handle, 8, 4)])
    state = replay(recorder)
    before, known = served(state, 3), len(recorder.records)
    if change == "inherit":
        recorder.chunk.op(OpKind.INHERIT, "b")
    elif change == "rewind":
        recorder.rewind(handle, 2)
    elif change == "lost":
        recorder.chunk.op(OpKind.LOST, "b", position=2, count=1, arg=NOT_CAPTURED)
    elif change == "preempt":
        recorder.preempt(handle, 2)
    elif change == "resume":
        recorder.chunk.op(OpKind.RESUME, "b", blocks=[8, 9, 10])
    elif change == "too many":
        monkeypatch.setattr("routetrace.server.index.apply.MAX_LIVE", 1)
        recorder.begin("other", block_ids=[11])
    if change != "preempt":
        recorder.step(rows(1), [(handle, FIRST[change], 1)])
    recorder.flush()
    for number, record in enumerate(recorder.records[known:], known + 1):
        (leave_out if change == "lost chunk" else apply_record)(state, number, record)
    after = served(state, 3)
    assert after == served(reloaded(state), 3)
    assert after != before


def test_a_request_without_track_clears_the_slots_that_it_writes():
    """It goes back into cached blocks of which another request made the rows."""
    recorder = Recorder()
    handle = recorder.begin("lost", prompt_len=10, block_ids=[1, 2, 3])
    recorder.step(rows(4), [(handle, 0, 4)])
    recorder.flush()
    recorder.step(rows(1), [(handle, 4, 1)])
    recorder.flush()
    lost = len(recorder.records)
    recorder.preempt(handle, 5)
    other = recorder.begin("other", prompt_len=9, block_ids=[4, 5, 6])
    recorder.step(rows(9), [(other, 0, 9)])
    recorder.finish(other, 10)
    recorder.resume(handle, 8, block_ids=[4, 5, 7])
    recorder.step(rows(1), [(handle, 8, 1)])
    recorder.rewind(handle, 7)
    recorder.step(rows(3), [(handle, 6, 3)])
    hit = recorder.begin("t", prompt_len=9, num_computed_tokens=8, block_ids=[4, 5, 8])
    recorder.step(rows(1), [(hit, 8, 1)])
    recorder.finish(hit, 10)
    there, gaps = served(replay(recorder, lost))
    assert there == [0, 1, 2, 3, 4, 5, 8]
    assert gaps == [(6, 8, pb.MISSING_REASON_KV_UNKNOWN)]


def test_no_row_of_an_epoch_that_a_later_one_of_the_boot_replaces():
    """A chunk was refused twice: it may have contained calls that take rows back."""
    old, new = Recorder(), Recorder()
    handle = old.begin("r", trace_id="t", prompt_len=6, block_ids=[1, 2])
    old.step(rows(3), [(handle, 0, 3)])
    state = replay(old)
    assert served(state)[0] == [0, 1, 2]
    hit = old.begin("hit", block_ids=[3])
    old.finish(hit, 1)
    for number, record in enumerate(new.records, len(old.records) + 1):
        apply_record(state, number, record)
    assert served(state) == served(reloaded(state)) == ([], [])


@pytest.mark.parametrize("lost", [False, True])
def test_of_several_preemptions_of_an_attempt_the_smallest_number_counts(lost):
    """vLLM dropped what it had sampled, and a chunk of one rank with that news was lost."""
    first, second = (Recorder(shard=shard) for shard in ("cp0", "cp1"))
    for recorder in (first, second):
        handle = recorder.begin("r", trace_id="t", prompt_len=5, block_ids=[1, 2])
        if recorder is first:
            recorder.step(rows(5), [(handle, 0, 5)])
        recorder.preempt(handle, 5)
        recorder.flush()
        recorder.preempt(handle, 4)
        recorder.flush()
    left_out = [*first.records, *second.records][-1] if lost else None
    first.resume(handle, 0, block_ids=[3, 4])
    first.step(rows(7), [(handle, 0, 7)])
    first.finish(handle, 8)
    first.flush()
    state = State(100)
    for number, record in enumerate([*first.records, *second.records], 1):
        (leave_out if record is left_out else apply_record)(state, number, record)
    [trace] = state.traces.traces.values()
    assert trace.join.requests[0].first_that_sampled == 1


def test_attempts_of_0_8_end_where_the_last_of_their_ranks_did():
    first, second = (Recorder(shard=shard) for shard in ("cp0", "cp1"))
    for recorder, count in ((first, 2), (second, 4)):
        handle = recorder.begin("r", trace_id="t", prompt_len=4, block_ids=[1, 2])
        recorder.step(rows(2), [(handle, count - 2, 2)])
        recorder.preempt(handle, 4)
        recorder.resume(handle, 0, block_ids=[3, 4])
        recorder.flush()
    state = State(100)
    for number, record in enumerate([*first.records, *second.records], 1):
        apply_record(state, number, record)
    state = of_0_8(state, [])
    assert state.traces.traces["run", "t"].join.requests[0].first_that_sampled == 0
    assert served(state)[0] == [0, 1, 2, 3]


def test_a_row_that_who_handed_over_has_lost_is_of_unknown_kv():
    """The owner computed it again, after its answer began, and lost it, too."""
    recorder = Recorder()
    handle = recorder.begin("giver", trace_id="t", prompt_len=8, block_ids=[1, 2, 3])
    recorder.step(rows(3), [(handle, 0, 3)])
    recorder.chunk.op(OpKind.LOST, "giver", position=3, count=1, arg=QUEUE_FULL)
    recorder.step(rows(4), [(handle, 4, 4)])
    recorder.finish(handle, 9, transfer_id="x")
    cached = {"num_computed_tokens": 8, "num_external_tokens": 8, "transfer_id": "x"}
    handle = recorder.begin("r", trace_id="t", prompt_len=8, block_ids=[4, 5, 6], **cached)
    recorder.step(rows(1), [(handle, 8, 1)])
    recorder.preempt(handle, 9)
    recorder.resume(handle, 0, block_ids=[7, 8, 9])
    recorder.step(rows(3), [(handle, 0, 3)])
    recorder.chunk.op(OpKind.LOST, "r", position=3, count=1, arg=NOT_CAPTURED)
    recorder.step(rows(6), [(handle, 4, 6)])
    recorder.finish(handle, 11)
    state = replay(recorder)
    assert served(state, 2)[1] == [(3, 4, pb.MISSING_REASON_KV_UNKNOWN)]
    assert served(state, 2, pb.READ_POLICY_LATEST)[1] == [(3, 4, NOT_CAPTURED)]
