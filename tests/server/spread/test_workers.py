"""Calls to other workers: over sockets, on to owners on other hosts, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from routetrace.common.errors import Moved, RouteTraceError, Unavailable
from routetrace.common.security import Security
from routetrace.server.common.rpc import fail
from routetrace.server.core import Core
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.workers import SERVICE, SocketWorkers
from routetrace.server.store.memory import MemoryStore
from routetrace.stored import parts_pb2 as parts

Answer = Callable[[], "parts.LocateResponse | RouteTraceError"]


@asynccontextmanager
async def worker(target: str, answer: Answer) -> AsyncIterator[int]:
    """A worker that answers every call; yields its port."""

    async def handle(_: Any, context: Any) -> Any:
        given = answer()
        if isinstance(given, RouteTraceError):
            await fail(context, given)
        return given

    handler = grpc.unary_unary_rpc_method_handler(
        handle,
        parts.LocateRequest.FromString,
        lambda message: message.SerializeToString(),
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Locate": handler}),)
    )
    port = server.add_insecure_port(target)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def here(*indexes: int) -> parts.LocateResponse:
    return parts.LocateResponse(here=indexes)


async def ask(workers: SocketWorkers) -> list[int]:
    answer = await workers.call(1, "Locate", parts.LocateRequest(), parts.LocateResponse)
    return list(answer.here)


async def test_bytes_that_do_not_parse_are_a_typed_error(caplog: pytest.LogCaptureFixture) -> None:
    core = Core(MemoryStore(1 << 20), ServerConfig(store="memory"))
    server = grpc.aio.server()
    core.parts.add_to(server, trusted=False)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in core.parts.methods:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/{SERVICE}/{name}")(b"\xff\xff")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "2 bytes that do not parse" in caught.value.details()
    finally:
        await server.stop(None)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_a_worker_that_stands_by_names_the_owner_which_is_asked_from_then_on(
    tmp_path: Path, stack: AsyncExitStack
):
    asked = {"sibling": 0, "first": 0, "second": 0}
    owner = {"now": "first"}
    ports: dict[str, int] = {}

    def sibling() -> RouteTraceError:
        asked["sibling"] += 1
        return Moved("it is there", target=f"127.0.0.1:{ports[owner['now']]}")

    def at(name: str, number: int) -> Answer:
        def answer() -> parts.LocateResponse | RouteTraceError:
            asked[name] += 1
            return here(number) if owner["now"] == name else Unavailable("its lease is over")

        return answer

    socket = str(tmp_path / "parts-1")
    await stack.enter_async_context(worker(f"unix:{socket}", sibling))
    for number, name in enumerate(("first", "second")):
        ports[name] = await stack.enter_async_context(worker("127.0.0.1:0", at(name, number)))
    workers = SocketWorkers({1: socket}, Security())
    stack.push_async_callback(workers.close)
    assert workers.address(1) == ""
    assert [await ask(workers), await ask(workers)] == [[0], [0]]
    assert workers.address(1) == f"127.0.0.1:{ports['first']}"
    assert asked == {"sibling": 1, "first": 2, "second": 0}
    owner["now"] = "second"
    assert [await ask(workers), await ask(workers)] == [[1], [1]]
    assert asked == {"sibling": 2, "first": 3, "second": 2}


async def test_owners_that_name_each_other_are_unavailable(tmp_path: Path, stack: AsyncExitStack):
    ports: list[int] = []
    socket = str(tmp_path / "parts-1")
    asked = 0

    def answer() -> RouteTraceError:
        nonlocal asked
        asked += 1
        return Moved("it is there", target=f"127.0.0.1:{ports[asked % 2]}")

    await stack.enter_async_context(worker(f"unix:{socket}", answer))
    ports += [await stack.enter_async_context(worker("127.0.0.1:0", answer)) for _ in range(2)]
    workers = SocketWorkers({1: socket}, Security())
    stack.push_async_callback(workers.close)
    with pytest.raises(Unavailable, match="worker 1 does not answer: it is there"):
        await ask(workers)
    assert asked == 3


async def test_a_worker_that_is_gone_is_unavailable_until_it_is_back(
    tmp_path: Path, stack: AsyncExitStack
):
    socket = str(tmp_path / "parts-1")
    workers = SocketWorkers({1: socket}, Security())
    stack.push_async_callback(workers.close)
    with pytest.raises(Unavailable, match="worker 1 does not answer: UNAVAILABLE"):
        await ask(workers)
    async with worker(f"unix:{socket}", lambda: here(7)):
        for _ in range(100):
            try:
                assert await ask(workers) == [7]
                break
            except Unavailable:  # gRPC waits before it connects again
                await workers.close()
                workers = SocketWorkers({1: socket}, Security())
        else:
            raise AssertionError("it does not come back")


async def test_a_token_does_not_travel_in_plain_text(tmp_path: Path, stack: AsyncExitStack):
    (tmp_path / "token").write_text("secret\n")
    socket = str(tmp_path / "parts-1")
    moved = Moved("it is there", target="192.0.2.1:7411")
    await stack.enter_async_context(worker(f"unix:{socket}", lambda: moved))
    workers = SocketWorkers({1: socket}, Security(token_file=str(tmp_path / "token")))
    stack.push_async_callback(workers.close)
    with pytest.raises(Unavailable, match="plain text"):
        await ask(workers)
