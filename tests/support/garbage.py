"""`python -m support.garbage TARGET FOLDER`: serve, call, and print the garbage that calls leave.

A server that collects nothing answers calls of every method, with every kind of end. It prints as
JSON how many objects of the server only a garbage collector would free, by type, the calls that do
not end, and the ends of the others.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from routetrace.server import daemon
from routetrace.server.process import pauses
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder, Stream, seal
from support.servers.client_server import LAYOUT, rows_of

_TIMES = 3
_PATIENCE_S = 30.0
#: Types of gRPC that hold a call, and so its request.
_OF_CALLS = ("RPCState", "_ServicerContext", "AbortError")


class _Calls:
    """Calls to a server, and their ends."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.ends: Counter[str] = Counter()

    def make(self) -> None:
        """Make calls of all methods."""
        with grpc.insecure_channel(self._target) as channel:
            traces, ingest = pb_grpc.TraceServiceStub(channel), pb_grpc.IngestServiceStub(channel)
            self._call(traces.GetServerInfo, pb.GetServerInfoRequest())
            self._call_with_nothing(traces, "TraceService")
            self._call_with_nothing(ingest, "IngestService")
            self._call_unreadably(channel)
            self._ask_for_health(health_pb2_grpc.HealthStub(channel))
            feeder = Feeder(self._target, LAYOUT, run="r", block_size=1, num_blocks=64)
            for name in ("a", "b"):
                handle = feeder.begin(name, prompt_len=8)
                feeder.step(rows_of(LAYOUT, 8), [(handle, 0, 8)])
                feeder.finish(handle, 9)
            feeder.flush()
            self._read(traces)
            self._write_wrongly(ingest, feeder)

    def _call_with_nothing(self, stub: Any, service: str) -> None:
        """Call each method with an empty message, which most refuse."""
        for method in pb.DESCRIPTOR.services_by_name[service].methods:
            empty = getattr(pb, method.input_type.name)()
            self._call(getattr(stub, method.name), [empty] if method.client_streaming else empty)

    def _call_unreadably(self, channel: grpc.Channel) -> None:
        """Call with bytes that are no message, with too many, and a method that does not exist."""
        name = pb.DESCRIPTOR.services_by_name["TraceService"].full_name
        for method, message in (
            ("StatTrace", b"\xff"),
            ("StatTrace", bytes(1 << 20)),
            ("GetTrace", b"\xff"),
            ("GetTraces", bytes(100_000)),
            ("Unknown", b""),
        ):
            streams = method.startswith("Get")
            call = (channel.unary_stream if streams else channel.unary_unary)(f"/{name}/{method}")
            self._call(call, message)

    def _ask_for_health(self, health: Any) -> None:
        for service in ("", "unknown"):
            request = health_pb2.HealthCheckRequest(service=service)
            self._call(health.Check, request)
            self._call(health.Watch, request, cancel=True)

    def _read(self, traces: Any) -> None:
        wait: dict[str, Any] = {"wait_for": pb.WAIT_FOR_END}
        for name in ("a", "missing"):
            one = {"run": "r", "trace_id": name}
            self._call(traces.GetTrace, pb.GetTraceRequest(**one))
            self._call(traces.GetTrace, pb.GetTraceRequest(**one, layer_ids=[99]))
            self._call(traces.GetTrace, pb.GetTraceRequest(**one, **wait), timeout=0.1)
            self._call(traces.GetTrace, pb.GetTraceRequest(**one, **wait), cancel=True)
            self._call(traces.StatTrace, pb.StatTraceRequest(**one))
        names = ("a", "missing", "b")
        many = pb.GetTracesRequest(run="r", reads=[pb.GetTraceRequest(trace_id=n) for n in names])
        self._call(traces.GetTraces, many)
        for read in many.reads:
            read.wait_for = pb.WAIT_FOR_END
        self._call(traces.GetTraces, many, timeout=0.1)
        self._call(traces.GetTraces, many, cancel=True)
        for count in (4, 100_000):
            blocks = {"block_ids": [1] * count, "num_tokens": count}
            self._call(traces.GetBlocks, pb.GetBlocksRequest(run="r", engine_id="e0", **blocks))
        self._call(traces.ListTraces, pb.ListTracesRequest(run="r"))
        self._call(traces.WatchTraces, pb.WatchTracesRequest(run="r"), cancel=True)
        self._call(traces.DeleteTrace, pb.DeleteTraceRequest(run="r", trace_id="a"))

    def _write_wrongly(self, ingest: Any, feeder: Feeder) -> None:
        """Write beside another writer of the same place, and send messages that are refused."""
        Feeder(self._target, LAYOUT, run="r", boot_id="next").close()
        with suppress(grpc.RpcError):
            feeder.close()
        hello = pb.Hello(run="r", engine_id="e1", boot_id="boot", layout=LAYOUT.to_proto())
        stream = Stream(self._target, hello)
        stream.send(seal(1, b"not a header", b""))
        self.ends[str(stream.receive().WhichOneof("message"))] += 1
        stream.close()
        for second in (pb.IngestRequest(hello=hello), pb.IngestRequest()):
            self._call(ingest.Ingest, [pb.IngestRequest(hello=hello), second])

    def _call(
        self,
        method: Callable[..., Any],
        request: Any,
        *,
        timeout: float = _PATIENCE_S,
        cancel: bool = False,
    ) -> None:
        for _ in range(_TIMES):
            self.ends[self._end_of(method, request, timeout, cancel)] += 1

    def _end_of(
        self, method: Callable[..., Any], request: Any, timeout: float, cancel: bool
    ) -> str:
        try:
            sent = iter(request) if isinstance(request, list) else request
            found = method(sent, timeout=timeout, wait_for_ready=True)
            if cancel:
                time.sleep(0.05)
                found.cancel()
            if isinstance(found, grpc.Call):
                list(found)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def _is_of_server(found: object) -> bool:
    kind = type(found)
    if kind.__name__ == "frame":
        return "routetrace/server" in found.f_code.co_filename  # type: ignore[attr-defined]
    return kind.__module__.startswith("routetrace.server") or kind.__name__ in _OF_CALLS


def _await_ends() -> int:
    """Wait for the end of all calls; return the number of those that do not end.

    Cycles with a generator are seen here: a collection would let it end, and keep them until then.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = sum(type(found).__name__ == "_ServicerContext" for found in gc.get_objects())
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


async def _call_and_look(target: str) -> None:
    """Stand in for `pauses.collect_garbage`."""
    gc.disable()
    calls = _Calls(target)
    await asyncio.to_thread(calls.make)
    num_open = await asyncio.to_thread(_await_ends)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    left = Counter(type(found).__qualname__ for found in gc.garbage if _is_of_server(found))
    print(json.dumps({"open": num_open, "left": left, "ends": calls.ends}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Serve until the calls have ended; return the server's exit code."""
    target, folder = sys.argv[1:]
    pauses.collect_garbage = lambda: _call_and_look(target)  # type: ignore[assignment]
    settings = {"listen": target, "data-dir": folder, "metrics-listen": "", "log-level": "error"}
    return daemon.main([f"--{name}={value}" for name, value in settings.items()])


if __name__ == "__main__":
    sys.exit(main())
