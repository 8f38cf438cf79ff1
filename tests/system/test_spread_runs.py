"""A run in all workers of a server: real processes, agents and clients, through crashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from faults.check import audit, read_all
from faults.scenarios.kill import SETTINGS, scripts
from faults.script import RUN
from faults.writers import Job, Run, Writers, no_violations
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import AsyncRouteClient, RouteClient
from routetrace.common.errors import NotFound
from routetrace.common.security import Security
from routetrace.server.access.partition import Partition
from routetrace.server.process.partitions import partition_dir
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.agents.rollouts import LAYOUT, Rollouts
from support.waiting import wait_for

WORKERS = 3
#: More than all tests of the module store.
QUOTA = 3 << 30


def serve(data_dir: Path | None = None, **settings: Any) -> ServerProcess:
    port = free_ports(WORKERS)
    return run_server(
        data_dir=data_dir, port=port, workers=WORKERS, spread_runs='["*"]', **settings
    )


def worker_of(engine_id: str, run: str = RUN) -> int:
    return Partition(0, WORKERS, spread=("*",)).of(run, engine_id)


def worker_pid(data_dir: Path, number: int) -> int:
    """The process that holds a partition; 0 while it takes it."""
    return int((partition_dir(data_dir, number) / "lock").read_text() or 0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(run_quota=QUOTA) as process:
        yield process


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerProcess]:
    with run_server() as process:
        yield process


@pytest.fixture
def one(alone: ServerProcess) -> Iterator[RouteClient]:
    with RouteClient(alone.target, run=RUN, timeout=60) as client:
        yield client
        for name in [stat.trace_id for stat in client.find()]:
            client.delete(name)


def test_turns_on_any_engine_are_read_as_from_one_process(server, alone, one):
    assert {worker_of(f"e{i}") for i in range(6)} == {*range(WORKERS)}
    with (
        Rollouts(alone.target, server.target, 1) as rollouts,
        RouteClient(server.target, run=RUN) as client,
    ):
        rollouts.turns(60, 12)
        rollouts.compare(one, client)
        assert {a.engine_id for a in client.agents()} == {f"e{i}" for i in range(6)}
        info = client.server_info()
        assert info.num_agents == 6
        assert info.num_traces >= len(rollouts.tokens)
        assert info.run_bytes == one.server_info().run_bytes
        assert info.run_quota_bytes == QUOTA
        some = [*rollouts.tokens][:5]
        for each in (one, client):
            assert each.renew([*some, "no such trace"], ttl_seconds=1 << 20) == 5
            each.delete(some[0])
        del rollouts.tokens[some[0]]
        rollouts.compare(one, client)
        assert client.retire_through(0).traces == len(rollouts.tokens)
        assert not [*client.find()]


async def test_an_event_loop_reads_from_the_workers_that_have_the_rows(server, alone, one):
    with Rollouts(alone.target, server.target, 3) as rollouts:
        rollouts.turns(30, 10)
        names = [*rollouts.tokens]
        async with AsyncRouteClient(server.target, run=RUN) as client:
            for _ in range(2):  # over new connections, then over those
                each = [await client.get(name) for name in names]
                batch = [trace async for trace in client.get_many(names)]
                for found in (each, batch):
                    assert [t.topk_ids.tolist() for t in found] == [
                        t.topk_ids.tolist() for t in one.get_many(names)
                    ]


def test_a_follower_gets_rows_of_any_worker_as_they_arrive(server):
    run = "followed"
    with RouteClient(server.target, run=run) as client:
        for number in range(6):
            config = AgentConfig(server.target, f"e{number}", LAYOUT, run=run)
            with CaptureAgent(config) as agent:
                rows = np.full((20, 3, 2), (number, 8), np.uint8)
                handle = agent.begin(f"r{number}", prompt_len=4)
                agent.step(rows[:10], [(handle, 0, 10)])
                parts = client.follow(f"r{number}", wait_for="rows", timeout=60)
                first = next(parts)
                agent.step(rows[10:], [(handle, 10, 10)])
                agent.finish(handle, 21)
                read = np.concatenate([first.topk_ids, *(part.topk_ids for part in parts)])
                assert np.array_equal(read, rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_turns_go_on_while_each_worker_is_killed(tmp_path, alone, one, seed):
    with (
        serve(tmp_path, **SETTINGS) as server,
        Rollouts(alone.target, server.target, seed) as rollouts,
        RouteClient(server.target, run=RUN, timeout=60) as client,
    ):
        for number in range(WORKERS):
            rollouts.turns(10, 8)
            pid = worker_pid(tmp_path, number)
            psutil.Process(pid).kill()
            rollouts.turns(10, 8)
            rollouts.compare(one, client)
            wait_for(lambda n=number, p=pid: worker_pid(tmp_path, n) not in (0, p), 60)
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_worker_that_is_killed_under_load_comes_back_with_all_that_was_acknowledged(
    tmp_path, seed
):
    jobs = [Job(seed, f"e{i}", deletes=True, reads=i == 0) for i in range(4)]
    with Writers(2) as writers, serve(tmp_path, **SETTINGS) as server:
        writers.jobs(jobs)
        host, _, port = server.target.rpartition(":")
        targets = {job.engine_id: f"{host}:{int(port) + worker_of(job.engine_id)}" for job in jobs}
        assert len({*targets.values()}) > 1
        with RouteClient(server.target, run=RUN, timeout=60) as client:
            writers.run(Run(server.target, 1 << 30, again=True, targets=targets))
            for number in (0, 1, 2):
                before = client.server_info().run_bytes
                wait_for(lambda b=before: client.server_info().run_bytes != b, 60)
                pid = worker_pid(tmp_path, number)
                psutil.Process(pid).kill()
                wait_for(lambda n=number, p=pid: worker_pid(tmp_path, n) not in (0, p), 60)
            before = client.server_info().run_bytes
            wait_for(lambda: client.server_info().run_bytes != before, 60)
            reports = writers.stop()
            no_violations(reports)
            known = [r.known for r in reports]
            served = read_all(client, list(zip(scripts(reports), known, strict=True)))
            assert served.rows > 100
        assert server.stop() == 0
    assert all(audit(partition_dir(tmp_path, number)) >= 0 for number in range(WORKERS))


def test_workers_ask_each_other_without_a_token(tmp_path):
    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "tokens.toml").write_text(
        f'[[token]]\nname="all"\nsha256="{digest}"\n'
        'scopes=["ingest", "read", "admin"]\nruns=["*"]\n'
    )
    security = Security(token="secret")
    settings = {"tokens_file": tmp_path / "tokens.toml"}
    with (
        serve(tmp_path / "several", **settings) as server,
        run_server(data_dir=tmp_path / "one", **settings) as alone,
        Rollouts(alone.target, server.target, 2, security=security) as rollouts,
        RouteClient(alone.target, run=RUN, security=security) as one,
        RouteClient(server.target, run=RUN, security=security) as client,
    ):
        rollouts.turns(12, 3)
        rollouts.compare(one, client)
        client.delete("t0")
        with pytest.raises(NotFound, match=r"deleted at .* by token all"):
            client.get("t0")
