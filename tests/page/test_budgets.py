"""Bounds of work, memory and connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from routetrace.client import Security
from routetrace.common.errors import InvalidArgument, Overloaded
from routetrace.page import backends, serving, traces
from routetrace.page.backends import Backends
from routetrace.page.budgets import Cache, Gate, Shared
from routetrace.page.config import PageConfig
from routetrace.page.sessions import ANYBODY
from routetrace.page.traces import Traces
from routetrace.v1 import routetrace_pb2 as pb
from support.pages import Browser, running_page
from support.servers.client_server import ScriptedServer, truth
from support.waiting import wait_for


class TestGate:
    async def test_as_many_as_it_lets_through(self) -> None:
        gate, inside, peak = Gate(2, 10, 30.0), 0, 0

        async def task() -> None:
            nonlocal inside, peak
            async with gate.enter():
                inside += 1
                peak = max(peak, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(task() for _ in range(12)))
        assert peak == 2

    async def test_beyond_those_who_wait_none_does(self) -> None:
        gate, end = Gate(1, 2, 3600.0), asyncio.Event()

        async def task() -> None:
            async with gate.enter():
                await end.wait()

        tasks = [asyncio.create_task(task()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Too much is being read") as caught:
            await task()
        assert caught.value.retry_after == 5
        end.set()
        await asyncio.gather(*tasks)
        await task()

    async def test_nobody_waits_longer_than_the_limit(self) -> None:
        gate = Gate(1, 2, 0.01)
        async with gate.enter():
            with pytest.raises(Overloaded):
                async with gate.enter():
                    raise AssertionError
        async with gate.enter():
            pass


class TestShared:
    async def test_who_asks_for_the_same_shares_a_call(self) -> None:
        shared, calls, end = Shared(), 0, asyncio.Event()

        async def make() -> int:
            nonlocal calls
            calls += 1
            await end.wait()
            return calls

        tasks = [asyncio.create_task(shared.call(key, make)) for key in ("a", "a", "b")]
        await asyncio.sleep(0)
        tasks[0].cancel()  # which does not end the call of the other one
        await asyncio.sleep(0)
        end.set()
        assert await asyncio.gather(*tasks[1:]) == [2, 2]
        assert await shared.call("a", make) == 3

    async def test_errors_are_shared_and_not_kept(self) -> None:
        shared, answers = Shared(), [Overloaded("busy"), 5]

        async def make() -> Any:
            await asyncio.sleep(0)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        failed = await asyncio.gather(
            shared.call("a", make), shared.call("a", make), return_exceptions=True
        )
        assert [type(one) for one in failed] == [Overloaded, Overloaded]
        assert await shared.call("a", make) == 5


@dataclass
class Value:
    nbytes: int


class TestCache:
    def test_those_used_last_stay(self) -> None:
        cache: Cache[Value] = Cache(100)
        for name in "abc":
            cache.put((name,), Value(30))
        assert cache.get(("a",))
        cache.put(("d",), Value(30))
        assert [name for name in "abcd" if cache.get((name,))] == ["a", "c", "d"]
        cache.make_room(60)
        assert [name for name in "abcd" if cache.get((name,))] == ["d"]

    def test_a_value_that_grows_drops_others(self) -> None:
        cache: Cache[Value] = Cache(100)
        first, second = Value(10), Value(10)
        cache.put(("a",), first)
        cache.put(("b",), second)
        second.nbytes = 95
        cache.settle()
        assert cache.get(("a",)) is None
        assert cache.nbytes == 95
        second.nbytes = 101
        cache.settle()
        assert cache.nbytes == 0

    def test_what_was_kept_for_a_token_is_dropped(self) -> None:
        cache: Cache[Value] = Cache(100)
        cache.put(("a", 1), Value(10))
        cache.put(("b", 1), Value(10))
        cache.drop("a")
        assert cache.get(("a", 1)) is None
        assert cache.get(("b", 1))


def test_a_trace_is_read_once(server) -> None:
    """Rectangles, tiles and rows of one state come from one read."""
    with ScriptedServer() as scripted:
        source = truth(300)
        scripted.serve(source)
        scripted.tell(lambda _: source.info)
        with running_page(scripted.target) as address:
            browser = Browser(address)
            for end, params in (
                ("segments", {}), ("tile", {"what": "changed", "z": 0, "x": 1}),
                ("rows", {"start": 0, "stop": 9}), ("segments", {}),
                ("tile", {"what": "changed", "z": 1, "x": 0}),
            ):  # fmt: skip
                assert browser.trace("default", end, id="req", **params).status == 200
            assert scripted.counts["GetTrace"] == 1
            assert scripted.counts["StatTrace"] == 5
            source.info.updated_ms += 1
            assert browser.trace("default", "segments", id="req").status == 200
            assert scripted.counts["GetTrace"] == 2


def test_what_was_read_for_one_token_is_not_kept_for_another() -> None:
    with ScriptedServer() as scripted:
        source = truth(300)
        scripted.serve(source)
        scripted.tell(lambda _: source.info)
        scripted.script["GetServerInfo"] = lambda request, _: pb.GetServerInfoResponse()
        with running_page(scripted.target) as address:
            browsers = Browser(address), Browser(address)
            for number, browser in enumerate(browsers):
                assert browser.sign_in(f"rt_{number}").status == 204
                for end in ("segments", "segments"):
                    assert browser.trace("default", end, id="req").status == 200
                assert scripted.counts["GetTrace"] == number + 1


def test_a_trace_that_is_too_large_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ScriptedServer() as scripted:
        source = truth(300)
        source.info.num_rows = 2**31 - 2
        scripted.serve(source)
        scripted.tell(lambda _: source.info)
        with running_page(scripted.target) as address:
            answer = Browser(address).trace("default", "segments", id="req")
            assert answer.status == 400
            assert "expected at most 512 MiB" in answer.error["message"]
            assert not scripted.counts["GetTrace"]
    assert traces.MAX_BYTES == 512 << 20


def connect(address: str) -> socket.socket:
    url = urlsplit(address)
    return socket.create_connection((url.hostname, url.port), timeout=30)


def test_what_a_trace_takes_is_known_before_it_is_read() -> None:
    """So that none drops itself once its tiles are worked out, and is read for each of them."""
    source = truth(700)
    size = 0
    with ScriptedServer() as scripted:
        scripted.serve(source)
        scripted.tell(lambda _: source.info)

        async def read(most: int) -> int:
            nonlocal size
            server = Backends(PageConfig(target=scripted.target, security=Security()))
            kept = Traces(server, most)
            stat = await server.stat(ANYBODY, "default", "req", None)
            size = kept._size(stat)
            for _ in range(2):
                await kept.levels(ANYBODY, stat, "as_sampled")
                await kept.segments(ANYBODY, stat, "as_sampled")
            await server.aclose()
            return kept._kept.nbytes

        asyncio.run(read(1 << 30))
        scripted.requests.clear()
        assert 0 < asyncio.run(read(size)) <= size
        assert scripted.counts["GetTrace"] == 1
        with pytest.raises(InvalidArgument, match="expected at most 2 MiB"):
            asyncio.run(read(size - 1))


def test_reads_under_way_share_the_memory() -> None:
    going, end = threading.Event(), threading.Event()
    with ScriptedServer() as scripted:

        def info(request: Any) -> pb.TraceInfo:
            info = truth(300, trace_id=request.trace_id).info
            info.num_rows = 15_000_000 if request.trace_id != "small" else 300  # of 5 x (3 + 1) B
            return info

        def get(request: Any, context: Any) -> Any:
            if request.trace_id == "first":
                going.set()
                assert end.wait(60)
            return iter(truth(300, trace_id=request.trace_id).responses(request))

        scripted.tell(info)
        scripted.script["GetTrace"] = get
        with running_page(scripted.target) as address, ThreadPoolExecutor() as pool:
            first = pool.submit(Browser(address).trace, "default", "segments", id="first")
            assert going.wait(60)
            answer = Browser(address).trace("default", "segments", id="second")
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert answer.error["message"] == "Too much is being read. Trying again in 5 s."
            assert Browser(address).trace("default", "segments", id="small").status == 200
            end.set()
            first.result()
            assert Browser(address).trace("default", "segments", id="second").status == 200


def test_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time; those for whom no place becomes free are refused."""
    monkeypatch.setattr(backends, "_MAX_WAIT_S", 0.1)
    started: list[str] = []
    end = threading.Event()
    with ScriptedServer() as scripted:

        def get(request: Any, context: Any) -> Any:
            started.append(request.trace_id)
            assert end.wait(60)
            return iter(truth(300, trace_id=request.trace_id).responses(request))

        scripted.tell(lambda request: truth(300, trace_id=request.trace_id).info)
        scripted.script["GetTrace"] = get
        with running_page(scripted.target) as address, ThreadPoolExecutor() as pool:
            reads = [
                pool.submit(Browser(address).trace, "default", "segments", id=f"t{n}")
                for n in range(4)
            ]
            wait_for(lambda: len(started) == 4)
            for kept in ("segments", "rows"):
                params = {"start": 0, "stop": 9} if kept == "rows" else {}
                answer = Browser(address).trace("default", kept, id="t9", **params)
                assert (answer.status, answer.error["kind"]) == (503, "overloaded")
            assert Browser(address).trace("default", id="t9").status == 200  # without rows
            end.set()
            assert [read.result().status for read in reads] == [200] * 4
            assert Browser(address).trace("default", "segments", id="t9").status == 200


def is_ended(connection: socket.socket) -> bool:
    """Whether the page ends a connection, without an answer."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_connections_are_bounded(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    with running_page(server.target) as address:
        first = Browser(address)
        assert first.call("/api/v1/session").status == 200
        idle = [connect(address) for _ in range(2)]
        answer = Browser(address).call("/api/v1/session")
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "5"
        assert answer.error["kind"] == "overloaded"
        assert answer.error["message"] == "Too much is being read. Trying again in 5 s."
        assert answer.headers["Content-Security-Policy"]
        assert answer.headers["Connection"] == "close"
        wrong = Browser(address).call("/", headers={"Host": "evil.example"})
        assert wrong.status == 421
        assert first.call("/api/v1/session").status == 200  # those that were there go on
        for one in idle:
            one.close()
        wait_for(lambda: Browser(address).call("/api/v1/session").status == 200)


def test_far_beyond_the_bound_connections_are_dropped(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(serving, "_LOOK_S", 3600.0)  # idle connections stay
    with running_page(server.target) as address:
        held = [connect(address) for _ in range(4)]
        # The page has seen these four once it answers one of them.
        held[3].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[3].recv(100).startswith(b"HTTP/1.1 421")
        assert is_ended(connect(address))
        for one in held:
            one.close()


def test_a_connection_without_a_request_ends(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LOOK_S", 0.05)
    with running_page(server.target) as address:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: "):
            idle = connect(address)
            idle.sendall(sent)
            assert is_ended(idle)
        # A body that never comes.
        idle = connect(address)
        host = urlsplit(address).netloc
        idle.sendall(
            f"POST /api/v1/session HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n"
            "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n".encode()
        )
        assert is_ended(idle)


def test_a_request_that_is_worked_on_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at its connection do not end it."""
    monkeypatch.setattr(serving, "_LOOK_S", 0.05)
    with ScriptedServer() as scripted, running_page(scripted.target) as address:

        def info(_: Any) -> pb.TraceInfo:
            for _ in range(2):  # twice as long as an idle connection is kept
                assert is_ended(connect(address))
            return truth(30).info

        scripted.tell(info)
        assert Browser(address).trace("default", id="req").status == 200
