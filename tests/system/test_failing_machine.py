"""A disk that turns read-only, and a process without descriptors: a line each, no tracebacks."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from routetrace.client import RouteClient, Unavailable
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

ROWS = rows_of(LAYOUT, 50)
#: Seconds in which a cause is logged once.
WINDOW_S = 10.0


def record(feeder: Feeder, name: str, **options: int) -> None:
    handle = feeder.begin(name, **options)
    feeder.step(ROWS, [(handle, 0, len(ROWS))])
    feeder.finish(handle, len(ROWS) + 1)
    feeder.flush()


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def lines(log: Path, words: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if words in line]


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Let a process open no further file."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path: while there is a file, processes that start from now on cannot write to the disk."""
    folder = tmp_path / "plugin"
    folder.mkdir()
    switch = folder / "switch"
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import os

        def refusing(name, call):
            def refused(*args, **keywords):
                writes = name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if writes and os.access({str(switch)!r}, os.F_OK):
                    raise OSError({errno.EROFS}, os.strerror({errno.EROFS}))
                return call(*args, **keywords)
            return refused

        calls = "pwrite fdatasync fsync ftruncate posix_fallocate rename open"
        for name in calls.split():
            setattr(os, name, refusing(name, getattr(os, name)))
        """)
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setattr(ServerProcess, "popen", subprocess.Popen)  # not forked without the plugin
    return switch


@pytest.mark.slow
def test_a_disk_that_turns_read_only_is_a_line_at_a_limited_rate(
    read_only: Path, tmp_path: Path
) -> None:
    settings = {"data_dir": tmp_path / "data", "sweep_interval_seconds": 0.1}
    with run_server(metrics_listen="127.0.0.1:0", **settings) as server:

        def sweeps() -> float:
            return Scraped(server.metrics_target).value("routetrace_sweep_seconds_count")

        feeder = Feeder(server.target, LAYOUT, run="r")
        record(feeder, "kept")
        for number in range(9):  # space that is reclaimed once they expire
            record(feeder, f"short {number}", ttl_seconds=2)
        read_only.touch()
        with RouteClient(server.target, run="r", timeout=1) as client:
            with pytest.raises(Unavailable, match="the store cannot write: Read-only file system"):
                client.delete("kept")
            wait_for(lambda: lines(server.log, "a sweep failed"))
            begun, before = sweeps(), time.monotonic()
            wait_for(lambda: sweeps() >= begun + 30, 120)
            assert np.array_equal(client.get("kept").topk_ids, ROWS), "reads go on"
            told = [lines(server.log, words) for words in ("records cannot", "a sweep failed")]
            windows = 2 + (time.monotonic() - before) // WINDOW_S
            assert len(told[0]) == 1 <= len(told[1]) <= windows
            for line in (told[0][0], told[1][0]):
                assert "(Read-only file system); choose a writable data_dir" in line
            assert "Traceback" not in server.log.read_text()
            read_only.unlink()
            client.delete("kept", timeout=60)
        feeder.close()


@pytest.mark.slow
def test_a_server_without_descriptors_logs_a_line_and_comes_back() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server:
        metrics(server.metrics_target)
        with no_descriptors(server.pid):
            waiting = []
            for address in (server.metrics_target, server.target):
                host, _, port = address.partition(":")
                waiting += [socket.create_connection((host, int(port))) for _ in range(4)]
            wait_for(lambda: lines(server.log, "accepting a connection failed"))
            wait_for(lambda: lines(server.log, "File descriptor limit reached"))
        for one in waiting:
            one.close()
        assert "routetrace_" in metrics(server.metrics_target)
        with RouteClient(server.target, timeout=60) as client:
            assert client.server_info().num_traces == 0
        assert "Traceback" not in server.log.read_text()
        assert len(lines(server.log, "accepting a connection failed")) <= 2


@pytest.mark.slow
def test_a_page_without_descriptors_logs_a_line_and_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with run_server() as server, log.open("wb") as output:
        command = [sys.executable, "-m", "routetrace.page", "--listen", "127.0.0.1:0"]
        command += ["--target", server.target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output) as page:
            try:
                assert page.stdout
                address = page.stdout.readline().decode().strip()
                ask = urllib.request.Request(address)
                assert urllib.request.urlopen(ask, timeout=30).status == 200
                port = int(address.rstrip("/").rpartition(":")[2])
                with no_descriptors(page.pid):
                    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
                    wait_for(lambda: lines(log, "out of system resource"))
                for one in waiting:
                    one.close()
                assert urllib.request.urlopen(ask, timeout=60).status == 200
            finally:
                page.terminate()
    assert "Traceback" not in log.read_text()
    assert len(lines(log, "out of system resource")) <= 2


def test_whoever_hangs_up_at_the_metrics_port_fills_no_log() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server:
        host, _, port = server.metrics_target.partition(":")
        at_once = struct.pack("ii", 1, 0)
        for sent in (b"", b"GET /me", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
            with suppress(OSError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        for _ in range(3):
            metrics(server.metrics_target)
        assert server.stop() == 0
        text = server.log.read_text()
    assert "Traceback" not in text
    assert "Exception" not in text
