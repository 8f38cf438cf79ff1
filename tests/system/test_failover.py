"""Two servers over one object store, a real agent and readers: kill -9, a stall, a clean stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from faults.serving import free_port
from routetrace.client import RouteClient
from routetrace.common.errors import Closed, InvalidArgument, NotFound, Unavailable
from routetrace.common.target import parse_target, resolver_options, targets_of
from support.agents.routed_engine import Engine
from support.scrape import http_status
from support.servers.fake_s3 import FakeS3
from support.servers.object_servers import ObjectServer
from support.waiting import wait_for, with_time

BOUND_S = 90.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[FakeS3, ObjectServer, ObjectServer]]:
    with ExitStack() as stack:
        s3 = stack.enter_context(FakeS3())
        first = stack.enter_context(ObjectServer(tmp_path, s3.endpoint))
        wait_for(lambda: first.serves, BOUND_S)
        second = stack.enter_context(
            ObjectServer(tmp_path, s3.endpoint, metrics_listen=f"127.0.0.1:{free_port()}")
        )
        wait_for(lambda: second.stands_by, BOUND_S)
        yield s3, first, second


@pytest.mark.slow
def test_kill_9_stall_and_stop_lose_nothing(pair):
    _, first, second = pair
    target = f"{first.target},{second.target}"
    engine = Engine(target, "chaos")
    with RouteClient(target, run="chaos", timeout=BOUND_S) as client:
        engine.generate(30)
        assert engine.agent.flush(BOUND_S)
        assert engine.compare(client) == 30
        first.kill()
        engine.generate(30)
        assert engine.compare(client) == 60
        assert second.serves
        first.start()
        wait_for(lambda: first.stands_by, BOUND_S)
        # The owner stalls, and wakes after the other has taken over.
        second.signal(signal.SIGSTOP)
        wait_for(lambda: first.serves, BOUND_S)
        second.signal(signal.SIGCONT)
        engine.generate(30)
        assert engine.compare(client) == 90
        wait_for(lambda: "starting over as a standby" in second.log, BOUND_S)
        wait_for(lambda: second.health() == "NOT_SERVING", BOUND_S)
        assert first.stop() == 0
        engine.generate(10)
        assert engine.compare(client) == 100
        wait_for(lambda: second.serves, BOUND_S)
    engine.end()


@pytest.mark.slow
def test_callers_of_a_standby_are_refused_with_a_retry_time(pair):
    _, first, second = pair
    with RouteClient(second.target, run="x") as client:
        with pytest.raises(Unavailable, match="standby") as caught:
            with_time(lambda seconds: client.get("t", timeout=seconds), 0.3)
        assert caught.value.retry_after > 0
    target = f"{second.target},{first.target}"
    with RouteClient(target, run="x", timeout=BOUND_S) as client, pytest.raises(NotFound):
        client.get("t")  # the answer of the one that serves
    assert first.target in second.log  # names the owner
    metrics = second.settings["metrics_listen"]
    assert http_status(metrics, "/livez") == 200
    assert http_status(metrics, "/readyz") == 503


@pytest.mark.slow
def test_an_address_list_goes_to_the_server_that_serves(pair):
    _, first, second = pair
    for target in (f"ipv4:{first.target},{second.target}", f"ipv4:{second.target},{first.target}"):
        with RouteClient(target, run="x", timeout=BOUND_S) as client:
            for _ in range(20):
                with pytest.raises(NotFound):
                    client.get("t")


@pytest.mark.slow
def test_while_s3_is_stopped_reads_are_refused_and_rows_wait(pair):
    s3, first, second = pair
    target = f"{first.target},{second.target}"
    engine = Engine(target, "outage")
    engine.generate(20)
    assert engine.agent.flush(BOUND_S)
    with s3.stopped():
        wait_for(lambda: not first.serves, BOUND_S)
        engine.generate(20)
        assert not engine.agent.flush(0.5)
    with RouteClient(target, run="outage", timeout=BOUND_S) as client:
        assert engine.compare(client) == 40
    engine.end()


def test_a_store_that_ignores_conditions_is_refused_at_the_start(tmp_path):
    with FakeS3() as s3:
        s3.atomic = False
        with ObjectServer(tmp_path, s3.endpoint) as server:
            assert server.process is not None
            assert server.process.wait(BOUND_S) == 2
            assert "does not do conditional puts atomically" in server.log


def test_targets():
    assert parse_target("a, b:7 ,a") == "a:7411,b:7"
    assert targets_of("a:7411,b:7") == ["a:7411", "b:7"]
    assert targets_of("ipv4:1.2.3.4:5,1.2.3.5:5") == ["ipv4:1.2.3.4:5,1.2.3.5:5"]
    assert resolver_options("dns:///traces:7411")
    assert not resolver_options("traces:7411")
    for wrong in ("a,", ",", "a,http://b", "a:1,b:99999"):
        with pytest.raises(InvalidArgument, match=r"(target|port) is "):
            parse_target(wrong)


@pytest.mark.slow
def test_many_threads_follow_to_the_other_server(pair):
    _, first, second = pair
    target = f"{first.target},{second.target}"
    engine = Engine(target, "threads")
    engine.generate(10)
    assert engine.agent.flush(BOUND_S)
    failures: list[BaseException] = []
    with RouteClient(target, run="threads", timeout=BOUND_S) as client:
        stop = threading.Event()

        def read() -> None:
            try:
                while not stop.is_set():
                    np.testing.assert_array_equal(client.get("r3").topk_ids, engine.rows["r3"])
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        first.kill()
        wait_for(lambda: second.serves, BOUND_S)
        assert engine.compare(client) == 10
        stop.set()
        for reader in readers:
            reader.join(BOUND_S)
    assert not failures
    engine.end()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_waits_for_no_read_of_the_store(tmp_path, workers):
    threads = min(32, (os.cpu_count() or 1) + 4)  # of an event loop
    with FakeS3() as s3, ExitStack() as stack:
        server = stack.enter_context(ObjectServer(tmp_path, s3.endpoint, workers, object_cache=0))
        wait_for(lambda: server.serves, BOUND_S)
        engine = Engine(server.target, "stopped")
        for _ in range(threads + 4):
            engine.generate(1)
            assert engine.agent.flush(BOUND_S)  # each is an object of the log
        engine.end()
        hangs, reads = threading.Event(), []
        stack.callback(hangs.set)

        def before(verb: str, key: str) -> None:
            if verb == "GET" and "/log/" in key:
                reads.append(key)
                hangs.wait()

        s3.before = before
        pool = stack.enter_context(ThreadPoolExecutor(len(engine.rows)))
        client = stack.enter_context(RouteClient(server.target, run="stopped", timeout=BOUND_S))
        readings = [pool.submit(client.get, name) for name in engine.rows]
        wait_for(lambda: len(reads) == threads, BOUND_S)
        assert server.stop() == 0
        assert len({*reads}) == len(reads) == threads  # none was answered, or given up
        client.close()
        for reading in readings:
            with pytest.raises(Closed):
                reading.result()
