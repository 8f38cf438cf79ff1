"""A load, from the first look at the server to the last trace forgotten."""

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

from routetrace.cli.load.children import GONE, Child, Message
from routetrace.cli.load.plan import Load
from routetrace.cli.load.totals import Latencies, added
from routetrace.client import RouteClient, ServerInfo
from routetrace.v1.errors import InvalidArgument, RouteTraceError

_TICK_SECONDS = 0.25
#: Sessions that wait for a reader; beyond, they are passed over, and counted.
_MOST_UNREAD = 2_000
#: Reads that a reader has under way or knows of.
_AHEAD = 2
#: How long reads that are under way may take after an interruption.
_PATIENCE_SECONDS = 5.0


class Broken(RouteTraceError):
    """A process of the load ended by itself."""


@dataclass
class Tally:
    """All that the processes said, added up."""

    stats: dict[str, Any] = field(default_factory=dict)
    """As `AgentStats`, of all agents."""
    counts: dict[str, Any] = field(default_factory=dict)
    """What the engines did."""
    oldest: float = 0.0
    """Seconds that the oldest unacknowledged row has been under way."""
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
    """As `Finding`, of all reads."""
    errors: list[str] = field(default_factory=list)
    """The first of what they complain of."""
    reads: int = 0
    followed: int = 0
    skipped: int = 0
    """Sessions that nobody read, as the readers are slower than the engines."""
    unread: int = 0
    """Sessions that wait for a reader."""
    get: Latencies = field(default_factory=Latencies)
    ready: Latencies = field(default_factory=Latencies)
    ack: Latencies = field(default_factory=Latencies)
    cpu: dict[str, Any] = field(default_factory=dict)
    """Seconds by what they were spent on."""
    worker_bytes: int = 0
    """Memory of the largest background of an agent."""
    seconds: float = 0.0
    """That the engines ran."""
    reading_seconds: float = 0.0
    """Until the last session was read."""
    forgotten: int = 0
    interrupted: bool = False
    before: ServerInfo | None = None
    after: ServerInfo | None = None


Show = Callable[[str, Tally], None]


class Run:
    """Processes, and who of them has said what.

    Args:
        load: what was asked for.
        client: of its server and run.
        show: called a few times a second with what is being done, and how far it is.
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
        self._said: dict[Child, Message] = {}
        self._asked: dict[Child, int] = {}
        self._follows: dict[str, Child] = {}
        self._unread: deque[dict[str, Any]] = deque()
        self._begun = 0.0
        self.tally = Tally()

    def __call__(self) -> Tally:
        """Runs the load.

        Raises:
            RouteTraceError: if the server can not be reached, or a process of the load breaks.
        """
        self._look()
        with _interruptible(self._interrupt):
            try:
                self._start()
                self._drive()
                self._drain()
            finally:
                for child in self._children:
                    child.hang_up()
                deadline = time.monotonic() + 5
                for child in self._children:
                    child.end(deadline - time.monotonic())
                with contextlib.suppress(RouteTraceError):
                    self.tally.after = self._client.server_info()
                    self._forget()
        return self.tally

    # ------------------------------------------------------------------ in order

    def _look(self) -> None:
        """The run must be empty: what is in it goes in the end."""
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
                child.say(load.to_json())
        self._asked = dict.fromkeys([*self._readers, *self._followers], 0)
        while len(self._ready) < len(self._children) and not self.tally.interrupted:
            self._listen("starting")
        for agent in self._agents:
            agent.say("go")

    def _drive(self) -> None:
        """Until the time is up, all tokens are there, or somebody has had enough."""
        self._begun = time.monotonic()
        until = self._begun + (self._load.seconds or float("inf"))
        while not self.tally.interrupted and time.monotonic() < until:
            if self._done.issuperset(self._agents):
                break
            self._listen("running")
        for agent in self._agents:
            agent.say("stop")
        while not self._done.issuperset(self._agents):
            self._listen("sending the rest")

    def _drain(self) -> None:
        """Until what has ended is read; not after an interruption."""
        patience = 0.0
        while self._unread or any(self._asked.values()):
            if self.tally.interrupted:
                self.tally.skipped += len(self._unread)
                self._unread.clear()
                patience = patience or time.monotonic() + _PATIENCE_SECONDS
                if time.monotonic() > patience:
                    self.tally.skipped += sum(self._asked.values())
                    return
            self._listen("reading the rest")
        self.tally.reading_seconds = time.monotonic() - self._begun
        for child in (*self._readers, *self._followers):
            child.hang_up()
        while not self._done.issuperset(self._children):
            self._listen("ending")

    def _forget(self) -> None:
        if not self._load.keep:
            newest = int(self.tally.counts.get("weight_updates", 0))
            self.tally.forgotten = self._client.retire_through(newest)

    def _interrupt(self) -> None:
        if self.tally.interrupted:
            raise KeyboardInterrupt
        self.tally.interrupted = True

    # ------------------------------------------------------------------ what they say

    def _listen(self, what: str) -> None:
        """Takes what was said, for a moment."""
        until = time.monotonic() + _TICK_SECONDS
        with contextlib.suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                child, message = self._inbox.get(timeout=left)
                self._take(child, message)
                self._hand_out()
        self._add_up()
        self._show(what, self.tally)

    def _take(self, child: Child, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "ready":
            self._ready.add(child)
        elif kind == "progress":
            self._said[child] = message
        elif kind == "begun":
            self._follow(message["name"])
        elif kind == "ended":
            self._ended(message["truth"])
        elif kind == "found":
            self._found(child, message["finding"])
        elif kind == "final":
            self._final(child, message)
        elif kind == GONE and child not in self._done:
            said = "".join(f": {line}" for line in message["said"])
            raise Broken(f"{child.name} ended with code {message['code']}{said}")

    def _follow(self, name: str) -> None:
        free = next((f for f in self._followers if not self._asked[f]), None)
        if free is not None:
            self._asked[free] = 1
            self._follows[name] = free
            free.say({"name": name})

    def _ended(self, truth: dict[str, Any]) -> None:
        follower = self._follows.pop(truth["name"], None)
        if follower is not None:
            follower.say(truth)
        if not (self._readers and truth["num_tokens"] > 1):
            return
        if len(self._unread) >= _MOST_UNREAD:
            self.tally.skipped += 1
        else:
            self._unread.append(truth)

    def _hand_out(self) -> None:
        while self._unread:
            reader = min(self._readers, key=self._asked.__getitem__)
            if self._asked[reader] >= _AHEAD:
                return
            self._asked[reader] += 1
            reader.say(json.dumps(self._unread.popleft()))

    def _found(self, child: Child, finding: dict[str, Any]) -> None:
        tally = self.tally
        self._asked[child] -= 1
        error, seconds, ready = (finding.pop(name) for name in ("error", "seconds", "ready"))
        if error and len(tally.errors) < 10:
            tally.errors.append(error)
        if child in self._followers:
            tally.followed += 1
            # The same rows again, which were not asked for twice.
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
            self._said[child] = {**message, "oldest": 0.0}
            self.tally.ack.add_counts(message["ack"])
            self.tally.seconds = max(self.tally.seconds, message["seconds"])
            self.tally.worker_bytes = max(self.tally.worker_bytes, message["memory"]["worker"])

    def _add_up(self) -> None:
        tally = self.tally
        tally.unread = len(self._unread) + sum(self._asked.values())
        if said := list(self._said.values()):
            tally.stats = added([one["stats"] for one in said])
            tally.counts = added([one["counts"] for one in said])
            tally.counts["weight_updates"] = max(one["counts"]["weight_updates"] for one in said)
            tally.oldest = max(one["oldest"] for one in said)


@contextlib.contextmanager
def _interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Calls it at Ctrl-C."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
