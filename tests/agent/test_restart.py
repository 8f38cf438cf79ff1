"""A background that dies: another one takes over, and every row is sent or counted."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent, supervisor, worker
from support.agents.checked import MODES, assert_kept, config_for, make_rows
from support.servers.ingest_server import IngestServer
from support.shared_names import left_behind, shared_names
from support.waiting import wait_for


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The next background starts at once; how long it waits is tested apart."""
    monkeypatch.setattr(supervisor, "_DELAYS_S", (0.01, 0.05))


def kill(agent: CaptureAgent) -> None:
    """Kill the background, and wait until another one runs."""
    pid = agent.worker_pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: agent.worker_pid != pid)


def errors(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def finished(agent: CaptureAgent, name: str, rows: np.ndarray) -> None:
    """A request of these rows, from begin to end."""
    handle = agent.begin(name, prompt_len=1)
    agent.step(rows, [(handle, 0, len(rows))])
    agent.finish(handle, len(rows) + 1)


def assert_sent(server: IngestServer, name: str, rows: np.ndarray) -> None:
    """The server has the request, whole."""
    request = server.model.request(name)
    assert [request.row(p) for p in range(len(rows))] == [row.tobytes() for row in rows]
    assert (request.num_tokens, request.lost) == (len(rows) + 1, [])


def test_a_killed_background_is_reported_once_and_later_requests_are_sent(server, caplog):
    rows = make_rows(40)
    config = config_for(server, background="process")
    with CaptureAgent(config) as agent:
        before = agent.begin("before", prompt_len=1)
        agent.step(rows[:10], [(before, 0, 10)])
        assert agent.flush(20)
        assert not server.hello.former_epoch
        former = server.epoch
        kill(agent)
        # The request that ran is not known any more; its rows are counted.
        agent.step(rows[10:14], [(before, 10, 4)])
        agent.step(rows[14:18], [(before, 14, 4)])
        finished(agent, "after", rows[20:])
        agent.finish(before, 19)
        assert agent.flush(20)
        assert server.hello.former_epoch == former
        assert_sent(server, "after", rows[20:])
        assert [r.request_id for r in server.model.requests] == ["after"]
        assert server.model.request("after").index == 1
        assert_kept(agent.stats(), agent_lost=8)
        assert agent.stats().acknowledged_rows == 30
    (text,) = errors(caplog)
    assert re.search(
        r"engine 'e0' of run 'default'.* was killed by signal SIGKILL .*another one starts in .* "
        r"queue_bytes$",
        text,
    )


def test_what_began_in_the_ring_is_sent_by_the_next_background(server):
    rows = make_rows(60)
    settings = {"background": "process", "block_size": 4, "num_blocks": 16}
    with CaptureAgent(config_for(server, **settings)) as agent:
        before = agent.begin("before", prompt_len=1, block_ids=[0, 1, 2, 3])
        agent.step(rows[:10], [(before, 0, 10)])
        assert agent.flush(20)
        os.kill(agent.worker_pid, signal.SIGSTOP)
        agent.step(rows[10:11], [(before, 10, 1)])  # continues the step that the dead one read
        ring = agent.begin("ring", prompt_len=1, block_ids=[4, 5, 6])
        agent.step(rows[20:23], [(before, 11, 1), (ring, 0, 2)])
        for i in range(4):  # each continues the one before
            agent.step(rows[30 + 2 * i : 32 + 2 * i], [(before, 12 + i, 1), (ring, 2 + i, 1)])
        # Takes four rows that are known and four that only the dead background knew.
        hit = agent.begin("hit", num_computed_tokens=8, block_ids=[4, 1, 7])
        kill(agent)
        agent.step(rows[50:52], [(hit, 8, 1), (ring, 6, 1)])
        agent.finish(ring, 8)
        agent.finish(hit, 10)
        agent.finish(before, 20)
        assert agent.flush(20)
        expected = [*rows[21:23], *rows[[31, 33, 35, 37]], rows[51]]
        assert_sent(server, "ring", np.array(expected))
        hits = [server.model.request("hit").row(p) for p in range(9)]
        assert hits == [*(r.tobytes() for r in expected[:4]), *[None] * 4, rows[50].tobytes()]
        assert_kept(agent.stats(), agent_lost=6)


def test_backgrounds_that_die_again_and_again(server, caplog):
    rows = make_rows(30)
    with CaptureAgent(config_for(server, background="process")) as agent:
        for i in range(3):
            handle = agent.begin(f"lost {i}")
            agent.step(rows[:3], [(handle, 0, 3)])
            kill(agent)
        finished(agent, "after", rows)
        assert agent.flush(20)
        assert_sent(server, "after", rows)
        stats = agent.stats()
        assert_kept(stats, **stats.dropped_rows)
        assert sum(stats.dropped_rows.values()) <= 9
    assert len(errors(caplog)) == 3


def test_rows_are_conserved_whenever_a_background_is_killed(server):
    """With chunks in all places: in the ring, lingering, sent, and acknowledged."""
    rows = make_rows(32)
    config = config_for(server, background="process", linger_seconds=0.002)
    with CaptureAgent(config) as agent:
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                stats = agent.stats()
                assert stats.in_flight_rows >= 0
                known = stats.acknowledged_rows + sum(stats.dropped_rows.values())
                assert known + stats.in_flight_rows == stats.offered_rows

        def step(count: int) -> None:
            handle = agent.begin(f"r{time.monotonic_ns()}", prompt_len=1)
            for p in range(count):
                agent.step(rows, [(handle, 32 * p, 32)])
            agent.rewind(handle, 32 * count - 5)
            agent.preempt(handle, 32 * count - 5)
            agent.step(rows[:5], [(handle, 32 * count - 5, 5)])  # late
            agent.finish(handle, 32 * count - 4)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for _ in range(4):
                pid = agent.worker_pid
                for i in range(50):
                    step(20)
                    if i == 25:
                        os.kill(pid, signal.SIGKILL)
                wait_for(lambda pid=pid: agent.worker_pid != pid)
            assert agent.flush(60)
        finally:
            done.set()
            thread.join()
        assert_kept(agent.stats(), **agent.stats().dropped_rows)


def test_a_background_in_a_thread_that_fails_is_followed_by_another_one(
    server, caplog, monkeypatch
):
    take, failures = worker.Worker._take, [1]

    def failing(self, record):
        if failures and self._words[worker.Word.OFFERED] > 5:
            failures.pop()
            raise MemoryError("no memory")
        return take(self, record)

    monkeypatch.setattr(worker.Worker, "_take", failing)
    rows = make_rows(20)
    with CaptureAgent(config_for(server)) as agent:
        before = agent.begin("before")
        agent.step(rows[:5], [(before, 0, 5)])
        assert agent.flush(20)
        finished(agent, "after", rows)
        wait_for(lambda: not failures)
        assert agent.flush(20) or agent.flush(20)  # the first one may have met the failure
        assert_sent(server, "after", rows)
        assert_kept(agent.stats())
    (text,) = errors(caplog)
    assert "failed with MemoryError('no memory')" in text


def test_another_one_that_cannot_be_started_is_tried_again(server, caplog, monkeypatch):
    rows = make_rows(20)
    with CaptureAgent(config_for(server, background="process")) as agent:
        assert agent.flush(20)
        popen, refusals = subprocess.Popen, [1, 2]

        def refused(*args, **kwargs):
            if refusals:
                refusals.pop()
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return popen(*args, **kwargs)

        monkeypatch.setattr(subprocess, "Popen", refused)
        kill(agent)
        finished(agent, "after", rows)
        assert agent.flush(20)
        assert_kept(agent.stats())
    assert len(errors(caplog)) == 3
    assert "cannot be started ([Errno 11] Resource temporarily unavailable)" in errors(caplog)[1]


def test_a_background_that_dies_while_the_agent_closes_is_followed_by_one_more(server):
    rows = make_rows(20)
    agent = CaptureAgent(config_for(server, background="process"))
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGSTOP)
    finished(agent, "after", rows)
    pid = agent.worker_pid
    closing = threading.Thread(target=agent.close)
    closing.start()
    os.kill(pid, signal.SIGKILL)
    closing.join(60)
    assert_sent(server, "after", rows)
    assert_kept(agent.stats())


def test_a_flush_that_a_background_took_with_it_ends(server):
    server.hold.clear()
    with CaptureAgent(config_for(server, background="process")) as agent:
        finished(agent, "a", make_rows(3))
        flushed = []
        flush = threading.Thread(target=lambda: flushed.append(agent.flush(600)))
        flush.start()
        wait_for(lambda: agent._link.ring.read == agent._link.ring.written > 0)
        kill(agent)
        flush.join(60)
        assert flushed == [False]
        server.hold.set()


def test_an_agent_that_is_closed_between_two_backgrounds_leaves_none(server, monkeypatch):
    monkeypatch.setattr(supervisor, "_DELAYS_S", (3600.0, 3600.0))
    before = shared_names()
    agent = CaptureAgent(config_for(server, background="process"))
    assert agent.flush(20)
    finished(agent, "lost", make_rows(2))
    os.kill(agent.worker_pid, signal.SIGKILL)
    wait_for(lambda: agent._link.deaths)
    finished(agent, "ring", make_rows(5))
    agent.close()
    assert_sent(server, "ring", make_rows(5))
    assert agent.stats().in_flight_rows == 0
    wait_for(lambda: not Path(f"/proc/{agent.worker_pid}").exists())
    wait_for(lambda: not left_behind(before, [os.getpid()]))


def test_the_delay_doubles_and_begins_anew_after_a_while(server, caplog, monkeypatch):
    monkeypatch.setattr(supervisor, "_DELAYS_S", (0.01, 0.04))
    with CaptureAgent(config_for(server, background="process")) as agent:
        for _ in range(4):
            kill(agent)
        monkeypatch.setattr(supervisor, "_WORKED_S", 0)
        kill(agent)
    said = [re.search(r"starts in (\S+) s", text)[1] for text in errors(caplog)]
    assert said == ["0.01", "0.02", "0.04", "0.04", "0.01"]


# ---------------------------------------------------------------------- close


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "closed with" in r.getMessage()]


CLOSED = r"routetrace: engine 'e0' of run 'default' closed with (\d+ rows?|calls) that .*\((\w+)\)"


@pytest.mark.parametrize("leaves", ["close", "with"])
def test_close_reports_rows_of_a_background_that_is_stopped(server, caplog, leaves):
    config = config_for(server, background="process", close_timeout_seconds=0.5)
    agent = CaptureAgent(config)
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGSTOP)
    pid = agent.worker_pid
    if leaves == "with":
        with agent:
            finished(agent, "a", make_rows(7))
    else:
        finished(agent, "a", make_rows(7))
        assert agent.close(0.5).unsent_rows == 7
    (text,) = warnings(caplog)
    assert re.match(CLOSED, text).groups() == ("7 rows", "unsent")
    assert f"(process {pid}) did not end in time" in text
    agent.close()
    assert len(warnings(caplog)) == 1


def slow_start(tmp_path, monkeypatch, seconds: float) -> None:
    """Have processes of backgrounds start later, as on a busy machine."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if any('background.py' in word for word in sys.orig_argv):\n"
        f"    time.sleep({seconds})\n"
    )
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_close_reports_rows_of_a_background_that_has_not_started(
    server, caplog, tmp_path, monkeypatch
):
    slow_start(tmp_path, monkeypatch, 3600)
    agent = CaptureAgent(config_for(server, background="process"))
    finished(agent, "a", make_rows(7))
    assert agent.close(0.2).unsent_rows == 7  # a time that is given is the whole time
    (text,) = warnings(caplog)
    assert re.match(CLOSED, text).groups() == ("7 rows", "unsent")
    assert "had not started in time" in text


def test_close_reports_rows_of_a_background_that_is_dead(server, caplog, tmp_path, monkeypatch):
    agent = CaptureAgent(config_for(server, background="process"))
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGSTOP)
    finished(agent, "a", make_rows(7))
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError("no processes"))
    )
    os.kill(agent.worker_pid, signal.SIGKILL)
    wait_for(lambda: agent._link.deaths)
    assert agent.close().dropped_rows == {"agent_lost": 7}
    (text,) = warnings(caplog)
    assert re.match(CLOSED, text).groups() == ("7 rows", "agent_lost")
    assert errors(caplog)


@MODES
def test_close_reports_nothing_where_nothing_is_lost(server, caplog, mode):
    with CaptureAgent(config_for(server, background=mode)) as agent:
        finished(agent, "a", make_rows(7))
        agent.begin("runs")
    assert not caplog.records


def test_close_reports_ends_that_are_lost_without_rows(server, caplog):
    server.hold.clear()
    agent = CaptureAgent(config_for(server))
    agent.finish(agent.begin("a"), 1)
    agent.close(0.5)
    server.hold.set()
    (text,) = warnings(caplog)
    assert re.match(CLOSED, text).groups() == ("calls", "unsent")


SCRIPT = """
import sys
import numpy as np
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout
target, leaves = sys.argv[1:]
layout = ModelLayout((1, 2, 4), 6, 300, 3)
agent = CaptureAgent(AgentConfig(target, "e0", layout, close_timeout_seconds=2))
handle = agent.begin("a", prompt_len=1)
rows = np.arange(9, dtype=np.uint16).reshape(1, 3, 3).repeat(10, axis=0)
agent.step(rows, [(handle, 0, 10)])
agent.finish(handle, 11)
if leaves == "with":
    with agent:
        pass
"""


@pytest.mark.parametrize("leaves", ["with", "exit"])
def test_a_short_script_on_a_busy_machine_loses_nothing(server, tmp_path, monkeypatch, leaves):
    """Its background starts later than close() has time for."""
    slow_start(tmp_path, monkeypatch, 4)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.target, leaves],
        capture_output=True,
        text=True,
        check=True,
    )
    assert server.rows == 10
    assert server.model.request("a").num_tokens == 11
    assert done.stderr == ""


def test_the_exit_of_the_interpreter_reports_lost_rows(tmp_path):
    """Here no server is there."""
    with IngestServer() as server:
        target = server.target
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, target, "exit"], capture_output=True, text=True, check=True
    )
    (text,) = [line for line in done.stderr.splitlines() if "closed with" in line]
    assert re.match(CLOSED, text).groups() == ("10 rows", "unsent")
