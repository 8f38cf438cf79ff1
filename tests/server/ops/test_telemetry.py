"""Every call is counted once, as its caller saw it end, whatever its arity."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from routetrace.server.common.metrics import Metrics
from routetrace.server.ops.telemetry import Telemetry

ENDS = ("ok", "abort", "raise", "bad", "deadline", "cancel", "refused")


async def end_as_told(message: bytes, context: Any) -> None:
    if message == b"abort":
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "told to")
    if message == b"raise":
        raise RuntimeError("told to")
    if message in (b"deadline", b"cancel"):
        await asyncio.Event().wait()


async def unary_unary(request: bytes, context: Any) -> bytes:
    await end_as_told(request, context)
    return request


async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    await end_as_told(request, context)
    yield request


async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for request in requests:
        await end_as_told(request, context)
    return b"ok"


async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request
        await end_as_told(request, context)


async def stream_stream_by_hand(_: Any, context: Any) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request)
        await end_as_told(request, context)


BEHAVIORS = (unary_unary, unary_stream, stream_unary, stream_stream, stream_stream_by_hand)
METHODS = {behavior.__name__: behavior for behavior in BEHAVIORS}
TYPES = dict(
    zip(METHODS, ("unary", "server_stream", "client_stream", *["bidi_stream"] * 2), strict=True)
)


def arity_of(method: str) -> tuple[str, str]:
    client, server, *_ = method.split("_")
    return client, server


def described() -> Any:
    """The file that describes the service with these methods."""
    file = descriptor_pb2.FileDescriptorProto(name="arities.proto", package="t")
    file.message_type.add(name="M")
    service = file.service.add(name="Arities")
    for name in METHODS:
        client, server = (side == "stream" for side in arity_of(name))
        method = service.method.add(name=name, input_type=".t.M", output_type=".t.M")
        method.client_streaming, method.server_streaming = client, server
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName("arities.proto")


def parse(message: bytes) -> bytes:
    if message == b"bad":
        raise ValueError("told to")
    return message


class Refusing(grpc.aio.ServerInterceptor):
    """Refuses calls that say so, with a handler of one arity for all."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused")

        if ("refused", "yes") in handler_call_details.invocation_metadata:
            return grpc.unary_unary_rpc_method_handler(refuse)
        return await continuation(handler_call_details)


class Served:
    """A channel to a server of the service, and what the server counts."""

    def __init__(self, channel: grpc.aio.Channel, metrics: Metrics) -> None:
        self.channel, self._metrics = channel, metrics

    async def call(self, method: str, end: str, count: int = 1) -> str:
        """Make a call of `count` messages that ends like that; its status."""
        client, server = arity_of(method)
        received = self.value("msg_received_total", method)

        async def requests() -> AsyncIterator[bytes]:
            for _ in range(count - 1):
                yield b"ok"
            yield end.encode()
            if end in ("deadline", "cancel"):
                await asyncio.Event().wait()

        call = getattr(self.channel, f"{client}_{server}")(f"/t.Arities/{method}")(
            requests() if client == "stream" else end.encode(),
            timeout=0.5 if end == "deadline" else 30,
            metadata=(("refused", "yes"),) if end == "refused" else (),
        )
        if end == "cancel":
            if server == "stream":
                await call.read()
            else:
                await self.until(lambda: self.value("msg_received_total", method) > received)
            call.cancel()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            if server == "stream":
                while await call.read() is not grpc.aio.EOF:
                    pass
            else:
                await call
        return str((await call.code()).name)

    def value(self, name: str, method: str, **labels: str) -> float:
        """Of grpc_server_{name}."""
        if method in METHODS:
            labels |= {"grpc_type": TYPES[method], "grpc_service": "t.Arities"}
        else:
            labels |= {"grpc_type": method, "grpc_service": method}
        labels["grpc_method"] = method
        value = self._metrics.registry.get_sample_value(f"grpc_server_{name}", labels)
        return value or 0.0

    def handled(self, method: str) -> dict[str, float]:
        """Calls that ended, by status."""
        counts = {
            code.name: self.value("handled_total", method, grpc_code=code.name)
            for code in grpc.StatusCode
        }
        return {name: count for name, count in counts.items() if count}

    async def until(self, condition: Callable[[], object]) -> None:
        """Until it holds: a caller may know of a call's end before the server."""
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it does not come to hold")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    metrics = Metrics()
    server = grpc.aio.server(interceptors=[Telemetry(metrics, [described()]), Refusing()])
    handlers = {
        name: getattr(grpc, "{}_{}_rpc_method_handler".format(*arity_of(name)))(
            behavior, parse, bytes
        )
        for name, behavior in METHODS.items()
    }
    service = grpc.method_handlers_generic_handler("t.Arities", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(channel, metrics)
    await server.stop(None)


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_is_counted_as_its_caller_saw_it(method: str, served: Served) -> None:
    seen: Counter[str] = Counter()
    for end in random.Random(method).sample(ENDS * 2, len(ENDS) * 2):
        seen[await served.call(method, end)] += 1
        await served.until(lambda: sum(served.handled(method).values()) >= seen.total())
        assert served.handled(method) == seen
    assert seen.keys() == {
        "OK", "FAILED_PRECONDITION", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED", "UNAUTHENTICATED",
    }  # fmt: skip
    assert served.value("started_total", method) == seen.total()
    assert served.value("handling_seconds_count", method) == seen.total()
    assert served.value("handling_seconds_sum", method) > 0.6  # of those two that ran out of time


@pytest.mark.parametrize("method", METHODS)
async def test_messages_are_counted_in_both_directions(method: str, served: Served) -> None:
    client, server = arity_of(method)
    counts = [1, 3, 2] if client == "stream" else [1, 1, 1]
    for count in counts:
        assert await served.call(method, "ok", count) == "OK"
    received = sum(counts)
    sent = 3 if server == "unary" else received if client == "stream" else 6
    await served.until(lambda: sum(served.handled(method).values()) == 3)
    assert served.value("msg_received_total", method) == received
    assert served.value("msg_sent_total", method) == sent


async def test_a_call_of_nothing_that_exists_is_counted_as_unknown(served: Served) -> None:
    for path in ("/t.Arities/nothing", "/no.Such/thing"):
        with pytest.raises(grpc.aio.AioRpcError):
            await served.channel.unary_unary(path)(b"")
    await served.until(lambda: served.handled("unknown") == {"UNIMPLEMENTED": 2})
    assert served.value("started_total", "unknown") == 2
