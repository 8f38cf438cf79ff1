"""Two servers over the partitions of one bucket; `make test-scale` has hand-overs as well."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument
from routetrace.server.access.partition import place
from routetrace.server.store.object.bucket import open_bucket
from support.agents.routed_engine import Engine
from support.servers.fake_s3 import FakeS3
from support.servers.object_servers import ObjectServer, owned_by
from support.waiting import wait_for

BOUND_S = 90.0
#: One in each partition.
RUNS = ("a", "c")


@pytest.mark.long
def test_each_server_leads_to_the_owner(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    assert [place(run, 2) for run in RUNS] == [0, 1]
    with ExitStack() as stack:
        s3 = stack.enter_context(FakeS3())
        bucket = open_bucket("s3://bucket/runs", s3.endpoint)
        # A server that comes later gets its share after several leases: not while this test lasts.
        first, second = (
            ObjectServer(tmp_path, s3.endpoint, workers=2, object_lease_seconds=600)
            for _ in range(2)
        )
        named = first.target.replace("127.0.0.1", "localhost")
        first.settings["advertise"] = named
        for server in (first, second):
            stack.enter_context(server)
            wait_for(lambda s=server: s.serves, BOUND_S)
        assert not owned_by(bucket, 2, second.target)
        # A token goes to hosts that are configured, and to no other.
        with (
            RouteClient(second.target, run="c", timeout=BOUND_S) as client,
            pytest.raises(InvalidArgument, match="expected localhost among its hosts"),
        ):
            client.get("r0")
        target = f"{second.target},{named}"
        engines = [Engine(target, run) for run in RUNS]
        for engine in engines:
            engine.generate(10)
            assert engine.agent.flush(BOUND_S)
        clients = [stack.enter_context(RouteClient(target, run=r, timeout=BOUND_S)) for r in RUNS]
        assert [e.compare(c) for e, c in zip(engines, clients, strict=True)] == [10, 10]
        assert owned_by(bucket, 2, named) == [0, 1]
        assert clients[0].server_info().runs == RUNS
        for engine in engines:
            engine.end()


@pytest.mark.slow
def test_a_server_takes_over_all_of_one_that_is_killed(tmp_path: Path, monkeypatch):
    """Whichever of them owned what before."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with ExitStack() as stack:
        s3 = stack.enter_context(FakeS3())
        bucket = open_bucket("s3://bucket/runs", s3.endpoint)
        first, second = (
            ObjectServer(tmp_path, s3.endpoint, workers=2, object_lease_seconds=5) for _ in range(2)
        )
        for server in (first, second):
            stack.enter_context(server)
            wait_for(lambda s=server: s.serves, BOUND_S)
        target = f"{second.target},{first.target}"
        engines = [Engine(target, run) for run in RUNS]
        clients = [stack.enter_context(RouteClient(target, run=r, timeout=BOUND_S)) for r in RUNS]
        for engine, client in zip(engines, clients, strict=True):
            engine.generate(10)
            assert engine.agent.flush(BOUND_S)
            assert engine.compare(client) == 10
        first.kill()
        for engine, client in zip(engines, clients, strict=True):
            engine.generate(10)
            assert engine.compare(client) == 20
            engine.end()
        assert owned_by(bucket, 2, second.target) == [0, 1]
