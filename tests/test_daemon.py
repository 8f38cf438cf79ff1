"""The process: what it says of its health, how it ends, and where it refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from routetrace.server import daemon
from routetrace.server.config import ServerConfig
from routetrace.server.testing import ServerProcess, run_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INGEST, TRACE = daemon.READY_SERVICES


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class StubCore:
    """A core whose start, sweep and stop are the test's to decide."""

    made: StubCore

    def __init__(self, store: Any, config: ServerConfig) -> None:
        StubCore.made = self
        self.may_start = asyncio.Event()
        self.sweeps = asyncio.Queue[int]()
        self.stopped = False

    def add_to(self, server: grpc.aio.Server) -> None:
        pass

    async def start(self) -> None:
        await self.may_start.wait()

    async def sweep(self) -> None:
        self.sweeps.put_nowait(1)
        raise RuntimeError("this sweep failed")

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
async def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[asyncio.Task[None], ServerConfig, Any]]:
    """The daemon in this process, over a StubCore: its task, settings and a health stub."""
    monkeypatch.setattr(daemon, "Core", StubCore)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = ServerConfig(
        listen=f"127.0.0.1:{port}",
        store="memory",
        drain_seconds=0.2,
        sweep_interval_seconds=0.01,
        ready_file=tmp_path / "ready",
    )
    task = asyncio.create_task(daemon._serve(config))
    async with grpc.aio.insecure_channel(config.listen) as channel:
        yield task, config, health_pb2_grpc.HealthStub(channel)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_ready_is_more_than_alive(
    served: tuple[asyncio.Task[None], ServerConfig, Any], caplog: pytest.LogCaptureFixture
) -> None:
    task, config, stub = served
    assert config.ready_file

    async def check(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, wait_for_ready=True, timeout=30)).status

    assert await check("") == SERVING
    assert await check(INGEST) == await check(TRACE) == NOT_SERVING
    assert not config.ready_file.exists()
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=TRACE), timeout=30)
    assert (await watch.read()).status == NOT_SERVING

    StubCore.made.may_start.set()
    assert (await watch.read()).status == SERVING
    await StubCore.made.sweeps.get()
    assert await check(INGEST) == await check(TRACE) == SERVING
    assert config.ready_file.read_text() == config.listen
    for _ in range(3):  # one that fails does not end the others
        await StubCore.made.sweeps.get()
    assert "this sweep failed" in caplog.text

    os.kill(os.getpid(), signal.SIGTERM)
    assert (await watch.read()).status == NOT_SERVING
    await asyncio.wait_for(task, 30)
    assert StubCore.made.stopped
    assert not config.ready_file.exists()


async def test_sigterm_during_the_start(
    served: tuple[asyncio.Task[None], ServerConfig, Any],
) -> None:
    task, _, stub = served
    await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 30)
    assert StubCore.made.stopped


def test_a_server_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_server(data_dir=tmp_path / "data", log_format="json") as server:
        assert server.target.startswith("127.0.0.1:")
        assert daemon.main(["health", "--target", server.target]) == 0
        assert server.stop() == 0
        assert daemon.main(["health", "--target", server.target, "--timeout", "2"]) == 1
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert capsys.readouterr().out.count(": SERVING") == 2
    assert {"event", "level", "ts"} <= set.intersection(*({*line} for line in lines))
    events = [line["event"] for line in lines]
    assert f"listening on {server.target}" in events
    assert events[-1] == "stopped"
    assert not server.log.exists()
    # What it left needs no looking through.
    assert (tmp_path / "data" / "db" / "clean").exists()


def test_a_second_signal_ends_it_at_once() -> None:
    with (
        run_server(drain_seconds=1000) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        os.kill(server.pid, signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert server.stop() == 128 + signal.SIGTERM


def test_where_it_can_not_start(tmp_path: Path) -> None:
    with run_server(data_dir=tmp_path) as server:
        port = server.target.rpartition(":")[2]
        refusal = ended_with(lambda: run_server(port=int(port)))
        assert refusal == f"can not listen on {server.target}: [Errno 98] Address already in use"
        refusal = ended_with(lambda: run_server(data_dir=tmp_path))
        assert f"data_dir {tmp_path} is in use by process {server.pid}" in refusal
    (tmp_path / "file").write_text("")
    assert "Not a directory" in ended_with(lambda: run_server(data_dir=tmp_path / "file" / "x"))


def ended_with(start: Callable[[], ServerProcess]) -> str:
    """The one line that a server which does not start leaves."""
    with pytest.raises(RuntimeError, match="ended with code 1: ") as error:
        start()
    (line,) = str(error.value).splitlines()
    return line.partition("routetrace-server: ")[2]


def test_kill_9_and_start_again(tmp_path: Path) -> None:
    with run_server(data_dir=tmp_path) as server:
        server.kill()
    assert not (tmp_path / "db" / "clean").exists()
    with run_server(data_dir=tmp_path) as server:
        assert server.stop() == 0


async def test_a_burst_of_calls_is_not_cancelled() -> None:
    count = 3000
    with run_server(drain_seconds=0) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [
                stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(count)
            ]
            answers = await asyncio.gather(
                *(watch.read() for watch in watches), return_exceptions=True
            )
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            assert not failed, (len(failed), failed[0])
            for watch in watches:
                watch.cancel()
