"""The agent's stream: its states, and exactly once over a server that breaks and forgets."""

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import COUNTER_BYTES, Word
from routetrace.capture_agent.pipeline.chunks import ChunkBuilder
from routetrace.capture_agent.transport.connection import Call, Transport
from routetrace.capture_agent.transport.sender import Sender
from routetrace.capture_agent.transport.stream import TRANSITIONS, WINDOW, StreamState
from routetrace.codec.records import OP, OpKind, unpack
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

LAYOUT = ModelLayout((0,), 1, 8, 2)

#: From docs/ARCHITECTURE.md: a stream opens, is welcomed, breaks, and may end for good at any time.
ALLOWED = {
    ("closed", "opening"),
    ("closed", "ended"),
    ("opening", "open"),
    ("opening", "closed"),
    ("opening", "ended"),
    ("open", "closed"),
    ("open", "ended"),
}


class Agent:
    """A sender that is not started, with a clock that the test sets."""

    def __init__(self, transport: Transport | None = None) -> None:
        self.now = 0.0
        self.words = memoryview(bytearray(COUNTER_BYTES)).cast("Q")
        self.builder = ChunkBuilder(LAYOUT)
        config = AgentConfig("127.0.0.1:1", "e0", LAYOUT)
        self.sender = Sender(
            config, self.words, self.builder, lambda: None, transport, clock=lambda: self.now
        )

    def put(self, name: str) -> None:
        """Put a chunk in which one request begins."""
        self.builder.op(OpKind.LOST, name, arg=pb.MISSING_REASON_QUEUE_FULL, count=1)
        self.builder.seal()
        self.sender.put(self.builder.ready.popleft())


def names_of(chunk: pb.Chunk) -> tuple[str, ...]:
    return tuple(pb.ChunkHeader.FromString(chunk.header).request_ids)


@pytest.mark.parametrize(("old", "new"), [*product(StreamState, StreamState)])
def test_every_transition(old, new):
    stream = Agent().sender.stream
    stream.state = old
    assert stream.enter(new) == ((old.value, new.value) in ALLOWED)
    assert stream.state is (new if (old.value, new.value) in ALLOWED else old)


def test_table_names_every_state():
    assert set(TRANSITIONS) == set(StreamState)


class Server:
    """Stores chunks in order; by chance it refuses, answers late, breaks the stream or forgets."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epoch = 0
        self.stored: list[tuple[str, ...]] = []
        self.lost: list[tuple[str, ...]] = []
        self.first = 1

    @property
    def next_sequence(self) -> int:
        return self.first + len(self.stored)

    def welcome(self, hello: pb.Hello) -> pb.IngestResponse:
        if hello.epoch != self.epoch or self.epoch == 0 or self.rng.random() < 0.05:
            # No memory of this epoch: what was stored before stays stored under the old one.
            self.epoch += 1
            self.lost += self.stored
            self.stored, self.first = [], self.rng.choice((1, 50))
        welcome = pb.Welcome(
            epoch=self.epoch,
            next_sequence=self.next_sequence,
            max_chunk_bytes=1 << 20,
            heartbeat_ms=self.rng.choice((0, 100)),
        )
        return pb.IngestResponse(welcome=welcome)

    def take(self, chunk: pb.Chunk) -> pb.IngestResponse:
        if chunk.sequence < self.next_sequence:
            return pb.IngestResponse(ack=pb.Ack(sequence=chunk.sequence))
        kind, wait = 0, 0
        if chunk.sequence > self.next_sequence:
            kind, wait = pb.ERROR_KIND_OUT_OF_SEQUENCE, 50
        elif self.rng.random() < 0.1:
            kind, wait = pb.ERROR_KIND_OVERLOADED, 200
        if kind:
            error = pb.ErrorDetail(kind=kind, retry_after_ms=wait)
            return pb.IngestResponse(reject=pb.Reject(sequence=chunk.sequence, error=error))
        self.stored.append(names_of(chunk))
        return pb.IngestResponse(ack=pb.Ack(sequence=chunk.sequence))


@pytest.mark.parametrize("seed", range(60))
def test_every_chunk_is_stored_once_and_in_order(seed):
    agent, server, rng = Agent(), Server(seed), random.Random(seed)
    sender, put, is_open = agent.sender, [], False
    answers: list[pb.IngestResponse] = []
    acknowledged = 0
    for _ in range(400):
        agent.now += 0.05
        action = rng.random()
        if action < 0.3 and len(put) < 60:
            put.append(f"r{len(put)}")
            agent.put(put[-1])
        elif not is_open:
            hello = pb.IngestRequest.FromString(sender.open()).hello
            welcome = server.welcome(hello)
            sender.receive(welcome)
            is_open, answers, acknowledged = True, [], welcome.welcome.next_sequence - 1
        elif action < 0.6 and (message := sender.next_message()):
            request = pb.IngestRequest.FromString(message)
            if request.HasField("chunk"):
                assert request.chunk.sequence <= acknowledged + WINDOW
                answers.append(server.take(request.chunk))
        elif action < 0.95 and answers:
            answer = answers.pop(0)
            acknowledged = max(acknowledged, answer.ack.sequence)
            sender.receive(answer)
        elif action > 0.97:
            sender.closed()  # answers that are under way are lost
            is_open = False
    # A calm end.
    for _ in range(1000):
        if not sender.outbox:
            break
        agent.now += 1
        if sender.stream.state is not StreamState.OPEN:
            sender.receive(server.welcome(pb.IngestRequest.FromString(sender.open()).hello))
            answers = []
        while message := sender.next_message():
            request = pb.IngestRequest.FromString(message)
            if request.HasField("chunk"):
                answers.append(server.take(request.chunk))
        while answers:
            sender.receive(answers.pop(0))
    assert not sender.outbox
    # After a lost memory a chunk may be stored again, in the new epoch; in one epoch, never.
    assert len(set(server.stored)) == len(server.stored)
    told = [name for names in (*server.lost, *server.stored) for name in names]
    assert [*dict.fromkeys(told)] == put
    assert agent.words[Word.CHUNKS] >= len(put)
    assert sender.outbox.nbytes == 0


def test_a_refused_chunk_is_replaced_by_its_losses():
    agent = Agent()
    sender = agent.sender
    agent.put("a")
    agent.put("b")
    sender.open()
    sender.receive(pb.IngestResponse(welcome=pb.Welcome(epoch=1, next_sequence=1)))
    first = pb.IngestRequest.FromString(sender.next_message()).chunk
    error = pb.ErrorDetail(kind=pb.ERROR_KIND_INVALID_ARGUMENT, message="no")
    sender.receive(pb.IngestResponse(reject=pb.Reject(sequence=first.sequence, error=error)))
    again = pb.IngestRequest.FromString(sender.next_message()).chunk
    assert again.sequence == first.sequence
    sender.receive(pb.IngestResponse(reject=pb.Reject(sequence=1, error=error)))
    # The events are lost, too: a new epoch.
    assert sender.stream.state is StreamState.CLOSED
    assert sender.next_message() is None
    assert pb.IngestRequest.FromString(sender.open()).hello.epoch == 0
    sender.receive(pb.IngestResponse(welcome=pb.Welcome(epoch=2, next_sequence=1)))
    last = pb.IngestRequest.FromString(sender.next_message()).chunk
    ops = unpack(pb.ChunkHeader.FromString(last.header).ops, OP, "ops")
    assert ops["kind"].tolist() == [OpKind.RESET]
    sender.receive(pb.IngestResponse(reject=pb.Reject(sequence=1, error=error)))
    assert sender.ended
    assert sender.next_message() is None


def test_a_heartbeat_has_the_age_of_the_oldest_chunk_without_an_acknowledgement():
    agent = Agent()
    sender = agent.sender

    def lag_ms() -> int:
        return pb.IngestRequest.FromString(sender.stream.heartbeat()).heartbeat.lag_ms

    assert lag_ms() == 0
    for name in "ab":
        agent.now += 1.5
        agent.put(name)
    agent.now += 1
    assert lag_ms() == 2500
    sender.open()
    welcome = pb.Welcome(epoch=1, next_sequence=1, max_chunk_bytes=1 << 20, heartbeat_ms=100)
    sender.receive(pb.IngestResponse(welcome=welcome))
    assert lag_ms() == 2500
    for sequence, lag in ((1, 1000), (2, 0)):
        sender.receive(pb.IngestResponse(ack=pb.Ack(sequence=sequence)))
        assert lag_ms() == lag


class SlowTransport:
    """A transport whose calls end some time after they are cancelled, as on a busy machine."""

    def __init__(self) -> None:
        self.connected = threading.Event()
        self.alive = 0
        """Channels and calls."""

    @contextmanager
    def connect(self) -> Iterator[Callable[[Iterator[bytes]], Call]]:
        self.alive += 1
        yield lambda requests: SlowCall(self, requests)
        self.alive -= 1


class SlowCall:
    def __init__(self, transport: SlowTransport, requests: Iterator[bytes]) -> None:
        self._transport = transport
        self._cancelled, self._over = threading.Event(), threading.Event()
        next(requests)
        transport.alive += 1
        transport.connected.set()

    def __iter__(self) -> Iterator[pb.IngestResponse]:
        self._cancelled.wait()
        threading.Timer(1.5, self._over.set).start()
        self._over.wait()
        return iter(())

    def cancel(self) -> None:
        self._cancelled.set()

    def __del__(self) -> None:
        self._transport.alive -= 1


def test_a_fork_waits_until_no_call_is_left():
    """gRPC's calls take a lock when they are collected: a child would wait for it for ever."""
    transport = SlowTransport()
    sender = Agent(transport).sender
    sender.start()
    assert transport.connected.wait(30)
    gc.disable()  # calls are not left to the collector of cycles
    try:
        if (child := os.fork()) == 0:
            os._exit(transport.alive)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sender.close(0.0)
