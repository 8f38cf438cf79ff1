"""The page as a child of the server: when it runs, as whose client, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from routetrace.client import RouteClient
from routetrace.server.process import page as page_process
from routetrace.server.process.page import _reason_for_none
from routetrace.server.settings.config import ServerConfig
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.agents.feeder import Feeder
from support.pages import Browser
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import Pki, entry
from support.waiting import wait_for


def lines(server: ServerProcess) -> list[str]:
    return [json.loads(line)["event"] for line in server.log.read_text().splitlines()]


def said(server: ServerProcess, text: str) -> bool:
    return any(text in line for line in lines(server))


def until_listening(server: ServerProcess, times: int = 1) -> None:
    """Wait for a page, which leaves the processor to others while it starts."""
    wait_for(lambda: len([x for x in lines(server) if x.startswith("page on")]) == times, 90)


def child_of(server: ServerProcess) -> psutil.Process:
    [child] = psutil.Process(server.pid).children()
    return child


def fill(server: ServerProcess) -> None:
    feeder = Feeder(server.target, LAYOUT)
    handle = feeder.begin("one", prompt_len=1)
    feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
    feeder.finish(handle, 5)
    feeder.close()


def ids(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address}api/v1/runs/default/traces", timeout=20) as answer:
        return [trace["trace_id"] for trace in json.loads(answer.read())["traces"]]


@pytest.fixture
def server() -> Iterator[tuple[ServerProcess, str]]:
    listen = f"127.0.0.1:{free_ports(1)}"
    with run_server(page_listen=listen, drain_seconds=1) as process:
        until_listening(process)
        yield process, f"http://{listen}/"


def test_it_serves_the_traces_of_its_server(server: tuple[ServerProcess, str]):
    process, address = server
    fill(process)
    wait_for(lambda: ids(address) == ["one"])
    child = child_of(process)
    assert child.nice() == min(19, psutil.Process(process.pid).nice() + 10)
    # Over a socket that others cannot reach; its directory goes with the server.
    [directory] = [Path(d).parent for d in _unix_sockets(child.cmdline())]
    assert directory.stat().st_mode & 0o777 == 0o700
    session = Browser(address).call("/api/v1/session").json
    assert session["target"] == process.target, "a name that others can use"
    process.stop()
    wait_for(lambda: not psutil.pid_exists(child.pid))
    assert not directory.exists()


def _unix_sockets(command: list[str]) -> list[str]:
    return [part.removeprefix("unix:") for part in command if part.startswith("unix:")]


def test_it_is_started_again_after_a_crash(server: tuple[ServerProcess, str]):
    process, address = server
    first = child_of(process)
    first.kill()
    wait_for(lambda: said(process, "the page has ended; started again"))
    until_listening(process, 2)
    assert child_of(process).pid != first.pid
    assert ids(address) == []


def test_it_ends_with_a_server_that_is_killed(server: tuple[ServerProcess, str]):
    process, _ = server
    child = child_of(process)
    process.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_ingest_goes_on_while_the_page_is_stopped(server: tuple[ServerProcess, str]):
    process, _ = server
    child = child_of(process)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        fill(process)
        with RouteClient(process.target) as client:
            assert client.get("one").complete
        assert process.stop() == 0, "a page that does not end is killed"
    finally:
        if psutil.pid_exists(child.pid):
            os.kill(child.pid, signal.SIGCONT)


def test_a_port_that_is_taken_is_one_line_in_the_log():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with run_server(page_listen=listen) as process:
            wait_for(lambda: said(process, f"cannot listen on {listen}"), 90)
            wait_for(lambda: not psutil.Process(process.pid).children())
            fill(process)
            assert len([line for line in lines(process) if "page" in line]) == 1


def test_an_empty_address_is_no_page():
    with run_server(page_listen="") as process:
        fill(process)
        assert not psutil.Process(process.pid).children()
        assert not said(process, "page")


def test_with_workers_it_follows_runs_to_their_ports():
    port = free_ports(4)
    listen = f"127.0.0.1:{port + 3}"
    runs = {"a": 0, "b": 2}
    with run_server(
        listen=f"127.0.0.1:{port}", workers=3, run_workers=json.dumps(runs), page_listen=listen
    ) as process:
        until_listening(process)
        for run, worker in runs.items():
            feeder = Feeder(f"127.0.0.1:{port + worker}", LAYOUT, run=run)
            handle = feeder.begin(f"of-{run}", prompt_len=1)
            feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
            feeder.finish(handle, 5)
            feeder.close()
        browser = Browser(f"http://{listen}/")
        for run in runs:
            answer = browser.call(f"/api/v1/runs/{run}/traces")
            assert [trace["trace_id"] for trace in answer.json["traces"]] == [f"of-{run}"]
        assert len([line for line in lines(process) if line.startswith("page on")]) == 1


def test_tokens_and_certificate_are_those_of_the_server(tmp_path: Path):
    pki = Pki(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("rt_a", "a"))
    listen = f"127.0.0.1:{free_ports(1)}"
    with run_server(tokens_file=tokens, page_listen=listen, **pki.server.of_server) as process:
        until_listening(process)
        assert said(process, "page on http://"), "on loopback, where others cannot listen in"
        browser = Browser(f"http://{listen}/")
        assert browser.call("/api/v1/runs/default/traces").status == 401
        assert browser.sign_in("rt_a").status == 204
        assert browser.call("/api/v1/runs/default/traces").status == 200


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"page_listen": "", "tls_client_ca": Path("ca")}, ""),
        ({"tls_client_ca": Path("ca")}, "client certificate"),
        ({"workers": 2}, "ask for TLS"),
    ],
)
def test_why_there_is_none(settings: dict[str, Any], reason: str):
    config = ServerConfig(tls_cert=Path("c"), tls_key=Path("k"), **settings)
    found = _reason_for_none(config)
    assert reason in found
    assert bool(reason) == bool(found)


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_process, "_PACKAGES", ("starlette_that_is_not_there",))
    assert "pip install '.[page]'" in _reason_for_none(ServerConfig())


def test_a_directory_that_cannot_hold_its_socket_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with run_server(page_listen=f"127.0.0.1:{free_ports(1)}") as process:
        fill(process)
        wait_for(lambda: said(process, "TMPDIR names another directory"))
        assert not psutil.Process(process.pid).children()


def test_other_machines_need_tls_and_tokens():
    with pytest.raises(ValueError, match=r"page_listen is '0.0.0.0:1'.*tls_cert and tokens_file"):
        ServerConfig(page_listen="0.0.0.0:1")
    ServerConfig(page_listen="0.0.0.0:1", insecure=True)


def test_the_child_ends_with_its_standard_input():
    command = [sys.executable, "-m", "routetrace.page", "--child", "--listen", "127.0.0.1:0"]
    command += ["--target", "127.0.0.1:1", "--shown-target", "shown:1"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline().startswith("http://127.0.0.1:")
    child.stdin.close()
    assert child.wait(30) in (0, -signal.SIGTERM)
    child.stdout.close()
