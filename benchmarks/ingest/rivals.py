"""Rivals of ingest, each a server in its own process.

    python benchmarks/run.py ingest.rivals tcp FILE      messages over a plain socket, into a file
    python benchmarks/run.py ingest.rivals flight FILE   Arrow Flight do_put, into a file
    python benchmarks/run.py ingest.rivals flight -      Arrow Flight do_put, kept in memory

Those with a file append to it and wait for the disk with one fdatasync for all that came in
meanwhile, then acknowledge; what comes in during that wait is the next group. They check nothing,
know nothing of what they keep, and print the port that they listen on.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from measure import program

_HEAD = struct.Struct("<I")
_IOV = 512


class Committer:
    """Appends to a file in groups, one fdatasync each, in a thread of its own."""

    def __init__(self, path: str, done: Callable[[int], None]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = done
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def add(self, message: Any) -> None:
        """One more; None ends it."""
        self._todo.put(message)

    def close(self) -> None:
        """Wait until all of it is written."""
        self._todo.put(None)
        self._thread.join()
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def _loop(self) -> None:
        ending = False
        while not ending:
            group = [self._todo.get()]
            while not self._todo.empty() and len(group) < _IOV:
                group.append(self._todo.get())
            if group[-1] is None:
                ending = True
                group.pop()
            if group:
                size = sum(map(len, group))
                written = os.writev(self._file, group)
                while written < size:  # seldom: the rest of it
                    written += os.write(self._file, b"".join(group)[written:])
                os.fdatasync(self._file)
                self._done(len(group))


def serve_tcp(path: str) -> None:
    """Messages of 4 bytes of length and a body; each is acknowledged with one byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        committer = Committer(path, partial(_answer, connection))
        head = bytearray(4)
        while connection.recv_into(head, 4, socket.MSG_WAITALL) == 4:
            body = bytearray(_HEAD.unpack(head)[0])
            view, at = memoryview(body), 0
            while at < len(body):
                got = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
                if not got:
                    return
                at += got
            committer.add(body)
        committer.close()
        connection.close()


def _answer(connection: socket.socket, count: int) -> None:
    connection.sendall(b"." * count)


def send_tcp(port: int, messages: Sequence[bytes], window: int) -> float:
    """To that server; returns the seconds until the last is acknowledged."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room = threading.Semaphore(window)

        def answers() -> None:
            left = len(messages)
            while left:
                got = len(connection.recv(1 << 12))
                if not got:
                    raise SystemExit("the plain server hung up")
                left -= got
                room.release(got)

        listening = threading.Thread(target=answers)
        begin = time.perf_counter()
        listening.start()
        for message in messages:
            room.acquire()
            connection.sendmsg([_HEAD.pack(len(message))])
            connection.sendall(message)
        listening.join()
        return time.perf_counter() - begin


def serve_flight(path: str) -> None:
    """Record batches of one column of bytes; acknowledged with metadata, as groups are written."""
    from pyarrow import flight

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("grpc://127.0.0.1:0")
            self.kept: list[Any] = []

        def do_put(self, _context: Any, _what: Any, reader: Any, writer: Any) -> None:
            def done(count: int) -> None:
                writer.write(b"." * count)

            committer = None if path == "-" else Committer(path, done)
            for batch in _batches(reader):
                if committer:
                    committer.add(batch.column(0).buffers()[1])
                else:
                    self.kept.append(batch)
                    done(1)
            if committer:
                committer.close()

    server = Server()
    print(server.port, flush=True)
    server.serve()


def _batches(reader: Any) -> Iterator[Any]:
    with suppress(StopIteration):
        while True:
            yield reader.read_chunk().data


class FlightPut:
    """A client of that server."""

    def __init__(self, port: int) -> None:
        from pyarrow import flight

        self._client = flight.connect(f"grpc://127.0.0.1:{port}")
        self._descriptor = flight.FlightDescriptor.for_path("messages")

    def send(self, messages: Sequence[bytes], window: int) -> float:
        """Return the seconds until the last is acknowledged."""
        import pyarrow as pa

        schema = pa.schema([("message", pa.uint8())])
        batches = [
            pa.record_batch(
                [pa.Array.from_buffers(pa.uint8(), len(m), [None, pa.py_buffer(m)])], schema
            )
            for m in messages
        ]
        room = threading.Semaphore(window)
        begin = time.perf_counter()
        writer, answers = self._client.do_put(self._descriptor, schema)

        def listen() -> None:
            left = len(messages)
            while left:
                got = len(answers.read())
                left -= got
                room.release(got)

        listening = threading.Thread(target=listen)
        listening.start()
        for batch in batches:
            room.acquire()
            writer.write_batch(batch)
        listening.join()
        took = time.perf_counter() - begin
        writer.close()
        return took


class Rival:
    """One of them, running.

    Attributes:
        port: that it listens on.
        pid: of its process.
    """

    def __init__(self, kind: str, path: Path | str) -> None:
        self._process = subprocess.Popen(
            program("ingest.rivals", kind, str(path)), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    {"tcp": serve_tcp, "flight": serve_flight}[sys.argv[1]](sys.argv[2])
