"""The agent under pressure: no server, a slow one, one that hangs, restarts or is cut off.

Real processes and sockets; what arrives is compared cell by cell with what was handed over.
"""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from faults.proxy import Proxy
from faults.serving import free_port
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.vllm.settings import settings_of
from routetrace.capture_agent.pipeline.chunks import NO_BLOCKS, ChunkBuilder
from routetrace.capture_agent.transport import sender
from routetrace.capture_agent.transport.ledger import Ledger
from routetrace.capture_agent.transport.spill import Record, Spill
from routetrace.client import AsyncRouteClient, RouteClient
from routetrace.codec.records import OpKind, token_digests
from routetrace.common.errors import Incomplete, InvalidArgument, Unauthenticated
from routetrace.common.security import Security
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.pressure import LAYOUT, Load, check_sample, memory_of, read_back, without_server
from support.servers.ingest_server import IngestServer, Model, read_chunk
from support.waiting import keeps_to, wait_for

MODES = pytest.mark.parametrize("mode", ["thread", "process"])
MIB = 1 << 20


def config_for(target: str, **settings) -> AgentConfig:
    return AgentConfig(
        target,
        "e0",
        LAYOUT,
        **{
            "background": "thread",
            "linger_seconds": 0.02,
            "flush_interval_seconds": 0.01,
            **settings,
        },
    )


# ---------------------------------------------------------------------- no server


@pytest.mark.slow
@pytest.mark.parametrize("spilling", [False, True])
def test_minutes_without_a_server(spilling, tmp_path):
    """Memory stays under its cap, every row is counted, and what is stored is right."""
    settings = {"spill_dir": str(tmp_path), "spill_bytes": 4 * MIB} if spilling else {}
    figures = without_server(6000, 8, 3 * MIB, **settings)
    assert figures["grown_bytes"] < 3 * MIB + 8 * MIB  # the second are gRPC's and the allocator's
    assert figures["queued_bytes"] < 3 * MIB
    assert figures["dropped"]["queue_full"] > figures["acknowledged"] > 0
    assert figures["spilled_bytes"] <= 4 * MIB
    assert (figures["spilled_bytes"] > 3 * MIB) is spilling
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_reader_of_a_dropped_request_is_told(tmp_path):
    port = free_port()
    config = config_for(f"127.0.0.1:{port}", queue_bytes=MIB)
    with CaptureAgent(config) as agent:
        load = Load(agent, 8)
        load.steps(3000)
        # Of those that begin when there is no memory even for events nothing is told but this.
        load.finish()
        with run_server(port=port) as server:
            assert agent.flush(30)
            assert agent.stats().unreported_requests == 0
            found = read_back(server.target, load)
            last = load.requests[-8]
            with RouteClient(server.target) as client, pytest.raises(Incomplete) as caught:
                client.get(last.name, wait_for="end", timeout=30)
    assert "queue_full" in str(caught.value)
    assert found["queue_full"] == agent.stats().dropped_rows["queue_full"]


def test_what_is_known_of_a_request_is_not_the_chunk_that_told_of_it():
    ledger, builder = Ledger(), ChunkBuilder(LAYOUT)
    before = memory_of(os.getpid())["RssAnon"]
    for i in range(100):
        builder.begin(f"r{i}", pb.RequestBegin(prompt_len=64), i, 0, 0, NO_BLOCKS)
        builder.digests(f"r{i}", token_digests(np.arange(64)))
        builder.blocks([f"r{i}"] * 3, np.arange(3 * i, 3 * i + 3, dtype=np.uint32))
        builder.op(OpKind.EXTERNAL, blocks=np.arange(200_000, dtype=np.uint32))
        builder.seal()
        ledger.apply(builder.ready.popleft())
    grown = memory_of(os.getpid())["RssAnon"] - before
    assert grown < 20 * MIB, "of 80 MiB of headers"
    assert 100 * 16 < ledger.nbytes < 2 * 100 * 1024
    told = Model()
    for chunk in ledger.begin_anew(LAYOUT):
        told.apply(*read_chunk(chunk.header, chunk.payload))
    assert {r.request_id for r in told.requests} == {f"r{i}" for i in range(100)}
    assert all(set(r.digests) == {64} for r in told.requests)
    given = {r.request_id: r.blocks for r in told.requests}
    assert given == {f"r{i}": [3 * i, 3 * i + 1, 3 * i + 2] for i in range(100)}
    for i in range(100):
        builder.op(OpKind.FINISH, f"r{i}")
    builder.seal()
    ledger.apply(builder.ready.popleft())
    assert ledger.nbytes == 0


def test_a_server_without_memory_is_told_how_far_earlier_attempts_came():
    ledger, builder = Ledger(), ChunkBuilder(LAYOUT)
    for name in ("again", "silent", "preempted", "new"):
        builder.begin(name, pb.RequestBegin(prompt_len=64), 0, 0, 0, NO_BLOCKS)
    for stop in (70, 60):
        builder.op(OpKind.LOST, "again", count=stop, arg=pb.MISSING_REASON_NOT_CAPTURED)
        builder.op(OpKind.PREEMPT, "again", position=stop)
        builder.op(OpKind.RESUME, "again", value=stop + 3)
    builder.op(OpKind.LOST, "again", count=9, arg=pb.MISSING_REASON_NOT_CAPTURED)
    builder.op(OpKind.RESUME, "silent")  # there was no memory to report the preemption
    builder.op(OpKind.PREEMPT, "preempted", position=65)  # other ranks computed the last tokens
    builder.seal()
    ledger.apply(builder.ready.popleft())
    told = Model()
    for chunk in ledger.begin_anew(LAYOUT):
        told.apply(*read_chunk(chunk.header, chunk.payload))
    lost = {r.request_id: [attempt.lost for attempt in r.attempts] for r in told.requests}
    gone = pb.MISSING_REASON_AGENT_LOST
    assert lost == {
        "again": [[(0, 70, gone)], [(0, 60, gone)], [(0, 9, gone)]],
        "silent": [[], []],
        "preempted": [[]],
        "new": [[]],
    }
    assert {r.request_id: [*r.stops] for r in told.requests} == {
        "again": [70, 60],
        "silent": [],
        "preempted": [65],
        "new": [],
    }
    assert {r.request_id: r.had for r in told.requests if r.had} == {
        "again": [73, 63],
        "silent": [0],
    }


# ---------------------------------------------------------------------- a server in trouble


TROUBLES = ["slow", "hangs", "restarts", "cut", "reset", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "spilling"), [*((t, False) for t in TROUBLES), ("slow", True), ("restarts", True)]
)
def test_a_server_in_trouble_gets_every_row_once(trouble, spilling, tmp_path):
    settings = {"data_dir": tmp_path / "data", "heartbeat_seconds": 0.2}
    server = run_server(port=free_port(), **settings)
    proxy = Proxy(server.target)
    spill = {"spill_dir": str(tmp_path), "spill_bytes": 64 * MIB} if spilling else {}
    config = config_for(
        proxy.target, background="process", queue_bytes=(1 if spilling else 64) * MIB
    )
    config = AgentConfig(**{**vars(config), **spill})
    with CaptureAgent(config) as agent:
        load = Load(agent, 16)
        load.steps(100)
        assert agent.flush(30)
        if trouble == "slow":
            proxy.slow("down", delay_s=0.1)
        elif trouble in ("hangs", "cut"):
            proxy.cut("down") if trouble == "hangs" else proxy.cut(how="drop")
        elif trouble == "reset":
            proxy.reset_randomly(7, 200_000)
            proxy.reset_all()
        elif trouble == "restarts":
            server.kill()
        elif trouble == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        for _ in range(20):
            load.steps(20)
            check_sample(agent.stats(), load.offered)
        if trouble == "restarts":
            server = run_server(port=int(server.target.rpartition(":")[2]), **settings)
        elif trouble == "stopped":
            os.kill(server.pid, signal.SIGCONT)
        elif trouble == "reset":
            assert not agent.flush(0.5)
            proxy.reset_randomly(7, 0)
        proxy.heal()
        load.finish()
        assert agent.flush(60)
        check_sample(agent.stats(), load.offered)
        stats = agent.stats()
        assert (stats.dropped_rows, stats.in_flight_rows) == ({}, 0)
        assert stats.acknowledged_rows == load.offered
        assert (stats.queued_bytes, stats.spilled_bytes) == (0, 0)
    assert read_back(server.target, load) == {"stored": load.offered}
    proxy.close()
    server.stop()


@pytest.mark.parametrize("trouble", ["absent", "hangs"])
def test_the_engine_never_waits_however_full_the_agent_is(trouble):
    """Its thread never gives up the CPU: nothing on the step path blocks."""
    with IngestServer() as server:
        if trouble == "absent":
            server.stop()
        server.hold.clear()
        config = config_for(
            server.target,
            background="process",
            queue_bytes=MIB,
            ring_bytes=MIB,
            close_timeout_seconds=0.1,
        )
        with CaptureAgent(config) as agent:
            load = Load(agent, 64)
            load.steps(300)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            for _ in range(3000):
                load.step()
            waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
            check_sample(agent.stats(), load.offered)
            # The background sees to its ring when it is its turn.
            wait_for(lambda: agent.stats().dropped_rows.get("queue_full"))
        server.hold.set()
    # Who waits for room in the ring does so in hundreds of steps.
    assert waits < 100, "some page faults, and turns of the server's threads in this process"


# ---------------------------------------------------------------------- signs of life


def conserved(beat: pb.Heartbeat) -> bool:
    told = beat.acknowledged_rows + sum(beat.dropped_rows.values()) + beat.in_flight_rows
    return beat.offered_rows == told


@MODES
def test_heartbeats_come_from_the_welcome_to_the_close(mode):
    with IngestServer() as server:
        server.heartbeat_ms = 30
        server.hold.clear()
        with CaptureAgent(config_for(server.target, background=mode)) as agent:
            server.wait_for(lambda: len(server.heartbeats) >= 3)  # of an agent that is idle
            assert server.heartbeats[0] == pb.Heartbeat()
            server.hold.set()
            load = Load(agent, 4)
            load.steps(50)
            load.finish()
            assert agent.flush(20)
            idle = len(server.heartbeats)
            server.wait_for(lambda: len(server.heartbeats) >= idle + 3)
        server.wait_for(lambda: server.heartbeats[-1].acknowledged_rows == load.offered)
        assert all(map(conserved, server.heartbeats))
        assert server.heartbeats[-1].in_flight_rows == 0


def test_a_clean_close_ends_with_a_heartbeat():
    with IngestServer() as server:
        server.heartbeat_ms = 60_000
        with CaptureAgent(config_for(server.target)) as agent:
            load = Load(agent, 4)
            load.steps(10)
        server.wait_for(lambda: len(server.heartbeats) == 2)
        first, last = server.heartbeats
        assert first.acknowledged_rows == 0
        assert (last.acknowledged_rows, last.in_flight_rows) == (load.offered, 0)


def test_a_server_that_asks_for_no_heartbeats_gets_none():
    with IngestServer() as server:  # which fails on one
        with CaptureAgent(config_for(server.target)) as agent:
            load = Load(agent, 4)
            load.steps(10)
            assert agent.flush(20)
        assert server.heartbeats == []


def test_heartbeats_tell_of_what_waits_and_what_was_dropped(tmp_path):
    with IngestServer() as server:
        server.heartbeat_ms = 20
        server.script = lambda chunk: pb.ErrorDetail(retry_after_ms=10_000)  # never stored
        config = config_for(
            server.target, queue_bytes=MIB, spill_dir=str(tmp_path), spill_bytes=2 * MIB
        )
        with CaptureAgent(config) as agent:
            load = Load(agent, 64)
            load.steps(600)
            server.wait_for(lambda: server.heartbeats[-1].dropped_rows["queue_full"] > 0)
            told = server.heartbeats[-1]
            assert conserved(told)
            assert 0 < told.queued_bytes <= MIB < told.spilled_bytes <= 2 * MIB
            server.script = None
            agent.close(0.2)


# ---------------------------------------------------------------------- the disk


def test_the_disk_is_a_ring_of_bytes(tmp_path):
    rng = random.Random(5)
    spill = Spill(str(tmp_path), 10_000)
    held: deque[tuple[Record, bytes]] = deque()
    given_back: list[Record] = []
    refused = 0
    for _ in range(5000):
        if rng.random() < 0.55:
            data = rng.randbytes(rng.randint(1, 2000))
            record = spill.write(data)
            if record:
                held.append((record, data))
            else:
                refused += 1
                # Room that is given back in the middle can be used later, in its turn.
                assert sum(r.size for r in spill._records) + len(data) > 10_000 - 2 * 2000
        elif held:
            # One that is given up in the middle is given back before those in front of it.
            at = 0 if rng.random() < 0.8 else rng.randrange(len(held))
            record, _ = held[at]
            del held[at]
            spill.release(record)
            given_back.append(record)
        if held:
            record, data = rng.choice(held)
            assert spill.read(record) == data
        assert spill.nbytes == sum(len(data) for _, data in held)
        assert os.fstat(spill._fd).st_size <= 10_000
    assert refused > 100
    assert len(given_back) > 1000
    while held:
        spill.release(held.popleft()[0])
    assert os.fstat(spill._fd).st_size == 0
    assert os.listdir(tmp_path) == []


def test_bytes_that_come_back_damaged_are_not_given_out(tmp_path):
    spill = Spill(str(tmp_path), MIB)
    whole, flipped, cut = (spill.write(os.urandom(1000)) for _ in range(3))
    assert whole
    assert flipped
    assert cut
    os.pwrite(spill._fd, b"\0" * 8, flipped.at + 500)
    os.ftruncate(spill._fd, cut.at + 999)
    assert spill.read(whole)
    assert spill.read(flipped) is None
    assert spill.read(cut) is None


def test_what_is_damaged_on_the_disk_is_missing_and_the_rest_is_right(tmp_path):
    port = free_port()
    config = config_for(
        f"127.0.0.1:{port}",
        background="process",
        queue_bytes=MIB,
        spill_dir=str(tmp_path),
        spill_bytes=64 * MIB,
    )
    with CaptureAgent(config) as agent:
        load = Load(agent, 16)
        load.steps(600)
        load.finish()
        assert not agent.flush(0)  # nothing waits for more rows to come
        wait_for(lambda: agent.stats().spilled_bytes > MIB)
        spilled = agent.stats().spilled_bytes
        (file,) = (
            fd
            for fd in Path(f"/proc/{agent.worker_pid}/fd").iterdir()
            if os.readlink(fd).startswith(str(tmp_path))
        )
        with file.open("r+b", buffering=0) as disk:
            disk.seek(spilled // 2)
            disk.write(os.urandom(100))
        with run_server(port=port) as server:
            assert agent.flush(60)
            stats = agent.stats()
            check_sample(stats, load.offered)
            found = read_back(server.target, load)
    lost = stats.dropped_rows["corrupt"]
    assert 0 < lost < load.offered / 2
    assert stats.dropped_rows == {"corrupt": lost}
    assert found == {"stored": load.offered - lost, "corrupt": lost}


def test_a_disk_that_is_full_falls_back_to_memory(tmp_path, caplog):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    spill = Spill(str(tmp_path), MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most[1]))
    try:
        first = spill.write(b"x" * 6000)
        assert spill.write(b"y" * 6000) is None  # and half of it was written
        assert spill.write(b"z") is None  # left alone for a while
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert spill.nbytes == 6000
    assert first
    assert spill.read(first) == b"x" * 6000
    spill._rests_until = 0.0
    again = spill.write(b"y" * 6000)
    assert again
    assert spill.read(again) == b"y" * 6000
    assert caplog.text.count("cannot spill") == 1


# ---------------------------------------------------------------------- who gets in


def test_what_is_wrong_with_security_is_told_when_the_engine_starts(tmp_path):
    missing = str(tmp_path / "ca.pem")
    for security in (Security(ca_file=missing), {"ca_file": missing}, {"token_file": missing}):
        with pytest.raises(InvalidArgument, match=missing):
            CaptureAgent(config_for("127.0.0.1:1", security=security))
    connect = (
        lambda security: config_for("127.0.0.1:1", security=security),
        lambda security: RouteClient("127.0.0.1:1", security=security),
        lambda security: AsyncRouteClient("127.0.0.1:1", security=security),
    )
    for wrong, named in (
        ({"password": "s3cret"}, "security is with 'password'; expected"),
        ({"tls": "s3cret"}, "security.tls is a str; expected bool"),
        ({"token": 5}, "security.token is an int; expected str"),
        ({"token": b"s3cret"}, "security.token is a bytes; expected str"),
        ({"ca_file": ["s3cret"]}, "security.ca_file is a list; expected str"),
        ("s3cret", "security is a str; expected Security"),
        (["s3cret"], "security is a list; expected Security"),
    ):
        for make in connect:
            with pytest.raises(InvalidArgument, match=re.escape(named)) as caught:
                make(wrong)
            assert "s3cret" not in str(caught.value) + repr(vars(caught.value))
            assert caught.value.__cause__ is None
    assert Security(ca_file=tmp_path / "ca.pem") == Security(ca_file=missing)


def test_security_from_the_environment(monkeypatch):
    monkeypatch.setenv("ROUTETRACE_TOKEN", "from-outside")
    config = config_for("127.0.0.1:1")
    assert config.security == Security(token="from-outside")
    assert "from-outside" not in repr(config)
    config = config_for("127.0.0.1:1", security={"token": "inside"})
    assert config.security == Security(token="inside")


class VllmConfig:
    """As much of vLLM's as is looked at."""

    kv_transfer_config = None
    instance_id = "boot"

    class parallel_config:  # noqa: N801
        data_parallel_index, data_parallel_size = 0, 1

    def __init__(self, **settings: object) -> None:
        self.additional_config = {"routetrace": settings}


def test_settings_of_vllm_show_no_token():
    settings = settings_of(VllmConfig(engine_id="e", security={"token": "s3cret"}))
    assert settings is not None
    assert settings.agent["security"] == Security(token="s3cret")
    assert "s3cret" not in repr(settings)
    with pytest.raises(InvalidArgument, match="token") as caught:
        settings_of(VllmConfig(engine_id="e", token="s3cret"))
    assert "s3cret" not in str(caught.value)


@MODES
def test_a_token_goes_to_the_server_and_nowhere_else(mode):
    with IngestServer() as server:
        config = config_for(server.target, background=mode, security={"token": "s3cret"})
        with CaptureAgent(config) as agent:
            assert agent.flush(20)
            handle = agent.begin("r")
            agent.finish(handle, 1)
            assert agent.flush(20)
            command = Path(f"/proc/{agent.worker_pid}/cmdline").read_bytes()
        assert b"s3cret" not in command
        assert server.metadata[0]["authorization"] == "Bearer s3cret"


@pytest.mark.slow
def test_an_agent_that_is_refused_says_so_once_and_goes_on_trying(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sender, "_REFUSED_S", 0.05)
    token = tmp_path / "token"
    token.write_text("old")
    with IngestServer() as server:
        server.admit = lambda hello, metadata: (
            None
            if metadata["authorization"] == "Bearer new"
            else Unauthenticated("the token is not known")
        )
        config = config_for(server.target, queue_bytes=MIB, security={"token_file": str(token)})
        with CaptureAgent(config) as agent, caplog.at_level(logging.WARNING):
            load = Load(agent, 16)
            load.steps(600)
            server.wait_for(lambda: len(server.metadata) > 5)
            server.wait_for(lambda: agent.stats().dropped_rows.get("queue_full"))
            check_sample(agent.stats(), load.offered)
            token.unlink()  # for a moment
            wait_for(lambda: "cannot be read" in caplog.text)
            (tmp_path / "next").write_text("new")
            (tmp_path / "next").rename(token)
            load.finish()
            assert agent.flush(30)
            check_sample(agent.stats(), load.offered)
            assert agent.stats().in_flight_rows == 0
    assert caplog.text.count("the token is not known") == 1
    assert "Bearer" not in caplog.text
    assert "Traceback" not in caplog.text


# ---------------------------------------------------------------------- ends


@MODES
@pytest.mark.parametrize(
    "trouble",
    ["hangs", "spilled", *(pytest.param(t, marks=pytest.mark.long) for t in ("absent", "slow"))],
)
def test_close_is_one_budget_and_says_what_was_not_sent(mode, trouble, tmp_path):
    def close() -> float:
        with IngestServer() as server:
            if trouble in ("absent", "spilled"):
                server.stop()
            elif trouble == "hangs":
                server.hold.clear()
            else:
                server.script = lambda chunk: time.sleep(0.2)
            spill = {"spill_dir": str(tmp_path)} if trouble == "spilled" else {}
            agent = CaptureAgent(
                config_for(server.target, background=mode, queue_bytes=2 * MIB, **spill)
            )
            load = Load(agent, 64)
            load.steps(200)
            started = time.monotonic()
            report = agent.close(1)
            taken = time.monotonic() - started
            dropped = sum(report.dropped_rows.values())
            assert report.acknowledged_rows + dropped + report.unsent_rows == load.offered
            assert report.unsent_rows > 0
            if trouble == "spilled":
                assert report.dropped_rows == {}
            server.hold.set()
        assert os.listdir(tmp_path) == []
        return taken

    keeps_to(2.5, close)  # and not as long for each of its parts


ENGINE = """
import faulthandler, multiprocessing, os, signal, sys, threading, time
import numpy as np
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((0,), 1, 300, 3)
ROWS = np.arange(3, dtype=np.uint16).reshape(1, 1, 3)
target, mode, how = sys.argv[1:]
faulthandler.enable(all_threads=True)

def agent_of(name, **settings):
    run = f"{how}-{mode}"
    return CaptureAgent(AgentConfig(target, name, LAYOUT, run=run, background=mode, **settings))

def work(name, close=True):
    agent = agent_of(name)
    handle = agent.begin("r-" + name)
    agent.step(ROWS, [(handle, 0, 1)])
    agent.finish(handle, 2)
    if close:
        agent.close()

def wait_for(child):
    assert os.waitpid(child, 0)[1] == 0, child

def main():
    if how == "fork-before":  # while it is connecting
        for i in range(10 if mode == "thread" else 2):
            agent = agent_of(f"parent{i}")
            child = os.fork()
            if child == 0:
                assert agent.begin("nothing") == 0
                if i % 2:
                    if not (grandchild := os.fork()):
                        os._exit(0)
                    wait_for(grandchild)
                    work(f"child{i}")
                sys.exit(0)
            wait_for(child)
            handle = agent.begin(f"r-parent{i}")
            agent.finish(handle, 1)
            assert agent.flush(20)
    elif how == "fork-during":
        agent = agent_of("parent")
        handle, stop, n = agent.begin("r-parent"), threading.Event(), 0
        def steps():
            nonlocal n
            while not stop.is_set():
                agent.step(ROWS, [(handle, n, 1)])
                n += 1
        thread = threading.Thread(target=steps)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                assert agent.step(ROWS, [(handle, 0, 1)]) == 0
                assert agent.stats().offered_rows == 0
                agent.close()
                os._exit(0)
            wait_for(child)
        stop.set()
        thread.join()
        agent.finish(handle, n + 1)
        assert agent.flush(30)
        assert agent.stats().acknowledged_rows == n
    elif how in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(how)
        children = [
            context.Process(target=work, args=(f"{how}{i}", i == 0), daemon=True) for i in range(2)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
    elif how == "hangs":
        for i in range(3):
            agent = agent_of(f"e{i}", close_timeout_seconds=1)
            keep.append((agent, agent.begin("r")))
            assert agent.flush(30)
        os.kill(int(os.environ["SERVER_PID"]), signal.SIGSTOP)
        for agent, handle in keep:
            agent.step(ROWS, [(handle, 0, 1)])
        print(time.time(), flush=True)

keep = []
if __name__ == "__main__":
    main()
"""


def run_engine(
    server: IngestServer | ServerProcess, tmp_path: Path, mode: str, how: str
) -> tuple[str, float]:
    """Run it to its end; what it printed, and when it ended."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    with subprocess.Popen(
        [sys.executable, script, server.target, mode, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SERVER_PID": str(getattr(server, "pid", 0))},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # each process of it prints its stacks
            pytest.fail(f"it did not end:\n{process.communicate()[1]}")
    ended = time.time()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out, ended


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    with run_server() as server:
        yield server


@MODES
@pytest.mark.parametrize(
    "how",
    [
        "fork-during",
        "spawn",
        *(pytest.param(h, marks=pytest.mark.long) for h in ("fork-before", "fork")),
    ],
)
def test_processes_come_and_go(real, mode, how, tmp_path):
    run_engine(real, tmp_path, mode, how)
    expected = {f"r-{how}0", f"r-{how}1"}
    if how == "fork-before":
        expected = {"r-parent0", "r-parent1", "r-child1"}
    elif how == "fork-during":
        expected = {"r-parent"}
    with RouteClient(real.target, run=f"{how}-{mode}") as client:
        for name in expected:
            client.get(name, missing="mask", wait_for="end", timeout=30)


@MODES
def test_an_engine_that_exits_while_the_server_hangs_is_done_in_time(real, mode, tmp_path):
    """Three agents with a second each take one second, and not three."""

    def exits() -> float:
        try:
            said, ended = run_engine(real, tmp_path, mode, "hangs")
        finally:
            os.kill(real.pid, signal.SIGCONT)
        return ended - float(said)

    keeps_to(2.9, exits)


def test_a_process_that_is_killed_leaves_nothing_on_the_disk(tmp_path):
    with IngestServer() as server:
        server.stop()
        config = config_for(
            server.target, background="process", queue_bytes=MIB, spill_dir=str(tmp_path)
        )
        with CaptureAgent(config) as agent:
            load = Load(agent, 64)
            load.steps(600)
            wait_for(lambda: agent.stats().spilled_bytes > 0)
            assert os.listdir(tmp_path) == []
            os.kill(agent.worker_pid, signal.SIGKILL)
            load.steps(10)
            report = agent.close()
        assert sum(report.dropped_rows.values()) + report.unsent_rows == load.offered
        assert os.listdir(tmp_path) == []


def test_threads_that_step_and_read_counters_see_every_row_accounted_for():
    with IngestServer() as server:
        config = config_for(server.target, background="process", queue_bytes=MIB)
        with CaptureAgent(config) as agent:
            load = Load(agent, 16)
            done = threading.Event()
            samples = 0

            def sample() -> None:
                nonlocal samples
                while not done.is_set():
                    stats = agent.stats()
                    check_sample(stats, stats.offered_rows)
                    samples += 1

            threads = [threading.Thread(target=sample) for _ in range(2)]
            for thread in threads:
                thread.start()
            load.steps(300)
            load.finish()
            assert agent.flush(30)
            done.set()
            for thread in threads:
                thread.join()
            assert samples > 100
            assert agent.stats().in_flight_rows == 0
