"""Ends of an agent: close, a process that dies, forks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

import grpc
import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent, link, supervisor
from routetrace.capture_agent.transport import sender
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    Closed,
    InvalidArgument,
)
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.routetrace_pb2_grpc import (
    IngestServiceServicer,
    add_IngestServiceServicer_to_server,
)
from support.agents.checked import BIG, FULL, LAYOUT, MODES, assert_kept, config_for, make_rows
from support.servers.ingest_server import IngestServer
from support.shared_names import left_behind, shared_names
from support.waiting import keeps_to, wait_for


def test_after_close(server):
    agent = CaptureAgent(config_for(server))
    handle = agent.begin("a")
    agent.step(make_rows(10), [(handle, 0, 10)])
    report = agent.close()
    assert report.acknowledged_rows == 10
    assert agent.close() == report
    assert agent.stats().acknowledged_rows == 10
    assert server.model.request("a").lost == [(10, 0, pb.MISSING_REASON_AGENT_LOST)]
    for call in (
        lambda: agent.begin("b"),
        lambda: agent.step(make_rows(1), [(handle, 10, 1)]),
        lambda: agent.finish(handle, 11),
        agent.flush,
    ):
        with pytest.raises(Closed):
            call()


@MODES
def test_close_keeps_to_its_time_and_says_what_was_not_sent(server, mode):
    server.hold.clear()

    def close() -> float:
        with CaptureAgent(config_for(server, background=mode)) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            started = time.monotonic()
            report = agent.close(1.0)
            taken = time.monotonic() - started
        assert (report.acknowledged_rows, report.dropped_rows, report.unsent_rows) == (0, {}, 10)
        assert_kept(agent.stats(), unsent=10)
        return taken

    keeps_to(4, close)


def test_a_stopped_background_costs_steps_and_is_told_when_it_runs_again(server):
    rows = make_rows(1000, BIG)
    config = config_for(server, BIG, background="process", ring_bytes=2 << 20)
    with CaptureAgent(config) as agent:
        first, second = agent.begin("first"), agent.begin("second")
        assert agent.flush(20)
        os.kill(agent.worker_pid, signal.SIGSTOP)
        for p in range(10):
            agent.step(rows, [(first, 500 * p, 500), (second, 500 * p, 500)])
        agent.rewind(second, 4000)
        agent.step(rows[:10], [(second, 4000, 10)])
        agent.set_weight_version(3)
        os.kill(agent.worker_pid, signal.SIGCONT)
        assert agent.flush(20)
        agent.step(rows[:20], [(first, 5000, 10), (second, 4010, 10)])
        agent.finish(first, 5011)
        agent.finish(second, 4021)
        assert agent.flush(20)
        stats = agent.stats()
        assert_kept(stats, queue_full=stats.dropped_rows["queue_full"])
    a, b = server.model.requests
    kept = set(a.attempts[0].rows)
    assert 0 < len(kept) < 5010
    assert kept | a.lost_positions(FULL) == set(range(5010))
    assert not kept & a.lost_positions(FULL)
    assert set(b.attempts[0].rows) | b.lost_positions(FULL) >= set(range(4020))
    assert {p: b.row(p) for p in range(4010, 4020)} == {
        4000 + p: rows[p].tobytes() for p in range(10, 20)
    }


def test_a_killed_background_is_counted_and_never_waited_for(server, monkeypatch):
    monkeypatch.setattr(supervisor, "_DELAYS_S", (3600.0, 3600.0))  # until close()
    before = shared_names()
    agent = CaptureAgent(config_for(server, background="process", ring_bytes=1 << 20))
    handle = agent.begin("a")
    agent.step(make_rows(10), [(handle, 0, 10)])
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGKILL)
    for p in range(10, 50010, 1000):
        agent.step(make_rows(1000), [(handle, p, 1000)])
    assert not agent.flush(0.1)
    for i in range(2000):
        agent.finish(agent.begin(f"r{i}", labels={"x": "y" * 1000}), 1)
    agent.step(make_rows(10), [(handle, 50010, 10)])
    report = agent.close()
    assert report.acknowledged_rows == 10
    assert set(report.dropped_rows) == {"agent_lost", "queue_full"}
    assert_kept(agent.stats(), **report.dropped_rows)
    assert [r.request_id for r in server.model.requests] == [f"r{i}" for i in range(2000)]
    wait_for(lambda: not left_behind(before, [os.getpid()]))


ENGINE = """
import gc, os, signal, sys, time
import numpy as np
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout
target, elsewhere, mode, how = sys.argv[1:]
layout = ModelLayout((1, 2, 4), 6, 300, 3)
agent = CaptureAgent(AgentConfig(target, "e0", layout, background=mode, close_timeout_seconds=20))
handle = agent.begin("a")
rows = np.arange(9, dtype=np.uint16).reshape(1, 3, 3).repeat(10, axis=0)
agent.step(rows, [(handle, 0, 10)])
child = 0
if how == "killed":
    # Even with a child that holds on to everything, behind Python's back.
    import ctypes
    child = ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(agent.worker_pid, child, flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "collected":
    del agent
    gc.collect()
    time.sleep(0.1)
if how == "forked":
    assert agent.flush(20)
    child = os.fork()
    if child == 0:
        agent.begin("b")
        agent.step(rows, [(123, 0, 10)])
        agent.finish(0, 5)
        assert not agent.flush(1)
        assert agent.stats().offered_rows == 0
        assert agent.close().unsent_rows == 0
        other = CaptureAgent(AgentConfig(elsewhere, "e1", layout, background=mode))
        other.begin("other")
        ok = other.flush(20)
        other.close()
        del agent
        gc.collect()
        sys.exit(0 if ok else 3)
    assert os.waitpid(child, 0)[1] == 0
    agent.step(rows, [(handle, 10, 10)])
    assert agent.flush(20)
    assert agent.stats().acknowledged_rows == 20
"""


def run_engine(server: IngestServer, other: IngestServer, mode: str, how: str, errors: Path) -> int:
    """Run ENGINE until its background has ended too; the exit status."""
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, server.target, other.target, mode, how],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout as stdout:
        pid, child = map(int, stdout.readline().split())
    try:
        code = process.wait(60)
        server.wait_for(lambda: server.model.requests and server.model.requests[0].lost, 30)
        wait_for(lambda: is_zombie(pid), 20)  # else the background lives on
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    return code


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes")
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("process", "killed"),
        ("process", "exits"),
        ("thread", "exits"),
        ("process", "collected"),
        ("process", "forked"),
        ("thread", "forked"),
    ],
)
def test_the_engine_just_ends(server, mode, how, tmp_path):
    """Reported rows arrive, and neither processes nor shared memory remain."""
    before = shared_names()
    with IngestServer() as elsewhere:
        code = run_engine(server, elsewhere, mode, how, tmp_path / "stderr")
        if how == "forked":
            assert [r.request_id for r in elsewhere.model.requests] == ["other"]
    errors = (tmp_path / "stderr").read_text()
    assert code == (-signal.SIGKILL if how == "killed" else 0), errors
    request = server.model.requests[0]
    expected = 20 if how == "forked" else 10
    assert len(request.attempts[0].rows) == expected
    assert request.lost == [(expected, 0, pb.MISSING_REASON_AGENT_LOST)]
    assert any(closes(server)) == (how in {"exits", "forked"})  # which closes its agents
    wait_for(lambda: not left_behind(before, []))
    assert "Traceback" not in errors
    assert "leaked" not in errors


def closes(server: IngestServer) -> list[bool]:
    """Whether each chunk says that the agent was closed."""
    return [pb.ChunkHeader.FromString(chunk.header).closed for chunk in server.chunks]


@MODES
@pytest.mark.parametrize("flushed", [True, False])
def test_the_last_chunk_says_that_the_agent_was_closed(server, mode, flushed):
    with CaptureAgent(config_for(server, background=mode)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
        agent.finish(handle, 11)
        assert agent.flush(20)
        assert not any(closes(server))
        if not flushed:
            agent.begin("b")
    assert closes(server)[-1]
    assert closes(server).count(True) == 1


def test_an_agent_whose_calls_are_lost_does_not_say_that_it_was_closed(server):
    """The ends of requests may be among them: nobody could be told that there was none."""
    agent = CaptureAgent(config_for(server, background="process", ring_bytes=1 << 20))
    handle = agent.begin("a")
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGSTOP)
    prompt = np.zeros(20_000, np.int64)
    for i in range(500):  # more than fits anywhere
        agent.begin(f"r{i}", prompt_token_ids=prompt)
    agent.finish(handle, 1)
    os.kill(agent.worker_pid, signal.SIGCONT)
    agent.close(20)
    assert server.model.request("a").num_tokens == -1
    assert not any(closes(server))


def test_nobody_waits_to_tell_a_server_that_is_away_of_a_close_alone(server, caplog):
    with CaptureAgent(config_for(server)) as agent:
        agent.finish(agent.begin("a"), 1)
        assert agent.flush(20)
        server.stop()
        wait_for(lambda: not agent.stats().connected)
        agent.close(5)
    assert not [r for r in caplog.records if "closed with" in r.getMessage()]


def test_a_close_is_told_again_where_its_chunk_was_refused(server):
    refused = []

    def refuse(chunk: pb.Chunk) -> pb.ErrorDetail | None:
        if not pb.ChunkHeader.FromString(chunk.header).closed or refused:
            return None
        refused.append(chunk)
        return InvalidArgument(field="ops", value="x", expected="y").to_detail()

    server.script = refuse
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
    assert refused
    assert closes(server)[-1]
    assert server.model.request("a").lost[0] == (0, 10, pb.MISSING_REASON_REJECTED)


def test_a_flush_does_not_wait_for_a_background_that_was_given_up(server, monkeypatch):
    with CaptureAgent(config_for(server)) as agent:
        waits = []
        monkeypatch.setattr(agent._link, "wait", waits.append)
        agent._abandoned = True
        assert not agent.flush(2)
        assert not waits


def test_close_writes_the_backlog_under_the_lock(server, monkeypatch):
    """As flush() of another thread does: two at once would swap events."""
    held = []
    agent = CaptureAgent(config_for(server))
    drain = agent._feed.drain
    monkeypatch.setattr(
        agent._feed, "drain", lambda: held.append(agent._lock._is_owned()) or drain()
    )
    agent.close()
    assert held
    assert all(held)


def call_twice(abort: Callable[[grpc.ServicerContext], None]) -> str:
    """Let an agent call a server twice that ends each call; return the server's address."""

    class Ends(IngestServiceServicer):
        calls = 0

        def Ingest(self, requests, context):
            Ends.calls += 1
            next(requests)
            abort(context)

    server = grpc.server(ThreadPoolExecutor(2))
    add_IngestServiceServicer_to_server(Ends(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with CaptureAgent(AgentConfig(target, "e", LAYOUT, background="thread")) as agent:
            wait_for(lambda: Ends.calls > 1)
            agent.close(0)
    finally:
        server.stop(0)
    return target


def test_an_error_detail_that_does_not_parse_is_an_error_like_others(caplog):
    def abort(context):
        context.set_trailing_metadata(((ERROR_METADATA_KEY, b"\xff\xff\xff"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "of a proxy")

    call_twice(abort)
    assert any("of a proxy" in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_that_the_server_cancelled_is_named_in_words(caplog):
    # As gRPC ends streams that a server which stops has not begun.
    target = call_twice(lambda context: context.abort(grpc.StatusCode.CANCELLED, "CANCELLED"))
    said = f"{target} cancelled the call: the server stopped, or had too many calls (retrying"
    assert any(said in record.getMessage() for record in caplog.records)


def test_nothing_is_said_to_the_server_during_a_fork(server, caplog):
    """gRPC's threads go on in the child: what they know there, they must not be able to say."""
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("a")
        assert agent.flush(20)
        sender._before_fork()
        sender._before_fork()  # another thread forks as well
        sender._after_fork_in_parent()
        agent.step(make_rows(3), [(handle, 0, 3)])
        agent.finish(handle, 4)
        assert not agent.flush(0.5)
        assert server.welcomes == 1
        sender._after_fork_in_parent()
        assert agent.flush(20)
        assert server.welcomes == 2
        stats = agent.stats()
    assert_kept(stats)
    assert stats.acknowledged_rows == 3
    assert not caplog.records


def test_the_background_has_names(server):
    with CaptureAgent(config_for(server)) as agent:
        assert agent.flush(20)
        names = {thread.name for thread in threading.enumerate()}
    assert {"routetrace-worker", "routetrace-sender"} <= names


def test_the_process_of_the_background_can_be_recognised(server):
    """In `ps`, also where an id has characters that no argument may have."""
    for engine_id in ("rollout-0", "a\0b \n\N{SNOWMAN}"):
        config = replace(config_for(server, background="process"), engine_id=engine_id, run="grpo")
        with CaptureAgent(config) as agent:
            assert agent.flush(20)
            command = Path(f"/proc/{agent.worker_pid}/cmdline").read_bytes().split(b"\0")[1:-1]
        assert command == [
            str(Path(link.__file__).with_name("background.py")).encode(),
            f"engine_id={engine_id!a}".encode(),
            b"run='grpo'",
            f"version={version('routetrace')}".encode(),
        ]


@MODES
def test_an_agent_without_metadata_of_its_package_works(server, monkeypatch, mode):
    """As from a tree on PYTHONPATH."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with CaptureAgent(config_for(server, background=mode)) as agent:
        assert agent.flush(20)
        if mode == "process":
            command = Path(f"/proc/{agent.worker_pid}/cmdline").read_bytes().split(b"\0")
            assert b"version=unknown" in command


@pytest.mark.parametrize("way", [["-m", "routetrace.capture_agent.background"], ["{path}"]])
def test_the_background_is_no_program(way):
    path = str(Path(link.__file__).with_name("background.py"))
    done = subprocess.run(
        [sys.executable, *(word.format(path=path) for word in way), "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "routetrace: a capture agent starts this itself; see CaptureAgent\n"


@pytest.mark.parametrize("requests", [1, 2])
def test_close_names_what_was_not_acknowledged_and_a_remedy(server, caplog, requests):
    server.hold.clear()
    config = replace(config_for(server), engine_id="e7", run="grpo")
    with CaptureAgent(config) as agent:
        for number in range(requests):
            handle = agent.begin(f"a{number}")
            agent.step(make_rows(1), [(handle, 0, 1)])
            agent.finish(handle, 2)
        agent.close(0.5)
    server.hold.set()
    rows = "1 row" if requests == 1 else "2 rows"
    (text,) = [r.getMessage() for r in caplog.records if "closed with" in r.getMessage()]
    assert re.match(
        rf"routetrace: engine 'e7' of run 'grpo' closed with {rows} that the server did not "
        r"acknowledge \(unsent\); they are lost, unless the server stored them without "
        rf"acknowledging: the background \(process {os.getpid()}\) did not end in time: give "
        r"close\(\) more time \(close_timeout_seconds is \d+\), look whether the process was "
        r"stopped, and at the server with routetrace doctor$",
        text,
    )
