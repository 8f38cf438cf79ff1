"""Parts of attacks: the process, its calls, and the outcomes that it counts."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections import Counter
from collections.abc import AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from neighbours.place import Access
from neighbours.tenants import LAYOUT
from routetrace.codec.records import OP, FinishReason, OpKind
from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder, Stream, seal

#: The attacker's token covers this run, and others of its pattern.
RUN = "attack-0"
#: Traces of one chunk of `store`.
_PER_CHUNK = 2000


class Attack:
    """One attacking process.

    Attributes:
        access: server and token.
        number: of the process.
        outcomes: number of calls by their end.
    """

    def __init__(self, pipe: Connection, access: Access, number: int) -> None:
        self._pipe = pipe
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.access = access
        self.number = number
        self.outcomes: Counter[str] = Counter()

    def prepared(self) -> None:
        """Say that the attack may begin; return when it is to begin."""
        self._pipe.send("ready")
        self._pipe.recv()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with suppress(EOFError, OSError):
            self._pipe.recv()
        self._stop.set()

    @property
    def over(self) -> bool:
        """Whether the attack is to end."""
        return self._stop.is_set()

    def pause(self, seconds: float | None = None) -> bool:
        """Wait until the attack is to end, no longer than `seconds`; return whether it is."""
        return self._stop.wait(seconds)

    def count(self, outcome: str, number: int = 1) -> None:
        """Count calls by their end."""
        with self._lock:
            self.outcomes[outcome] += number

    def call(self, call: Callable[..., Any], request: Any, timeout: float = 20.0) -> Any:
        """Call a method, count its end; return the response, None after an error."""
        try:
            found = call(request, timeout=timeout, metadata=self.access.metadata)
        except grpc.RpcError as error:
            self.count(outcome(error))
            return None
        self.count("OK")
        return found

    def repeat(self, threads: int, calls: int, work: Callable[[int], Any]) -> None:
        """Do work for each number below `calls`, in threads, until the attack is to end."""
        numbers = iter(range(calls))

        def run() -> None:
            while not self.over:
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    return
                work(number)

        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(run) for _ in range(threads)]:
                future.result()

    def feeder(self, engine_id: str, **options: Any) -> Feeder:
        """A writer of the attacker's run."""
        return Feeder(
            self.access.target, LAYOUT, run=RUN, engine_id=engine_id,
            security=self.access.security, **options,
        )  # fmt: skip

    def stream(self, engine_id: str, **pool: int) -> Stream:
        """A writer of the attacker's run, spoken by hand."""
        hello = pb.Hello(
            run=RUN, engine_id=engine_id, boot_id="boot", layout=LAYOUT.to_proto(), **pool
        )
        return Stream(self.access.target, hello, self.access.security)

    def ask(self, stream: Stream, sequence: int, header: bytes, payload: bytes = b"") -> str:
        """Send a chunk; count and return the kind of its reply."""
        stream.send(seal(sequence, header, payload))
        try:
            reply = stream.receive()
        except grpc.RpcError as error:
            kind = outcome(error)
        except StopIteration:
            kind = "the stream ended"
        else:
            kind = "OK"
            if reply.HasField("reject"):
                kind = pb.ErrorKind.Name(reply.reject.error.kind).removeprefix("ERROR_KIND_")
        self.count(kind)
        return kind

    def store(self, traces: int) -> None:
        """Store finished traces without rows."""
        stream = self.stream(f"filler-{self.number}")
        for sequence, start in enumerate(range(0, traces, _PER_CHUNK), 1):
            header = begins(start, min(_PER_CHUNK, traces - start), f"p{self.number}")
            if (kind := self.ask(stream, sequence, header)) != "OK":
                raise RuntimeError(f"the traces of an attack were not stored: {kind}")
        stream.close()


def begins(first: int, count: int, prefix: str) -> bytes:
    """Header of a chunk of requests that begin and finish, without rows."""
    ops = np.zeros(2 * count, OP)
    ops["kind"][0::2], ops["kind"][1::2] = int(OpKind.BEGIN), int(OpKind.FINISH)
    ops["request"] = np.arange(count).repeat(2)
    ops["arg"][0::2] = np.arange(count)
    ops["value"][0::2] = np.arange(first, first + count)
    ops["arg"][1::2], ops["count"][1::2] = FinishReason.STOP, 2
    return pb.ChunkHeader(
        layout=LAYOUT.to_proto(),
        request_ids=[f"{prefix}-{i:x}" for i in range(first, first + count)],
        begins=[pb.RequestBegin(prompt_len=1)] * count,
        ops=ops.tobytes(),
    ).SerializeToString()


def outcome(error: grpc.RpcError) -> str:
    """Name of an error's status; one without a typed error is `untyped`."""
    name = error.code().name
    keys = [key for key, _ in error.trailing_metadata() or ()]
    return name if ERROR_METADATA_KEY in keys else f"{name} untyped"


async def hold_streams(
    attack: Attack,
    start: Callable[[grpc.aio.Channel, int], AsyncIterable[object]],
    count: int,
    per_channel: int,
) -> None:
    """Hold streams open until the attack ends; count their messages and ends.

    Args:
        attack: the attack.
        start: opens a stream on a channel, by its number.
        count: streams.
        per_channel: streams of one connection.
    """
    credentials = attack.access.credentials()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.secure_channel(attack.access.target, credentials, options)
        for _ in range(-(-count // per_channel))
    ]

    async def hold(number: int) -> None:
        try:
            async for _ in start(channels[number // per_channel], number):
                attack.count("OK")
        except grpc.RpcError as error:
            attack.count(outcome(error))

    tasks = [asyncio.create_task(hold(number)) for number in range(count)]
    await asyncio.to_thread(attack.pause)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()


def attacker(
    pipe: Connection, name: str, access: Access, number: int, sizes: dict[str, Any]
) -> None:
    """Run the attack `module.function`; send the outcomes of its calls."""
    module, _, function = name.partition(".")
    attack = Attack(pipe, access, number)
    run = getattr(importlib.import_module(f"neighbours.{module}"), function)
    try:
        run(attack, **sizes)
    except grpc.RpcError as error:
        # Refused before its first call could begin: as good a defence as any.
        attack.count(outcome(error))
        with suppress(OSError):
            pipe.send("ready")
    pipe.send(attack.outcomes)
