"""The product, as the oracle drives it: agents to tell, a server to disturb, a client to ask.

`InlineWorld` runs the code of every stop in one thread, with neither sockets nor processes: what
happens when is drawn from a seed, so that a failure comes again and hypothesis can shrink it.
`SocketWorld` is the real thing: agents with threads and processes of their own, a server process
with its store on disk, gRPC in between, and SIGKILL.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import grpc
import numpy as np

from oracle.marks import Unmarked, unmarked
from oracle.world import EngineSpec, Shard
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent import agent as agent_module
from routetrace.capture_agent import link as link_module
from routetrace.capture_agent.counters import COUNTER_BYTES
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.transport.sender import Sender
from routetrace.capture_agent.worker import Worker
from routetrace.client import RouteClient
from routetrace.client._core.messages import parser_of
from routetrace.client._shells.drive import Driver
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import at_once
from routetrace.server.core import Core
from routetrace.server.index import journal as journal_module
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import ServerProcess, free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb

RUN = "oracle"

#: In the inline world an answer waits for nothing that could still come.
_CALL_TIMEOUT_S = 10

#: How long an agent may be silent before the server gives it up; in the inline world by its clock.
AGENT_TIMEOUT_S = {"inline": 1e6, "socket": 1.0, "workers": 1.0}


class BaseWorld:
    """What both worlds share; an `oracle.world.World`.

    Args:
        layout: columns of the whole model.
        seed: of all that the world decides.
    """

    name: str
    client: RouteClient
    stand_ins = True
    """Whether rows of one trace may stand in for those of another."""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self.layout = layout
        self.rng = random.Random(f"world {seed}")
        self.agents: dict[tuple[str, str], CaptureAgent] = {}
        #: What the world did to the product.
        self.counts = dict.fromkeys(("server restarts", "snapshots", "reconnects", "damaged"), 0)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ for the cluster

    def connect(self, spec: EngineSpec, shard: Shard, boot_id: str) -> Any:
        """A capture agent for one shard of one boot of an engine."""
        rng, key = self.rng, (spec.engine_id, shard.name)
        if key in self.agents:
            self.cut(self.agents.pop(key))
        config = AgentConfig(
            target=self.target,
            run=RUN,
            engine_id=spec.engine_id,
            shard=shard.name,
            boot_id=boot_id,
            model=spec.model,
            external_kv_emptied=spec.empties == "declared",
            layout=self.layout.select(shard.layer_ids),
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            num_host_blocks=spec.host_blocks,
            frame_rows=rng.choice((1, 3, 16, 64, 256)),
            ring_bytes=4 << 20,
            **self.settings(),
        )
        self.agents[key] = self.start(config)
        return Unmarked(self.agents[key])

    def crash(self, engine_id: str) -> None:
        """All agents of the engine are gone, without a goodbye."""
        for key in [key for key in self.agents if key[0] == engine_id]:
            self.cut(self.agents.pop(key))

    def barrier(self) -> None:
        """Returns once everything told so far is at the server."""
        for engine_id in {engine_id for engine_id, _ in self.agents}:
            self.flush(engine_id)

    def bind(
        self,
        engine_id: str,
        request_id: str,
        trace_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        num_computed_tokens: int,
        step: int,
        token_ids: Sequence[int] | None,
    ) -> None:
        """Names the request behind KV blocks that a slot-only agent filled.

        What is read by its blocks at this moment is what the bound request is made of.
        """
        self.flush(engine_id)
        stat = self.client.bind(
            engine_id,
            request_id,
            block_ids,
            num_tokens,
            num_computed_tokens=num_computed_tokens,
            step=step,
            trace_id=trace_id,
            token_ids=None if token_ids is None else unmarked(token_ids),
        )
        if num_computed_tokens:
            # Nothing joins bound requests here: the last one is the last incarnation.
            bound = self.client.get(
                trace_id,
                incarnation=stat.num_incarnations,
                token_stop=num_computed_tokens,
                missing="mask",
            )
            found = self.client.get_blocks(
                engine_id, block_ids, num_computed_tokens, missing="mask"
            )
            assert np.array_equal(bound.valid, found.valid), f"{trace_id}: {bound} by {found}"
            assert np.array_equal(bound.topk_ids[bound.valid], found.topk_ids[bound.valid]), (
                f"{trace_id}: other rows by blocks"
            )

    def flush(self, engine_id: str) -> None:
        """Everything told so far by the agents of one engine is at the server."""
        for key, agent in self.agents.items():
            if key[0] == engine_id:
                assert agent.flush(60), f"agent {key} did not get rid of its rows in 60 s"

    # ------------------------------------------------------------------ for the runner

    def disturb(self) -> None:
        """Does something bad, now and then; called after each step of the cluster."""
        raise NotImplementedError

    def settle(self) -> None:
        """Whoever is gone counts as gone from now on."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all of it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ for subclasses

    target: str

    def settings(self) -> dict[str, Any]:
        """Settings of the next agent."""
        raise NotImplementedError

    def start(self, config: AgentConfig) -> CaptureAgent:
        """Makes an agent."""
        raise NotImplementedError

    def cut(self, agent: CaptureAgent) -> None:
        """The agent dies."""
        raise NotImplementedError


# ---------------------------------------------------------------------------- inline


class _Errors(logging.Handler):
    """Nothing may be logged as an error; warnings, and killed agents, are of the world."""

    def emit(self, record: logging.LogRecord) -> None:
        if "was killed by signal SIGKILL" in record.getMessage():  # by cut()
            return
        raise AssertionError(f"an error was logged: {self.format(record)}")


@contextmanager
def _no_errors() -> Iterator[None]:
    logger, handler = logging.getLogger("routetrace"), _Errors(logging.ERROR)
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


class Clock:
    """A clock that goes on when it is told to; stands in for `time`, and for the server's."""

    def __init__(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    now = monotonic

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Here(ThreadPoolExecutor):
    """An executor that does it at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class _Aborted(grpc.RpcError):
    """A call that the server ended; also the exception that ends it there."""

    def __init__(self, status: grpc.StatusCode, details: str, metadata: Sequence[Any]) -> None:
        super().__init__(details)
        self._all = status, details, [_Metadatum(*item) for item in metadata]

    def code(self) -> grpc.StatusCode:
        return self._all[0]

    def details(self) -> str:
        return self._all[1]

    def trailing_metadata(self) -> list[_Metadatum]:
        return self._all[2]


class _Metadatum(NamedTuple):
    key: str
    value: Any


class _Context:
    """What the servicers use of a gRPC context."""

    def __init__(self, requests: AsyncIterator[Any] | None = None) -> None:
        self._requests = requests

    def invocation_metadata(self) -> tuple[_Metadatum, ...]:
        return ()

    async def read(self) -> Any:
        assert self._requests is not None
        return await anext(self._requests, grpc.aio.EOF)

    async def abort(self, status: grpc.StatusCode, details: str, metadata: Sequence[Any]) -> None:
        raise _Aborted(status, details, metadata)


class _Call(NamedTuple):
    """A streaming call whose answers are all there."""

    responses: Iterator[Any]

    def __next__(self) -> Any:
        return next(self.responses)

    def __iter__(self) -> Any:
        return self

    def cancel(self) -> None:
        pass


class _Server:
    """A Core, called as gRPC would: serialized, by the names of the methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: Core) -> None:
        self._loop = loop
        self.core = core
        self._handlers: dict[str, Any] = {}
        core.add_to(self)  # type: ignore[arg-type]
        self.run(core.start())

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As of a gRPC server."""
        for handler in handlers:
            for path, method in handler._method_handlers.items():
                self._handlers[path.rpartition("/")[2]] = method

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """As of a gRPC server; the same handlers once more."""

    def run(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    async def rest(self) -> None:
        """Waits until what agents have sent is applied, also of those that are gone."""
        for _ in range(100):
            await asyncio.sleep(0)
            await self.core.journal.settled()

    def call(self, name: str, request: Any) -> Any:
        """The response of a unary call, or the call of a streaming one."""
        method = self._handlers[name]
        request = method.request_deserializer(request.SerializeToString())
        if method.response_streaming:
            parse = parser_of(getattr(pb, f"{name}Response"))
            return _Call(map(parse, self._answer(name, self._collect(method, request))))
        response = self._answer(name, method.unary_unary(request, _Context()))
        serialize = method.response_serializer or bytes
        return getattr(pb, f"{name}Response").FromString(serialize(response))

    def _answer(self, name: str, awaitable: Any) -> Any:
        try:
            return self.run(asyncio.wait_for(awaitable, _CALL_TIMEOUT_S))
        except asyncio.TimeoutError:
            raise AssertionError(f"{name}: no answer, though everything is there") from None

    async def _collect(self, method: Any, request: Any) -> list[Any]:
        return [response async for response in method.unary_stream(request, _Context())]

    def stream(self, requests: AsyncIterator[Any]) -> Any:
        """The responses of Ingest."""
        method = self._handlers["Ingest"]
        read = (method.request_deserializer(r.SerializeToString()) async for r in requests)
        return method.stream_stream(read, _Context(read))


class _Loopback(Driver):
    """Carries out the client's plans on a server in this process."""

    def __init__(self, config: Any, world: InlineWorld) -> None:
        super().__init__(config)
        self._world = world

    @contextmanager
    def _connected(self, worker: str = "") -> Iterator[Any]:
        yield _Methods(self._world, worker)


@dataclass(frozen=True)
class _Methods:
    """The methods of a server by name."""

    world: InlineWorld
    worker: str

    def __getitem__(self, name: str) -> Any:
        return lambda request, **_: self.world.asked(request, self.worker).call(name, request)


class _InlineStream:
    """Moves the messages of a sender that was not started: the world says when."""

    def __init__(self, world: InlineWorld, sender: Sender, engine_id: str) -> None:
        self._world = world
        self._sender = sender
        self._engine_id = engine_id
        self.server = world.server_of(engine_id)
        self._pipe: asyncio.Queue[Any] | None = None
        #: Numbers of the chunks that were sent and not answered; 0 for the Hello.
        self._outstanding: list[int] = []

    def talk(self, most_sent: int, most_heard: int) -> None:
        """Sends some chunks, and takes some of the answers."""
        if self._pipe is None:
            self._open()
        while most_sent and (message := self._chunk()):
            self._send(message)
            most_sent -= 1
        while most_heard and self._outstanding and self._pipe is not None:
            self._hear()
            most_heard -= 1

    def send_damaged(self) -> None:
        """A chunk is damaged on its way; the next one of its number is not."""
        if self._pipe is not None and (message := self._chunk()):
            data = bytearray(message.chunk.header)
            data[self._world.rng.randrange(len(data))] ^= 1 << self._world.rng.randrange(8)
            message.chunk.header = bytes(data)
            self._send(message)
            self._world.counts["damaged"] += 1

    def send_twice(self) -> None:
        """A chunk arrives that arrived before; its answer says nothing new."""
        if self._pipe is not None and (message := self._chunk()):
            self._send(message)
            self._send(message)

    def hang_up(self) -> None:
        """The connection breaks: what was not answered may or may not have arrived."""
        if self._pipe is not None:
            self._sender.closed()
            self._pipe = None
            self._outstanding.clear()
            self.server.run(self._responses.aclose())
            self._world.counts["reconnects"] += 1

    @property
    def busy(self) -> bool:
        """Whether there is something to send, or to hear."""
        return bool(self._sender.outbox)

    def _open(self) -> None:
        self._pipe = asyncio.Queue()
        self.server = self._world.server_of(self._engine_id)
        self._responses = self.server.stream(self._incoming(self._pipe))
        self._send(pb.IngestRequest.FromString(self._sender.open()))
        self._hear()

    def _chunk(self) -> pb.IngestRequest | None:
        """The next chunk, if one may be sent; heartbeats on the way to it are not answered."""
        assert self._pipe is not None
        while message := self._sender.next_message():
            request = pb.IngestRequest.FromString(message)
            if not request.HasField("heartbeat"):
                return request
            self._pipe.put_nowait(request)
        return None

    def _send(self, message: pb.IngestRequest) -> None:
        assert self._pipe is not None
        self._pipe.put_nowait(pb.IngestRequest.FromString(message.SerializeToString()))
        self._outstanding.append(message.chunk.sequence)

    def _hear(self) -> None:
        response = self.server.run(anext(self._responses))
        while response.HasField("pace"):
            self._sender.receive(pb.IngestResponse.FromString(response.SerializeToString()))
            response = self.server.run(anext(self._responses))
        error = response.reject.error
        assert not response.HasField("reject") or error.retry_after_ms, f"refused: {error}"
        # One Ack stands for chunks that follow each other by their numbers.
        first, last = self._outstanding[0], response.ack.sequence or response.reject.sequence
        count = last - first + 1 if response.HasField("ack") else 1
        answered = self._outstanding[:count]
        assert answered == [*range(last - count + 1, last + 1)], f"{response} to {answered}"
        del self._outstanding[:count]
        self._sender.receive(pb.IngestResponse.FromString(response.SerializeToString()))

    @staticmethod
    async def _incoming(pipe: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        while True:
            yield await pipe.get()


class _TellingRing(Ring):
    """A ring that tells when a record was written."""

    def __init__(self, buffer: memoryview, tell: Callable[[], None]) -> None:
        super().__init__(buffer)
        self._tell = tell

    def commit(self) -> None:
        super().commit()
        self._tell()

    @property
    def full(self) -> bool:
        """Whether a good part of it was not read yet, as far as its writer can know."""
        return self.written - self._cursors[8] > self.size // 8


class _Deaf:
    """In place of the worker's end of the socket."""

    def send(self, _: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Pace:
    """How probable it is, after each record, that the background does something."""

    work: float
    seal: float
    talk: float
    trouble: float = 0.003


class _InlineLink:
    """Stands in for WorkerLink: the background, in the caller's thread, when the seed says so."""

    def __init__(self, world: InlineWorld, config: AgentConfig, *, held: bool) -> None:
        assert not held, "no agent replaces another one here"
        self._world = world
        memory = memoryview(mmap.mmap(-1, COUNTER_BYTES + config.ring_bytes))
        self.words = memory[:COUNTER_BYTES].cast("Q")
        self.ring = _TellingRing(memory[COUNTER_BYTES:], self._written)
        clock = world.clock.monotonic
        self.worker = Worker(config, memory, _Deaf(), 0, clock=clock)  # type: ignore[arg-type]
        self.sender = _InlineStream(world, self.worker.sender, config.engine_id)
        self.sender.talk(0, 0)  # says how large chunks may be
        rng = world.rng
        self._pace = _Pace(
            work=rng.choice((0.02, 0.2, 1.0)),
            seal=rng.choice((0.0, 0.02, 0.5)),
            talk=rng.choice((0.02, 0.2, 1.0)),
        )
        self.alive = True

    def _written(self) -> None:
        if not self.alive:
            return
        world, pace, sender = self._world, self._pace, self.sender
        rng = world.rng
        world.clock.advance(0.01)
        if rng.random() < pace.work or self.ring.full:
            self.worker._work()
        if rng.random() < pace.seal:
            self.worker._ship_all()
        if rng.random() < pace.talk:
            sender.talk(rng.randint(1, 4), rng.randint(0, 4))
        if rng.random() < pace.trouble:
            self.worker._ship_all()
            rng.choice((sender.hang_up, sender.send_damaged, sender.send_twice))()

    def wait(self, _: float) -> None:
        """All that is under way arrives."""
        while self.worker._work():
            pass
        while self.sender.busy:
            self._world.clock.advance(0.01)
            self.sender.talk(16, 1 << 30)

    def die(self) -> None:
        """Some of what was sealed may still arrive; all else is gone."""
        rng = self._world.rng
        if rng.random() < 0.5:
            self.worker._work()
        if rng.random() < 0.5:
            self.worker._ship_all()
        self.sender.talk(rng.randint(0, 8), rng.randint(0, 8))
        self.sender.hang_up()
        self.alive = False

    # As of WorkerLink; nobody has to be woken.

    pid = 0

    deaths = 0

    @property
    def leftover(self) -> str | None:
        return None if self.alive else "agent_lost"

    def wait_until_up(self, _: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def wake_if_behind(self) -> None:
        pass

    def hang_up(self) -> None:
        self.alive = False

    def close(self, _: float) -> str:
        reason = self.leftover or "unsent"
        self.alive = False
        return reason

    def forget_in_child(self) -> None:
        pass


class InlineWorld(BaseWorld):
    """The code of every stop, in one thread."""

    name = "inline"
    target = "inline:1"

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        super().__init__(layout, seed)
        self.clock = Clock(1e9)
        self._server_clock = Clock(1e9)
        self._store = MemoryStore()
        self._config = ServerConfig(
            metrics_listen="127.0.0.1:0",  # its sweeps count the traces
            store="memory",
            max_chunk_bytes=self.rng.choice((1 << 17, 8 << 20)),
            agent_timeout_seconds=AGENT_TIMEOUT_S[self.name],
            default_ttl_seconds=1 << 31,
        )
        self._patches = ExitStack()
        self._patches.enter_context(_no_errors())
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Here(1))
        self._start()
        self.client = RouteClient(self.target, run=RUN)
        self.client._driver = _Loopback(self.client._config, self)

    def _start(self) -> None:
        with patch.object(journal_module, "Clock", lambda: self._server_clock):
            core = Core(self._store, self._config)
        self.server = _Server(self._loop, core)

    def rest(self) -> None:
        """Returns once the server has nothing left to do."""
        self.server.run(self.server.rest())

    def server_of(self, engine_id: str) -> _Server:
        """The server that takes the rows of an engine."""
        return self.server

    def asked(self, request: Any, worker: str) -> _Server:
        """The server that the client asks; `worker` is the port of one that it was sent to."""
        return self.server

    def settings(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "background": "thread",
            "linger_seconds": rng.choice((0.0, 0.0, 0.05, 0.5, 3600)),
            "flush_interval_seconds": rng.choice((0.001, 0.1, 60)),
        }

    def start(self, config: AgentConfig) -> CaptureAgent:
        with patch.object(agent_module, "WorkerLink", partial(_InlineLink, self)):
            return CaptureAgent(config)

    def cut(self, agent: CaptureAgent) -> None:
        agent._link.die()
        agent.close(0)

    def disturb(self) -> None:
        self._server_clock.advance(0.001)
        if self.rng.random() < 0.003:
            self.restart(snapshot=self.rng.random() < 0.5)
        elif self.rng.random() < 0.02:
            self.server.run(self.server.core.sweep())

    def barrier(self) -> None:
        super().barrier()
        if self.rng.random() < 0.2:
            self.restart(snapshot=True)  # and nothing comes that could hide what got lost

    def restart(self, *, snapshot: bool) -> None:
        """The server starts over, from what its store holds: records, or a snapshot and records."""
        for agent in self.agents.values():
            agent._link.sender.hang_up()
        if snapshot:
            number, data = at_once(self.server.core.journal.snapshot())
            self._store.compact((number, data), ())
            self.counts["snapshots"] += 1
        self._start()
        self.counts["server restarts"] += 1

    def settle(self) -> None:
        self.pass_time(2 * AGENT_TIMEOUT_S[self.name])

    def pass_time(self, seconds: float) -> None:
        """Let time pass at the server alone."""
        self._server_clock.advance(seconds)

    def close(self) -> None:
        for agent in self.agents.values():
            agent._link.alive = False
            agent.close(0)
        self.client.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        self._patches.close()


# ---------------------------------------------------------------------------- sockets


class SocketWorld(BaseWorld):
    """Threads, processes, sockets, a store on disk, and SIGKILL."""

    name = "socket"

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        super().__init__(layout, seed)
        self._stack = ExitStack()
        self._stack.enter_context(_no_errors())
        self._directory = self._stack.enter_context(TemporaryDirectory(prefix="oracle-"))
        self._workers: dict[CaptureAgent, Worker] = {}
        self._server: ServerProcess | None = None
        self._steps = 0
        self._kill_at = self.rng.choice((0, self.rng.randint(20, 500)))
        self._back_at = 0
        self.target = "127.0.0.1:0"
        self._serve()
        self.client = self._stack.enter_context(RouteClient(self.target, run=RUN))

    def _serve(self) -> None:
        if self._server is None:
            self._server = self._stack.enter_context(
                run_server(
                    data_dir=self._directory,
                    agent_timeout_seconds=AGENT_TIMEOUT_S[self.name],
                    sweep_interval_seconds=0.5,
                    **self.server_settings(),
                )
            )
            self.target = self._server.target

    def server_settings(self) -> dict[str, Any]:
        """Settings of the server that differ between worlds."""
        return {"listen": self.target}

    def settings(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "background": rng.choice(("process", "thread", "thread")),
            "linger_seconds": rng.choice((0.0, 0.02, 0.3)),
            "flush_interval_seconds": rng.choice((0.001, 0.02, 0.1)),
        }

    def start(self, config: AgentConfig) -> CaptureAgent:
        workers: list[Worker] = []

        def make(*args: Any) -> Worker:
            workers.append(Worker(*args))
            return workers[0]

        with patch.object(link_module, "Worker", make):
            agent = CaptureAgent(config)
        if workers:
            self._workers[agent] = workers[0]
        return agent

    def cut(self, agent: CaptureAgent) -> None:
        worker = self._workers.pop(agent, None)
        if worker is None:
            os.kill(agent.worker_pid, signal.SIGKILL)
        else:
            # What was not sent is gone: the stream ends, and no other one begins.
            worker.sender.close(time.monotonic())
        agent.close(0)

    def flush(self, engine_id: str) -> None:
        self._serve()
        super().flush(engine_id)

    def barrier(self) -> None:
        self._serve()
        super().barrier()

    def disturb(self) -> None:
        self._steps += 1
        if self.rng.random() < 0.05:
            time.sleep(0.01)  # the engine is much faster than real ones: lets the others catch up
        if self._steps == self._back_at:
            self._serve()
        elif self._steps == self._kill_at and self._server:
            self.kill()
            self.counts["server restarts"] += 1

    def kill(self) -> None:
        """Kill the server, and start it some steps later."""
        assert self._server
        self._server.kill()
        self._server = None
        self._back_at = self._steps + self.rng.randint(1, 50)

    def settle(self) -> None:
        time.sleep(1.3 * AGENT_TIMEOUT_S[self.name])

    def close(self) -> None:
        with self._stack:
            for agent in self.agents.values():
                self.cut(agent)


class WorkersWorld(SocketWorld):
    """As SocketWorld, with two workers: the run is at the second, which is killed alone."""

    name = "workers"

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self._front = f"127.0.0.1:{free_ports(2)}"
        super().__init__(layout, seed)
        self._kill_at = self.rng.randint(20, 60)

    def server_settings(self) -> dict[str, Any]:
        return {"listen": self._front, "workers": 2, "run_workers": f'{{"{RUN}": 1}}'}

    def kill(self) -> None:
        lock = Path(self._directory) / "partition-1" / "lock"
        os.kill(int(lock.read_text()), signal.SIGKILL)
