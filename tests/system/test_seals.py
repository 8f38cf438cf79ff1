"""A byte that changes on the way changes no answer: each one, of what a real server sends."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from routetrace.client import RouteClient
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.messages import parser_of, unary_parser_of
from routetrace.common.errors import Corrupt
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of

NUM_ROWS = 70  # more than one digest


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        feeder = Feeder(process.target, LAYOUT, run="r", engine_id="e", block_size=8, num_blocks=16)
        feeder.version = 3
        tokens = np.arange(NUM_ROWS + 1)
        handle = feeder.begin("t", prompt_len=5, block_ids=range(10), labels={"group": "g"})
        feeder.step(rows_of(LAYOUT, NUM_ROWS), [(handle, 0, 40), (handle, 40, NUM_ROWS - 40)])
        feeder.finish(handle, NUM_ROWS + 1, token_ids=tokens)
        holes = feeder.begin("holes")
        feeder.step(rows_of(LAYOUT, 4), [(holes, 2, 4)])
        feeder.finish(holes, 9)
        feeder.flush()
        yield process
        feeder.close()


def raw(server, service: str, method: str, request) -> list[bytes]:
    """The messages of an answer as they came."""
    with grpc.insecure_channel(server.target) as channel:
        path = f"/routetrace.v1.{service}/{method}"
        if method in ("GetTrace", "GetBlocks"):
            call = channel.unary_stream(path, type(request).SerializeToString, None)
            return list(call(request, timeout=20))
        return [channel.unary_unary(path, type(request).SerializeToString, None)(request)]


def flips(data: bytes):
    """The bytes with one of them changed, in all places."""
    rng = random.Random(0)
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def facts(trace) -> dict:
    """All that a trace says, comparable."""
    names = [name for name in trace.__dataclass_fields__ if name[0] != "_"]
    said = {name: getattr(trace, name) for name in (*names, "topk_ids", "valid")}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in said.items()}


READS = [
    ("GetTrace", pb.GetTraceRequest(run="r", trace_id="t"), Want("t", None)),
    ("GetTrace", pb.GetTraceRequest(run="r", trace_id="holes"), Want("holes", None, mask=True)),
    (
        "GetTrace",
        pb.GetTraceRequest(run="r", trace_id="t", token_stop=20, layer_ids=[2, 7]),
        Want("t", (2, 7), token_stop=20),
    ),
    (
        "GetBlocks",
        pb.GetBlocksRequest(run="r", engine_id="e", block_ids=range(9), num_tokens=NUM_ROWS),
        Want("", None, num_rows=NUM_ROWS),
    ),
]


@pytest.mark.parametrize(("method", "request_", "want"), READS)
def test_no_byte_of_a_read_can_change(server, method, request_, want):
    messages = raw(server, "TraceService", method, request_)
    parse = parser_of(pb.GetTraceResponse)

    def read(messages: list[bytes]):
        assembler = Assembler(want)
        for message in messages:
            assembler.feed(*parse(message))
        return assembler.finish()

    right, accepted = facts(read(messages)), 0
    for i, message in enumerate(messages):
        for flipped in flips(message):
            try:
                trace = read([*messages[:i], flipped, *messages[i + 1 :]])
            except Corrupt:
                continue
            assert facts(trace) == right
            accepted += 1
    # zstd has bits that mean nothing, and its checksum is over what they stand for.
    assert accepted < sum(map(len, messages)) // 20


BEGIN = pb.RequestBegin(trace_id="bound")
UNARY = [
    ("TraceService", "StatTrace", pb.StatTraceRequest(run="r", trace_id="holes")),
    ("TraceService", "ExplainCell", pb.ExplainCellRequest(run="r", trace_id="holes", position=1)),
    ("TraceService", "ListTraces", pb.ListTracesRequest(run="r")),
    (
        "IngestService",
        "BindRequest",
        pb.BindRequestRequest(
            run="r", engine_id="e", request_id="b", block_ids=[0, 1], num_tokens=9, begin=BEGIN
        ),
    ),
]


@pytest.mark.parametrize(("service", "method", "request_"), UNARY)
def test_no_byte_of_what_is_said_of_traces_can_change(server, service, method, request_):
    (answer,) = raw(server, service, method, request_)
    parse = unary_parser_of(getattr(pb, f"{method}Response"))
    assert parse(answer).ByteSize() > 50
    for flipped in flips(answer):
        with pytest.raises((DecodeError, IndexError)):
            parse(flipped)


def test_a_broken_seal_of_a_unary_answer_is_corrupt(server, monkeypatch):
    monkeypatch.setattr("routetrace.client._core.messages.stepped_crc32", lambda data: 0)
    with RouteClient(server.target, run="r") as client:
        for call in (
            lambda: client.stat("t"),
            lambda: list(client.find()),
            lambda: client.get("t"),
        ):
            with pytest.raises(Corrupt):
                call()
