"""Chunks that come twice, too early, too late, damaged, or from the past: a model says what counts.

A run is a list of actions drawn from a seed, carried out on the server's own code in this process
or on a real server. Each answer is compared with the model's, and in the end every row. A run that
fails is cut down to the actions that it needs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc

from faults.check import Known, Served, Violation, check, compare, temporary
from faults.script import RUN, Script
from faults.serving import Server
from oracle.harness import _Aborted, _Here, _Server
from routetrace.client import RouteClient
from routetrace.client._shells.drive import Driver
from routetrace.server.common.slices import at_once
from routetrace.server.core import Core
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Store
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Stream

Action = tuple[str, int]

#: How often what happens.
WEIGHTS = {
    "next": 30,
    "shuffled": 15,
    "again": 15,
    "early": 10,
    "other": 8,
    "damaged": 8,
    "reconnect": 6,
    "replaced": 3,
    "old_epoch": 3,
    "new_epoch": 2,
    "restart": 2,
    "sweep": 4,
}

#: Chunks overtake each other by so many at most.
REORDER = 64

#: So far back a chunk is known by its checksums.
WINDOW = 100


class Wire(Protocol):
    """One ingest stream."""

    welcome: pb.Welcome

    def send(self, chunk: pb.Chunk) -> None: ...

    def receive(self) -> pb.IngestResponse: ...


class Target(Protocol):
    """A server."""

    client: RouteClient

    def open(self, hello: pb.Hello) -> Wire: ...

    def hang_up(self, wire: Wire) -> None: ...

    def restart(self) -> None: ...

    def sweep(self) -> None: ...

    def duplicates(self) -> float: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------------------- targets


class _InlineWire:
    def __init__(self, server: _Server, hello: pb.Hello) -> None:
        self._server = server
        self._pipe: asyncio.Queue[Any] = asyncio.Queue()
        self.responses = server.stream(self._incoming(self._pipe))
        self._pipe.put_nowait(pb.IngestRequest(hello=hello))
        self.welcome = self.receive().welcome

    def send(self, chunk: pb.Chunk) -> None:
        self._pipe.put_nowait(pb.IngestRequest(chunk=chunk))

    def receive(self) -> pb.IngestResponse:
        response: pb.IngestResponse = self._server.run(anext(self.responses))
        return response

    @staticmethod
    async def _incoming(pipe: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        while True:
            yield await pipe.get()


class _Loopback(Driver):
    """Calls the server in this process."""

    def __init__(self, config: Any, target: Inline) -> None:
        super().__init__(config)
        self._target = target

    @contextmanager
    def _connected(self, _: str = "") -> Iterator[dict[str, Any]]:
        yield _Methods(self._target)


class _Methods(dict[str, Any]):
    def __init__(self, target: Inline) -> None:
        self._target = target

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda request, **_: self._target.server.call(name, request)


class Inline:
    """The servicers, called as gRPC would, in this thread.

    Args:
        store: of the records; a new one in memory if None.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Here(1))
        self._store: Any = store or MemoryStore()
        self._config = ServerConfig(
            store="memory",
            agent_timeout_seconds=1e6,
            metrics_listen="127.0.0.1:0",  # its sweeps count the traces
        )
        self.client = RouteClient("inline:1", run=RUN, timeout=2)
        self.client._driver = _Loopback(self.client._config, self)
        self._counted = 0.0
        self._start()

    def _start(self) -> None:
        self._core = Core(self._store, self._config)
        self.server = _Server(self._loop, self._core)

    def open(self, hello: pb.Hello) -> Wire:
        """A stream."""
        return _InlineWire(self.server, hello)

    def hang_up(self, wire: Wire) -> None:
        """Its end, without a goodbye."""
        assert isinstance(wire, _InlineWire)
        self.server.run(wire.responses.aclose())

    def restart(self) -> None:
        """Drop everything that was not stored."""
        self._counted = self.duplicates()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._start()

    def sweep(self) -> None:
        """A snapshot, and what else a sweep does."""
        number, data = at_once(self._core.journal.snapshot())
        self._store.compact((number, data), ())
        self.server.run(self._core.sweep())

    def duplicates(self) -> float:
        """As the server counts them, over all its lives."""
        value = self._core.metrics.registry.get_sample_value("routetrace_ingest_duplicates_total")
        return self._counted + (value or 0.0)

    def close(self) -> None:
        """End it."""
        self.client.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class Real:
    """A server process, with its store on disk."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        path = Path(self._stack.enter_context(temporary()))
        settings = {"sweep_interval_seconds": 0.2}
        self._server = self._stack.enter_context(Server(path, **settings))
        self.client = self._stack.enter_context(RouteClient(self._server.target, run=RUN))
        self._counted = 0.0

    def open(self, hello: pb.Hello) -> Wire:
        """A stream."""
        wire: Wire = Stream(self._server.target, hello)
        return wire

    def hang_up(self, wire: Wire) -> None:
        """Its end, without a goodbye."""
        assert isinstance(wire, Stream)
        wire.channel.close()

    def restart(self) -> None:
        """kill -9, and again."""
        self._counted = self.duplicates()
        self._server.kill()
        self._server.start()

    def sweep(self) -> None:
        """They come by themselves."""

    def duplicates(self) -> float:
        """As the server counts them, over all its lives."""
        return self._counted + self._server.metrics()["routetrace_ingest_duplicates_total"]

    def close(self) -> None:
        """End it."""
        self._stack.close()


# ---------------------------------------------------------------------------- the model


class Model:
    """Carries actions out and knows each answer before it comes."""

    def __init__(self, seed: int, target: Target) -> None:
        self._seed = seed
        self._target = target
        self.counts: Counter[str] = Counter()
        self._boots: list[tuple[Script, int]] = []  # earlier ones, and how far they got
        self._epochs: list[int] = []
        self.steps = 0
        self._new_epoch()

    def _new_epoch(self) -> None:
        if self._epochs:
            self._boots.append((self._script, self._stored))
        self._script = Script(self._seed, "e0", boot=len(self._epochs) + 1)
        self._stored = 0
        self._wire = self._target.open(self._script.hello())
        welcome = self._wire.welcome
        check(welcome.next_sequence == 1, f"a new epoch begins with {welcome.next_sequence}")
        check(all(welcome.epoch > e for e in self._epochs), f"epoch {welcome.epoch} is not new")
        self._epochs.append(welcome.epoch)

    def _connect(self) -> None:
        self._wire = self._target.open(self._script.hello(self._epochs[-1]))
        welcome = self._wire.welcome
        check(welcome.epoch == self._epochs[-1], "another epoch")
        check(
            welcome.next_sequence == self._stored + 1,
            f"asked for {welcome.next_sequence}, stored {self._stored}",
        )

    def _say(self, sends: Sequence[tuple[int, str]]) -> None:
        """Send chunks without waiting in between, and compare the answers."""
        expected = []
        for sequence, kind in sends:
            chunk = self._script.chunk(sequence)
            if kind == "other":
                chunk = self._script.other(sequence)
            elif kind == "damaged":
                # Frames have checksums of their own; the header's is the chunk's alone.
                name = "header" if sequence % 2 else "payload"
                data = bytearray(getattr(chunk, name))
                data[len(data) // 2] ^= 1
                setattr(chunk, name, bytes(data))
            if sequence <= self._stored:
                self.counts["duplicates"] += kind != "other"
                answer = "INVALID_ARGUMENT" if kind == "other" else "ack"
            elif sequence > self._stored + 1:
                answer = "OUT_OF_SEQUENCE"
            elif kind == "damaged":
                answer = "CORRUPT"
            else:
                answer = "ack"
                self._stored += 1
            expected.append((sequence, answer))
            self.counts[answer] += 1
            self._wire.send(chunk)
        while expected:
            self.steps += 1
            got = _read(self._wire.receive())
            for want in answered(expected, got):
                check(got[1] == want[1], f"answer {got}, expected {want}; stored {self._stored}")

    # ------------------------------------------------------------------ actions

    def do(self, action: Action) -> None:
        """Carry one out."""
        kind, value = action
        rng = random.Random(value)
        self.counts[kind] += 1
        getattr(self, f"_do_{kind}")(rng)

    def _do_next(self, rng: random.Random) -> None:
        self._say([(self._stored + 1 + i, "good") for i in range(rng.randint(1, 20))])

    def _do_shuffled(self, rng: random.Random) -> None:
        """A window of chunks, some twice, each at most REORDER places from its own."""
        size = rng.randint(2, REORDER)
        numbers = [self._stored + 1 + i for i in range(size)]
        numbers += rng.choices(numbers, k=rng.randint(0, size // 2))
        reach = rng.choice((2, 8, REORDER))
        numbers.sort(key=lambda n: n + rng.uniform(0, reach))
        # Up to 32 are taken without an answer.
        for at in range(0, len(numbers), 24):
            self._say([(n, "good") for n in numbers[at : at + 24]])

    def _do_again(self, rng: random.Random) -> None:
        if self._stored:
            low = max(1, self._stored - WINDOW)
            numbers = [rng.randint(low, self._stored) for _ in range(rng.randint(1, 10))]
            self._say([(n, "good") for n in numbers])

    def _do_early(self, rng: random.Random) -> None:
        self._say([(self._stored + 1 + rng.randint(1, REORDER), "good")])

    def _do_other(self, rng: random.Random) -> None:
        if self._stored:
            low = max(1, self._stored - WINDOW)
            self._say([(rng.randint(low, self._stored), "other")])

    def _do_damaged(self, rng: random.Random) -> None:
        first = self._stored + 1
        self._say([(first, "damaged"), (first + 1, "good")])

    def _do_reconnect(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self._target.hang_up(self._wire)
        self._connect()

    def _do_replaced(self, rng: random.Random) -> None:
        """A stream that another one has replaced says something more."""
        old = self._wire
        self._connect()
        old.send(self._script.chunk(self._stored + 1))
        self._fenced(old.receive)

    def _do_old_epoch(self, rng: random.Random) -> None:
        if len(self._epochs) > 1:
            script, _ = rng.choice(self._boots)
            epoch = self._epochs[rng.randrange(len(self._epochs) - 1)]
            self._fenced(lambda: self._target.open(script.hello(epoch)))

    def _do_new_epoch(self, rng: random.Random) -> None:
        """The engine boots anew; a stream of the boot before is of no use any more."""
        old, script, stored = self._wire, self._script, self._stored
        self._new_epoch()
        old.send(script.chunk(stored + 1))
        self._fenced(old.receive)

    def _do_restart(self, rng: random.Random) -> None:
        self._target.restart()
        self._connect()

    def _do_sweep(self, rng: random.Random) -> None:
        self._target.sweep()

    def _fenced(self, call: Callable[[], Any]) -> None:
        self.steps += 1
        try:
            answer = call()
        except _Aborted as error:
            check(error.code() is grpc.StatusCode.FAILED_PRECONDITION, f"{error!r}")
        except grpc.RpcError as error:
            check(error.code() is grpc.StatusCode.FAILED_PRECONDITION, f"{error!r}")
        else:
            raise Violation(f"expected to be fenced, got {answer}")

    def finish(self) -> Served:
        """Compare every row of every boot, and what the server counted."""
        served = Served()
        for script, stored in [*self._boots, (self._script, self._stored)]:
            served += compare(self._target.client, script, Known(stored, stored), prefetch=0)
        counted = self._target.duplicates()
        check(
            counted == self.counts["duplicates"],
            f"{self.counts['duplicates']} duplicates, the server counted {counted:.0f}",
        )
        return served


def answered(asked: list[tuple[int, str]], answer: tuple[int, str]) -> list[tuple[int, str]]:
    """Take the chunks that one answer answers, in the order in which they were sent, out of them.

    An acknowledgement stands for those that follow each other by their numbers, up to its own.
    """
    last, kind = answer
    first = asked[0][0]
    count = last - first + 1 if kind == "ack" else 1
    found = asked[:count]
    numbers = [number for number, _ in found]
    check(
        numbers == [*range(first, first + count)] and numbers[-1:] == [last],
        f"answer {answer} to chunks {numbers or first}",
    )
    del asked[:count]
    return found


def _read(response: pb.IngestResponse) -> tuple[int, str]:
    if response.HasField("ack"):
        return response.ack.sequence, "ack"
    error = response.reject.error
    kind = pb.ErrorKind.Name(error.kind).removeprefix("ERROR_KIND_")
    again = kind in {"OUT_OF_SEQUENCE", "CORRUPT"}
    check(bool(error.retry_after_ms) == again, f"{kind}: to be sent again? {error}")
    return response.reject.sequence, kind


# ---------------------------------------------------------------------------- runs


def draw(seed: int, count: int) -> list[Action]:
    """The actions of a seed."""
    rng = random.Random(f"order {seed}")
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [(kind, rng.getrandbits(32)) for kind in kinds]


def carry_out(seed: int, actions: Sequence[Action], make: Callable[[], Target]) -> Model:
    """One run.

    Raises:
        Violation: if an answer or a row is not the model's.
    """
    target = make()
    try:
        model = Model(seed, target)
        for action in actions:
            model.do(action)
        served = model.finish()
        model.counts["rows"] += served.rows
        return model
    finally:
        target.close()


def shrink(seed: int, actions: list[Action], make: Callable[[], Target]) -> list[Action]:
    """Leave out what is not needed to fail; for a minute at most."""
    deadline = time.monotonic() + 60
    size = len(actions) // 2
    while size and time.monotonic() < deadline:
        at = 0
        while at < len(actions) and time.monotonic() < deadline:
            fewer = actions[:at] + actions[at + size :]
            try:
                carry_out(seed, fewer, make)
            except Exception:
                actions = fewer
            else:
                at += size
        size //= 2
    return actions


def run(
    seed: int, *, runs: int = 3, actions: int = 150, real_runs: int = 1, real_actions: int = 60
) -> dict[str, int]:
    """Figures of runs in this process, and of some on a real server."""
    total: Counter[str] = Counter()
    for i in range(runs + real_runs):
        make: Callable[[], Target] = Inline if i < runs else Real
        drawn = draw(seed + i, actions if i < runs else real_actions)
        try:
            model = carry_out(seed + i, drawn, make)
        except Exception as error:
            least = shrink(seed + i, drawn, make) if make is Inline else drawn
            raise Violation(
                f"seed {seed + i}, {make.__name__}: {error!r}; {len(least)} actions are enough: "
                f"{[kind for kind, _ in least][:30]}"
            ) from error
        total.update(model.counts)
        total["answers" if make is Inline else "answers_over_sockets"] += model.steps
    names = ("answers", "answers_over_sockets", "ack", "OUT_OF_SEQUENCE", "CORRUPT")
    figures = {name.lower(): total[name] for name in names}
    return figures | {
        "conflicts_refused": total["INVALID_ARGUMENT"],
        "epochs": total["new_epoch"],
        "restarts": total["restart"],
        "rows_compared": total["rows"],
    }
