"""Actions of engines, sent to a real server by hand and read back over the socket."""

from __future__ import annotations

import numpy as np
import pytest

from routetrace.codec.records import SPAN, OpKind, token_digests
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.prefill_decode import LAYOUT, Pair, assert_rows, reasons, rows_of
from support.reads import Reads


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


@pytest.fixture(scope="module")
def reads(server):
    client = Reads(server.target)
    yield client
    client.close()


@pytest.mark.parametrize("reason", ["handoff", "length"])
def test_prefill_and_decode_engines_are_one_trace(server, reads, reason):
    run = f"pd {reason}"
    pair = Pair(server, run)
    pair.fill(reason)
    _, _, info = reads.get("t", run)
    # Not whole, although every row of it is there: it goes on elsewhere.
    if reason == "handoff":
        assert (info.state, info.num_tokens, info.num_rows) == (pb.TRACE_STATE_RUNNING, 0, 100)
    else:
        assert (info.state, info.num_tokens) == (pb.TRACE_STATE_COMPLETE, 101)
    handle = pair.begin()
    pair.decode.finish(handle, 110)
    pair.decode.flush()
    cells, end, info = reads.get("t", run)
    assert (info.state, info.num_tokens) == (pb.TRACE_STATE_COMPLETE, 110)
    assert (info.incarnation, list(info.engine_ids)) == (2, ["decode", "prefill"])
    assert info.num_incarnations == (1 if reason == "handoff" else 2)
    assert not end.missing
    # The last prompt token was computed on both: what the decode engine chose sampled the next.
    assert_rows(cells, (0, pair.rows[:99]), (99, pair.more))
    cells, _, _ = reads.get("t", run, policy=pb.READ_POLICY_LATEST)
    assert_rows(cells, (0, pair.rows[:99]), (99, pair.more))
    cells, _, _ = reads.get("t", run, incarnation=1)
    assert_rows(cells, (0, pair.rows))
    pair.close()


def test_the_slow_agent_of_a_prefill_engine_is_waited_for(server, reads):
    pair = Pair(server, "slow pd")
    handle = pair.begin()
    pair.decode.finish(handle, 110)
    pair.decode.flush()
    _, end, info = reads.get("t", "slow pd")
    assert info.state == pb.TRACE_STATE_INCOMPLETE  # as its request has ended
    assert reasons(end) == [(0, 99, "kv_unknown")]
    request = pb.GetTraceRequest(run="slow pd", trace_id="t", wait_for=pb.WAIT_FOR_END)
    call = reads.stub.GetTrace(request, timeout=20)
    pair.fill()
    assert next(iter(call)).info.state == pb.TRACE_STATE_COMPLETE
    pair.close()


def test_an_end_after_kv_from_elsewhere_is_one_at_once(server, reads):
    pair = Pair(server, "aborted pd")
    handle = pair.begin()
    pair.decode.chunk.op(OpKind.ROWS, "d", position=111, count=2, step=9,
                         frame=pair.decode.chunk.frame(rows_of(2)))  # fmt: skip
    pair.decode.finish(handle, 120, reason="abort")
    pair.decode.flush()
    # Within the agent timeout; nothing that is waited for would make it whole.
    for wait_for in (pb.WAIT_FOR_UNSPECIFIED, pb.WAIT_FOR_END):
        _, end, info = reads.get("t", "aborted pd", wait_for=wait_for)
        assert info.state == end.info.state == pb.TRACE_STATE_INCOMPLETE
        assert reasons(end) == [
            (0, 99, "kv_unknown"),
            (109, 111, "not_captured"),
            (113, 119, "aborted"),
        ]
    pair.close()


def test_a_follower_goes_along_to_the_next_engine(server, reads):
    pair = Pair(server, "follow pd")
    pair.fill()
    request = pb.GetTraceRequest(run="follow pd", trace_id="t", follow=True)
    call = reads.stub.GetTrace(request, timeout=20)
    runs = []
    for response in call:
        runs += [(int(s["position"]), int(s["count"])) for s in np.frombuffer(response.spans, SPAN)]
        if response.spans and len(runs) == 1:
            pair.decode.finish(pair.begin(), 110)
            pair.decode.flush()
    # The last prompt token comes again, as the engine chose that sampled the next one.
    assert runs == [(0, 100), (99, 10)]
    assert response.end.info.state == pb.TRACE_STATE_COMPLETE
    assert (response.end.token_stop, len(response.end.missing)) == (109, 0)
    pair.close()


def test_rows_that_may_still_be_rejected_are_not_served(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="drafts")
    rows = rows_of(20)
    handle = feeder.begin("r", prompt_len=4)
    feeder.step(rows[:8], [(handle, 0, 8)], tentative=3)
    feeder.flush()
    cells, end, info = reads.get("r", "drafts", token_stop=8)
    assert_rows(cells, (0, rows[:5]))
    assert (info.num_rows, reasons(end)) == (5, [(5, 8, "not_yet")])
    # Two of the drafts were kept, one was not: the next step starts in its place.
    feeder.step(rows[10:14], [(handle, 7, 4)], tentative=3)
    feeder.flush()
    cells, _, _ = reads.get("r", "drafts")
    assert_rows(cells, (0, rows[:7]), (7, rows[10:11]))
    feeder.finish(handle, 10)
    feeder.flush()
    cells, _, info = reads.get("r", "drafts")
    assert_rows(cells, (0, rows[:7]), (7, rows[10:12]))
    assert info.state == pb.TRACE_STATE_COMPLETE
    feeder.close()


def test_drafts_of_an_engine_that_died_are_missing():
    with run_server(agent_timeout_seconds=0) as server:
        reads = Reads(server.target)
        feeder = Feeder(server.target, LAYOUT, run="dead")
        rows = rows_of(8)
        handle = feeder.begin("r", prompt_len=4)
        feeder.step(rows, [(handle, 0, 8)], tentative=3)
        feeder.close()
        cells, end, info = reads.get("r", "dead", token_stop=8, wait_for=pb.WAIT_FOR_END)
        assert_rows(cells, (0, rows[:5]))
        assert info.state == pb.TRACE_STATE_INCOMPLETE
        assert reasons(end) == [(5, 8, "agent_lost")]
        # A prefill that nobody went on from has no end either.
        pair = Pair(server, "dead pd")
        pair.fill()
        _, end, info = reads.get("t", "dead pd", wait_for=pb.WAIT_FOR_END)
        assert (info.state, info.num_tokens) == (pb.TRACE_STATE_INCOMPLETE, 0)
        assert not end.missing
        pair.close()
        reads.close()


def test_kv_from_elsewhere_is_unknown_until_a_pass_writes_it(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="external", block_size=4, num_blocks=6)
    rows = rows_of(40)
    first = feeder.begin("first", block_ids=[1, 2, 3])
    feeder.step(rows[:12], [(first, 0, 12)])
    feeder.finish(first, 13)
    # Block 1 is a hit; what block 2 held goes, and other KV is loaded into it.
    second = feeder.begin(
        "second", block_ids=[1, 2, 4], num_computed_tokens=8, num_external_tokens=4
    )
    feeder.step(rows[20:22], [(second, 8, 2)])
    feeder.preempt(second, 10)
    feeder.resume(second, 10, block_ids=[1, 3, 4], num_external_tokens=6)
    feeder.step(rows[30:32], [(second, 10, 2)])
    feeder.finish(second, 13)
    # A hit on what was loaded and never computed here.
    third = feeder.begin("third", block_ids=[1, 2, 5], num_computed_tokens=8)
    feeder.finish(third, 9)
    feeder.flush()
    cells, end, _ = reads.get("second", "external")
    assert_rows(cells, (0, rows[:4]), (8, rows[20:22]), (10, rows[30:32]))
    assert reasons(end) == [(4, 8, "kv_unknown")]
    cells, end, _ = reads.get("third", "external")
    assert_rows(cells, (0, rows[:4]))
    assert reasons(end) == [(4, 8, "kv_unknown")]
    feeder.close()


def test_rows_of_one_weight_version(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="versions")
    rows = rows_of(30)
    handle = feeder.begin("r")
    feeder.version = 7
    feeder.step(rows[:6], [(handle, 0, 6)])
    feeder.version = 8
    feeder.step(rows[6:10], [(handle, 6, 4)])
    feeder.preempt(handle, 10)
    feeder.resume(handle, 0)
    feeder.step(rows[10:22], [(handle, 0, 12)])
    feeder.finish(handle, 14)
    feeder.flush()
    both = {"weight_version": 8, "policy": pb.READ_POLICY_LATEST}
    cells, end, _ = reads.get("r", "versions", weight_version=7)
    assert_rows(cells, (0, rows[:6]))
    assert reasons(end) == [(6, 12, "other_version"), (12, 13, "not_captured")]
    # The first six were sampled from rows of version 7; that 8 computed them again counts not here.
    cells, end, _ = reads.get("r", "versions", weight_version=8)
    assert_rows(cells, (6, rows[6:10]), (10, rows[20:22]))
    assert reasons(end) == [(0, 6, "other_version"), (12, 13, "not_captured")]
    cells, _, _ = reads.get("r", "versions", **both)
    assert_rows(cells, (0, rows[10:22]))
    cells, end, _ = reads.get("r", "versions", weight_version=0)
    assert not cells
    assert reasons(end)[0] == (0, 12, "other_version")
    feeder.close()


def test_a_reader_waits_for_the_rows_that_it_asked_for(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="rows")
    rows = rows_of(10)

    def ask(**fields):
        request = pb.GetTraceRequest(run="rows", trace_id="r", wait_for=pb.WAIT_FOR_ROWS, **fields)
        return reads.stub.GetTrace(request, timeout=20)

    some, whole = ask(token_stop=4), ask()
    handle = feeder.begin("r")
    feeder.step(rows[:6], [(handle, 0, 6)])
    feeder.flush()
    assert next(iter(some)).info.state == pb.TRACE_STATE_RUNNING
    feeder.step(rows[6:], [(handle, 6, 4)])
    feeder.finish(handle, 11)
    feeder.flush()
    assert next(iter(whole)).info.state == pb.TRACE_STATE_COMPLETE
    feeder.close()


@pytest.mark.parametrize("asked", [{}, {"token_stop": 8}])
def test_rows_that_can_no_longer_come_are_not_waited_for(server, reads, asked):
    feeder = Feeder(server.target, LAYOUT, run="no rows")
    handle = feeder.begin("r", prompt_len=4)
    feeder.step(rows_of(6), [(handle, 0, 6)])
    feeder.flush()
    request = pb.GetTraceRequest(
        run="no rows", trace_id="r", wait_for=pb.WAIT_FOR_ROWS, omit_token_digests=True, **asked
    )
    answer = reads.stub.GetTrace(request, timeout=60)
    feeder.finish(handle, 11)
    feeder.flush()
    *_, last = answer
    assert last.end.info.state == pb.TRACE_STATE_INCOMPLETE
    assert reasons(last.end) == [(6, asked.get("token_stop", 10), "not_captured")]
    feeder.close()


def test_what_was_joined_is_joined_after_a_restart(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        pair = Pair(server, "again")
        pair.fill()
        pair.decode.finish(pair.begin(), 110)
        pair.close()
    with run_server(data_dir=tmp_path) as server:
        reads = Reads(server.target)
        cells, _, info = reads.get("t", "again")
        assert info.state == pb.TRACE_STATE_COMPLETE
        assert_rows(cells, (0, pair.rows[:99]), (99, pair.more))
        reads.close()


def test_blocks_are_those_of_the_engines_newest_boot(server, reads):
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    rows = rows_of(8)

    for i, boot_id in ((0, "a"), (1, "a"), (0, "b")):
        feeder = Feeder(server.target, stages[i], run="boots", shard=f"pp{i}", boot_id=boot_id,
                        block_size=4, num_blocks=2)  # fmt: skip
        columns = LAYOUT.columns(feeder.layout.layer_ids)
        feeder.step_slots(rows[:4][:, columns], range(4))
        feeder.close()
    # The second stage has not been heard of since the restart: its slots mean nothing any more.
    cells, end, _ = reads.blocks("e0", "boots", block_ids=[0], num_tokens=4)
    assert {layer for _, layer in cells} == {1}
    assert [(m.start, m.stop, list(m.layer_ids)) for m in end.missing] == [(0, 4, [2, 4])]


def test_a_bound_request_has_only_the_rows_that_it_computed(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="bound", block_size=4, num_blocks=8)
    rows = rows_of(16)
    feeder.step_slots(rows[:8], range(8))  # somebody else's
    feeder.step_slots(rows[8:12], [8, 9, 10, 11])
    feeder.flush()
    tokens = np.arange(70)
    request = pb.BindRequestRequest(
        run="bound",
        engine_id="e0",
        request_id="r",
        block_ids=[2, 0],
        num_tokens=7,
        num_computed_tokens=4,
        step=2,
        token_digests=token_digests(tokens[:7]).tobytes(),
    )
    for _ in range(2):  # asking again changes nothing
        assert reads.ingest.BindRequest(request).trace.num_incarnations == 1
    cells, end, info = reads.get("r", "bound")
    assert_rows(cells, (0, rows[8:12]))
    assert reasons(end) == [(4, 6, "not_captured")]
    assert info.token_digests == token_digests(tokens[:7]).tobytes()
    # Of another step it is another request; one that ended before its first pass has no row.
    request.step, request.num_computed_tokens = 1, 0
    assert reads.ingest.BindRequest(request).trace.num_incarnations == 2
    cells, end, _ = reads.get("r", "bound", incarnation=2)
    assert (cells, reasons(end)) == ({}, [(0, 6, "not_captured")])
    # Nor does another request of the trace take its place, whatever its blocks.
    request.request_id, request.begin.trace_id = "other", "r"
    assert reads.ingest.BindRequest(request).trace.num_incarnations == 3
    feeder.close()


def test_a_lost_begin_leaves_a_request_that_joins_nothing(server, reads):
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    rows = rows_of(3)
    for i, stage in enumerate(stages):
        feeder = Feeder(server.target, stage, run="no begin", shard=f"pp{i}")
        feeder.names.append("r")
        if i == 0:
            feeder.begin("r")
        feeder.step(rows[:, LAYOUT.columns(stage.layer_ids)], [(0, 0, 3)])
        feeder.chunk.op(OpKind.FINISH, "r", count=4, arg=1)
        feeder.close()
    _, _, info = reads.get("r", "no begin")
    assert info.num_incarnations == 2
