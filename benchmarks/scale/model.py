"""A partition of servers without disks under load: a discrete simulation.

Engines make a chunk a second, of 1 MiB at most. A server takes chunks and reads in the order of
their arrival, on one core, and groups commits as store/object/store.py does. Trainers read each
chunk once, as a whole, `read_after` seconds after it was acknowledged. Network, memory bandwidth
and limits of the object store are not modelled.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

from routetrace.cli.bench import capacity
from routetrace.server.access.partition import place
from routetrace.server.store.object.queue import COMPANY_BYTES, GROUP_BYTES
from routetrace.server.store.object.store import COMPANY_SECONDS

#: Most bytes of an agent's chunk, seconds for which it waits, and chunks under way.
CHUNK_BYTES, FLUSH_SECONDS, WINDOW = 1 << 20, 1.0, 16
#: Bytes of an agent's queue above which it drops.
KEPT_BYTES = capacity.QUEUE_BYTES * 7 // 8


@dataclass(frozen=True)
class Setup:
    """A deployment; the defaults are those of the product, or measured by servers.py."""

    nodes: int = 100
    tokens: float = 5_000
    """Tokens a second of a node."""
    engines: int = 8
    """Of a node."""
    runs: int = 1
    """Each has as many engines as the others, to one."""
    servers: int = 1
    """Each owns one partition."""
    pinned: bool = True
    """Whether `run_workers` deals the runs out; else their hash does."""
    sharing: int = 2
    """Servers of one prefix, which stand by for each other."""
    model: str = "qwen3-30b-a3b"
    core: float = 1.0
    """Speed of cores, as a multiple of those of cli/bench/capacity.py."""
    into: float = 1.3
    """Microseconds of a token in, beyond the disk store's."""
    fetched: float = 2.0
    """Microseconds of a token out that is read from the object store, beyond the disk store's."""
    put_seconds: float = 0.030
    """Median of a PUT, without its bytes."""
    put_p99: float = 0.150
    put_rate: float = 100e6
    """Bytes a second of one PUT."""
    read_after: float = 20.0
    cache: float = 256 * 2**20
    """`object_cache` of a server."""
    lease: float = 5.0
    replay: float = 2.0
    """Seconds from the end of a lease until the next owner serves."""
    seconds: float = 60.0
    seed: int = 1

    @property
    def costs(self) -> capacity.Costs:
        """Costs of the disk store."""
        return capacity.MEASURED[self.model]

    @property
    def micros_in(self) -> float:
        """Microseconds of a token in."""
        return (self.costs.ingest + self.into) / self.core

    def micros_out(self, fetched: bool) -> float:
        """Return the microseconds of a token out."""
        return (self.costs.read + self.fetched * fetched) / self.core

    @property
    def core_seconds(self) -> float:
        """CPU of a token, in and out, where reads come from the object store."""
        return (self.micros_in + self.micros_out(True)) / 1e6

    @property
    def needed(self) -> int:
        """Servers whose cores are not busier than capacity.BUSY."""
        return math.ceil(self.nodes * self.tokens * self.core_seconds / capacity.BUSY)

    def engines_of(self) -> list[int]:
        """Return the number of engines at each partition."""
        engines = self.nodes * self.engines
        found = [0] * self.servers
        for number in range(self.runs):
            at = number % self.servers if self.pinned else place(f"run-{number}", self.servers)
            found[at] += engines // self.runs + (number < engines % self.runs)
        return found


@dataclass(eq=False)
class Engine:
    """An engine with its agent: chunks that are not acknowledged.

    Attributes:
        waiting: chunks that were not sent, oldest first.
        sent: number of chunks under way.
    """

    waiting: deque[Chunk] = field(default_factory=deque)
    sent: int = 0


@dataclass(eq=False)
class Chunk:
    """A chunk, and the second at which its engine made it."""

    engine: Engine
    made: float


@dataclass
class Counts:
    """Work of a server."""

    busy: float = 0.0
    """CPU seconds."""
    puts: float = 0.0
    gets: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    """From the object store."""

    def rates(self, before: Counts, seconds: float) -> Counts:
        """Return the work of one second."""
        names = [f.name for f in fields(self)]
        return Counts(*((getattr(self, n) - getattr(before, n)) / seconds for n in names))


@dataclass
class Result:
    """Fate of the tokens of a partition, and the work of its server."""

    made: float = 0.0
    acknowledged: float = 0.0
    dropped: float = 0.0
    queued: float = 0.0
    rates: Counts = field(default_factory=Counts)
    """In the second half."""
    latencies: list[float] = field(default_factory=list)
    """Seconds from a chunk to its acknowledgement."""
    backlog: float = 0.0
    """Most bytes of one agent."""
    drained: float = math.nan
    """Seconds from the death of the server until no chunk of before its return waits."""


class Partition:
    """Simulation of one partition, with the server that owns it.

    Args:
        setup: of all.
        engines: of its runs.
        seed: of its times.
        killed: second at which its server dies; another one takes over.
    """

    def __init__(self, setup: Setup, engines: int, seed: str, killed: float = math.inf) -> None:
        self._setup = setup
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._engines = [Engine() for _ in range(engines)]
        rate = setup.tokens / setup.engines
        sent = setup.costs.sent
        self._chunk_tokens = min(rate * FLUSH_SECONDS, CHUNK_BYTES / sent)
        self._chunk_bytes = self._chunk_tokens * sent
        self._every = self._chunk_tokens / rate
        self._killed, self._again = killed, killed + setup.lease + setup.replay
        self._sigma = math.log(setup.put_p99 / setup.put_seconds) / 2.326
        self.now = 0.0
        self.result = Result()
        self._done = Counts()
        self._owner = 0  # ownerships: what a dead server had begun is void
        self._serves = True
        self._free_at = 0.0
        self._queue: deque[Chunk] = deque()
        self._under_way: dict[Chunk, None] = {}
        self._asked: dict[int, float] = {}  # reads that wait for an answer
        self._lost_cache = -1.0  # bytes that were stored before the owner began
        self._committing = False
        self._patience = self._due = 0.0

    def run(self) -> Result:
        """Return the result of `seconds`."""
        for engine in self._engines:
            self._at(self._random.random() * self._every, partial(self._make, engine))
        if self._killed < math.inf:
            self._at(self._killed, self._die)
            self._at(self._again, self._return)
        half = self._setup.seconds / 2
        self._until(half)
        before = replace(self._done)
        self._until(self._setup.seconds)
        self.result.rates = self._done.rates(before, half)
        waiting = sum(len(engine.waiting) + engine.sent for engine in self._engines)
        self.result.queued = waiting * self._chunk_tokens
        return self.result

    def _until(self, second: float) -> None:
        while self._events and self._events[0][0] <= second:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _owned(self, when: float, event: Callable[[], None]) -> None:
        """Plan what ends with the server that has begun it."""
        owner = self._owner
        self._at(when, lambda: event() if owner == self._owner else None)

    # ------------------------------------------------------------------ agents

    def _make(self, engine: Engine) -> None:
        self.result.made += self._chunk_tokens
        held = (len(engine.waiting) + engine.sent + 1) * self._chunk_bytes
        if held > KEPT_BYTES:
            self.result.dropped += self._chunk_tokens
        else:
            engine.waiting.append(Chunk(engine, self.now))
            self.result.backlog = max(self.result.backlog, held)
            self._send(engine)
        pause = self._every * self._random.uniform(0.9, 1.1)
        self._at(self.now + pause, partial(self._make, engine))

    def _send(self, engine: Engine) -> None:
        while self._serves and engine.waiting and engine.sent < WINDOW:
            chunk = engine.waiting.popleft()
            engine.sent += 1
            self._under_way[chunk] = None
            self._work(self._setup.micros_in, partial(self._arrived, chunk))

    # ------------------------------------------------------------------ the server

    def _work(self, micros: float, done: Callable[[], object]) -> None:
        """Take the core for each token of a chunk, behind what has come before."""
        begin, seconds = max(self.now, self._free_at), self._chunk_tokens * micros / 1e6
        self._free_at = begin + seconds

        def finish() -> None:
            self._done.busy += seconds
            done()

        self._owned(self._free_at, finish)

    def _arrived(self, chunk: Chunk) -> None:
        self._queue.append(chunk)
        if not self._committing:
            if len(self._queue) == 1:
                self._due = self.now + self._patience
                self._owned(self._due, self._commit)
            elif len(self._queue) * self._chunk_bytes >= COMPANY_BYTES:
                self._commit()

    def _commit(self) -> None:
        full = len(self._queue) * self._chunk_bytes >= COMPANY_BYTES
        if self._committing or not self._queue or (self.now < self._due and not full):
            return
        count = min(len(self._queue), math.ceil(GROUP_BYTES / self._chunk_bytes))
        group = [self._queue.popleft() for _ in range(count)]
        setup = self._setup
        size = count * self._chunk_bytes
        took = self._random.lognormvariate(math.log(setup.put_seconds), self._sigma)
        took += size / setup.put_rate
        self._committing = True
        self._owned(self.now + took, lambda: self._stored(group, size, took))

    def _stored(self, group: list[Chunk], size: float, took: float) -> None:
        result = self.result
        self._done.puts += 1
        self._done.bytes_in += size
        self._committing, self._patience = False, min(took, COMPANY_SECONDS)
        for chunk in group:
            del self._under_way[chunk]
            chunk.engine.sent -= 1
            result.latencies.append(self.now - chunk.made)
            result.acknowledged += self._chunk_tokens
            read = partial(self._read, next(self._order), self._done.bytes_in)
            self._at(self.now + self._setup.read_after, read)
            self._send(chunk.engine)
        if self.now > self._again and math.isnan(result.drained) and self._is_drained():
            result.drained = self.now - self._killed
        if self._queue:
            self._due = self.now + self._patience
            self._owned(self._due, self._commit)
            self._commit()

    def _read(self, number: int, stored: float) -> None:
        self._asked[number] = stored
        if not self._serves:
            return  # `_return` asks again
        setup = self._setup
        old = self._done.bytes_in - stored > setup.cache / setup.sharing
        fetched = old or stored <= self._lost_cache
        if fetched:
            self._done.gets += 1
            self._done.bytes_out += self._chunk_bytes
        self._work(setup.micros_out(fetched), lambda: self._asked.pop(number))

    # ------------------------------------------------------------------ take-over

    def _die(self) -> None:
        self._owner += 1
        self._serves = self._committing = False
        self._queue.clear()
        for chunk in reversed(self._under_way):
            chunk.engine.waiting.appendleft(chunk)
            chunk.engine.sent = 0
        self._under_way.clear()

    def _return(self) -> None:
        self._serves, self._free_at = True, self.now
        self._patience, self._lost_cache = 0.0, self._done.bytes_in
        for engine in self._engines:
            self._send(engine)
        for number, stored in [*self._asked.items()]:
            self._read(number, stored)

    def _is_drained(self) -> bool:
        """Whether all chunks from before the return are stored."""
        waiting = (engine.waiting[0] for engine in self._engines if engine.waiting)
        return all(chunk.made >= self._again for chunk in (*waiting, *self._under_way))
