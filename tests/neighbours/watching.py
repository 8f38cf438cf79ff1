"""Processes of a campaign, and the watch on the server: its memory, and its answers to probes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from faults.check import check
from neighbours.place import Access
from neighbours.processors import Part, starting, yield_to_victim

_SPAWN = multiprocessing.get_context("spawn")
_READY_S = 240.0


class Child:
    """A process with a pipe; its function gets the pipe first, and ends after its second message.

    Args:
        part: part of the process in the campaign.
        function: sends "ready" once it is prepared, and a result at its end. Messages between are
            lists of samples.
        args: further arguments of the function.
    """

    def __init__(self, part: Part, function: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=function, args=(theirs, *args), daemon=True)
        with starting(part):
            self._process.start()
        self._part = part
        theirs.close()
        self._receiver = threading.Thread(target=self._receive)
        self._ready, self._over = threading.Event(), threading.Event()
        self.samples: list[tuple[float, float]] = []
        self.result: Any = None
        #: Whether it ended by itself, with an error; known after `end`.
        self.failed = False
        self._receiver.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the process is prepared."""
        self._ready.wait(_READY_S)
        check(self._ready.is_set() and not self._over.is_set(), f"{self} did not get ready")

    def go(self) -> None:
        """Let it work."""
        if self._part is Part.NEIGHBOUR:
            yield_to_victim(self.pid)
        self._pipe.send("go")

    def stop(self) -> None:
        """Ask it to end."""
        with suppress(OSError):  # it has ended
            self._pipe.send("stop")

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; return whether it has."""
        return self._over.wait(seconds)

    def end(self, seconds: float = 0.0) -> None:
        """Wait for the end, then kill the process."""
        killed = not self.wait(seconds)
        if killed:
            self._process.kill()
        self._process.join()
        self._receiver.join()
        self.failed = not killed and self._process.exitcode != 0

    def _receive(self) -> None:
        connection: Connection = self._pipe
        try:
            while True:
                message = connection.recv()
                if message == "ready":
                    self._ready.set()
                elif isinstance(message, list):
                    self.samples += message
                else:
                    self.result = message
        except (EOFError, OSError):
            pass
        finally:
            self._over.set()
            self._ready.set()

    def __str__(self) -> str:
        return f"process {self._process.pid}"


class Watch:
    """Samples of the server's memory, and of its answers to health probes, until closed.

    Attributes:
        memory: (time, bytes).
        probes: (time, seconds) of answered probes.
    """

    def __init__(self, access: Access) -> None:
        self._over = threading.Event()
        self._process = psutil.Process(access.pid)
        self._channel = access.channel()
        self.memory: list[tuple[float, float]] = []
        self.probes: list[tuple[float, float]] = []
        self._threads = [
            threading.Thread(target=self._sample_memory),
            threading.Thread(target=self._probe),
        ]
        with starting(Part.VICTIM):
            for thread in self._threads:
                thread.start()

    def peak_mib(self, start: float, stop: float) -> float:
        """Return the peak memory in a span of time."""
        return max((m for t, m in self.memory if start <= t <= stop), default=0.0) / (1 << 20)

    def longest_ms(self, start: float, stop: float) -> float:
        """Return the time of the longest probe that ran in a span of time."""
        found = [s for t, s in self.probes if t <= stop and t + s >= start]
        return max(found, default=0.0) * 1000

    def _sample_memory(self) -> None:
        with suppress(psutil.NoSuchProcess):
            while not self._over.wait(0.05):
                self.memory.append((time.monotonic(), self._process.memory_info().rss))

    def _probe(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        while not self._over.wait(0.01):
            begun = time.monotonic()
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            except grpc.RpcError:
                continue  # a probe that is refused says nothing about the event loop
            self.probes.append((begun, time.monotonic() - begun))

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._channel.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
