"""Control of a load, from the first call to the deletion of its traces."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from routetrace.client import RouteClient, ServerInfo
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.simulation.children import EXITED, Child, Message
from routetrace.simulation.plan import Load
from routetrace.simulation.totals import Latencies, added

_TICK_SECONDS = 0.25
#: Maximum sessions queued for readers; further ones are skipped and counted.
_MAX_UNREAD = 2_000
#: Maximum reads assigned to a reader.
_MAX_PENDING = 2
#: Time limit of assigned reads after an interruption.
_DRAIN_SECONDS = 5.0


class Broken(RouteTraceError):
    """A process of the load exited early."""


@dataclass
class Tally:
    """Sums over all processes."""

    stats: dict[str, Any] = field(default_factory=dict)
    """`AgentStats` of all agents."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Counts of all engines."""
    oldest: float = 0.0
    """Age in seconds of the oldest row in flight."""
    found: dict[str, Any] = field(
        default_factory=lambda: {
            "rows": 0,
            "cells": 0,
            "fetched": 0,
            "wrong": 0,
            "later": 0,
            "failed": 0,
        }
    )
    """`Finding` of all reads."""
    errors: list[str] = field(default_factory=list)
    """First errors."""
    reads: int = 0
    followed: int = 0
    skipped: int = 0
    """Sessions not read because readers were slower than engines."""
    unread: int = 0
    """Sessions queued for or assigned to readers."""
    get: Latencies = field(default_factory=Latencies)
    ready: Latencies = field(default_factory=Latencies)
    ack: Latencies = field(default_factory=Latencies)
    cpu: dict[str, Any] = field(default_factory=dict)
    """CPU seconds by purpose."""
    worker_bytes: int = 0
    """Memory of the largest background process."""
    seconds: float = 0.0
    """Duration of the engines."""
    reading_seconds: float = 0.0
    """Time until the last session was read."""
    deleted: int = 0
    interrupted: bool = False
    before: ServerInfo | None = None
    after: ServerInfo | None = None


Show = Callable[[str, Tally], None]


class Run:
    """A load, its processes and their messages.

    Args:
        load: the parameters.
        client: client of the server and run.
        show: called a few times a second with the phase and the tally.
    """

    def __init__(self, load: Load, client: RouteClient, show: Show) -> None:
        self._load = load
        self._client = client
        self._show = show
        self._inbox: queue.Queue[tuple[Child, Message]] = queue.Queue()
        self._children: list[Child] = []
        self._agents: list[Child] = []
        self._readers: list[Child] = []
        self._followers: list[Child] = []
        self._ready: set[Child] = set()
        self._done: set[Child] = set()
        self._progress: dict[Child, Message] = {}
        self._pending: dict[Child, int] = {}
        self._follows: dict[str, Child] = {}
        self._unread: deque[dict[str, Any]] = deque()
        self._begun = 0.0
        self.tally = Tally()

    def __call__(self) -> Tally:
        """Run the load.

        Raises:
            RouteTraceError: if the server is unreachable or a process of the load exits early.
        """
        self._check_empty()
        with _interruptible(self._interrupt):
            try:
                self._start()
                self._drive()
                self._drain()
            finally:
                for child in self._children:
                    child.close_input()
                deadline = time.monotonic() + 5
                for child in self._children:
                    child.end(deadline - time.monotonic())
                with contextlib.suppress(RouteTraceError):
                    self.tally.after = self._client.server_info()
                    self._delete_traces()
        return self.tally

    # ------------------------------------------------------------------ phases

    def _check_empty(self) -> None:
        """Refuse a run with traces, as all traces of the run are deleted at the end."""
        info = self.tally.before = self._client.server_info(timeout=min(10.0, self._load.timeout))
        if info.num_traces:
            raise InvalidArgument(
                field="run",
                value=f"{self._load.run!r}, which holds {info.num_traces} traces",
                expected="a run without traces, as those of a load are deleted with their run",
            )

    def _start(self) -> None:
        load = self._load
        for kind, count, children, module, words in (
            ("engine", load.agents, self._agents, "agents", []),
            ("reader", load.readers, self._readers, "readers", ["read"]),
            ("follower", load.followers, self._followers, "readers", ["follow"]),
        ):
            for number in range(count):
                name = f"{kind} {number}"
                child = Child(name, module, [*words, str(number)], self._inbox)
                self._children.append(child)
                children.append(child)
                child.send(load.to_json())
        self._pending = dict.fromkeys([*self._readers, *self._followers], 0)
        while len(self._ready) < len(self._children) and not self.tally.interrupted:
            self._receive("starting")
        for agent in self._agents:
            agent.send("go")

    def _drive(self) -> None:
        """Run engines until the time is up, all tokens are computed, or an interruption."""
        self._begun = time.monotonic()
        until = self._begun + (self._load.seconds or float("inf"))
        while not self.tally.interrupted and time.monotonic() < until:
            if self._done.issuperset(self._agents):
                break
            self._receive("running")
        for agent in self._agents:
            agent.send("stop")
        while not self._done.issuperset(self._agents):
            self._receive("sending backlog")

    def _drain(self) -> None:
        """Wait until ended sessions are read; after an interruption, only assigned ones."""
        deadline = 0.0
        while self._unread or any(self._pending.values()):
            if self.tally.interrupted:
                self.tally.skipped += len(self._unread)
                self._unread.clear()
                deadline = deadline or time.monotonic() + _DRAIN_SECONDS
                if time.monotonic() > deadline:
                    self.tally.skipped += sum(self._pending.values())
                    return
            self._receive("reading rest")
        self.tally.reading_seconds = time.monotonic() - self._begun
        for child in (*self._readers, *self._followers):
            child.close_input()
        while not self._done.issuperset(self._children):
            self._receive("ending")

    def _delete_traces(self) -> None:
        if not self._load.keep:
            newest = int(self.tally.counts.get("weight_updates", 0))
            self.tally.deleted = self._client.retire_through(newest).traces

    def _interrupt(self) -> None:
        if self.tally.interrupted:
            raise KeyboardInterrupt
        self.tally.interrupted = True

    # ------------------------------------------------------------------ messages

    def _receive(self, phase: str) -> None:
        """Handle messages for one tick, then show progress."""
        until = time.monotonic() + _TICK_SECONDS
        with contextlib.suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                child, message = self._inbox.get(timeout=left)
                self._handle(child, message)
                self._assign()
        self._add_up()
        self._show(phase, self.tally)

    def _handle(self, child: Child, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "ready":
            self._ready.add(child)
        elif kind == "progress":
            self._progress[child] = message
        elif kind == "begun":
            self._follow(message["name"])
        elif kind == "ended":
            self._ended(message["truth"])
        elif kind == "found":
            self._found(child, message["finding"])
        elif kind == "final":
            self._final(child, message)
        elif kind == EXITED and child not in self._done:
            errors = "".join(f": {line}" for line in message["errors"])
            raise Broken(f"{child.name} exited with code {message['code']}{errors}")

    def _follow(self, name: str) -> None:
        free = next((f for f in self._followers if not self._pending[f]), None)
        if free is not None:
            self._pending[free] = 1
            self._follows[name] = free
            free.send({"name": name})

    def _ended(self, truth: dict[str, Any]) -> None:
        follower = self._follows.pop(truth["name"], None)
        if follower is not None:
            follower.send(truth)
        if not (self._readers and truth["num_tokens"] > 1):
            return
        if len(self._unread) >= _MAX_UNREAD:
            self.tally.skipped += 1
        else:
            self._unread.append(truth)

    def _assign(self) -> None:
        while self._unread:
            reader = min(self._readers, key=self._pending.__getitem__)
            if self._pending[reader] >= _MAX_PENDING:
                return
            self._pending[reader] += 1
            reader.send(json.dumps(self._unread.popleft()))

    def _found(self, child: Child, finding: dict[str, Any]) -> None:
        tally = self.tally
        self._pending[child] -= 1
        error, seconds, ready = (finding.pop(name) for name in ("error", "seconds", "ready"))
        if error and len(tally.errors) < 10:
            tally.errors.append(error)
        if child in self._followers:
            tally.followed += 1
            # Counted with the same rows of the reader.
            finding["fetched"] = 0
        else:
            tally.reads += 1
            if not finding["failed"]:
                tally.get.add(seconds)
                tally.ready.add(ready)
        tally.found = added([tally.found, finding])

    def _final(self, child: Child, message: Message) -> None:
        self._done.add(child)
        self.tally.cpu = added([self.tally.cpu, message["cpu"]])
        if child in self._agents:
            self._progress[child] = {**message, "oldest": 0.0}
            self.tally.ack.add_counts(message["ack"])
            self.tally.seconds = max(self.tally.seconds, message["seconds"])
            self.tally.worker_bytes = max(self.tally.worker_bytes, message["memory"]["worker"])

    def _add_up(self) -> None:
        tally = self.tally
        tally.unread = len(self._unread) + sum(self._pending.values())
        if parts := list(self._progress.values()):
            tally.stats = added([one["stats"] for one in parts])
            tally.counts = added([one["counts"] for one in parts])
            tally.counts["weight_updates"] = max(one["counts"]["weight_updates"] for one in parts)
            tally.oldest = max(one["oldest"] for one in parts)


@contextlib.contextmanager
def _interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` at Ctrl-C."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
