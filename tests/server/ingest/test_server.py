"""The server against engines that behave badly: every cell is compared with their own truth."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest

from routetrace.client import RouteClient
from routetrace.codec.records import FinishReason, OpKind
from routetrace.common.errors import ERROR_METADATA_KEY, NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder, Stream, seal
from support.agents.simulated import LAYOUT, drive
from support.reads import Reads


@pytest.fixture(scope="module")
def server():
    with run_server(agent_timeout_seconds=0.5, sweep_interval_seconds=0.2) as process:
        yield process


@pytest.fixture
def reads(server):
    reads = Reads(server.target)
    yield reads
    reads.close()


def error_of(call) -> pb.ErrorDetail:
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    for key, value in caught.value.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return pb.ErrorDetail.FromString(value)
    raise AssertionError(f"no ErrorDetail: {caught.value}")


def check(sim: SmallEngine, reads: Reads, run: str) -> int:
    """Compare every cell of every request; return their number."""
    compared = 0
    for request in sim.done:
        for policy, name in (
            (pb.READ_POLICY_AS_SAMPLED, "as_sampled"),
            (pb.READ_POLICY_LATEST, "latest"),
        ):
            cells, end, info = reads.get(request.name, run, policy=policy)
            truth = request.truth(name)
            assert end.info.num_tokens == len(request.tokens)
            expected = {
                (p, layer)
                for p, row in truth.items()
                if row is not None
                for layer in LAYOUT.layer_ids
            }
            assert set(cells) == expected, request.name
            for (position, layer), (ids, version, _) in cells.items():
                row, row_version = truth[position]
                np.testing.assert_array_equal(ids, row[LAYOUT.column[layer]])
                assert version == row_version
                compared += 1
            missing = {
                (p, layer)
                for m in end.missing
                for p in range(m.start, m.stop)
                for layer in (m.layer_ids or LAYOUT.layer_ids)
            }
            everything = {
                (p, layer) for p in range(len(request.tokens) - 1) for layer in LAYOUT.layer_ids
            }
            assert missing == everything - expected
            whole = pb.TRACE_STATE_COMPLETE if not missing else pb.TRACE_STATE_INCOMPLETE
            if policy == pb.READ_POLICY_AS_SAMPLED:
                assert info.state == whole
    return compared


@pytest.mark.parametrize("seed", range(12))
def test_every_cell_equals_the_engines_truth(server, reads, seed):
    run = f"truth-{seed}"
    sim = drive(server.target, seed, run, num_blocks=12 + seed)
    assert check(sim, reads, run) > 500


def test_the_simulated_engine_is_bad_enough(server):
    total: dict[str, int] = {}
    for seed in range(8):
        for name, count in drive(server.target, seed, f"bad-{seed}", num_blocks=14).counts.items():
            total[name] = total.get(name, 0) + count
    assert all(count >= 5 for count in total.values()), total


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_restart_serves_the_same_rows(tmp_path, kill):
    with run_server(data_dir=tmp_path) as server:
        sims = [drive(server.target, 100 + i, f"run-{i}", num_blocks=14) for i in range(3)]
        reads = Reads(server.target)
        before = [reads.get(r.name, f"run-{i}")[1] for i, s in enumerate(sims) for r in s.done]
        reads.close()
        if kill:
            server.kill()
        else:
            assert server.stop() == 0
    with run_server(data_dir=tmp_path) as server:
        reads = Reads(server.target)
        for i, sim in enumerate(sims):
            assert check(sim, reads, f"run-{i}") > 500
        after = [reads.get(r.name, f"run-{i}")[1] for i, s in enumerate(sims) for r in s.done]
        reads.close()
    assert before == after


@pytest.mark.parametrize("seed", range(2))
def test_damaged_records_cost_cells_and_never_show_a_wrong_one(tmp_path, seed):
    rng = random.Random(seed)
    with run_server(data_dir=tmp_path) as server:
        # Without drafts: an engine that makes some tells which rows may still be rejected.
        engine = {"num_blocks": 14, "draft_tokens": 0}
        sims = {run: drive(server.target, 200 + seed, run, **engine) for run in ("a", "b")}
        server.kill()
    (log,) = tmp_path.glob("store-*/log-*")
    data = bytearray(log.read_bytes())
    for _ in range(3):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    log.write_bytes(data)
    there = lost = 0
    with run_server(data_dir=tmp_path) as server:
        for run, sim in sims.items():
            with RouteClient(server.target, run=run) as client:
                for request in sim.done:
                    try:
                        trace = client.get(request.name, missing="mask")
                    except NotFound:
                        lost += len(request.tokens) - 1
                        continue
                    assert len(trace) < len(request.tokens)
                    for position in range(len(trace)):
                        # Of several passes over it, any may be left.
                        passes = [a[position][0] for a in request.attempts if a.get(position)]
                        if trace.valid[position].any():
                            there += 1
                            assert any((trace.topk_ids[position] == row).all() for row in passes)
                        else:
                            lost += bool(passes)
        # What came after the damage is there.
        assert there > 200
        assert lost > 0, "nothing was hit"


@pytest.mark.slow
def test_expired_traces_go_and_live_ones_stay_over_a_restart(tmp_path):
    rows = rows_of(4, seed=1)
    with run_server(data_dir=tmp_path, sweep_interval_seconds=0.1) as server:
        feeder = Feeder(server.target, LAYOUT, block_size=4, num_blocks=4)
        reads = Reads(server.target)
        for name, ttl in (("short", 1), ("long", 1000)):
            handle = feeder.begin(name, ttl_seconds=ttl)
            feeder.step(rows, [(handle, 0, 4)])
            feeder.finish(handle, 5)
            feeder.flush()
        feeder.close()
        stat = pb.StatTraceRequest(run="default", trace_id="short")
        while (
            reads.stub.ListTraces(pb.ListTracesRequest(run="default")).traces[-1].trace_id
            == "short"
        ):
            pass  # within its second, and a sweep
        detail = error_of(lambda: reads.stub.StatTrace(stat))
        assert detail.kind == pb.ERROR_KIND_NOT_FOUND
        assert detail.field == "trace_id"
        reads.close()
        server.kill()
    with run_server(data_dir=tmp_path) as server:
        reads = Reads(server.target)
        cells, end, _ = reads.get("long")
        assert len(cells) == 12
        assert end.info.state == pb.TRACE_STATE_COMPLETE
        assert error_of(lambda: reads.stub.StatTrace(stat)).kind == pb.ERROR_KIND_NOT_FOUND
        reads.close()


def rows_of(n: int, seed: int = 0, layout: ModelLayout = LAYOUT) -> np.ndarray:
    keys = np.random.default_rng(seed).random((n, len(layout.layer_ids), layout.num_experts))
    return np.argsort(keys, axis=-1)[..., : layout.top_k].astype(layout.dtype)


def test_ranges_and_layers_are_cut_by_the_server(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="cut")
    rows = rows_of(700)
    handle = feeder.begin("r", prompt_len=3, labels={"group": "g"})
    for at in range(0, 700, 350):
        feeder.step(rows[at : at + 350], [(handle, at, 350)])
    feeder.finish(handle, 701)
    feeder.close()
    cells, end, info = reads.get("r", "cut", token_start=150, token_stop=420, layer_ids=[4])
    assert set(cells) == {(p, 4) for p in range(150, 420)}, "not even the bytes of other layers"
    assert (end.token_start, end.token_stop) == (150, 420)
    assert not end.missing
    for (position, _), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[position, 2])
    assert info.labels == {"group": "g"}
    assert list(info.layout.layer_ids) == [1, 2, 4]


def test_pipeline_stages_fill_one_trace(server, reads):
    rows = rows_of(6)
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    feeders = [
        Feeder(server.target, stage, run="pp", shard=f"pp{i}", block_size=4, num_blocks=4)
        for i, stage in enumerate(stages)
    ]
    for feeder, stage in zip(feeders, stages, strict=True):
        handle = feeder.begin("r", block_ids=[2, 1])
        feeder.step(rows[:, LAYOUT.columns(stage.layer_ids)], [(handle, 0, 6)])
        feeder.finish(handle, 7)
        feeder.flush()
        cells, end, info = reads.get("r", "pp")
        complete = feeder is feeders[-1]
        assert info.state == (pb.TRACE_STATE_COMPLETE if complete else pb.TRACE_STATE_RUNNING)
        if not complete:
            assert [list(m.layer_ids) for m in end.missing] == [[2, 4]]
    for (position, layer), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[position, LAYOUT.column[layer]])
    assert len(cells) == 18
    by_block, end, _ = reads.blocks("e0", "pp", block_ids=[2, 1], num_tokens=6, token_start=1)
    assert {p for p, _ in by_block} == set(range(1, 6))
    for cell, (ids, _, _) in by_block.items():
        np.testing.assert_array_equal(ids, cells[cell][0])
    for feeder in feeders:
        feeder.close()


def test_slots_and_a_bind_give_what_request_aware_agents_give(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="slots", block_size=4, num_blocks=4)
    rows = rows_of(12)
    feeder.step_slots(rows[:5], [12, 13, 14, 15, 4])
    feeder.flush()
    feeder.step_slots(rows[5:7], [5, 6])  # step 2
    feeder.step_slots(rows[7:8], [13])  # step 3: the block went to somebody else
    feeder.flush()
    bound = reads.ingest.BindRequest(
        pb.BindRequestRequest(
            run="slots", engine_id="e0", request_id="r", block_ids=[3, 1], num_tokens=8, step=2
        )
    )
    assert bound.trace.state == pb.TRACE_STATE_INCOMPLETE
    cells, end, _ = reads.get("r", "slots")
    assert {p for p, _ in cells} == {0, 2, 3, 4, 5, 6}
    for (position, layer), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[position, LAYOUT.column[layer]])
    assert [(m.start, m.stop, m.reason) for m in end.missing] == [
        (1, 2, pb.MISSING_REASON_KV_UNKNOWN)
    ]
    feeder.close()


def test_a_retry_comes_before_the_request_that_was_aborted(server, reads):
    rows = rows_of(8)
    feeder = Feeder(server.target, LAYOUT, run="retried", engine_id="e")
    for at, reason in ((0, "abort"), (4, "stop")):
        handle = feeder.begin("r")
        feeder.step(rows[at : at + 4 - at // 4], [(handle, at // 4, 4 - at // 4)])
        feeder.finish(handle, 5, reason=reason)
        feeder.flush()
        cells, end, info = reads.get("r", "retried")
        assert (info.incarnation, info.finish_reason) == (1 + at // 4, reason)
    # The retry lacks a row: those of the aborted one, complete, are not its own.
    assert [(m.start, m.stop) for m in end.missing] == [(0, 1)]
    np.testing.assert_array_equal(cells[1, 1][0], rows[4, 0])
    feeder.close()


def test_another_request_of_the_same_trace_is_another_incarnation(server, reads):
    rows = rows_of(8)
    for i, engine in enumerate(("a", "b")):
        feeder = Feeder(server.target, LAYOUT, run="again", engine_id=engine)
        handle = feeder.begin("r")
        feeder.step(rows[4 * i : 4 * i + 4], [(handle, 0, 4)])
        if i == 0:
            feeder.finish(handle, 5)
        feeder.flush()
        newest, _, info = reads.get("r", "again")
        assert info.incarnation == 1, "the newest complete one"
        feeder.close()
    assert info.num_incarnations == 2
    cells, _, _ = reads.get("r", "again", incarnation=2)
    np.testing.assert_array_equal(cells[0, 1][0], rows[4, 0])
    np.testing.assert_array_equal(newest[0, 1][0], rows[0, 0])
    detail = error_of(lambda: reads.stub.GetTrace(
        pb.GetTraceRequest(run="again", trace_id="r", incarnation=3)))  # fmt: skip
    assert (detail.kind, detail.field, detail.value) == (
        pb.ERROR_KIND_NOT_FOUND,
        "incarnation",
        "3",
    )


def test_a_follower_gets_rows_while_they_come_and_rewound_ones_again(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="follow", block_size=4, num_blocks=4)
    rows = rows_of(10)
    handle = feeder.begin("r", block_ids=[0, 1])
    feeder.step(rows[:3], [(handle, 0, 3)])
    feeder.flush()
    stream = reads.stub.GetTrace(
        pb.GetTraceRequest(run="follow", trace_id="r", follow=True), timeout=20
    )
    received = [next(stream), next(stream)]  # info, and the first rows
    feeder.rewind(handle, 2)
    feeder.step(rows[3:6], [(handle, 2, 3)])
    feeder.flush()
    received.append(next(stream))
    feeder.finish(handle, 6)
    feeder.close()
    from support.reads import collect

    cells, end, _ = collect([*received, *stream])
    assert end.info.state == pb.TRACE_STATE_COMPLETE
    expected = [0, 1, 3, 4, 5]
    for (position, layer), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[expected[position], LAYOUT.column[layer]])


def test_wait_returns_when_the_trace_has_ended(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="wait")
    request = pb.GetTraceRequest(run="wait", trace_id="r", wait_for=pb.WAIT_FOR_END)
    call = reads.stub.GetTrace(request, timeout=20)
    handle = feeder.begin("r")
    feeder.step(rows_of(2), [(handle, 0, 2)])
    feeder.flush()
    feeder.finish(handle, 3)
    feeder.close()
    assert next(iter(call)).info.state == pb.TRACE_STATE_COMPLETE
    detail = None
    with pytest.raises(grpc.RpcError) as caught:
        list(
            reads.stub.GetTrace(
                pb.GetTraceRequest(run="wait", trace_id="x", wait_for=pb.WAIT_FOR_END), timeout=0.3
            )
        )
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert detail is None


def test_a_lost_agent_leaves_an_incomplete_trace(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="lost")
    handle = feeder.begin("r")
    feeder.step(rows_of(2), [(handle, 0, 2)])
    feeder.flush()
    _, _, info = reads.get("r", "lost")
    assert info.state == pb.TRACE_STATE_RUNNING
    feeder.stream.close()
    # Waits out agent_timeout_seconds, and no longer than its own deadline.
    _, end, info = reads.get("r", "lost", wait_for=pb.WAIT_FOR_END, token_stop=5)
    assert info.state == pb.TRACE_STATE_INCOMPLETE
    assert [(m.start, m.stop, m.reason) for m in end.missing] == [
        (2, 5, pb.MISSING_REASON_AGENT_LOST)
    ]


def test_look_ups_and_forgetting(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="find")
    for i in range(7):
        feeder.set_weight_version(i)
        handle = feeder.begin(f"r{i}", labels={"group": f"g{i % 2}", "sample": str(i)})
        feeder.step(rows_of(1), [(handle, 0, 1)])
        if i != 5:
            feeder.finish(handle, 2)
    feeder.flush()

    def listed(**fields):
        page = reads.stub.ListTraces(pb.ListTracesRequest(run="find", **fields))
        return [t.trace_id for t in page.traces], page.next_page_token

    assert listed()[0] == [f"r{i}" for i in range(6, -1, -1)]
    assert listed(labels={"group": "g1"}) == (["r5", "r3", "r1"], "")
    assert listed(states=[pb.TRACE_STATE_RUNNING])[0] == ["r5"]
    first, token = listed(page_size=4)
    second, end = listed(page_size=4, page_token=token)
    assert (first + second, end) == ([f"r{i}" for i in range(6, -1, -1)], "")
    assert (
        reads.stub.RenewLease(
            pb.RenewLeaseRequest(run="find", trace_ids=["r0", "none"], ttl_seconds=5)
        ).num_renewed
        == 1
    )
    stat = reads.stub.StatTrace(pb.StatTraceRequest(run="find", trace_id="r0"))
    assert 0 < stat.info.expires_ms - stat.info.updated_ms < 60_000
    reads.stub.DeleteTrace(pb.DeleteTraceRequest(run="find", trace_id="r0"))
    retired = reads.stub.RetireTraces(pb.RetireTracesRequest(run="find", through_weight_version=5))
    assert retired.num_retired == 4, "r1 .. r4; r5 runs still"
    assert listed()[0] == ["r6", "r5"]
    assert listed(page_token="x" * 0)[0] == ["r6", "r5"]
    feeder.close()


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "kind", "field", "value", "expected"),
    [
        (
            {"trace_id": "none"},
            pb.ERROR_KIND_NOT_FOUND,
            "trace_id",
            "'none'",
            "a trace of run 'bad'",
        ),
        (
            {"layer_ids": [3]},
            pb.ERROR_KIND_INVALID_ARGUMENT,
            "layer_ids",
            "[3]",
            "ids among [1, 2, 4]",
        ),
        ({"token_stop": 5}, pb.ERROR_KIND_INVALID_ARGUMENT, "token_stop", "5", "at most 4"),
        ({"token_start": 9}, pb.ERROR_KIND_INVALID_ARGUMENT, "token_start", "9", "at most 4"),
        (
            {"token_start": 3, "token_stop": 2},
            pb.ERROR_KIND_INVALID_ARGUMENT,
            "token_stop",
            "2",
            "at least token_start = 3",
        ),
        ({"policy": 9}, pb.ERROR_KIND_INVALID_ARGUMENT, "policy", "9", "a ReadPolicy"),
    ],
)
def test_reads_refuse_bad_input_by_name(server, reads, fields, kind, field, value, expected):
    feeder = Feeder(server.target, LAYOUT, run="bad")
    handle = feeder.begin("r")
    feeder.step(rows_of(4), [(handle, 0, 4)])
    feeder.finish(handle, 5)
    feeder.close()
    request = pb.GetTraceRequest(**{"run": "bad", "trace_id": "r", **fields})
    detail = error_of(lambda: reads.stub.GetTrace(request))
    assert (detail.kind, detail.field, detail.value) == (kind, field, value)
    assert detail.expected.startswith(expected)


def bad_chunks():
    def make(change):
        def build(sequence):
            maker = ChunkMaker(LAYOUT)
            maker.op(OpKind.BEGIN, "r", arg=0)
            maker.begins.append(pb.RequestBegin(trace_id="poisoned"))
            maker.op(OpKind.ROWS, "r", count=2, frame=maker.frame(rows_of(2)), step=1)
            return change(maker, sequence)

        return build

    def op(**fields):
        def change(maker, sequence):
            for name, value in fields.items():
                maker.ops[-1][name] = value
            return maker.make(sequence)

        return change

    def frame(body):
        def change(maker, sequence):
            maker.frames[-1] = body
            return maker.make(sequence)

        return change

    def reheader(**fields):
        def change(maker, sequence):
            chunk = maker.make(sequence)
            header = pb.ChunkHeader.FromString(chunk.header)
            header.MergeFrom(pb.ChunkHeader(**fields))
            return seal(sequence, header.SerializeToString(), chunk.payload)

        return change

    def seal_garbage(maker, sequence):
        return seal(sequence, b"\xff\xff\xff", b"")

    def damaged(maker, sequence):
        chunk = maker.make(sequence)
        chunk.payload_crc32 ^= 1
        return chunk

    other = ModelLayout((1, 2, 4), 6, 40, 4)
    wide = ModelLayout((1, 2, 4), 6, 300, 3)
    from routetrace.codec.frame import encode_frame

    return {
        "unknown op": (make(op(kind=77)), "ops.kind[1]", "77"),
        "request index": (make(op(request=5)), "ops.request[1]", "5"),
        "frame index": (make(op(frame=3)), "ops.frame[1]", "3"),
        "too many rows": (make(op(count=3)), "ops.count[1]", "3"),
        "row outside": (make(op(row=1)), "ops.count[1]", "2"),
        "position": (make(op(position=2**32 - 1)), "ops.position[1]", str(2**32 - 1)),
        "block id": (
            make(lambda m, s: (m.op(OpKind.BLOCKS, "r", blocks=[99]), m.make(s))[1]),
            "block_ids[0]",
            "99",
        ),
        "a source without a target": (
            make(lambda m, s: (m.op(OpKind.COPY, blocks=[0, 1, 2]), m.make(s))[1]),
            "ops.num_blocks[2]",
            "3",
        ),
        "no begin": (make(lambda m, s: (m.begins.clear(), m.make(s))[1]), "ops.arg[0]", "0"),
        "begin index": (
            make(lambda m, s: (m.ops[0].__setitem__("value", 2**63), m.make(s))[1]),
            "ops.value[0]",
            str(2**63),
        ),
        "finish reason": (
            make(lambda m, s: (m.op(OpKind.FINISH, "r", arg=9), m.make(s))[1]),
            "ops.arg[2]",
            "9",
        ),
        "ragged ops": (make(reheader(ops=b"123")), "ops", None),
        "id too long": (make(reheader(request_ids=["x" * 600])), "request_ids", None),
        "not a header": (make(seal_garbage), "header", None),
        "other top_k": (
            make(frame(encode_frame(rows_of(2, layout=other), other))),
            "frame[0].top_k",
            "4",
        ),
        "other dtype": (
            make(frame(encode_frame(rows_of(2, layout=wide), wide))),
            "frame[0].num_experts",
            "300",
        ),
        "not a frame": (make(frame(b"nonsense")), None, None),
        "damaged on the way": (make(damaged), "payload_crc32", None),
        "bad layout": (make(reheader(layout=pb.RoutingLayout(top_k=5))), "layout", None),
        "out of sequence": (make(lambda m, s: m.make(s + 5)), "sequence", None),
    }


@pytest.mark.parametrize("name", bad_chunks())
def test_a_poisoned_chunk_is_refused_by_name_and_the_stream_goes_on(server, reads, name):
    build, field, value = bad_chunks()[name]
    feeder = Feeder(server.target, LAYOUT, run=f"poison {name}", block_size=4, num_blocks=4)
    rows = rows_of(4)
    handle = feeder.begin("good", block_ids=[1])
    feeder.step(rows[:2], [(handle, 0, 2)])
    feeder.flush()
    feeder.stream.send(build(feeder.sequence))
    reject = feeder.stream.receive().reject
    if field:
        assert reject.error.field == field
    if value:
        assert reject.error.value == value
    assert reject.error.expected or reject.error.message
    retryable = name in ("damaged on the way", "out of sequence", "not a frame")
    assert bool(reject.error.retry_after_ms) == retryable
    feeder.step(rows[2:], [(handle, 2, 2)])
    feeder.finish(handle, 5)
    feeder.close()
    cells, end, info = reads.get("good", f"poison {name}")
    assert info.state == pb.TRACE_STATE_COMPLETE
    assert len(cells) == 12
    assert (
        error_of(
            lambda: reads.stub.StatTrace(
                pb.StatTraceRequest(run=f"poison {name}", trace_id="poisoned")
            )
        ).kind
        == pb.ERROR_KIND_NOT_FOUND
    )


def test_chunks_are_stored_once_and_old_epochs_are_fenced(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="once")
    handle = feeder.begin("r")
    feeder.step(rows_of(2), [(handle, 0, 2)])
    chunk = feeder.chunk.make(1)
    for _ in range(3):
        feeder.stream.send(chunk)
        assert feeder.stream.receive().ack.sequence == 1
    maker = ChunkMaker(LAYOUT)
    maker.op(OpKind.FINISH, "r", count=3, arg=FinishReason.STOP)
    feeder.stream.send(maker.make(1))
    assert feeder.stream.receive().reject.error.field == "sequence"
    hello = pb.Hello()
    hello.CopyFrom(feeder.hello)
    hello.epoch = feeder.stream.welcome.epoch
    again = Stream(server.target, hello)
    assert (again.welcome.epoch, again.welcome.next_sequence) == (hello.epoch, 2)
    feeder.stream.send(maker.make(2))
    with pytest.raises(grpc.RpcError) as caught:
        feeder.stream.receive()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    again.send(maker.make(2))
    assert again.receive().ack.sequence == 2
    hello.epoch = 0
    newer = Stream(server.target, hello)
    assert newer.welcome.epoch > again.welcome.epoch
    hello.epoch = again.welcome.epoch
    with pytest.raises(grpc.RpcError) as caught:
        Stream(server.target, hello)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    again.send(maker.make(3))
    with pytest.raises(grpc.RpcError):
        again.receive()
    newer.close()
    cells, _, info = reads.get("r", "once")
    assert (info.state, len(cells)) == (pb.TRACE_STATE_COMPLETE, 6)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run": ""}, "run"),
        ({"engine_id": "x" * 600}, "engine_id"),
        ({"num_blocks": 1 << 31, "block_size": 16}, "num_blocks"),
        ({"layout": pb.RoutingLayout(top_k=99)}, "top_k"),
        ({"layout": pb.RoutingLayout(layer_ids=[3])}, "layer_ids"),
        ({"layout": pb.RoutingLayout(id_type=pb.ID_TYPE_UINT16)}, "id_type"),
    ],
)
def test_a_bad_hello_is_refused_by_name(server, change, field):
    hello = pb.Hello(run="hello", engine_id="e", layout=LAYOUT.to_proto())
    hello.MergeFrom(pb.Hello(**change))
    for name, value in change.items():
        if not value:
            hello.ClearField(name)
    with pytest.raises(grpc.RpcError) as caught:
        Stream(server.target, hello)
    details = [v for k, v in caught.value.trailing_metadata() if k == ERROR_METADATA_KEY]
    assert pb.ErrorDetail.FromString(details[0]).field == field


@pytest.mark.parametrize("how", ["begin", "blocks", "external", "reset"])
def test_a_block_that_changed_hands_is_unknown_until_written(server, reads, how):
    feeder = Feeder(server.target, LAYOUT, run=f"hands {how}", block_size=4, num_blocks=4)
    first = feeder.begin("first", block_ids=[1])
    feeder.step(rows_of(4), [(first, 0, 4)])
    feeder.finish(first, 5)
    if how == "begin":
        second = feeder.begin("second", block_ids=[1])
        feeder.finish(second, 1, reason="abort")
    elif how == "blocks":
        second = feeder.begin("second", block_ids=[2])
        feeder.add_blocks(second, [1])
        feeder.finish(second, 1, reason="abort")
    elif how == "external":
        feeder.chunk.op(OpKind.EXTERNAL, blocks=[1])
    else:
        feeder.chunk.op(OpKind.RESET)
    # Nobody reported a forward pass over block 1 since: not even an engine that swears by it.
    third = feeder.begin("third", block_ids=[1, 3], num_computed_tokens=4)
    feeder.step(rows_of(1, seed=1), [(third, 4, 1)])
    feeder.finish(third, 6)
    feeder.close()
    cells, end, info = reads.get("third", f"hands {how}")
    assert {p for p, _ in cells} == {4}
    assert info.state == pb.TRACE_STATE_INCOMPLETE
    assert [(m.start, m.stop, m.reason) for m in end.missing] == [
        (0, 4, pb.MISSING_REASON_KV_UNKNOWN)
    ]


def test_lost_rows_take_what_stood_there_before_with_them(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="lost rows", block_size=4, num_blocks=4)
    handle = feeder.begin("r", block_ids=[1, 2])
    feeder.step(rows_of(6), [(handle, 0, 6)])
    # Positions 2 and 3 were computed again, by a pass whose rows did not make it here.
    feeder.chunk.op(OpKind.LOST, "r", position=2, count=2, arg=pb.MISSING_REASON_QUEUE_FULL)
    feeder.finish(handle, 7)
    feeder.begin("next", block_ids=[1, 3], num_computed_tokens=4)
    feeder.flush()
    cells, end, _ = reads.get("r", "lost rows")
    assert {p for p, _ in cells} == {0, 1}
    assert [(m.start, m.stop, m.reason) for m in end.missing] == [
        (2, 4, pb.MISSING_REASON_QUEUE_FULL),
        (4, 6, pb.MISSING_REASON_NOT_CAPTURED),
    ]
    cells, _, _ = reads.get("next", "lost rows")
    assert {p for p, _ in cells} == {0, 1}
    feeder.close()


def test_a_list_says_what_a_read_says_of_an_attempt_that_sampled_nothing(server, reads):
    feeder = Feeder(server.target, LAYOUT, run="given up", block_size=4, num_blocks=8)
    handle = feeder.begin("r", prompt_len=5, block_ids=[1, 2])
    feeder.step(rows_of(4), [(handle, 0, 4)])
    feeder.preempt(handle, 4)
    feeder.resume(handle, 0, block_ids=[3, 4])
    feeder.step(rows_of(2), [(handle, 0, 2)])
    feeder.finish(handle, 5, reason="abort")
    feeder.flush()
    [listed] = reads.stub.ListTraces(pb.ListTracesRequest(run="given up")).traces
    cells, _, _ = reads.get("r", "given up")
    assert {p for p, _ in cells} == {0, 1}
    assert listed.state == pb.TRACE_STATE_INCOMPLETE
    feeder.close()


def test_stages_join_the_request_that_they_belong_to_and_no_other_boot(server, reads):
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    rows = [rows_of(3, seed=i) for i in range(3)]

    def connect(i, boot_id):
        return Feeder(server.target, stages[i], run="skew", shard=f"pp{i}", boot_id=boot_id)

    def report(feeder, i, use):
        handle = feeder.begin("r")
        feeder.step(rows[use][:, LAYOUT.columns(stages[i].layer_ids)], [(handle, 0, 3)])
        feeder.finish(handle, 4)
        feeder.flush()

    feeders = [connect(0, "first"), connect(1, "first")]
    # The id is used twice, and the second stage is a whole request behind the first.
    for i, use in ((0, 0), (0, 1), (1, 0), (1, 1)):
        report(feeders[i], i, use)
    # Again, but both stages boot before the second one got to report.
    report(feeders[0], 0, 2)
    for feeder in feeders:
        feeder.close()
    feeders = [connect(0, "second"), connect(1, "second")]
    report(feeders[1], 1, 0)
    for use in (0, 1):
        cells, _, info = reads.get("r", "skew", incarnation=use + 1)
        assert info.state == pb.TRACE_STATE_COMPLETE
        for (position, layer), (ids, _, _) in cells.items():
            np.testing.assert_array_equal(ids, rows[use][position, LAYOUT.column[layer]])
    for incarnation, layers in ((3, {1}), (4, {2, 4})):
        cells, _, info = reads.get("r", "skew", incarnation=incarnation)
        assert {layer for _, layer in cells} == layers
    assert info.num_incarnations == 4
    for feeder in feeders:
        feeder.close()


def test_a_bind_before_its_agent_has_connected_waits(server, reads):
    request = pb.BindRequestRequest(
        run="early", engine_id="e0", request_id="r", block_ids=[0], num_tokens=4, step=1
    )
    bound = reads.ingest.BindRequest.future(request, timeout=60)
    # Another engine that connects, and a call that is answered: the bind was there before both.
    other = Feeder(server.target, LAYOUT, run="early", engine_id="e1", block_size=4, num_blocks=4)
    with pytest.raises(grpc.RpcError):
        reads.get("r", "early")
    assert not bound.done()
    feeder = Feeder(server.target, LAYOUT, run="early", block_size=4, num_blocks=4)
    feeder.step_slots(rows_of(3), [0, 1, 2])
    feeder.flush()
    assert bound.result().trace.state == pb.TRACE_STATE_COMPLETE
    for each in (feeder, other):
        each.close()


def test_a_bind_waits_for_the_newest_epoch_of_its_engine(server, reads):
    """The agent lost its epoch while the bind waited: the writer that had to report is gone."""

    def feeder() -> Feeder:
        return Feeder(server.target, LAYOUT, run="anew", block_size=4, num_blocks=4)

    old, rows = feeder(), rows_of(6)
    old.step_slots(rows[:3], [0, 1, 2])
    old.flush()
    request = pb.BindRequestRequest(
        run="anew", engine_id="e0", request_id="r", block_ids=[0], num_tokens=4, step=2
    )
    bound = reads.ingest.BindRequest.future(request, timeout=60)
    with pytest.raises(grpc.RpcError):  # a call that is answered: the bind was there before it
        reads.get("r", "anew")
    assert not bound.done()
    new = feeder()
    assert new.stream.welcome.epoch > old.stream.welcome.epoch
    new.step_number = 1
    new.step_slots(rows[3:], [0, 1, 2])
    new.flush()
    assert bound.result().trace.state == pb.TRACE_STATE_COMPLETE
    cells, _, _ = reads.get("r", "anew")
    for (position, layer), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[3 + position, LAYOUT.column[layer]])
    new.close()


def test_a_bind_whose_agent_never_connects_says_so_in_time(server, reads):
    request = pb.BindRequestRequest(
        run="early", engine_id="nobody", request_id="r", block_ids=[0], num_tokens=4
    )
    detail = error_of(lambda: [reads.ingest.BindRequest(request, timeout=2)])
    assert (detail.kind, detail.field) == (pb.ERROR_KIND_NOT_FOUND, "engine_id")
