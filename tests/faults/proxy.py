"""A TCP proxy that breaks what goes through it, in a thread of its own."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from faults.serving import free_port

Cut = Literal["stall", "drop"]

_PIECE = 1 << 16


@dataclass(eq=False)
class _Direction:
    """One way through the proxy: what happens to bytes from now on."""

    flows: asyncio.Event = field(default_factory=asyncio.Event)
    drops: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        self.flows.set()


@dataclass(eq=False)
class _Connection:
    sides: list[asyncio.StreamWriter]
    reset_after: int = 1 << 62  # bytes, both ways
    passed: int = 0
    lost: int = 0

    def reset(self) -> None:
        """Both ends learn of it by RST, and at once."""
        for side in self.sides:
            raw = side.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                linger = struct.pack("ii", 1, 0)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            side.transport.abort()


class Proxy:
    """Listens on a port of its own and passes on to a target; a context manager.

    Directions are "up", to the server, and "down", from it.
    """

    def __init__(self, target: str) -> None:
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.upstream = target
        self.connections = 0
        self.resets = 0
        self.passed = {"up": 0, "down": 0}
        self.eaten = {"up": 0, "down": 0}
        self._open: set[_Connection] = set()
        self._draw: Callable[[], int] | None = None
        self._buffer = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    # ------------------------------------------------------------------ faults

    def cut(self, *directions: str, how: Cut = "stall") -> None:
        """Nothing passes any more: it is held back (as by TCP), or lost."""

        def do() -> None:
            for name in directions or ("up", "down"):
                if how == "stall":
                    self._ways[name].flows.clear()
                else:
                    self._ways[name].drops = True

        self._call(do)

    def heal(self) -> None:
        """All passes again; connections that lost bytes are reset, as nothing can mend them."""

        def do() -> None:
            for connection in list(self._open):
                if connection.lost:
                    self._reset(connection)
            for way in self._ways.values():
                way.drops = False
                way.flows.set()

        self._call(do)

    def reset_all(self) -> int:
        """Reset every connection; return how many."""

        def do() -> int:
            for connection in (found := list(self._open)):
                self._reset(connection)
            return len(found)

        return int(self._call(do))

    def reset_randomly(self, seed: int, most_bytes: int) -> None:
        """Reset each new connection after a random number of bytes; 0: no longer."""
        rng = random.Random(f"proxy {seed}")

        def do() -> None:
            self._draw = (lambda: rng.randint(1, most_bytes)) if most_bytes else None

        self._call(do)

    def slow(self, direction: str, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Delay what passes, or limit how much does; of new connections, buffers are small."""

        def do() -> None:
            self._ways[direction].delay_s = delay_s
            self._ways[direction].bytes_per_s = bytes_per_s
            self._buffer = 4096 if bytes_per_s else 0

        self._call(do)

    @property
    def open(self) -> int:
        """Connections."""
        return len(self._open)

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._ways = {"up": _Direction(), "down": _Direction()}
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def _call(self, do: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return do()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _reset(self, connection: _Connection) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self.resets += 1
            connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer])
        if self._draw:
            connection.reset_after = self._draw()
        self.connections += 1
        self._open.add(connection)
        try:
            host, _, port = self.upstream.rpartition(":")
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            connection.sides.append(up_writer)
            for side in connection.sides:
                if self._buffer:
                    raw = side.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)
            await asyncio.gather(
                self._pass("up", connection, reader, up_writer),
                self._pass("down", connection, up_reader, writer),
            )
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the proxy closes
        finally:
            self._open.discard(connection)
            for side in connection.sides:
                side.transport.abort()

    async def _pass(
        self,
        name: str,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        way = self._ways[name]
        while True:
            await way.flows.wait()
            size = _PIECE
            if way.bytes_per_s:
                size = max(1, int(way.bytes_per_s / 10))
            data = await reader.read(size)
            if not data:
                writer.transport.close()
                return
            await way.flows.wait()
            if way.drops:
                connection.lost += len(data)
                self.eaten[name] += len(data)
                continue
            if way.delay_s:
                await asyncio.sleep(way.delay_s)
            left = connection.reset_after - connection.passed
            connection.passed += len(data)
            self.passed[name] += min(len(data), left)
            writer.write(data[:left])
            if left <= len(data):
                # What was passed on is to arrive before the reset does.
                await asyncio.sleep(0)
                self._reset(connection)
                return
            await writer.drain()
            if way.bytes_per_s:
                await asyncio.sleep(len(data) / way.bytes_per_s)

    # ------------------------------------------------------------------ ends

    def close(self) -> None:
        """End everything."""

        async def end() -> None:
            self._server.close()
            for connection in list(self._open):
                connection.reset()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._await(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
