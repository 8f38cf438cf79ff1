"""Bytes of people who mean harm: typed errors, bounded time and memory, and a server that stays."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import grpc
import numpy as np
import pytest

from faults.fuzz.mutate import bomb, put_group, reseal_frame
from faults.fuzz.runner import run_target
from routetrace.client import RouteClient
from routetrace.client._core import assemble as assemble_module
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.messages import MAX_FIELDS, MAX_HEAD_BYTES, parser_of
from routetrace.codec.frame import Codec, decode_frame, decode_frames, encode_frame, read_header
from routetrace.codec.records import DIGEST, NO_REQUEST, OP, SPAN, U32, U64, OpKind
from routetrace.common.errors import Corrupt, InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_LAYERS
from routetrace.server.index.apply import apply_record
from routetrace.server.index.chunk import MAX_CHUNK_ROWS, MAX_OPS, parse_header
from routetrace.server.index.records.record import encode_open
from routetrace.server.index.state import State
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker, Feeder, Stream, seal
from support.reads import Reads
from support.servers.client_server import LAYOUT, ScriptedServer, rows_of, sealed, truth

MIB = 1 << 20
SEED = 20_261_121


def peak(pid: int | str = "self") -> int:
    """Most bytes that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def forget_peak() -> int:
    """Bytes that this process has now; `peak` counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


@pytest.fixture(scope="module")
def server():
    with run_server(max_chunk_bytes=8 * MIB, agent_timeout_seconds=0.5) as process:
        yield process


@pytest.fixture
def reads(server):
    reads = Reads(server.target)
    yield reads
    reads.close()


@pytest.fixture
def stream(server, request):
    hello = pb.Hello(
        run=request.node.name[:60], engine_id="e", boot_id="b", layout=LAYOUT.to_proto(),
        block_size=4, num_blocks=64,
    )  # fmt: skip
    stream = Stream(server.target, hello)
    stream.run = hello.run
    yield stream
    stream.close()


def good_chunk(sequence: int = 1, name: str = "good") -> pb.Chunk:
    """A request of 4 rows, from begin to finish."""
    maker = ChunkMaker(LAYOUT)
    maker.begins.append(pb.RequestBegin(prompt_len=2))
    maker.op(OpKind.BEGIN, name, blocks=[0], value=sequence)
    maker.op(OpKind.ROWS, name, count=4, frame=maker.frame(rows_of(LAYOUT, 4)), step=1)
    maker.op(OpKind.FINISH, name, count=5, arg=1)
    return maker.make(sequence)


def send(stream: Stream, chunk: pb.Chunk) -> pb.IngestResponse:
    stream.send(chunk)
    return stream.receive()


def rewritten(change) -> pb.Chunk:
    """The good chunk with another header, sealed."""
    chunk = good_chunk()
    header = pb.ChunkHeader.FromString(chunk.header)
    change(header)
    return seal(1, header.SerializeToString(), chunk.payload)


def ops_of(n: int, **fields) -> np.ndarray:
    ops = np.zeros(n, OP)
    for name, values in fields.items():
        ops[name] = values
    return ops


# ------------------------------------------------------------------ fuzzing, the quick share


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "inputs"),
    [("frame", 500), ("stream", 300), ("message", 300), ("layout", 1000), ("answer", 300),
     ("chunk", 60), ("storm", 6), ("record", 60), ("snapshot", 60), ("request", 400),
     ("page", 300)],
)  # fmt: skip
def test_fuzzing_finds_nothing(target, inputs):
    report = run_target(target, SEED, 100, inputs)
    assert not report["findings"], report["findings"]
    assert report["inputs"] >= inputs // 4
    assert 0 < report["taken"] < report["inputs"] or target == "record"


# ------------------------------------------------------------------ chunks, at a real server


def test_a_zstd_bomb_is_stored_unopened_and_refused_by_the_reader_before_it_allocates(
    server, stream
):
    layout = ModelLayout((1,), 2, 40, 3)
    hello = pb.Hello(run="bomb", engine_id="e", layout=layout.to_proto())
    bombs = Stream(server.target, hello)
    maker = ChunkMaker(layout)
    maker.begins.append(pb.RequestBegin())
    maker.op(OpKind.BEGIN, "r")
    maker.frame(rows_of(layout, 12_000))
    maker.frames[0] = put_group(maker.frames[0], 0, bomb(1 << 30))
    assert len(maker.frames[0]) < 40_000
    maker.op(OpKind.ROWS, "r", count=12_000, step=1)
    maker.op(OpKind.FINISH, "r", count=12_001, arg=1)
    before = peak(server.pid)
    assert send(bombs, maker.make(1)).ack.sequence == 1
    with RouteClient(server.target, run="bomb") as client:
        own = forget_peak()
        with pytest.raises(Corrupt, match="zstd content size"):
            client.get("r")
        assert peak() - own < 64 * MIB
    assert peak(server.pid) - before < 64 * MIB
    bombs.close()


REFUSED = {
    "a label too many": lambda h: h.begins[0].labels.update({f"k{i}": "v" for i in range(10_000)}),
    "a label too long": lambda h: h.begins[0].labels.update({"k": "v" * 2000}),
    "a million ops": lambda h: setattr(h, "ops", bytes(56 * (MAX_OPS + 1))),
    "a million begins": lambda h: h.MergeFromString(b"\x1a\x00" * 1_000_000),
    "an id too long": lambda h: h.request_ids.append("x" * 513),
    "an empty id": lambda h: h.request_ids.append(""),
    "rows without end": lambda h: setattr(h, "frame_rows", np.array([1 << 16] * 17, U32).tobytes()),
    "a frame without rows": lambda h: setattr(h, "frame_rows", np.array([0], U32).tobytes()),
    "another layout": lambda h: h.layout.layer_ids.pop(),
    "layers without end": lambda h: h.layout.layer_ids.extend([1] * 1_000_000),
    "half an op": lambda h: setattr(h, "ops", h.ops[:-1]),
    "blocks named twice": lambda h: setattr(
        h, "ops", h.ops + ops_of(9, kind=OpKind.BLOCKS, num_blocks=1).tobytes()
    ),
    "a block outside of the pool": lambda h: setattr(h, "block_ids", np.array([64], U32).tobytes()),
    "blocks of an op that takes none": lambda h: setattr(
        h, "ops", h.ops + ops_of(1, kind=OpKind.REWIND, num_blocks=1).tobytes()
    ),
    "a begin named twice": lambda h: setattr(
        h, "ops", h.ops + ops_of(1, kind=OpKind.BEGIN).tobytes()
    ),
    "digests named twice": lambda h: h.MergeFrom(
        pb.ChunkHeader(
            ops=h.ops + ops_of(2, kind=OpKind.DIGEST, count=1).tobytes(),
            token_digests=np.zeros(1, DIGEST).tobytes(),
        )
    ),
    "slots named twice": lambda h: h.MergeFrom(
        pb.ChunkHeader(
            ops=ops_of(2, kind=OpKind.ROWS, request=NO_REQUEST, count=2).tobytes(),
            slots=np.zeros(2, U64).tobytes(),
        )
    ),
    "more rows than the frames hold": lambda h: setattr(
        h, "ops", h.ops + ops_of(1, kind=OpKind.ROWS, count=4).tobytes()
    ),
    "drafts before the first position": lambda h: setattr(
        h, "ops", ops_of(1, kind=OpKind.ROWS, count=4, value=5).tobytes()
    ),
    "a position beyond the last": lambda h: setattr(
        h, "ops", ops_of(1, kind=OpKind.LOST, position=1 << 31, count=1).tobytes()
    ),
    "bytes that are no header": lambda h: h.CopyFrom(pb.ChunkHeader(ops=b"\xff" * 56)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_poison_chunk_is_refused_once_and_for_all_and_the_next_one_is_taken(stream, what):
    chunk = rewritten(REFUSED[what])
    for _ in range(2):  # whoever sends it again is told the same
        answer = send(stream, chunk).reject
        assert answer.sequence == 1
        assert answer.error.kind == pb.ERROR_KIND_INVALID_ARGUMENT, answer
        assert answer.error.retry_after_ms == 0
        assert len(answer.error.SerializeToString()) < 4096
    assert send(stream, good_chunk()).ack.sequence == 1


def test_chunks_of_ops_that_say_the_most_are_applied_and_read_in_time(stream, server):
    """Each of them once cost as much as all before it."""
    n = 1 << 9
    kinds = [OpKind.ROWS, OpKind.LOST, OpKind.REWIND, OpKind.RESUME, OpKind.DIGEST, OpKind.FINISH]
    for kind in kinds:
        maker = ChunkMaker(LAYOUT)
        maker.requests = ["a"]
        maker.frame(rows_of(LAYOUT, n))
        ops = ops_of(n, kind=OpKind.ROWS, position=3 * np.arange(n), count=1, row=np.arange(n))
        ops["kind"][1::2] = kind
        if kind == OpKind.FINISH:
            ops["arg"][1::2], ops["count"][1::2], ops["row"][1::2] = 1, 5, 0
        elif kind == OpKind.DIGEST:
            maker.digests = [(i + 1, i) for i in range(n)]
        elif kind == OpKind.LOST:
            ops["position"][1::2] = 3 * np.arange(n // 2)
        elif kind == OpKind.RESUME:
            ops["count"][1::2] = 0
        maker.ops = [ops]
        answer = send(stream, maker.make(1 + kinds.index(kind)))
        assert answer.ack.sequence, (kind, answer)
        with RouteClient(server.target, run=stream.run, timeout=20) as client:
            assert client.get("a", missing="mask").num_rows < 1 << 31
            assert [s.trace_id for s in client.find()] == ["a"]


@pytest.mark.parametrize("name", ["a\0b", "\n\r\x1b[31m", "\U0001f600", "..", "%s{}", "x" * 512])
def test_ids_of_odd_characters_are_ids(stream, server, name):
    assert send(stream, good_chunk(1, name)).ack.sequence == 1
    with RouteClient(server.target, run=stream.run) as client:
        assert client.get(name).complete
        assert [s.trace_id for s in client.find()] == [name]
        with pytest.raises(LookupError):
            client.get(name + "?" if len(name) < 512 else "?")


def test_surrogates_are_no_text(stream):
    chunk = good_chunk()
    header = chunk.header.replace(b"good", b"\xed\xa0\x80x")
    assert send(stream, seal(1, header, chunk.payload)).reject.error.retry_after_ms == 0
    assert send(stream, good_chunk()).ack.sequence == 1


def test_a_chunk_or_a_message_above_the_limit_is_refused(server, stream):
    answer = send(stream, seal(1, b"", bytes(8 * MIB + 1)))
    assert answer.reject.error.kind == pb.ERROR_KIND_INVALID_ARGUMENT
    assert "max_chunk_bytes" in answer.reject.error.expected
    other = Stream(server.target, pb.Hello(run="r", engine_id="e", layout=LAYOUT.to_proto()))
    other.send(seal(1, b"", bytes(9 * MIB)))
    with pytest.raises(grpc.RpcError) as caught:
        other.receive()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other.channel.close()
    assert send(stream, good_chunk()).ack.sequence == 1


@pytest.mark.parametrize(
    ("block_size", "num_blocks"),
    [(2**32 - 1, 2**32 - 1), (1, 2**32 - 1), (2**32 - 1, 1)],
)
def test_a_hello_can_not_ask_for_slots_without_end(server, block_size, num_blocks):
    before = peak(server.pid)
    hello = pb.Hello(run="r", engine_id="slots", layout=LAYOUT.to_proto(),
                     block_size=block_size, num_blocks=num_blocks)  # fmt: skip
    with pytest.raises(grpc.RpcError) as caught:
        Stream(server.target, hello)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert peak(server.pid) - before < 64 * MIB


# ------------------------------------------------------------------ requests, at a real server


READS = {
    "ranges out of order": pb.GetTraceRequest(
        token_ranges=[pb.TokenRange(start=3, stop=4), pb.TokenRange(start=0, stop=1)]
    ),
    "ranges without end": pb.GetTraceRequest(token_ranges=[pb.TokenRange(stop=1)] * 500_000),
    "layers without end": pb.GetTraceRequest(layer_ids=[1] * 1_000_000),
    "reads without end": pb.GetTracesRequest(reads=[pb.GetTraceRequest(trace_id="t")] * 100_000),
    "an unknown layer": pb.GetTraceRequest(layer_ids=[2**32 - 1]),
    "a stop before the start": pb.GetTraceRequest(token_start=2, token_stop=1),
    "positions beyond the end": pb.GetTraceRequest(token_start=2**32 - 1),
    "an unknown policy": pb.GetTraceRequest(policy=77),
    "an unknown wait": pb.GetTraceRequest(wait_for=77),
    "a run of a megabyte": pb.GetTraceRequest(run="r" * MIB),
    "a trace id of a megabyte": pb.GetTraceRequest(trace_id="t" * MIB),
    "a page token that is no number": pb.ListTracesRequest(page_token="\u00b2"),
    "a page token without end": pb.ListTracesRequest(page_token="9" * 5000),
    "labels without end": pb.ListTracesRequest(labels={f"k{i}": "v" for i in range(10_000)}),
    "states without end": pb.ListTracesRequest(states=[1] * 1_000_000),
    "more rows than the blocks have slots": pb.GetBlocksRequest(
        block_ids=[0], num_tokens=2**32 - 1
    ),
    "blocks without end": pb.GetBlocksRequest(block_ids=[0] * 2_000_000, num_tokens=2**22),
    "a block outside of the pool": pb.GetBlocksRequest(block_ids=[64], num_tokens=1),
    "more tokens than there can be": pb.BindRequestRequest(
        request_id="b", block_ids=[0], num_tokens=2**32 - 1
    ),
    "blocks to bind without end": pb.BindRequestRequest(
        request_id="b", block_ids=[0] * 2_000_000, num_tokens=2**22
    ),
    "half a digest": pb.BindRequestRequest(request_id="b", num_tokens=2, token_digests=b"x"),
    "traces without end": pb.RenewLeaseRequest(trace_ids=["t"] * 500_000),
}


@pytest.mark.parametrize("what", READS)
def test_a_request_that_asks_for_too_much_is_refused_by_name(server, stream, reads, what):
    assert send(stream, good_chunk()).ack.sequence == 1
    request = type(READS[what])()
    request.CopyFrom(READS[what])
    request.run = request.run or stream.run
    name = type(request).__name__.removesuffix("Request")
    binds = name == "BindRequest"
    if name == "GetTrace":
        request.trace_id = request.trace_id or "good"
    elif name == "GetBlocks" or binds:
        request.engine_id = "e"
    stub = reads.ingest if binds else reads.stub
    before = peak(server.pid)
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(stub, name)(request, timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    details = [v for k, v in caught.value.trailing_metadata() if k == "routetrace-error-bin"]
    assert pb.ErrorDetail.FromString(details[0]).field
    assert len(details[0]) < 4096
    assert peak(server.pid) - before < 256 * MIB
    assert reads.get("good", stream.run)[1].info.num_rows == 4


def test_a_page_is_as_large_as_a_message_may_be(server, reads):
    run = "pages"
    feeder = Feeder(server.target, LAYOUT, run=run)
    labels = {f"k{i}": "v" * 1000 for i in range(64)}
    for i in range(150):  # 64 kB of labels each
        feeder.finish(feeder.begin(f"r{i}", labels=labels), 1)
        if i % 50 == 49:
            feeder.flush()
    feeder.close()
    names, token = [], ""
    while True:
        request = pb.ListTracesRequest(run=run, page_size=2**31 - 1, page_token=token)
        page = reads.stub.ListTraces(request, timeout=20)
        names += [info.trace_id for info in page.traces]
        if not (token := page.next_page_token):
            break
    assert names == [f"r{i}" for i in reversed(range(150))]


# ------------------------------------------------------------------ the client


def test_the_client_refuses_a_stream_of_bombs_before_it_allocates():
    """Declared sizes that are wrong, missing, or of a frame that is larger than any may be."""
    source = truth(12_000, layout=ModelLayout((1,), 2, 40, 3))
    [first, *_] = source.responses()
    frame = encode_frame(source.ids, source.layout)
    undeclared = struct.pack("<IB", 0xFD2FB528, 0) + b"\x58" + bomb(1 << 30)[13:]
    huge = bytearray(frame)
    struct.pack_into("<I", huge, 8, 65536 * 1024)
    with ScriptedServer() as server, RouteClient(server.target, timeout=20) as client:
        for body in (
            put_group(frame, 0, bomb(1 << 30)),
            put_group(frame, 0, bomb(36_000, 1 << 30)),
            put_group(frame, 0, undeclared),
            reseal_frame(bytes(huge)),
        ):
            message = pb.GetTraceResponse(
                spans=np.array([(0, 12_000, 0, 0, 0, 1, 0, 7)], SPAN).tobytes(),
                frame_lengths=np.array([len(body)], U32).tobytes(),
                payload=body,
            )
            info = pb.GetTraceResponse(info=source.info)
            server.script["GetTrace"] = lambda r, c, m=[info, message]: iter(m)
            own = forget_peak()
            with pytest.raises(Corrupt):
                client.get("req")
            assert peak() - own < 64 * MIB
    assert first.HasField("info")


def test_many_frames_of_much_content_are_decoded_a_few_at_a_time():
    layout = ModelLayout(tuple(range(16)), 16, 40, 16)
    ids = np.broadcast_to(np.arange(16, dtype=np.uint8), (1 << 16, 16, 16))
    frame = encode_frame(ids, layout)  # 16 MiB in a few kB
    assert len(frame) < 64 << 10
    own = forget_peak()
    for rows in decode_frames([(frame, None, None)] * 20):
        assert rows.nbytes == 16 * MIB
    assert peak() - own < 128 * MIB  # all at once are 320 MiB


def test_ids_of_experts_that_are_not_there_never_reach_a_caller(server):
    layout = ModelLayout((1, 2), 3, 40, 3)
    feeder = Feeder(server.target, layout, run="experts")
    handle = feeder.begin("r")
    rows = rows_of(layout, 4)
    feeder.step(rows, [(handle, 0, 4)])
    rows[2, 1, 0] = 40
    for codec in Codec:
        frame = encode_frame(rows, layout, codec=codec, validate=False)
        with pytest.raises(Corrupt, match="topk_ids"):
            decode_frame(frame)
        assert decode_frame(frame, layer_ids=(1,)).max() < 40 or codec is Codec.LAYER_ZSTD
    feeder.chunk.frames = [frame]
    feeder.finish(handle, 5)
    feeder.close()
    with RouteClient(server.target, run="experts") as client:
        for missing in ("raise", "mask"):
            with pytest.raises(Corrupt):
                client.get("r", missing=missing)


def fed(want: Want, *messages: pb.GetTraceResponse):
    assembler = Assembler(want)
    parse = parser_of(pb.GetTraceResponse)
    for message in messages:
        data = message if isinstance(message, bytes) else sealed(message)
        assembler.feed(*parse(data))
    return assembler.finish()


def info_of(num_rows: int, layout: ModelLayout = LAYOUT) -> pb.TraceInfo:
    info = pb.TraceInfo()
    info.CopyFrom(truth(3, layout=layout, state=pb.TRACE_STATE_RUNNING).info)
    info.num_rows = num_rows
    return info


def test_a_few_bytes_can_not_make_the_client_fill_its_memory():
    want = Want("req", None, mask=True)
    rows = 1 << 19
    info = info_of(rows)
    end = pb.ReadEnd(info=info, token_stop=rows)
    own = forget_peak()
    # Nothing there, nothing missing: one place that is wrong is enough.
    with pytest.raises(Corrupt, match="neither there nor missing"):
        fed(want, pb.GetTraceResponse(info=info, end=end))
    assert peak() - own < 10 * rows * 4
    # All missing, again and again.
    end.missing.extend([pb.MissingRange(start=0, stop=rows, reason=1)] * 2_000)
    with pytest.raises(Corrupt, match="more missing cells"):  # not after hours
        fed(want, pb.GetTraceResponse(info=info, end=end))
    wide = ModelLayout(tuple(range(MAX_LAYERS)), MAX_LAYERS, 2048, 1024)
    for huge in (info_of(assemble_module.MAX_ROWS, wide), info_of(2**32 - 1)):
        with pytest.raises(Corrupt, match="more than"):
            fed(
                want,
                pb.GetTraceResponse(info=huge, end=pb.ReadEnd(info=huge, token_stop=huge.num_rows)),
            )


@pytest.mark.parametrize(
    "data",
    [b"\x08\x00" * (MAX_FIELDS + 1), b"\x7a\x00\x7a\x00", b"\x82\x01" + b"\xff" * 9 + b"\x01",
     b"\x12" + b"\x81\x80\x80\x08" + bytes(MAX_HEAD_BYTES + 1), b"\x7a\x05abc", b"\x0b\x0c"],
    ids=["fields", "two payloads", "a length of 64 bits", "a head", "cut short", "groups"],
)  # fmt: skip
def test_a_message_of_too_much_does_not_parse(data):
    with pytest.raises(Corrupt, match="does not parse"):
        fed(Want("req", None), data)


def test_an_unknown_state_is_an_error_also_while_following():
    info = info_of(3)
    info.state = 99
    with pytest.raises(Corrupt):
        Assembler(Want("req", None, follow=True)).feed(pb.GetTraceResponse(info=info))


def test_rows_that_are_sent_again_leave_the_weight_versions_of_the_others_alone():
    want = Want("req", None, mask=True, follow=True)
    assembler = Assembler(want)
    frame = encode_frame(rows_of(LAYOUT, 10), LAYOUT)
    info = info_of(10)
    for position, count, version in ((0, 10, 1), (3, 2, 2)):
        assembler.feed(
            pb.GetTraceResponse(
                info=info,
                spans=np.array(
                    [(position, count, version - 1, 0, 0, 1, 0, version)], SPAN
                ).tobytes(),
                frame_lengths=np.array([len(frame)], U32).tobytes(),
                payload=frame,
            )
        )
    end = pb.ReadEnd(info=info, token_stop=10, num_spans=2)
    assembler.feed(pb.GetTraceResponse(end=end))
    assert set(assembler.finish().weight_versions) == {(0, 3, 1), (3, 5, 2), (5, 10, 1)}


def test_layouts_are_counted_before_they_are_read():
    for field in ("layer_ids", "moe_layer_ids"):
        message = LAYOUT.to_proto()
        getattr(message, field).extend(range(MAX_LAYERS))
        with pytest.raises(InvalidArgument, match=f"number of {field}"):
            ModelLayout.from_proto(message)


def test_what_the_limits_allow_is_taken():
    """The largest chunk that an agent makes, so that no limit is in its way."""
    layout = ModelLayout((0,), 1, 2, 1)
    state = State(1.0)
    opened = encode_open(
        0, ("r", "e", ""), epoch=1, boot_id="b", layout=layout, block_size=1, num_blocks=1 << 20,
    )  # fmt: skip
    writer = apply_record(state, 1, opened)
    ops = ops_of(1 << 12, kind=OpKind.ROWS, count=256, frame=np.arange(1 << 12))
    header = pb.ChunkHeader(
        layout=layout.to_proto(),
        request_ids=["a"],
        ops=ops.tobytes() + ops_of(1, kind=OpKind.BLOCKS, num_blocks=1 << 20).tobytes(),
        block_ids=np.arange(1 << 20, dtype=U32).tobytes(),
        frame_rows=np.full(1 << 12, 256, U32).tobytes(),
        frame_lengths=np.full(1 << 12, 300, U32).tobytes(),
    )
    parsed = parse_header(header.SerializeToString(), layout, writer.slots)
    assert int(parsed.frame_rows.sum()) == MAX_CHUNK_ROWS


@pytest.mark.long
def test_the_fuzzer_sees_a_crash_and_wrong_errors(monkeypatch, tmp_path):
    """So that no findings mean something."""
    plugin = tmp_path / "sitecustomize.py"
    breaks = {
        "frame": "routetrace.codec.frame_header as m; m.corrupt = lambda *a: KeyError(a)",
        "layout": "routetrace.common.layout as m; m.ModelLayout.to_proto = lambda self: 1 / 0",
        "answer": "os, routetrace.client.stat as m; m.facts_from_proto = lambda i: os.abort()",
    }
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for target, code in breaks.items():
        plugin.write_text(f"import sys\nif '--child' in sys.orig_argv:\n    import {code}\n")
        assert run_target(target, SEED, 5, 50)["findings"], target


def test_inputs_are_the_same_for_the_same_seed():
    from faults.fuzz.targets import FrameTarget, inputs

    first, second = (inputs(FrameTarget(), random.Random(5)) for _ in range(2))
    frames = [next(first) for _ in range(50)]
    assert frames == [next(second) for _ in range(50)]
    assert len({*frames}) > 20
    assert read_header(FrameTarget().samples(random.Random(1))).num_rows
