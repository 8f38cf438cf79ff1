"""Calls of every method of a real server: each answer is typed, and the log has no traceback."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from faults.fuzz.mutate import made_message, mutate_bytes, mutate_message
from faults.fuzz.server import reseal, runs
from faults.fuzz.targets import Target, pack_parts, unpack_parts
from routetrace.codec.records import DIGEST, U32
from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

#: Seconds of a call, and of one that may wait for what does not come.
_CALL_S, _WAIT_S = 20.0, 0.03
#: Methods that may wait, whatever they are asked.
_WAITING = ("BindRequest", "Watch", "WatchTraces")
#: Characters that stand for a lone surrogate, which no str of protobuf may hold, but bytes may.
_STAND_IN, _SURROGATE = "\ue000".encode(), b"\xed\xa0\x80"


class Log:
    """What a process has logged since the last look."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(errors="replace")

    def check(self) -> None:
        """Raise AssertionError with the place and the error of a traceback in it."""
        said = self._file.read()
        if "Traceback" in said:
            places = re.findall(r'/(routetrace/[^"]+)[\\"]+, line (\d+)', said)
            error = re.findall(r"(\w+(?:Error|Exception)\b.*)", said)[-1:]
            raise AssertionError(f"traceback in the log: {error} at {places[-1:]}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RequestTarget(Target):
    """Every method of the contract and of health, over a socket."""

    name = "request"
    limit = 256 << 20

    def __init__(self) -> None:
        self._server = run_server(max_chunk_bytes=1 << 20, agent_timeout_seconds=0.5)
        self._log = Log(self._server.log)
        self._channel = grpc.insecure_channel(self._server.target)
        self._methods = {
            f"/{service.full_name}/{method.name}": method
            for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
            for service in file.services_by_name.values()
            for method in service.methods
        }
        self._paths = sorted(self._methods)
        hello, chunks = runs()[0]
        self._stream = [pb.IngestRequest(hello=hello)]
        self._stream += [pb.IngestRequest(chunk=chunk) for chunk in chunks]
        ingest = pb_grpc.IngestServiceStub(self._channel).Ingest
        answers = list(ingest(iter(self._stream)))
        assert all(answer.HasField("ack") for answer in answers[1:])
        assert answers[-1].ack.sequence == chunks[-1].sequence
        beat = pb.Heartbeat(offered_rows=6, acknowledged_rows=5, dropped_rows={"queue_full": 1})
        self._stream.insert(1, pb.IngestRequest(heartbeat=beat))
        self._requests: dict[str, Message] = {
            "GetTrace": pb.GetTraceRequest(run="run", trace_id="r0"),
            "GetTraces": pb.GetTracesRequest(
                run="run", reads=[pb.GetTraceRequest(trace_id=f"r{i}") for i in range(3)]
            ),
            "GetBlocks": pb.GetBlocksRequest(
                run="run", engine_id="engine", block_ids=[0, 1], num_tokens=7
            ),
            "StatTrace": pb.StatTraceRequest(run="run", trace_id="r0"),
            "DescribeTrace": pb.DescribeTraceRequest(run="run", trace_id="r0"),
            "ExplainCell": pb.ExplainCellRequest(run="run", trace_id="r0", position=1),
            "ListTraces": pb.ListTracesRequest(run="run", labels={"sample": "r1"}),
            "LocateSequences": pb.LocateSequencesRequest(
                run="run",
                num_tokens=np.array([2, 64], U32).tobytes(),
                num_digests=np.array([1, 2], U32).tobytes(),
                token_digests=np.array([(2, 5), (8, 6), (64, 7)], DIGEST).tobytes(),
                labels=[pb.LabelSet(labels={"sample": "r1"})],
                weight_versions=[1],
                choices=np.array([0, 1], U32).tobytes(),
            ),
            "WatchTraces": pb.WatchTracesRequest(run="run"),
            "DeleteTrace": pb.DeleteTraceRequest(run="run", trace_id="none"),
            "RetireTraces": pb.RetireTracesRequest(run="run", through_weight_version=-1),
            "RenewLease": pb.RenewLeaseRequest(run="run", trace_ids=["r0"], ttl_seconds=90),
            "GetServerInfo": pb.GetServerInfoRequest(run="run"),
            "ListAgents": pb.ListAgentsRequest(run="run", page_size=1),
            "GetHistory": pb.GetHistoryRequest(run="run", after=3),
            "ReportAgreement": pb.ReportAgreementRequest(
                run="run", report=pb.AgreementReport(step=1, reporter="trainer", trace_ids=["r0"])
            ),
            "ListAgreement": pb.ListAgreementRequest(run="run", start=1),
            "ForgetEngine": pb.ForgetEngineRequest(run="run", engine_id="none"),
            "BindRequest": pb.BindRequestRequest(
                run="run", engine_id="engine", request_id="b", block_ids=[0, 1], num_tokens=7
            ),
        }

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        self._log.close()
        self._server.__exit__(None, None, None)

    @property
    def pid(self) -> int:
        """Of the server: its memory is what counts."""
        return self._server.pid

    def samples(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(self._paths))
        method = self._methods[self._paths[number]]
        if method.client_streaming:
            first = rng.randrange(len(self._stream))
            some = self._stream[:2] if first == 0 else [self._stream[0], *self._stream[first:][:3]]
            return bytes([number]) + pack_parts([m.SerializeToString() for m in some])
        kind = _kind(method.input_type)
        request = self._requests.get(method.name) or kind()
        if rng.random() < 0.4:  # the run is right, so that more than its name is looked at
            request = made_message(rng, kind())
            if hasattr(request, "run") and rng.random() < 0.9:
                request.run = "run"
        return bytes([number]) + _with_surrogates(request)

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        head, body = data[:1], data[1:]
        method = self._methods[self._paths[head[0] % len(self._paths)]]
        if not method.client_streaming:
            return head + _mutated(rng, _kind(method.input_type)(), body)
        parts = unpack_parts(body)
        if not parts:
            return data
        at = rng.randrange(len(parts))
        if rng.random() < 0.15:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(parts))
        elif rng.random() < 0.15:
            del parts[at]
        else:
            parts[at] = _resealed(rng, _mutated(rng, pb.IngestRequest(), parts[at]))
        return head + pack_parts(parts)

    def one_input(self, data: bytes) -> bool:
        if not data:
            return False
        path = self._paths[data[0] % len(self._paths)]
        taken = self._call(path, data[1:])
        self._log.check()
        return taken

    def _call(self, path: str, body: bytes) -> bool:
        """Return whether a call was answered without an error."""
        method = self._methods[path]
        may_wait = waits(method, body)
        limit = _WAIT_S if may_wait else _CALL_S
        try:
            if method.client_streaming:
                list(self._channel.stream_stream(path)(iter(unpack_parts(body)), timeout=limit))
            elif method.server_streaming:
                list(self._channel.unary_stream(path)(body, timeout=limit))
            else:
                self._channel.unary_unary(path)(body, timeout=limit)
        except grpc.RpcError as error:
            if not _is_typed(error, may_wait):
                raise
            return False
        return True


def _kind(descriptor: Descriptor) -> Any:
    """Return the class of a request."""
    return getattr(pb if descriptor.file == pb.DESCRIPTOR else health_pb2, descriptor.name)


def _mutated(rng: random.Random, message: Message, data: bytes) -> bytes:
    """Change a serialized message: one of its fields, or its bytes."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    mutate_message(rng, message)
    return _with_surrogates(message)


def _with_surrogates(message: Message) -> bytes:
    return message.SerializeToString().replace(_STAND_IN, _SURROGATE)


def _resealed(rng: random.Random, data: bytes) -> bytes:
    """Make the checksums of a chunk right, mostly."""
    try:
        request = pb.IngestRequest.FromString(data)
    except DecodeError:
        return data
    if not request.HasField("chunk") or rng.random() < 0.05:
        return data
    reseal(request.chunk)
    return request.SerializeToString()


def _is_typed(call: Any, may_wait: bool) -> bool:
    """Whether a call failed in one of the ways in which it may."""
    match call.code():
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            return False
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in call.details():
            return True  # gRPC's own: longer than messages may be
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return may_wait
        case grpc.StatusCode.UNIMPLEMENTED:
            return call.details() == "Method not found!"
        case _:
            return any(key == ERROR_METADATA_KEY for key, _ in call.trailing_metadata() or ())


def waits(method: Any, body: bytes) -> bool:
    """Whether a request asks to wait for what does not come, or has no end."""
    if method.name in _WAITING:
        return True
    if method.client_streaming:
        return False
    try:
        request: Any = _kind(method.input_type).FromString(body)
    except DecodeError:
        return False
    return any(
        getattr(read, name, 0)
        for read in (request, *getattr(request, "reads", ()))
        for name in ("wait_for", "wait", "follow")
    )
