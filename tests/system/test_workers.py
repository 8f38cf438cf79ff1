"""A server with several workers: the same answers, through crashes of any of its processes."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from faults.check import audit, read_all
from faults.scenarios.kill import SETTINGS, scripts
from faults.script import LAYOUT, RUN, Script
from faults.writers import Job, Run, Writers, no_violations
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import AsyncRouteClient, RouteClient
from routetrace.common.errors import DeadlineExceeded, NotFound, Unavailable
from routetrace.common.security import Security
from routetrace.server.access.partition import place
from routetrace.server.ops.health import READY_SERVICES
from routetrace.server.process.partitions import partition_dir
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.agents.feeder import Stream
from support.waiting import wait_for

SERVING = health_pb2.HealthCheckResponse.SERVING
#: Two for each of two workers.
RUNS = ("a", "b", "c", "d")
#: What depends on the moment at which a server got a chunk.
MOMENTS = {"created_at", "updated_at", "expires_at"}
#: The run of the faults is served by worker 1, so that each call to worker 0 is sent on.
PINNED = '{"faults": 1}'


def serve(data_dir: Path | None = None, workers: int = 2, **settings: Any) -> ServerProcess:
    port = settings.pop("port", 0) or free_ports(workers)
    return run_server(data_dir=data_dir, port=port, workers=workers, **settings)


def target_of(server: ServerProcess, number: int) -> str:
    host, _, port = server.target.rpartition(":")
    return f"{host}:{int(port) + number}"


def worker_pid(data_dir: Path, number: int) -> int:
    """The process that holds a partition; 0 while it takes it."""
    return int((partition_dir(data_dir, number) / "lock").read_text() or 0)


def family(server: ServerProcess) -> list[psutil.Process]:
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


# ---------------------------------------------------------------------------- the same answers


def feed(target: str, run: str, script: Script, chunks: int) -> None:
    hello = script.hello()
    hello.run = run
    stream = Stream(target, hello)
    for number in range(1, chunks + 1):
        stream.send(script.chunk(number))
        assert stream.receive().ack.sequence == number
    stream.close()


def facts(stat: Any) -> dict[str, Any]:
    found = {f.name: getattr(stat, f.name) for f in fields(stat) if f.name not in MOMENTS}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}


def same_trace(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other)
    return (
        np.array_equal(one.topk_ids, other.topk_ids)
        and np.array_equal(one.valid, other.valid)
        and np.array_equal(one.weight_versions, other.weight_versions)
        and (one.state, one.num_tokens, one.missing)
        == (other.state, other.num_tokens, other.missing)
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """Targets of one process and of two workers that got the same chunks; trace ids by run."""
    with run_server() as alone, serve() as together:
        names: dict[str, list[str]] = {}
        for run in RUNS:
            for engine in ("e0", "e1"):
                script = Script(7, f"{run}-{engine}")
                feed(alone.target, run, script, 60)
                feed(target_of(together, place(run, 2)), run, script, 60)
                said = script.said(60)
                names.setdefault(run, []).extend(
                    script.trace_id(request) for request in said if not script.is_short(request)
                )
        yield alone.target, together.target, names


def test_the_runs_are_on_both_workers():
    assert {place(run, 2) for run in RUNS} == {0, 1}


@pytest.mark.parametrize("run", RUNS)
def test_reads_answer_as_one_process_does(pair, run):
    alone, together, names = pair
    with RouteClient(alone, run=run) as one, RouteClient(together, run=run) as two:
        for name in names[run]:
            a, b = (c.get(name, missing="mask") for c in (one, two))
            assert same_trace(a, b)
            assert facts(one.stat(name)) == facts(two.stat(name))
        asked = [*names[run], "no such trace"]
        answers = [list(c.get_many(asked, missing="mask", errors="return")) for c in (one, two)]
        assert all(same_trace(a, b) for a, b in zip(*answers, strict=True))
        assert isinstance(answers[1][-1], NotFound)
        listed = [[facts(s) for s in c.find() if s.trace_id in names[run]] for c in (one, two)]
        assert listed[0] == listed[1] != []
        retirable = [{s.trace_id for s in c.find(retirable_through=0)} for c in (one, two)]
        assert retirable[0] & {*names[run]} == retirable[1] & {*names[run]} != set()
        agents = [[(a.engine_id, a.shard, a.connected) for a in c.agents()] for c in (one, two)]
        assert agents[0] == agents[1] != []
        infos = [c.server_info() for c in (one, two)]
        assert infos[0].runs == infos[1].runs == tuple(sorted(RUNS))
        assert min(info.run_bytes for info in infos) > 0


def test_a_batch_of_an_event_loop_and_a_follower_are_sent_on(pair):
    _, together, names = pair
    run = next(run for run in RUNS if place(run, 2))
    with RouteClient(together, run=run) as client:
        done = next(s.trace_id for s in client.find(states=["complete"]))
        whole = client.get(done)
        parts = list(client.follow(done))
        assert np.array_equal(np.concatenate([p.topk_ids for p in parts]), whole.topk_ids)


async def test_an_asyncio_client_is_sent_on(pair):
    _, together, names = pair
    for run in RUNS:
        async with AsyncRouteClient(together, run=run) as client:
            found = [t async for t in client.get_many(names[run], missing="mask")]
            assert len(found) == len(names[run])
            assert (await client.server_info()).runs == tuple(sorted(RUNS))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two workers, for tests that have runs of their own."""
    with serve(tmp_path_factory.mktemp("workers")) as server:
        yield server


def runs_of(prefix: str) -> list[str]:
    """Two new runs for each of two workers."""
    names = [f"{prefix}{number}" for number in range(40)]
    return [[name for name in names if place(name, 2) == n][i] for n in (0, 1) for i in (0, 1)]


def test_changes_reach_the_worker_of_the_run(shared):
    for run in runs_of("changes"):
        script = Script(3, run)
        feed(target_of(shared, place(run, 2)), run, script, 30)
        ended = [
            script.trace_id(request)
            for request, said in script.said(30).items()
            if said.ended and not script.is_short(request)
        ]
        with RouteClient(shared.target, run=run) as client:
            assert client.renew(ended, ttl_seconds=90_000) == len(ended)
            client.delete(ended[0])
            with pytest.raises(NotFound, match="was deleted"):
                client.get(ended[0])
            assert client.retire_through(100).traces >= len(ended) - 1


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_agents_on_both_workers_by_one_address(shared, mode):
    rows = np.tile(np.arange(LAYOUT.top_k, dtype=np.uint8), (40, len(LAYOUT.layer_ids), 1))
    for run in runs_of(mode):
        config = AgentConfig(shared.target, "e0", LAYOUT, run=run, background=mode)
        with CaptureAgent(config) as agent:
            handle = agent.begin("r", trace_id="t", prompt_len=40)
            agent.step(rows, [(handle, 0, 40)])
            agent.finish(handle, 41, reason="stop")
            assert agent.flush(60)
        with RouteClient(shared.target, run=run) as client:
            trace = client.get("t", wait_for="end", timeout=60)
            assert np.array_equal(trace.topk_ids, rows)


def test_a_reader_waits_for_a_run_that_does_not_exist_yet(shared):
    run = runs_of("later")[-1]
    script = Script(5, "e0")
    name = script.trace_id(0)
    with RouteClient(shared.target, run=run) as client, ThreadPoolExecutor(2) as pool:
        read = pool.submit(client.get, name, wait_for="end", timeout=60)
        parts = pool.submit(list, client.follow(name, wait_for="rows", timeout=60))
        feed(target_of(shared, 1), run, script, 40)
        assert np.array_equal(read.result().topk_ids, script.rows(0))
        assert sum(map(len, parts.result())) == script.num_rows(0)


# ---------------------------------------------------------------------------- crashes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_worker_that_is_killed_under_load_comes_back_with_all_that_was_acknowledged(
    tmp_path, seed
):
    jobs = [Job(seed, f"e{i}", deletes=True, reads=i == 0) for i in range(3)]
    with Writers(2) as writers, serve(tmp_path, run_workers=PINNED, **SETTINGS) as server:
        writers.jobs(jobs)
        other = worker_pid(tmp_path, 0)
        target = target_of(server, 1)
        with RouteClient(server.target, run=RUN, timeout=60) as client:
            writers.run(Run(target, 1 << 30, again=True))
            for _ in range(3):
                before = client.server_info().run_bytes
                wait_for(lambda b=before: client.server_info().run_bytes > b, 60)
                pid = worker_pid(tmp_path, 1)
                psutil.Process(pid).kill()
                wait_for(lambda p=pid: worker_pid(tmp_path, 1) not in (0, p), 60)
            before = client.server_info().run_bytes
            wait_for(lambda: client.server_info().run_bytes > before, 60)
            reports = writers.stop()
            no_violations(reports)
            # More than these have come back only where all had a turn.
            assert any(r.known.acked and r.connections > 1 for r in reports)
            known = [r.known for r in reports]
            served = read_all(client, list(zip(scripts(reports), known, strict=True)))
            assert served.rows > 100
        assert worker_pid(tmp_path, 0) == other
        assert server.stop() == 0
    assert audit(partition_dir(tmp_path, 1)) >= 0


def test_the_server_is_ready_while_all_workers_are(tmp_path):
    with serve(tmp_path) as server, grpc.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in READY_SERVICES:
            wait_for(
                lambda s=service: (
                    stub.Check(health_pb2.HealthCheckRequest(service=s), timeout=60).status
                    == SERVING
                ),
                60,
            )
        seen = stub.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICES[1]), timeout=120)
        assert next(seen).status == SERVING
        psutil.Process(worker_pid(tmp_path, 1)).kill()
        assert next(seen).status != SERVING
        assert next(seen).status == SERVING
        seen.cancel()


@pytest.mark.slow
def test_an_answer_for_the_whole_server_never_lacks_a_worker(tmp_path):
    run = next(run for run in RUNS if not place(run, 2))
    with serve(tmp_path) as server, RouteClient(server.target, run=run, timeout=2) as client:
        stopped = psutil.Process(worker_pid(tmp_path, 1))
        stopped.suspend()
        try:
            # The last attempt may end before the server's own wait for its worker.
            with pytest.raises((Unavailable, DeadlineExceeded)):
                client.server_info(timeout=6)
            with pytest.raises(NotFound):
                client.get("t", timeout=60)  # of a run that the other worker has no part in
        finally:
            stopped.resume()
        assert client.server_info(timeout=60).runs == ()


def test_workers_end_with_the_process_that_watches_them(tmp_path):
    with serve(tmp_path) as server:
        processes = family(server)
        assert len(processes) == 3
        server.kill()
        wait_for(lambda: all_gone(processes), 60)
        port = int(server.target.rpartition(":")[2])
    with serve(tmp_path, port=port) as server:
        processes = family(server)
        assert server.stop() == 0
        assert all_gone(processes)


def fails(**settings: Any) -> str:
    with pytest.raises(RuntimeError, match="ended with code 1") as caught:
        serve(**settings)
    return str(caught.value)


def test_a_worker_that_does_not_start_ends_the_server(tmp_path):
    with serve(tmp_path, run_workers=PINNED) as server:
        feed(target_of(server, 1), RUN, Script(1, "e0"), 5)
    text = fails(data_dir=tmp_path, run_workers='{"faults": 0}')
    assert "run_workers is faults=0" in text
    assert "worker 1 ended with code 1 before it was ready" in text
    with serve(tmp_path, run_workers=PINNED), socket.socket() as taken:
        port = free_ports(2)
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        assert f"cannot listen on 127.0.0.1:{port + 1}" in fails(port=port)


# ---------------------------------------------------------------------------- TLS, backup


def entry(token: str, scopes: str, runs: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nname="{token}"\nsha256="{digest}"\nscopes={scopes}\nruns={runs}\n'


def test_tls_and_tokens_hold_at_every_worker(tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name in ("server", "client"):
        issued = ca.issue_cert("127.0.0.1" if name == "server" else "client@example.org")
        (tmp_path / f"{name}.pem").touch(0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    (tmp_path / "tokens.toml").write_text(
        entry("all-of-it", '["ingest", "read"]', '["*"]') + entry("some-of-it", '["read"]', '["a"]')
    )
    settings = {
        "tls_cert": tmp_path / "server.pem",
        "tls_key": tmp_path / "server.pem",
        "tls_client_ca": tmp_path / "ca.pem",
        "tokens_file": tmp_path / "tokens.toml",
    }
    security = Security(
        ca_file=str(tmp_path / "ca.pem"),
        cert_file=str(tmp_path / "client.pem"),
        key_file=str(tmp_path / "client.pem"),
        token="all-of-it",
    )
    rows = np.tile(np.arange(LAYOUT.top_k, dtype=np.uint8), (4, len(LAYOUT.layer_ids), 1))
    with serve(tmp_path / "data", **settings) as server:
        for run in RUNS:
            config = AgentConfig(server.target, "e0", LAYOUT, run=run, security=security)
            with CaptureAgent(config) as agent:
                handle = agent.begin("t", prompt_len=4)
                agent.step(rows, [(handle, 0, 4)])
                agent.finish(handle, 5, reason="stop")
                assert agent.flush(60)
            with RouteClient(server.target, run=run, security=security) as client:
                assert np.array_equal(client.get("t").topk_ids, rows)
                assert client.server_info().runs == tuple(sorted(RUNS[: RUNS.index(run) + 1]))
        some = Security(
            ca_file=security.ca_file,
            cert_file=security.cert_file,
            key_file=security.key_file,
            token="some-of-it",
        )
        with RouteClient(server.target, run="a", security=some) as client:
            assert client.server_info().runs == ("a",)


@pytest.mark.long
def test_a_backup_has_every_partition(tmp_path):
    script = Script(2, "e0")
    with serve(tmp_path / "data") as server:
        for run in RUNS:
            feed(target_of(server, place(run, 2)), run, script, 20)
        command(
            "backup", f"--data-dir={tmp_path / 'data'}", f"--to={tmp_path / 'copy'}", "--verify"
        )
    command("restore", f"--data-dir={tmp_path / 'new'}", f"--from={tmp_path / 'copy'}", "--verify")
    names = [script.trace_id(r) for r in script.said(20) if not script.is_short(r)]
    with serve(tmp_path / "new") as server:
        for run in RUNS:
            with RouteClient(server.target, run=run) as client:
                for request, name in enumerate(names):
                    assert len(client.get(name, missing="mask")) > 0, request
    refused = command(
        "backup", f"--data-dir={tmp_path / 'new'}", f"--to={tmp_path / 'copy'}", code=1
    )
    assert "is not empty" in refused


def command(*args: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "routetrace.server.daemon", *args],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr
