"""Rivals of areas/reads.py: servers that have the bytes in memory, on the real server's core."""

# pyarrow is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from measure import PEER_CORE, pin


def _child(function: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    """Start a rival on the server's core; return what it said first."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process: Any = context.Process(target=function, args=(there, *args), daemon=True)
    process.start()
    pin(PEER_CORE, process.pid or 0)
    return here.recv(), process


@contextlib.contextmanager
def rival(function: Callable[..., None], *args: Any) -> Iterator[tuple[Any, int]]:
    """A rival for a while: what it said first, and its pid."""
    said, process = _child(function, *args)
    try:
        yield said, process.pid or 0
    finally:
        process.terminate()
        process.join()


def serve_tcp(pipe: Any, payloads: list[bytes]) -> None:
    """Send payload i whenever it is sent the number i."""
    os.sched_setaffinity(0, {PEER_CORE})
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(number := peer.recv(4, socket.MSG_WAITALL)) == 4:
            peer.sendall(payloads[struct.unpack("<I", number)[0]])


class Tcp:
    """The client of `serve_tcp`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, number: int) -> None:
        self._socket.sendall(struct.pack("<I", number))

    def ask_all(self, numbers: Sequence[int]) -> None:
        """Ask for several at once; they come in this order."""
        self._socket.sendall(np.array(numbers, "<u4").tobytes())

    def receive(self, into: memoryview) -> None:
        while into:
            into = into[self._socket.recv_into(into) :]

    def close(self) -> None:
        self._socket.close()


def serve_empty(pipe: Any) -> None:
    """A gRPC server whose only call says nothing."""
    os.sched_setaffinity(0, {PEER_CORE})

    async def nothing(_: bytes, __: Any) -> bytes:
        return b""

    async def serve() -> None:
        server = grpc.aio.server()
        handlers: Any = {"Nothing": grpc.unary_unary_rpc_method_handler(nothing)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("empty", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    asyncio.run(serve())


def serve_flight(pipe: Any, traces: list[list[bytes]]) -> None:
    """Send the messages of trace i for the ticket i, each as a batch of one value."""
    os.sched_setaffinity(0, {PEER_CORE})
    import pyarrow as pa
    from pyarrow import flight

    schema = pa.schema([("message", pa.large_binary())])
    batches = [
        [pa.record_batch([pa.array([m], pa.large_binary())], schema) for m in messages]
        for messages in traces
    ]

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, _: Any, ticket: Any) -> Any:
            wanted = batches[int(ticket.ticket)]
            reader = pa.RecordBatchReader.from_batches(schema, wanted)
            return flight.RecordBatchStream(reader)

    server = Server("grpc://127.0.0.1:0")
    pipe.send(f"grpc://127.0.0.1:{server.port}")
    server.serve()


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """A Redis that keeps nothing on disk, on the server's core."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="redis-") as where:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", where]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            pin(PEER_CORE, process.pid)
            deadline = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield port
        finally:
            process.terminate()
            process.wait()
