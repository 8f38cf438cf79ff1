"""A server in this process, whose clock stands until it is set, and a relay that records."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Coroutine, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from routetrace.server.core import Core
from routetrace.server.retention import retention
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.disk.store import DiskStore

#: Unix time at which the fixtures begin: long ago, so that no lease ends by the clock of a machine.
BEGINNING = 1_600_000_000.0

_RELAYED = {
    "/routetrace.v1.IngestService/Ingest": (True, True),
    "/routetrace.v1.TraceService/GetTrace": (False, True),
    "/routetrace.v1.TraceService/GetTraces": (False, True),
    "/routetrace.v1.TraceService/GetBlocks": (False, True),
    "/routetrace.v1.TraceService/StatTrace": (False, False),
    "/routetrace.v1.TraceService/ListTraces": (False, False),
    "/routetrace.v1.TraceService/GetServerInfo": (False, False),
}


class Serving:
    """A server on a data directory; a context manager."""

    def __init__(self, data_dir: Path, now: float = BEGINNING) -> None:
        self.now = now
        self.target = ""
        self._data_dir = data_dir
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def sweep(self) -> None:
        """Delete expired traces and write a snapshot."""
        least, retention._SNAPSHOT_RECORDS = retention._SNAPSHOT_RECORDS, 0
        try:
            self._run(self.core.sweep())
        finally:
            retention._SNAPSHOT_RECORDS = least

    def _run(self, call: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    async def _start(self) -> None:
        config = ServerConfig(data_dir=self._data_dir, default_ttl_seconds=1 << 20)
        self.store = DiskStore(self._data_dir, capacity_bytes=1 << 30)
        self.core = Core(self.store, config)
        self.core.journal.clock.now = lambda: self.now  # type: ignore[method-assign]
        self._server = grpc.aio.server()
        self.core.add_to(self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self.core.start()

    async def _stop(self) -> None:
        await self.core.stop()
        await self._server.stop(1)
        self.store.close()


class Relay:
    """Passes calls on to a server and keeps their bytes; a context manager."""

    def __init__(self, target: str) -> None:
        self.calls: list[dict[str, Any]] = []
        """Each with `method`, `requests` and `responses`, in the order of their begins."""
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((self,))  # type: ignore[arg-type]
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Relay:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1).wait()
        self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call."""
        method = details.method
        streams_in, streams_out = _RELAYED[method]

        def handle(given: Any, context: Any) -> Any:
            call: dict[str, Any] = {"method": method, "requests": [], "responses": []}
            self.calls.append(call)

            def requests() -> Iterator[bytes]:
                for request in given if streams_in else [given]:
                    call["requests"].append(request)
                    yield request

            def responses() -> Iterator[bytes]:
                try:
                    for response in self._channel.stream_stream(method)(requests(), timeout=60):
                        call["responses"].append(response)
                        yield response
                except grpc.RpcError as error:
                    trailing = [
                        (k, v) for k, v in error.trailing_metadata() or () if k[-4:] == "-bin"
                    ]
                    call["status"] = error.code().name
                    call["details"] = error.details()
                    call["metadata"] = [(k, base64.b64encode(v).decode()) for k, v in trailing]
                    context.set_trailing_metadata(trailing)
                    context.abort(error.code(), error.details())

            return responses() if streams_out else next(iter([*responses()]))

        if streams_in:
            return grpc.stream_stream_rpc_method_handler(handle)
        if streams_out:
            return grpc.unary_stream_rpc_method_handler(handle)
        return grpc.unary_unary_rpc_method_handler(handle)
