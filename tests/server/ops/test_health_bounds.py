"""Health checks and scrapes, which need no token, hold a bounded part of the server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.server.common.metrics import Metrics
from routetrace.server.ops import health
from routetrace.server.testing import run_server
from support.scrape import Scraped
from support.waiting import wait_for

ANY = health_pb2.HealthCheckRequest()


@contextlib.asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, **limits: int) -> Any:
    """A health service alone, with small limits; its service and a channel."""
    for name, value in limits.items():
        monkeypatch.setattr(health, name, value)
    server = grpc.aio.server()
    service = health.Health(Metrics())
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, channel
    await server.stop(None)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_open_watches_are_bounded_and_closed_ones_make_room(monkeypatch) -> None:
    async with served(monkeypatch, MAX_WATCHES=4) as (service, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        first, second = stub.Watch(ANY), stub.Watch(ANY)
        for watch in (first, second):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(ANY).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ERROR_METADATA_KEY in dict(refused.value.trailing_metadata() or ())
        assert (await stub.Check(ANY)).status == health_pb2.HealthCheckResponse.SERVING
        first.cancel()

        async def admitted() -> bool:
            try:
                return bool(await stub.Watch(ANY).read())
            except grpc.aio.AioRpcError:
                return False

        await until(admitted)
        service.drain()
        assert (await second.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_calls_without_their_message_make_room_for_those_with_it(monkeypatch) -> None:
    async with served(monkeypatch, MAX_UNREAD=3, _MESSAGE_SECONDS=3600) as (service, channel):
        method = channel.stream_stream(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        stub = health_pb2_grpc.HealthStub(channel)
        silent = [method() for _ in range(20)]
        for call in silent:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it has ended already, to make room
                await call.wait_for_connection()  # its headers are on their way
        for _ in range(5):
            assert (await stub.Check(ANY)).status == health_pb2.HealthCheckResponse.SERVING

        async def ended() -> bool:
            return sum(call.done() for call in silent) >= 17

        await until(ended)
        for call in silent:
            call.cancel()


async def test_a_call_whose_message_never_comes_ends(monkeypatch) -> None:
    monkeypatch.setattr(health, "_MESSAGE_SECONDS", 0.1)
    async with served(monkeypatch) as (_, channel):
        call = channel.stream_stream("/grpc.health.v1.Health/Check")()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_check_of_an_unknown_service_is_not_found(monkeypatch) -> None:
    async with served(monkeypatch) as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Check(health_pb2.HealthCheckRequest(service="none"))
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="none"))
        response = await unknown.read()
        assert response.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.slow
def test_half_requests_at_the_metrics_port_neither_add_up_nor_keep_scrapes_out() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server, ExitStack() as stack:
        host, _, port = server.metrics_target.rpartition(":")
        threads = Path(f"/proc/{server.pid}/task")
        before = len(list(threads.iterdir()))
        for round_number in range(4):
            for _ in range(50):
                half = stack.enter_context(socket.create_connection((host, int(port))))
                half.sendall(b"GET /met")
            # The half requests are all open: 10 s have not passed, or they are made again.
            wait_for(lambda: scraped(server.metrics_target), 60)
            assert len(list(threads.iterdir())) - before <= 40, round_number


def scraped(target: str) -> bool:
    try:
        return Scraped(target).value("routetrace_ready") == 1
    except OSError:
        return False
