"""Promises of vLLM's own store of routed experts, tested on this one.

One test for each behaviour that vLLM tests of its AuxOutput store
(`tests/distributed/aux_output_connector/test_store.py` of vllm-project/vllm at 09155aec), named for
it. Two of them have no counterpart:

* *Terminal release evicts the tail first*: there is no pool of blocks to evict from. Rows live by
  lease, and a chunk goes when no trace, live slot or read points into it (`Core.sweep`).
* *A full block waits for its late hash*: blocks have no hashes here, a row is known by its slot
  from the moment of its step. What does come late are token digests, tested in its place.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.codec.records import SPAN, OpKind
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder
from support.agents.prefill_decode import LAYOUT, Pair, assert_rows, reasons, rows_of
from support.reads import Reads


@pytest.fixture(scope="module")
def server():
    with run_server(sweep_interval_seconds=0.1, max_chunk_bytes=65536) as process:
        yield process


@pytest.fixture(scope="module")
def reads(server):
    client = Reads(server.target)
    yield client
    client.close()


@pytest.fixture
def feeder(server, request):
    feeder = Feeder(server.target, LAYOUT, run=request.node.name, block_size=4, num_blocks=16)
    yield feeder
    feeder.close()


@pytest.fixture
def read(reads, request):
    return lambda trace_id, **fields: reads.get(trace_id, request.node.name, **fields)


def test_an_unbacked_token_gap_is_no_row(feeder, read):
    rows = rows_of(6)
    handle = feeder.begin("r")
    feeder.step(rows, [(handle, 0, 4), (handle, 6, 2)])
    feeder.finish(handle, 9)
    feeder.flush()
    cells, end, info = read("r")
    assert_rows(cells, (0, rows[:4]), (6, rows[4:]))
    assert (info.state, reasons(end)) == (pb.TRACE_STATE_INCOMPLETE, [(4, 6, "not_captured")])


def test_a_rejected_speculative_gap_is_attached_again(feeder, read):
    rows = rows_of(14)
    handle = feeder.begin("r")
    feeder.step(rows[:8], [(handle, 0, 8)], tentative=3)
    feeder.rewind(handle, 6)
    feeder.step(rows[8:10], [(handle, 6, 2)], tentative=1)
    feeder.finish(handle, 9)
    feeder.flush()
    cells, _, info = read("r")
    assert_rows(cells, (0, rows[:6]), (6, rows[8:10]))
    assert info.state == pb.TRACE_STATE_COMPLETE


def test_an_overlap_with_stale_rows_leaves_none_of_them(feeder, read):
    rows = rows_of(10)
    handle = feeder.begin("r", block_ids=[0, 1])
    feeder.step(rows[:8], [(handle, 0, 8)])
    feeder.step(rows[8:], [(handle, 5, 2)])
    feeder.finish(handle, 9)
    other = feeder.begin("other", block_ids=[0, 1, 2], num_computed_tokens=8)
    feeder.finish(other, 9)
    feeder.flush()
    for name in ("r", "other"):
        cells, _, _ = read(name)
        assert_rows(cells, (0, rows[:5]), (5, rows[8:]))


def test_a_whole_batch_is_published_before_anybody_reads_a_prefix(feeder, read):
    rows = rows_of(10)
    first = feeder.begin("first", block_ids=[3, 5])
    feeder.step(rows[:8], [(first, 0, 8)])
    # In the same chunk.
    second = feeder.begin("second", block_ids=[3, 5, 7], num_computed_tokens=8)
    feeder.step(rows[8:], [(second, 8, 2)])
    feeder.finish(second, 11)
    feeder.flush()
    cells, _, info = read("second")
    assert_rows(cells, (0, rows))
    assert info.state == pb.TRACE_STATE_COMPLETE


def test_a_hand_over_by_name_needs_no_digests(server, reads):
    pair = Pair(server, "no digests")
    pair.fill()
    pair.prompt = None
    handle = pair.begin()
    pair.decode.finish(handle, 110)
    pair.decode.flush()
    cells, _, info = reads.get("t", "no digests", incarnation=2)
    assert info.state == pb.TRACE_STATE_COMPLETE
    assert_rows(cells, (0, pair.rows[:99]), (99, pair.more))
    pair.close()


def test_rows_that_were_emitted_are_not_read_again(feeder, reads):
    rows = rows_of(12)
    handle = feeder.begin("r")
    feeder.step(rows[:4], [(handle, 0, 4)])
    feeder.flush()
    request = pb.GetTraceRequest(run=feeder.hello.run, trace_id="r", follow=True)
    runs = []
    for response in reads.stub.GetTrace(request, timeout=20):
        runs += [(int(s["position"]), int(s["count"])) for s in np.frombuffer(response.spans, SPAN)]
        done = sum(count for _, count in runs)
        if response.spans and done < 12:
            feeder.step(rows[done : done + 4], [(handle, done, 4)])
            feeder.flush()
        elif response.spans:
            feeder.finish(handle, 13)
            feeder.flush()
    assert runs == [(0, 4), (4, 4), (8, 4)]


def test_a_read_goes_on_where_another_one_ended(feeder, read):
    rows = rows_of(10)
    handle = feeder.begin("r")
    feeder.step(rows[:7], [(handle, 0, 7)])
    feeder.flush()
    _, end, _ = read("r")
    feeder.step(rows[7:], [(handle, 7, 3)])
    feeder.finish(handle, 11)
    feeder.flush()
    assert_rows(read("r", token_start=end.token_stop)[0], (7, rows[7:]))


def test_a_prefill_chunk_that_ends_in_the_middle_of_a_block(feeder, read):
    rows = rows_of(8)
    first = feeder.begin("first", block_ids=[0, 1])
    feeder.step(rows[:6], [(first, 0, 6)])
    feeder.step(rows[6:], [(first, 6, 2)])
    second = feeder.begin("second", block_ids=[0, 1, 2], num_computed_tokens=8)
    feeder.finish(second, 9)
    feeder.flush()
    assert_rows(read("second")[0], (0, rows))


def test_stored_blocks_and_a_tail_are_one_trace(feeder, read):
    rows = rows_of(16)
    first = feeder.begin("first", block_ids=[0, 1])
    feeder.step(rows[:8], [(first, 0, 8)])
    feeder.finish(first, 9)
    feeder.flush()
    second = feeder.begin("second", block_ids=[0, 1, 4], num_computed_tokens=8)
    feeder.step(rows[8:11], [(second, 8, 3)])
    feeder.flush()
    assert_rows(read("second")[0], (0, rows[:11]))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_what_was_handed_over_does_not_alias_the_engines_buffer(server, mode):
    config = AgentConfig(
        target=server.target, run=f"alias {mode}", engine_id="e", layout=LAYOUT, background=mode
    )
    buffer, rows = np.empty((8, 3, 3), np.uint16), rows_of(24)
    with CaptureAgent(config) as agent:
        handle = agent.begin("r")
        for at in range(0, 24, 8):
            buffer[:] = rows[at : at + 8]
            agent.step(buffer, [(handle, at, 8)])
            buffer[:] = 0
        agent.finish(handle, 25)
    with RouteClient(server.target, run=f"alias {mode}") as client:
        trace = client.get("r", wait_for="end", timeout=20)
        np.testing.assert_array_equal(trace.topk_ids, rows)
        np.testing.assert_array_equal(client.get("r").topk_ids, rows)


def test_digests_told_in_parts_add_up(feeder, read):
    tokens = np.arange(200)
    handle = feeder.begin("r", prompt_len=70, prompt_token_ids=tokens[:70])
    feeder.finish(handle, 200, token_ids=tokens)
    feeder.flush()
    _, _, info = read("r")
    positions = np.frombuffer(info.token_digests, np.dtype("<u4,<u8"))["f0"]
    assert positions.tolist() == [64, 70, 128, 192, 200]


def test_finish_publishes_and_frees_the_name(server):
    # Rows linger for a minute, chunks for a minute: it is the end that sends them.
    config = AgentConfig(
        target=server.target, run="finish", engine_id="e", layout=LAYOUT,
        linger_seconds=60, flush_interval_seconds=0.01,
    )  # fmt: skip
    rows = rows_of(6)
    with CaptureAgent(config) as agent, RouteClient(server.target, run="finish") as client:
        started = time.monotonic()
        for i in range(2):
            handle = agent.begin("r", trace_id=f"t{i}")
            agent.step(rows[3 * i : 3 * i + 3], [(handle, 0, 3)])
            agent.finish(handle, 4)
            trace = client.get(f"t{i}", wait_for="end", timeout=30)
            np.testing.assert_array_equal(trace.topk_ids, rows[3 * i : 3 * i + 3])
        assert time.monotonic() - started < 60


def test_what_is_not_there_any_more_costs_its_own_cells_alone(feeder, read):
    rows = rows_of(12)
    first = feeder.begin("first", block_ids=[0, 1])
    feeder.step(rows[:8], [(first, 0, 8)])
    feeder.chunk.op(OpKind.EXTERNAL, blocks=[0])
    second = feeder.begin("second", block_ids=[0, 1, 2], num_computed_tokens=8)
    feeder.step(rows[8:], [(second, 8, 4)])
    feeder.finish(second, 13)
    feeder.flush()
    cells, end, _ = read("second")
    assert_rows(cells, (4, rows[4:]))
    assert reasons(end) == [(0, 4, "kv_unknown")]


def test_an_oversized_batch_leaves_nothing_behind(feeder, reads, read):
    handle = feeder.begin("r")
    feeder.step(rows_of(8000), [(handle, 0, 8000)])
    feeder.stream.send(feeder.chunk.make(feeder.sequence))
    error = feeder.stream.receive().reject.error
    assert (error.field, error.kind) == ("chunk", pb.ERROR_KIND_INVALID_ARGUMENT)
    feeder.chunk = ChunkMaker(LAYOUT)
    listed = reads.stub.ListTraces(pb.ListTracesRequest(run=feeder.hello.run))
    assert not listed.traces
    rows = rows_of(4)
    handle = feeder.begin("r")
    feeder.step(rows, [(handle, 0, 4)])
    feeder.finish(handle, 5)
    feeder.flush()
    assert_rows(read("r")[0], (0, rows))


def test_what_was_put_stays_as_it_was(feeder, read):
    rows = rows_of(8)
    handle = feeder.begin("r")
    feeder.step(rows[:4], [(handle, 0, 4)])
    feeder.flush()
    feeder.step(rows[4:], [(handle, 0, 4)])
    feeder.stream.send(feeder.chunk.make(feeder.sequence - 1))
    error = feeder.stream.receive().reject.error
    assert (error.field, error.kind) == ("sequence", pb.ERROR_KIND_INVALID_ARGUMENT)
    feeder.chunk = ChunkMaker(LAYOUT)
    assert_rows(read("r")[0], (0, rows[:4]))


def test_what_is_referred_to_is_not_evicted(feeder, reads, read):
    rows = rows_of(12)
    first = feeder.begin("first", block_ids=[0, 1])
    feeder.step(rows[:8], [(first, 0, 8)])
    feeder.finish(first, 9)
    feeder.flush()
    second = feeder.begin("second", block_ids=[0, 1, 2], num_computed_tokens=8)
    feeder.step(rows[8:], [(second, 8, 4)])
    feeder.finish(second, 13)
    # The blocks go to somebody else, and the trace that computed them is deleted.
    feeder.begin("third", block_ids=[0, 1, 2])
    feeder.flush()
    reads.stub.DeleteTrace(pb.DeleteTraceRequest(run=feeder.hello.run, trace_id="first"))
    time.sleep(0.5)  # several sweeps
    assert_rows(read("second")[0], (0, rows))


def test_a_request_that_ends_while_it_is_preempted_keeps_what_was_computed(feeder, read):
    rows = rows_of(9)
    handle = feeder.begin("r", block_ids=[0, 1, 2])
    feeder.step(rows, [(handle, 0, 9)], tentative=2)
    feeder.preempt(handle, 7)
    feeder.finish(handle, 8, reason="abort")
    feeder.flush()
    cells, _, info = read("r")
    assert_rows(cells, (0, rows[:7]))
    assert info.state == pb.TRACE_STATE_COMPLETE


def test_the_first_row_that_is_asked_for_is_honoured(server, reads):
    pair = Pair(server, "start")
    pair.fill()
    pair.decode.finish(pair.begin(), 110)
    pair.decode.flush()
    assert_rows(reads.get("t", "start", token_start=97)[0], (97, pair.rows[97:99]), (99, pair.more))
    # Past all that the prefill engine computed.
    cells, _, _ = reads.get("t", "start", token_start=103)
    assert_rows(cells, (103, pair.more[4:]))
    pair.close()


def test_requests_that_end_in_one_window_keep_apart(feeder, reads, read):
    rows = rows_of(12)
    handles = [feeder.begin(f"r{i}") for i in range(3)]
    feeder.step(rows, [(h, 0, 4) for h in handles])
    for handle in reversed(handles):
        feeder.finish(handle, 5)
    feeder.flush()
    for i in range(3):
        assert_rows(read(f"r{i}")[0], (0, rows[4 * i : 4 * i + 4]))
    listed = reads.stub.ListTraces(pb.ListTracesRequest(run=feeder.hello.run)).traces
    assert [t.trace_id for t in listed] == ["r2", "r1", "r0"]
