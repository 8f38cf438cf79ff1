"""The process: what it says of its health, how it ends, and where it refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from routetrace.client import RouteClient
from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.common.layout import ModelLayout
from routetrace.common.security import Security
from routetrace.server import daemon
from routetrace.server.core import Core
from routetrace.server.ops.health import READY_SERVICES
from routetrace.server.settings.config import ServerConfig
from routetrace.server.testing import ServerProcess, free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INGEST, TRACE = READY_SERVICES

#: Rows of it are larger than what sockets take in.
BIG = ModelLayout(tuple(range(24)), 24, 256, 8)


class SteeredCore(Core):
    """A core whose start and sweeps are the test's to decide."""

    made: SteeredCore

    def __init__(self, store: Any, config: ServerConfig) -> None:
        super().__init__(store, config)
        SteeredCore.made = self
        self.may_start = asyncio.Event()
        self.sweeps = asyncio.Queue[int]()
        self.stopped = False

    async def start(self) -> None:
        await self.may_start.wait()
        await super().start()

    async def sweep(self) -> None:
        self.sweeps.put_nowait(1)
        raise RuntimeError("this sweep failed")

    async def stop(self) -> None:
        await super().stop()
        self.stopped = True


@pytest.fixture
async def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[asyncio.Task[None], ServerConfig, Any]]:
    """The daemon in this process, over a SteeredCore: its task, settings and a health stub."""
    monkeypatch.setattr(daemon, "Core", SteeredCore)
    config = ServerConfig(
        listen=f"127.0.0.1:{free_ports(1)}",
        metrics_listen=f"127.0.0.1:{free_ports(1)}",
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
    scraped = await asyncio.to_thread(Scraped, config.metrics_listen)
    assert scraped.value("routetrace_ready") == 0
    assert "routetrace_build_info" in scraped.types
    assert "routetrace_traces" not in scraped.types  # nobody knows yet how many there will be

    SteeredCore.made.may_start.set()
    assert (await watch.read()).status == SERVING
    await SteeredCore.made.sweeps.get()
    assert await check(INGEST) == await check(TRACE) == SERVING
    assert config.ready_file.read_text() == f"{config.listen}\n{config.metrics_listen}"
    scraped = await asyncio.to_thread(Scraped, config.metrics_listen)
    assert scraped.value("routetrace_ready") == 1
    assert "routetrace_traces" in scraped.types
    for _ in range(3):  # one that fails does not end the others
        await SteeredCore.made.sweeps.get()
    assert "this sweep failed" in caplog.text

    os.kill(os.getpid(), signal.SIGTERM)
    assert (await watch.read()).status == NOT_SERVING
    await asyncio.wait_for(task, 30)
    assert SteeredCore.made.stopped
    assert not config.ready_file.exists()


def test_no_other_user_can_read_what_a_server_or_a_backup_writes(tmp_path: Path) -> None:
    data_dir, ready, copy = tmp_path / "data", tmp_path / "ready", tmp_path / "copy"
    program = [sys.executable, "-m", "routetrace.server.daemon"]
    flags = ["--workers=2", f"--listen=127.0.0.1:{free_ports(2)}", "--page-listen="]
    flags += [f"--data-dir={data_dir}", f"--ready-file={ready}"]
    with subprocess.Popen([*program, *flags], umask=0o022) as server:
        try:
            wait_for(lambda: ready.exists() or server.poll() is not None)
            written = [ready, data_dir, *data_dir.rglob("*")]
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in written}
        finally:
            server.terminate()
    words = ["backup", "--data-dir", str(data_dir), "--to", str(copy)]
    subprocess.run([*program, *words], umask=0o022, check=True, timeout=60)
    modes |= {path: stat.S_IMODE(path.stat().st_mode) for path in [copy, *copy.rglob("*")]}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert {"partition-0", "partition-1", "partitions", "lock"} <= {p.name for p in modes}


async def test_sigterm_during_the_start(
    served: tuple[asyncio.Task[None], ServerConfig, Any],
) -> None:
    task, _, stub = served
    await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 30)
    assert SteeredCore.made.stopped


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


def test_a_second_signal_ends_it_at_once() -> None:
    with (
        run_server(drain_seconds=1000, metrics_listen="127.0.0.1:0") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        os.kill(server.pid, signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        wait_for(lambda: not Scraped(server.metrics_target).value("routetrace_ready"))
        assert server.stop() == 128 + signal.SIGTERM


def test_a_stream_that_opens_while_the_server_drains_is_ended() -> None:
    with (
        run_server(drain_seconds=1000, metrics_listen="127.0.0.1:0") as server,
        grpc.insecure_channel(server.target) as channel,
        ThreadPoolExecutor(1) as thread,
    ):
        draining, over = threading.Event(), threading.Event()

        def requests() -> Iterator[pb.IngestRequest]:
            draining.wait(30)
            hello = pb.Hello(run="a", engine_id="e", layout=LAYOUT.to_proto())
            yield pb.IngestRequest(hello=hello)
            over.wait(60)

        def value(name: str, **labels: str) -> float:
            return Scraped(server.metrics_target).value(name, **labels)

        answers = pb_grpc.IngestServiceStub(channel).Ingest(requests(), timeout=60)
        wait_for(lambda: value("grpc_server_started_total", grpc_method="Ingest"))
        code = thread.submit(server.stop)
        wait_for(lambda: not value("routetrace_ready"))
        draining.set()
        with pytest.raises(grpc.RpcError) as refusal:
            list(answers)
        over.set()
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        assert code.result() == 0


def test_systemd_hears_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(30)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with run_server() as server:
            assert systemd.recv(100) == b"READY=1"
            assert server.stop() == 0
        assert systemd.recv(100) == b"STOPPING=1"


def test_ingest_is_not_serving_while_the_disk_takes_no_commits(tmp_path: Path) -> None:
    renewal = pb.RenewLeaseRequest(run="run", trace_ids=["trace"])
    with run_server(data_dir=tmp_path) as server, grpc.insecure_channel(server.target) as channel:
        traces = pb_grpc.TraceServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=INGEST), timeout=60)
        assert next(watch).status == SERVING
        traces.RenewLease(renewal, timeout=30)
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, hard))
        with pytest.raises(grpc.RpcError) as refusal:
            traces.RenewLease(renewal, timeout=30)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # as of a full disk
        assert str(tmp_path) not in str(refusal.value.details())
        assert next(watch).status == NOT_SERVING
        reads = health.Check(health_pb2.HealthCheckRequest(service=TRACE), timeout=30)
        assert reads.status == SERVING
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert next(watch).status == SERVING  # nobody has written in between
        traces.RenewLease(renewal, timeout=30)


def test_reflection_is_served_where_it_is_asked_for() -> None:
    for reflection, status in ((True, None), (False, grpc.StatusCode.UNIMPLEMENTED)):
        with (
            run_server(reflection=reflection) as server,
            grpc.insecure_channel(server.target) as channel,
        ):
            database = ProtoReflectionDescriptorDatabase(channel)
            if status is None:
                services = set(database.get_services())
                assert services == {
                    *READY_SERVICES,
                    "grpc.health.v1.Health",
                    "grpc.reflection.v1alpha.ServerReflection",
                }
                for service in services:
                    assert database.FindFileContainingSymbol(service).service
            else:
                with pytest.raises(grpc.RpcError) as refusal:
                    database.get_services()
                assert refusal.value.code() == status


@pytest.mark.slow
def test_where_it_can_not_start(tmp_path: Path) -> None:
    with run_server(data_dir=tmp_path, metrics_listen="127.0.0.1:0") as server:
        port = server.target.rpartition(":")[2]
        in_use = "[Errno 98] Address already in use"
        refusal = ended_with(lambda: run_server(port=int(port)))
        assert refusal == f"cannot listen on {server.target}: {in_use}"
        taken = server.metrics_target
        refusal = ended_with(lambda: run_server(metrics_listen=taken))
        assert refusal == f"cannot serve metrics on {taken}: {in_use}"
        refusal = ended_with(lambda: run_server(data_dir=tmp_path))
        assert f"data_dir {tmp_path} is in use by process {server.pid}" in refusal
    (tmp_path / "file").write_text("")
    assert "Not a directory" in ended_with(lambda: run_server(data_dir=tmp_path / "file" / "x"))
    missing = tmp_path / "none.pem"
    refusal = ended_with(lambda: run_server(tls_cert=missing, tls_key=missing), code=2)
    assert str(missing) in refusal


def ended_with(start: Callable[[], ServerProcess], code: int = 1) -> str:
    """The one line that a server which does not start leaves."""
    with pytest.raises(RuntimeError, match=f"ended with code {code}: ") as error:
        start()
    (line,) = str(error.value).splitlines()
    return line.partition("routetrace-server: ")[2]


class Feeding(threading.Thread):
    """Feeds traces, one chunk each, until the server ends the stream."""

    def __init__(self, target: str, run: str) -> None:
        super().__init__()
        self.feeder = Feeder(target, LAYOUT, run=run)
        self.acknowledged = 0
        self.status: grpc.StatusCode | None = None

    @staticmethod
    def rows(number: int) -> np.ndarray:
        return rows_of(LAYOUT, 20, seed=number)

    def run(self) -> None:
        try:
            while True:
                rows = self.rows(self.acknowledged)
                handle = self.feeder.begin(f"t{self.acknowledged}", prompt_len=len(rows))
                self.feeder.step(rows, [(handle, 0, len(rows))])
                self.feeder.finish(handle, len(rows) + 1)
                self.feeder.flush()
                self.acknowledged += 1
        except grpc.RpcError as error:
            self.status = error.code()


@pytest.mark.slow
def test_sigterm_under_load_ends_it_in_time_and_loses_nothing(tmp_path: Path) -> None:
    # Ids of 8 groups of 32 experts, one of each: quickly made, and hard to compress.
    draws = np.random.default_rng(0).integers(32, size=(20_000, len(BIG.layer_ids), BIG.top_k))
    big = (draws + 32 * np.arange(BIG.top_k)).astype(BIG.dtype)
    with (
        run_server(data_dir=tmp_path, drain_seconds=2) as server,
        # Without this, a client takes in megabytes that nobody reads.
        grpc.insecure_channel(server.target, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        feeder = Feeder(server.target, BIG)
        for name, finish in (("big", True), ("running", False)):
            handle = feeder.begin(name, prompt_len=len(big))
            for start in range(0, len(big), 1000):
                feeder.step(big[start : start + 1000], [(handle, start, 1000)])
                feeder.flush()
            if finish:
                feeder.finish(handle, len(big) + 1)
        feeder.flush()
        stub = pb_grpc.TraceServiceStub(channel)

        def read(trace_id: str, **how: Any) -> Any:
            return stub.GetTrace(pb.GetTraceRequest(run="default", trace_id=trace_id, **how))

        waiting = [read(f"never-{i}", wait_for=pb.WAIT_FOR_END) for i in range(50)]
        followers = [read("running", follow=True) for _ in range(10)]
        for follower in followers:
            next(follower)
        slow = [read("big") for _ in range(3)]
        for reader in slow:
            next(reader)  # and never again
        feedings = [Feeding(server.target, f"run-{i}") for i in range(4)]
        for feeding in feedings:
            feeding.start()
        wait_for(lambda: all(feeding.acknowledged > 20 for feeding in feedings))

        assert server.stop(timeout=30) == 0

        for feeding in feedings:
            feeding.join(30)
            assert feeding.status == grpc.StatusCode.UNAVAILABLE
        for call in waiting:
            assert call.code() == grpc.StatusCode.UNAVAILABLE
            assert ERROR_METADATA_KEY in dict(call.trailing_metadata())  # it says when to come back
        for follower in followers:
            with pytest.raises(grpc.RpcError):
                list(follower)
            assert follower.code() == grpc.StatusCode.UNAVAILABLE
        for reader in slow:
            with pytest.raises(grpc.RpcError):  # cut off when the time was over
                list(reader)
            assert reader.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with run_server(data_dir=tmp_path) as server:
        for feeding in feedings:
            with RouteClient(server.target, run=feeding.feeder.hello.run) as client:
                stats = {stat.trace_id: stat for stat in client.find()}
                for number in range(feeding.acknowledged):
                    trace = client.get(f"t{number}")
                    np.testing.assert_array_equal(trace.topk_ids, feeding.rows(number))
                # At most the one that was under way beside them.
                assert len(stats) <= feeding.acknowledged + 1
        with RouteClient(server.target) as client:
            np.testing.assert_array_equal(client.get("big").topk_ids, big)


def test_a_server_that_asks_for_certificates_and_tokens_is_asked_for_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name, identity in (("server", "traces.example"), ("client", "probe")):
        issued = ca.issue_cert(identity)
        (tmp_path / f"{name}.pem").touch(0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    (tmp_path / "tokens.toml").write_text(
        f'[[token]]\nname = "t"\nsha256 = "{"0" * 64}"\nscopes = ["read"]\nruns = ["*"]\n'
    )
    with run_server(
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server.pem",
        tls_client_ca=tmp_path / "ca.pem",
        tokens_file=tmp_path / "tokens.toml",
        metrics_listen="127.0.0.1:0",
    ) as server:
        ask = ["health", "--target", server.target, "--timeout", "10"]
        flags = {
            "--ca-file": str(tmp_path / "ca.pem"),
            "--server-name": "traces.example",
            "--cert-file": str(tmp_path / "client.pem"),
            "--key-file": str(tmp_path / "client.pem"),
        }
        assert daemon.main([*ask, *(word for flag in flags.items() for word in flag)]) == 0
        assert daemon.main([*ask, "--ca-file", flags["--ca-file"], "--timeout", "2"]) == 1
        assert daemon.main([*ask, "--timeout", "2"]) == 1
        assert daemon.main([*ask, "--ca-file", str(tmp_path / "none.pem")]) == 2
        assert "none.pem" in capsys.readouterr().err
        # The environment says the same, and a token there stays at home.
        for flag, value in flags.items():
            monkeypatch.setenv("ROUTETRACE" + flag[1:].upper().replace("-", "_"), value)
        monkeypatch.setenv("ROUTETRACE_TOKEN_FILE", str(tmp_path / "none"))
        assert daemon.main(ask) == 0
        # Who is refused is counted, too, and nothing of what he sent is read.
        monkeypatch.delenv("ROUTETRACE_TOKEN_FILE")
        with (
            Security.from_environment().channel(server.target, []) as channel,
            pytest.raises(grpc.RpcError) as refusal,
        ):
            pb_grpc.TraceServiceStub(channel).StatTrace(pb.StatTraceRequest(run="r"), timeout=30)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        of = {"grpc_method": "StatTrace"}

        def refused() -> float:
            value = Scraped(server.metrics_target).value
            return value("grpc_server_handled_total", grpc_code="UNAUTHENTICATED", **of)

        wait_for(refused)
        value = Scraped(server.metrics_target).value
        assert value("grpc_server_started_total", **of) == refused() == 1
        assert value("grpc_server_msg_received_total", **of) == 0
        assert value("routetrace_denied_total", reason="unauthenticated") == 1
        assert value("routetrace_certificate_expiry_timestamp_seconds") > time.time()


def test_a_token_is_made_by_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert daemon.main(["token", "--name", "t", "--scope", "read", "--run", "*"]) == 0
    assert 'name = "t"' in capsys.readouterr().out


@pytest.mark.slow
async def test_a_burst_of_calls_is_not_cancelled() -> None:
    count = 5000
    with run_server(drain_seconds=0) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answers = await asyncio.gather(
                *(stub.Check(request, timeout=100) for _ in range(count)), return_exceptions=True
            )
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            assert not failed, (len(failed), failed[0])
