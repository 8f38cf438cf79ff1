"""Mistakes of the first hour, each against real processes: a typed error names the remedy."""

from __future__ import annotations

import http.server
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import trustme

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.cli import main as routetrace_command
from routetrace.client import (
    AsyncRouteClient,
    Closed,
    DeadlineExceeded,
    FetchPlan,
    InvalidArgument,
    MicroBatch,
    MissingDependency,
    NotFound,
    PermissionDenied,
    Rank,
    RouteClient,
    RouteTraceError,
    Sample,
    Security,
    Unauthenticated,
    Unavailable,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, free_ports, run_server
from routetrace.trainers.replay import replay
from support.servers import forked
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)
ROWS = np.broadcast_to(np.arange(3, dtype=np.uint16), (3, 3, 3))
#: Seconds of a call, far more than any of these may take.
LONG = 60.0


def client(target: str, **options: Any) -> RouteClient:
    return RouteClient(target, **{"security": Security(), "timeout": LONG, **options})


def agent(target: str = "127.0.0.1", **options: Any) -> CaptureAgent:
    given = {"engine_id": "e", "layout": LAYOUT, "background": "thread", "security": Security()}
    return CaptureAgent(AgentConfig(target=target, **{**given, **options}))


def record(target: str, trace_id: str, run: str = "default", version: int = 0) -> None:
    """A trace of four tokens, sent by a real agent."""
    with agent(target, run=run, engine_id=f"engine of {trace_id}") as one:
        one.set_weight_version(version)
        handle = one.begin(trace_id, prompt_len=3, labels={"group": "g"})
        one.step(ROWS, [(handle, 0, 3)])
        one.finish(handle, 4)
        assert one.flush(30)


@pytest.fixture(autouse=True)
def background_ends() -> Iterator[None]:
    """Wait for agents whose close() had no time: what they log belongs to this test."""
    before = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - before:
        if thread.name == "routetrace-worker":
            thread.join(60)
            assert not thread.is_alive()


# ------------------------------------------------------------------ what listens there


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(metrics_listen="127.0.0.1:0", sweep_interval_seconds=0.2) as process:
        record(process.target, "kept")
        record(process.target, "z", run="err")
        yield process


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA
) -> Iterator[ServerProcess]:
    """A server with TLS and tokens."""
    folder = tmp_path_factory.mktemp("secured")
    leaf = authority.issue_cert("127.0.0.1")
    (folder / "key").touch(0o600)
    leaf.private_key_pem.write_to_path(str(folder / "key"))
    leaf.cert_chain_pems[0].write_to_path(str(folder / "cert"))
    authority.cert_pem.write_to_path(str(folder / "ca"))
    command = [sys.executable, "-m", "routetrace.server.daemon", "token", "--name", "reader"]
    command += ["--scope", "read", "--run", "grpo-*", "--out", str(folder / "token")]
    entry = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (folder / "tokens.toml").write_text(entry)
    files = {"tls_cert": folder / "cert", "tls_key": folder / "key"}
    with run_server(tokens_file=folder / "tokens.toml", **files) as process:
        process.folder = folder  # type: ignore[attr-defined]
        yield process


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """An HTTP/1 server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """A gRPC server of something else."""
    made = grpc.server(futures.ThreadPoolExecutor(1))
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}"
    made.stop(0)


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def dead() -> str:
    return f"127.0.0.1:{free_ports(1)}"


# ------------------------------------------------------------------ no connection


NO_ANSWER = (
    "no answer from {} in {} s, though it takes connections; is the server there stopped, or is "
    "this the port of another program?"
)


@contextmanager
def under_way(call: Callable[[], object]) -> Iterator[futures.Future[object]]:
    with futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def test_a_server_that_is_not_there_is_logged_at_once(dead, caplog):
    reader = client(dead)
    with under_way(lambda: reader.get("g0")) as call:
        wait_for(lambda: "cannot connect" in caplog.text)
        assert not call.done()
        reader.close()
        with pytest.raises(Closed):
            call.result()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"routetrace: cannot connect to {dead} (connection refused); is ")
    seconds = re.search(r" \(retrying for (\d+) s\)$", line)
    assert seconds
    assert 0 < int(seconds[1]) <= LONG


async def test_asyncio_logs_it_too(dead, caplog):
    async with AsyncRouteClient(dead, timeout=1, security=Security()) as reader:
        with pytest.raises(Unavailable, match=rf"cannot connect to {dead} \(connection refused\)"):
            await reader.get("g0")
    assert caplog.text.count("cannot connect") == 1


def test_a_server_that_comes_back_is_logged_and_the_call_ends_well(dead, caplog):
    port = int(dead.rpartition(":")[2])
    with client(dead) as reader, under_way(reader.server_info) as call:
        wait_for(lambda: "cannot connect" in caplog.text)
        with run_server(port=port):
            assert call.result().num_traces == 0
    assert caplog.records[-1].getMessage() == f"routetrace: connected to {dead} again"


def test_an_agent_logs_a_server_that_is_not_there_and_keeps_the_rows(dead, caplog):
    with agent(dead, engine_id="dp0", close_timeout_seconds=0) as one:
        handle = one.begin("r", prompt_len=3)
        one.step(ROWS, [(handle, 0, 3)])
        wait_for(lambda: "cannot connect" in caplog.text)
        assert one.stats().in_flight_rows == 3
    first = caplog.records[0].getMessage()
    assert first.startswith(
        f"routetrace: engine 'dp0': cannot connect to {dead} (connection refused); "
    )
    assert first.endswith(" (retrying, and rows wait in memory)")


@pytest.mark.parametrize("where", ["web", "metrics"])
def test_a_port_of_http_1(where, web, server, caplog):
    target = {"web": web, "metrics": server.metrics_target}[where]
    with client(target) as reader, pytest.raises(Unavailable) as caught:
        reader.get("g0")
    text = f"{target} speaks HTTP/1, not gRPC; is this the metrics port?"
    assert str(caught.value) == text
    with agent(target, close_timeout_seconds=0):
        wait_for(lambda: f"engine 'e': {text}" in caplog.text)
    assert "Traceback" not in caplog.text


def test_another_grpc_server(other):
    with client(other) as reader, pytest.raises(InvalidArgument) as caught:
        reader.server_info()
    assert caught.value.field == "target"
    assert "expected the address of a routetrace-server" in str(caught.value)


def test_a_port_that_never_answers_is_logged_before_the_deadline(silent, caplog):
    reader = client(silent)
    with under_way(lambda: reader.get("g0")) as call:
        wait_for(lambda: NO_ANSWER.format(silent, 3) in caplog.text)
        assert not call.done()
        reader.close()
    with agent(silent, close_timeout_seconds=0):
        wait_for(lambda: f"engine 'e': {NO_ANSWER.format(silent, 4)}" in caplog.text)
    assert "does not speak gRPC" not in caplog.text
    with client(silent, timeout=0.5) as reader, pytest.raises(DeadlineExceeded, match=silent):
        reader.get("g0")


def test_servers_that_take_connections_and_stall_are_waited_for(caplog):
    """As processes do that are stopped, or whose machine has no time for them."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(2)]
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.settimeout(60)
            listener.listen()
        ports = [listener.getsockname()[1] for listener in listeners]
        target = ",".join(f"127.0.0.1:{port}" for port in ports)
        reader = stack.enter_context(client(target, timeout=120))
        call = stack.enter_context(under_way(reader.server_info))
        for number in range(12):  # more attempts than are made at another protocol
            stack.enter_context(listeners[number % 2].accept()[0])
        for listener in listeners:
            listener.close()
        with run_server(port=ports[0]):
            assert call.result().num_traces == 0
    assert re.search(r"no answer from \S+ in 3 s, though it takes connections", caplog.text)
    assert "does not speak gRPC" not in caplog.text


def test_a_server_that_is_stopped_is_named_as_one_and_waited_for(caplog):
    with run_server() as process:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with client(process.target, timeout=120) as reader, ExitStack() as stack:
                one = stack.enter_context(agent(process.target))
                handle = one.begin("r", prompt_len=3)
                one.step(ROWS, [(handle, 0, 3)])
                one.finish(handle, 4)
                call = stack.enter_context(under_way(lambda: reader.get("r", wait_for="end")))
                for seconds in (3, 4):  # of the client, of the agent
                    text = NO_ANSWER.format(process.target, seconds)
                    wait_for(lambda text=text: text in caplog.text)
                os.kill(process.pid, signal.SIGCONT)
                assert np.array_equal(call.result().topk_ids, ROWS)
        finally:
            os.kill(process.pid, signal.SIGCONT)
    assert "does not speak gRPC" not in caplog.text


def test_a_silent_port_says_the_same_under_tls(silent, caplog):
    with client(silent, security=Security(tls=True)) as reader, under_way(reader.server_info):
        wait_for(lambda: NO_ANSWER.format(silent, 3) in caplog.text)
        reader.close()


def test_a_host_that_takes_no_connections_and_refuses_none(caplog):
    """As behind a firewall that drops packets: the system drops those beyond the backlog."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        target = f"127.0.0.1:{address[1]}"
        with client(target) as reader, under_way(reader.server_info):
            text = f"cannot connect to {target} (no answer in 3 s); check the port, and firewalls"
            wait_for(lambda: text in caplog.text)
            reader.close()


def test_a_port_of_another_protocol(caplog):
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def greet() -> None:
            with suppress(OSError):
                while True:
                    stack.enter_context(listener.accept()[0]).sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with client(target) as reader, pytest.raises(Unavailable) as caught:
            reader.server_info()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert str(caught.value) == (
        f"{target} does not speak gRPC; is this the port of a routetrace-server, 7411 by default?"
    )


def test_tls_against_plain_text(server, caplog):
    reader = client(server.target, security=Security(tls=True))
    with reader, pytest.raises(Unavailable) as caught:
        reader.get("g0")
    assert str(caught.value).startswith(f"{server.target} does not speak TLS; leave tls off, or ")
    with agent(server.target, security=Security(tls=True), close_timeout_seconds=0):
        wait_for(lambda: f"engine 'e': {caught.value}" in caplog.text)


def test_plain_text_against_tls(secured, caplog):
    reader = client(secured.target)
    with under_way(lambda: reader.get("g0")) as call:
        wait_for(lambda: "see tls and ca_file" in caplog.text)
        reader.close()
        with pytest.raises(Closed):
            call.result()
    assert secured.target in caplog.text


@pytest.mark.parametrize("known", [True, False], ids=["an answer", "an error"])
def test_a_server_that_was_reached_once_is_not_suspected_of_tls(known, caplog):
    """A closed socket is an outage then, for clients and agents."""
    with run_server() as server:
        record(server.target, "kept")
        with client(server.target) as reader, agent(server.target, close_timeout_seconds=0) as one:
            one.begin("running", prompt_len=3)
            assert one.flush(30)
            if known:
                reader.stat("kept")
            else:
                with pytest.raises(NotFound):
                    reader.stat("gone")
            with under_way(lambda: reader.get("running", wait_for="end")) as call:
                server.kill()
                wait_for(lambda: "engine 'e': " in caplog.text)
                wait_for(lambda: re.search("retrying for", caplog.text))
                reader.close()
                with pytest.raises(Closed):
                    call.result()
    assert "TLS" not in caplog.text


def test_a_hint_is_a_guess_about_a_server_that_never_answered():
    closed = "Socket closed"
    assert "if the server speaks TLS" in Security().hint(closed)
    assert Security().hint(closed, reached=True) == ""
    assert "client certificates" in Security(tls=True).hint(closed)
    assert Security(tls=True).hint(closed, reached=True) == ""
    own = Security(tls=True, cert_file="cert", key_file="key")
    assert "may not take" in own.hint(closed, reached=True), "it may have expired since"
    expired = "certificate has expired"
    assert Security(tls=True).hint(expired, reached=True) == Security(tls=True).hint(expired)


def test_a_certificate_of_another_authority(secured, tmp_path, caplog):
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca"))
    reader = client(secured.target, security=Security(ca_file=str(tmp_path / "ca")))
    with under_way(lambda: reader.get("g0")):
        wait_for(lambda: "the server's certificate is not of an authority in" in caplog.text)
        reader.close()


def test_an_unknown_host(caplog):
    reader = client("no-such-host.invalid")
    with under_way(lambda: reader.get("g0")):
        wait_for(lambda: "cannot resolve 'no-such-host.invalid'" in caplog.text)
        reader.close()


def test_no_port_means_7411():
    assert repr(client("traces")).startswith("<RouteClient traces:7411 ")
    config = AgentConfig(target="traces", engine_id="e", layout=LAYOUT, security=Security())
    assert config.target == "traces:7411"


# ------------------------------------------------------------------ no trace


def test_a_run_that_does_not_exist_names_those_that_do(server):
    with client(server.target, run="typo") as reader:
        assert reader.server_info().runs == ("default", "err")
        for call in (reader.get, reader.stat, reader.delete, lambda i: next(reader.follow(i))):
            with pytest.raises(NotFound) as caught:
                call("kept")
            assert str(caught.value) == "no run 'typo'; runs: default, err"
        with pytest.raises(DeadlineExceeded, match="no run 'typo'; runs: default, err"):
            reader.get("kept", wait_for="end", timeout=0.3)


def test_runs_that_a_token_does_not_cover_are_not_named(secured):
    folder: Path = secured.folder  # type: ignore[attr-defined]
    security = Security(ca_file=str(folder / "ca"), token_file=str(folder / "token"))
    with client(secured.target, run="grpo-typo", security=security) as reader:
        assert reader.server_info().runs == ()
        with pytest.raises(NotFound, match="no run 'grpo-typo'; runs: none yet"):
            reader.get("g0")
    denied = pytest.raises(PermissionDenied, match="token reader does not cover run 'sft'")
    with client(secured.target, run="sft", security=security) as reader, denied:
        reader.get("g0")
    bare = Security(ca_file=str(folder / "ca"))
    unknown = pytest.raises(Unauthenticated)
    with client(secured.target, run="grpo-1", security=bare) as reader, unknown:
        reader.get("g0")


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """A server that evicts soon."""
    with run_server(run_quota="40KiB", sweep_interval_seconds=0.2) as process:
        yield process


def evict(target: str) -> None:
    rng = np.random.default_rng(0)
    with client(target) as reader, agent(target, engine_id="filler") as one:
        for number in range(60):
            rows = rng.random((200, 3, 300)).argsort(axis=2)[..., :3].astype(np.uint16)
            handle = one.begin(f"filler-{number}")
            one.step(rows, [(handle, 0, 200)])
            one.finish(handle, 201)
            assert one.flush(30)
            try:
                reader.stat("gone")
            except NotFound:
                return
            time.sleep(0.1)
    raise AssertionError("nothing was evicted")


def test_missing_traces_are_told_apart(server, small):
    def expire(reader: RouteClient) -> None:
        reader.renew(["gone"], ttl_seconds=1)
        wait_for(lambda: not list(reader.find(labels={"fate": "x"})) and not there(reader))

    def there(reader: RouteClient) -> bool:
        return any(stat.trace_id == "gone" for stat in reader.find())

    fates: dict[str, tuple[ServerProcess, Callable[[RouteClient], object]]] = {
        "was deleted": (server, lambda reader: reader.delete("gone")),
        "was retired: all its rows are of retired weight versions": (
            server,
            lambda reader: reader.retire_through(-5),
        ),
        "has expired: its lease ran out; a longer ttl_seconds or renew keeps one": (server, expire),
        "was evicted: its run came near run_quota": (small, lambda _: evict(small.target)),
    }
    reasons = dict(zip(fates, ("deleted", "retired", "expired", "quota"), strict=True))
    begun = time.time()
    for fate, (process, end) in fates.items():
        record(process.target, "gone", version=-7)
        with client(process.target) as reader:
            end(reader)
            with pytest.raises(NotFound) as caught:
                reader.get("gone")
        facts = (caught.value.kind, caught.value.trace_id, caught.value.reason)
        assert facts == ("trace", "gone", reasons[fate])
        verb, colon, why = fate.partition(":")
        told = re.fullmatch(
            rf"trace 'gone' of run 'default' {verb} at (\S+Z){re.escape(colon + why)}",
            str(caught.value),
        )
        assert told, caught.value
        when = datetime.fromisoformat(told[1].replace("Z", "+00:00")).timestamp()
        assert begun - 2 < when < time.time() + 2
    with client(server.target) as reader, pytest.raises(NotFound) as caught:
        reader.get("never")
    assert str(caught.value) == (
        "trace 'never' is not in run 'default'; check run=, or wait_for=\"end\" if it has not begun"
    )
    assert (caught.value.kind, caught.value.trace_id, caught.value.reason) == ("trace", "never", "")


LOOKUPS: dict[str, tuple[str, str | None, Callable[[RouteClient], object]]] = {
    "get": ("trace", "never", lambda c: c.get("never")),
    "get_many": ("trace", "never", lambda c: list(c.get_many(["there", "never", "other"]))),
    "follow": ("trace", "never", lambda c: list(c.follow("never"))),
    "stat": ("trace", "never", lambda c: c.stat("never")),
    "delete": ("trace", "never", lambda c: c.delete("never")),
    "incarnation": ("incarnation", "there", lambda c: c.get("there", incarnation=9)),
    "blocks": ("engine", None, lambda c: c.get_blocks("never", [0], 1)),
    "engine": ("engine", None, lambda c: c.forget_engine("never")),
}


@pytest.mark.parametrize("call", LOOKUPS)
def test_a_missing_object_is_named(server, call):
    kind, trace_id, look_up = LOOKUPS[call]
    record(server.target, "there", version=-7)
    with client(server.target) as reader, pytest.raises(NotFound) as caught:
        look_up(reader)
    assert (caught.value.kind, caught.value.trace_id) == (kind, trace_id)
    with client(server.target, run="unknown") as reader, pytest.raises(NotFound) as caught:
        reader.get("there")
    assert (caught.value.kind, caught.value.trace_id) == ("run", "there")


def test_a_wait_in_vain_does_not_advise_to_wait(server):
    record(server.target, "there", version=-7)
    fact = "within 0.3 s: trace 'never' is not in run 'default'"
    with client(server.target) as reader:
        for wait_for_, verb in (("end", "end"), ("rows", "begin")):
            with pytest.raises(DeadlineExceeded) as caught:
                reader.get("never", wait_for=wait_for_, timeout=0.3)
            assert str(caught.value) == f"trace 'never' did not {verb} {fact}"
        with pytest.raises(DeadlineExceeded) as caught:
            list(reader.follow("never", wait_for="rows", timeout=0.3))
        assert str(caught.value).startswith("trace 'never' did not begin within 0.3 s: ")
        assert "wait_for" not in str(caught.value)


# ------------------------------------------------------------------ engines


def test_two_engines_with_one_id(server, caplog):
    with agent(server.target, engine_id="twin") as first:
        handle = first.begin("r")
        first.step(ROWS, [(handle, 0, 3)])
        first.finish(handle, 4)
        assert first.flush(30)
        with agent(server.target, engine_id="twin") as second:
            second.begin("s")
            assert second.flush(30)
            late = first.begin("late")
            first.step(ROWS, [(late, 0, 3)])
            wait_for(lambda: "FENCED" in caplog.text)
            wait_for(lambda: first.stats().dropped_rows.get("fenced") == 3)
    host = socket.gethostname()
    text = f"another agent of engine 'twin' of run 'default' connected later (host {host!r}, epoch"
    assert text in caplog.text
    assert "give each engine an engine_id of its own" in caplog.text


def test_ids_that_no_router_chose_are_logged_once(server, caplog):
    with agent(server.target, engine_id="wild") as one:
        handle = one.begin("wild")
        one.step(np.full((3, 3, 3), 999), [(handle, 0, 3)])
        one.step(np.zeros((3, 3, 3), int), [(handle, 3, 3)])
        one.finish(handle, 7)
        assert one.flush(30)
        assert one.stats().dropped_rows == {"invalid_ids": 6}
    assert caplog.text.count("outside [0, 300)") == 1
    assert "check num_experts of the layout, and pass no rows of padding" in caplog.text
    with client(server.target) as reader:
        assert {m.reason for m in reader.stat("wild").missing} == {"invalid_ids"}


def test_a_weight_version_that_goes_back_is_logged_once(server, caplog):
    with agent(server.target, engine_id="back") as one:
        for version in (3, 1, 2, 0):
            one.set_weight_version(version)
    assert caplog.text.count("goes back from 3 to 1") == 1
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_one_bad_id_does_not_end_the_background(server):
    with agent(server.target, engine_id="text") as one:
        with pytest.raises(InvalidArgument, match="request_id"):
            one.begin("\ud800")
        with pytest.raises(InvalidArgument, match="labels"):
            one.begin("r", labels={"group": "\ud800"})
        one.begin("r")
        assert one.flush(30)


# ------------------------------------------------------------------ wrong values


@dataclass
class Things:
    """What a mistake is made with."""

    agent: CaptureAgent
    handle: int
    client: RouteClient
    target: str

    @property
    def trace(self) -> Any:
        return self.client.get("kept")


@pytest.fixture(scope="module")
def things(server) -> Iterator[Things]:
    with agent(server.target, engine_id="things") as one, client(server.target) as reader:
        yield Things(one, one.begin("running"), reader, server.target)


class Model(torch.nn.Module):
    """A dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden_size": 8, "num_hidden_layers": 2}


# Field that the error names, words of its message, the mistake.
MISTAKES: list[tuple[str, str, Callable[[Things], object]]] = [
    ("target", "without a scheme", lambda t: client("http://127.0.0.1:7411")),
    ("target", "without a scheme", lambda t: client("grpc://traces:7411")),
    ("target", "without a scheme", lambda t: agent("https://127.0.0.1:7411")),
    ("port", "port is 99999", lambda t: client("127.0.0.1:99999")),
    ("target", "for example", lambda t: client("127.0.0.1:")),
    ("target", "str host:port", lambda t: agent(7411)),
    ("target", "or set ROUTETRACE_TARGET", lambda t: client("")),
    ("timeout", "timeout is '3' (str); expected a number", lambda t: client("x", timeout="3")),
    ("timeout", "of seconds above 0", lambda t: client("x", timeout=-1)),
    ("run", "run is 3 (int)", lambda t: client("x", run=3)),
    ("security", "expected Security", lambda t: client("x", security="token")),
    ("security.tls", "expected bool", lambda t: client("x", security={"tls": 1})),
    ("ca_file", "no such file", lambda t: client("x", security=Security(ca_file="/none"))),
    (
        "token_file",
        "no such file",
        lambda t: client("127.0.0.1", security=Security(token_file="/none")),
    ),
    ("tls", "in plain text", lambda t: client("traces", security=Security(token="t"))),
    ("config", "expected AgentConfig", lambda t: CaptureAgent(t.target)),
    ("layout", "expected ModelLayout", lambda t: agent(layout="qwen3")),
    ("layout", "expected ModelLayout", lambda t: agent(layout=None)),
    ("engine_id", "0 (int); expected str", lambda t: agent(engine_id=0)),
    ("engine_id", "engine_id is ''; expected 1 to 512", lambda t: agent(engine_id="")),
    ("run", "7 (int); expected str", lambda t: agent(run=7)),
    ("boot_id", "the same id at all shards", lambda t: agent(shard="pp0")),
    ("background", "'process' or 'thread'", lambda t: agent(background="fork")),
    (
        "queue_bytes",
        "queue_bytes is '1GiB' (str); expected int",
        lambda t: agent(queue_bytes="1GiB"),
    ),
    ("queue_bytes", "an integer in [1048576", lambda t: agent(queue_bytes=1)),
    ("ring_bytes", "(float); expected int", lambda t: agent(ring_bytes=6.4e7)),
    ("linger_seconds", "a number of seconds", lambda t: agent(linger_seconds="1s")),
    ("linger_seconds", "a number of seconds", lambda t: agent(linger_seconds=None)),
    ("block_size", "1.5 (float); expected int", lambda t: agent(block_size=1.5, num_blocks=3)),
    ("num_blocks", "block_size is 16", lambda t: agent(block_size=16)),
    ("attributes", "a mapping of strings to strings", lambda t: agent(attributes={"gpu": 1})),
    ("spill_dir", "can be written to", lambda t: agent(spill_dir="/no/such/folder")),
    ("spill_dir", "3 (int); expected str, a path or None", lambda t: agent(spill_dir=3)),
    ("security", "expected Security", lambda t: agent(security="token")),
    ("security", "with 'certificate'", lambda t: agent(security={"certificate": "x"})),
    ("labels['group']", "0 (int); expected str", lambda t: t.agent.begin("x", labels={"group": 0})),
    ("labels", "a mapping", lambda t: t.agent.begin("x", labels=["g"])),
    ("request_id", "3 (int); expected str", lambda t: t.agent.begin(3)),
    ("request_id", "1 to 512 characters", lambda t: t.agent.begin("x" * 600)),
    ("request_id", "an id that is not running", lambda t: t.agent.begin("running")),
    ("trace_id", "9 (int); expected str", lambda t: t.agent.begin("x", trace_id=9)),
    (
        "prompt_len",
        "prompt_len is '3' (str); expected",
        lambda t: t.agent.begin("x", prompt_len="3"),
    ),
    ("prompt_len", "3.5 (float); expected int", lambda t: t.agent.begin("x", prompt_len=3.5)),
    ("ttl_seconds", "an integer", lambda t: t.agent.begin("x", ttl_seconds=-1)),
    ("num_computed_tokens", "expected int", lambda t: t.agent.begin("x", num_computed_tokens="1")),
    ("block_ids", "a sequence of int", lambda t: t.agent.begin("x", block_ids="abc")),
    (
        "prompt_token_ids",
        "integers of shape (3,)",
        lambda t: t.agent.begin("x", prompt_len=3, prompt_token_ids=[1, 2]),
    ),
    (
        "prompt_token_ids",
        "integers of shape (3,)",
        lambda t: t.agent.begin("x", prompt_len=3, prompt_token_ids=[[1], [2, 3]]),
    ),
    ("rows", "(n, 3, 3)", lambda t: t.agent.step(np.zeros((3, 2, 3), int), [(t.handle, 0, 3)])),
    ("rows", "integer dtype", lambda t: t.agent.step(np.zeros((3, 3, 3)), [(t.handle, 0, 3)])),
    ("rows", "(n, 3, 3)", lambda t: t.agent.step(None, [(t.handle, 0, 3)])),
    ("spans[0][0]", "the value of begin()", lambda t: t.agent.step(ROWS, [(77, 0, 3)])),
    ("spans", "as many as in rows", lambda t: t.agent.step(ROWS, [(t.handle, 0, 2)])),
    ("spans", "of shape (m, 3)", lambda t: t.agent.step(ROWS, [(t.handle,), (0, 3)])),
    ("spans", "of shape (m, 3)", lambda t: t.agent.step(ROWS, None)),
    ("handle", "a running request", lambda t: t.agent.finish(99, 3)),
    (
        "reason",
        "'stop', 'length', 'abort' or 'handoff'",
        lambda t: t.agent.finish(t.handle, 3, reason="done"),
    ),
    ("num_tokens", "expected int", lambda t: t.agent.finish(t.handle, "4")),
    ("token_ids", "of shape (4,)", lambda t: t.agent.finish(t.handle, 4, token_ids=[1, 2, 3])),
    ("version", "expected int", lambda t: t.agent.set_weight_version("3")),
    ("version", "expected int", lambda t: t.agent.set_weight_version(1.5)),
    ("request_id", "3 (int)", lambda t: t.client.get(3)),
    ("request_id", "a list", lambda t: t.client.get(["kept"])),
    ("request_id", "request_id is ''", lambda t: t.client.get("")),
    ("trace_ids", "an iterable of str", lambda t: list(t.client.get_many("kept"))),
    ("missing", "'raise' or 'mask'", lambda t: t.client.get("kept", missing="zero")),
    ("wait_for", "'rows', 'end' or None", lambda t: t.client.get("kept", wait_for=True)),
    ("wait_for", "'rows', 'end' or None", lambda t: next(t.client.follow("kept", wait_for="all"))),
    ("policy", "or 'latest'", lambda t: t.client.get("kept", policy="newest")),
    ("prefix_rows", "or 'any'", lambda t: t.client.get("kept", prefix_rows=False)),
    ("layer_ids", "strictly ascending", lambda t: t.client.get("kept", layer_ids=[2, 1])),
    ("layer_ids", "strictly ascending", lambda t: t.client.get("kept", layer_ids=[])),
    ("layer_ids", "ids among", lambda t: t.client.get("kept", layer_ids=[3])),
    ("layer_ids", "a sequence", lambda t: t.client.get("kept", layer_ids=1)),
    ("token_stop", "at most 3", lambda t: t.client.get("kept", token_stop=99)),
    ("token_stop", "more than token_start", lambda t: t.client.get("kept", token_stop=0)),
    ("token_start", "expected int", lambda t: t.client.get("kept", token_start="0")),
    ("incarnation", "it has 1", lambda t: t.client.get("kept", incarnation=9)),
    ("weight_version", "expected int", lambda t: t.client.get("kept", weight_version="41")),
    ("states", "or 'incomplete'", lambda t: list(t.client.find(states=["done"]))),
    ("states", "an iterable of str", lambda t: list(t.client.find(states="complete"))),
    ("labels", "a mapping", lambda t: list(t.client.find(labels="group=g"))),
    ("labels['group']", "0 (int)", lambda t: list(t.client.find(labels={"group": 0}))),
    ("weight_version", "'3' (str); expected int", lambda t: t.client.retire_through("3")),
    ("trace_ids", "an iterable of str", lambda t: t.client.renew("kept", ttl_seconds=3)),
    ("ttl_seconds", "expected int", lambda t: t.client.renew(["kept"], ttl_seconds="1d")),
    ("engine_id", "an engine", lambda t: t.client.get_blocks("nobody", [0], 1)),
    (
        "options",
        "expected ReadOptions",
        lambda t: t.client.get("kept", options={"missing": "mask"}),
    ),
    ("plan", "expected FetchPlan", lambda t: t.client.fetch("kept")),
    ("trace_id", "3 (int)", lambda t: Sample.of(3, token_ids=[1, 2])),
    ("token_ids", "integers", lambda t: Sample.of("kept", token_ids="ab")),
    ("samples", "an iterable of Sample", lambda t: MicroBatch.packed("kept")),
    ("samples[0]", "expected Sample", lambda t: MicroBatch.packed(["kept"])),
    ("cp_rank", "an integer in [0, 0]", lambda t: Rank(layer_ids=[2], cp_rank=4)),
    ("device", "", lambda t: t.trace.to_torch("cuda:99")),
    ("device", "a torch device", lambda t: t.trace.to_torch("gpu")),
    ("dtype", "an integer dtype", lambda t: t.trace.to_torch(dtype=torch.float32)),
    (
        "model",
        "a Linear; expected a transformers MoE model",
        lambda t: replay(torch.nn.Linear(2, 2), t.trace),
    ),
    ("model", "a str; expected a transformers MoE model", lambda t: replay("qwen3", t.trace)),
    ("", "", lambda t: replay(Model(), t.trace)),
    (
        "",
        "",
        lambda t: t.client.fetch(
            FetchPlan.make(
                ModelLayout((0, 1), 6, 300, 3),
                MicroBatch.packed([Sample.of("kept", token_ids=[1, 2, 3, 4])]),
                Rank(layer_ids=[0]),
            )
        ),
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_wrong_value_is_named(number, things):
    field, words, mistake = MISTAKES[number]
    with pytest.raises(RouteTraceError) as caught:
        mistake(things)
    error = caught.value
    assert isinstance(error, (ValueError, LookupError, ImportError))
    assert not field or error.field == field, error
    assert words in str(error), error
    assert "\n" not in str(error)


def test_closed_is_closed(server):
    reader = client(server.target)
    reader.close()
    with pytest.raises(Closed):
        reader.get("kept")
    one = agent(server.target, engine_id="closed")
    one.close()
    with pytest.raises(Closed):
        one.begin("r")


# ------------------------------------------------------------------ commands


ENTRIES = {"routetrace": "routetrace.cli", "routetrace-server": "routetrace.server.command"}


def run(*words: str, timeout: float = 50, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    if words[1:2] != ("health",):
        return forked.run(*words, env=env, timeout=timeout)
    # It sets what gRPC reads as it is imported.
    call = f"import sys; from {ENTRIES[words[0]]} import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", call, *words[1:]],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# Exit code, words on stderr, command.
COMMANDS: list[tuple[int, str, tuple[str, ...]]] = [
    (1, "(connection refused)", ("routetrace", "list", "--target", "{dead}", "--timeout", "1")),
    (2, "without a scheme", ("routetrace", "list", "--target", "http://{target}")),
    (1, "speaks HTTP/1, not gRPC", ("routetrace", "list", "--target", "{metrics}")),
    (1, "does not speak TLS", ("routetrace", "list", "--tls")),
    (1, "no run 'typo'; runs: default, err", ("routetrace", "stat", "kept", "--run", "typo")),
    (1, "trace 'nobody' is not in run 'default'", ("routetrace", "stat", "nobody")),
    (2, "expected trace ids, or --label", ("routetrace", "get", "-o", "x.npz")),
    (2, "-o is required", ("routetrace", "get", "kept")),
    (2, "expected key=value", ("routetrace", "list", "--label", "group")),
    (2, "expected layer ids", ("routetrace", "get", "kept", "-o", "/tmp/x.npz", "--layers", "a")),
    (2, "expected positions", ("routetrace", "get", "kept", "-o", "/tmp/x.npz", "--tokens", "9")),
    (2, "No such command", ("routetrace", "lsit")),
    (2, "No such option", ("routetrace", "list", "--server", "x")),
    (2, "ca_file", ("routetrace", "list", "--ca-file", "/none")),
    (2, "listen is 'nonsense'", ("routetrace-server", "--listen", "nonsense")),
    (2, "expected tls_cert and tokens_file", ("routetrace-server", "--listen", "0.0.0.0:0")),
    (2, "tls_cert and tls_key", ("routetrace-server", "--tls-cert", "/none")),
    (2, "store_capacity", ("routetrace-server", "--store-capacity", "lots")),
    (2, "config file", ("routetrace-server", "--config", "/none.toml")),
    (2, "tokens", ("routetrace-server", "--tokens-file", "/none.toml", "--store", "memory")),
    (1, "choose a writable data_dir", ("routetrace-server", "--data-dir", "/proc/none")),
    (1, "cannot listen on {target}", ("routetrace-server", "--store=memory", "--listen={target}")),
    (2, "--prot", ("routetrace-server", "--prot", "7411")),
    (2, "without a scheme", ("routetrace-server", "health", "--target", "http://{target}")),
    (
        1,
        "cannot connect to {dead} (connection refused); is routetrace-server running there?",
        ("routetrace-server", "health", "--target", "{dead}"),
    ),
    (1, "speaks HTTP/1, not gRPC", ("routetrace-server", "health", "--target", "{metrics}")),
    (1, "does not speak TLS", ("routetrace-server", "health", "--tls")),
    (
        1,
        "{other} serves something else; is this the port of a routetrace-server?",
        ("routetrace-server", "health", "--target", "{other}"),
    ),
    (
        1,
        "no answer from {silent} within 0.5 s; check the port, and the log of the server",
        ("routetrace-server", "health", "--target", "{silent}", "--timeout", "0.5"),
    ),
]


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_wrong_command_ends_with_one_line(
    number, server, dead, other, silent, monkeypatch, capfd
):
    code, expected, words = COMMANDS[number]
    names = {"target": server.target, "metrics": server.metrics_target, "dead": dead}
    names |= {"other": other, "silent": silent}
    words = tuple(w.format(**names) for w in words)
    if words[0] == "routetrace":  # leaves nothing behind: no process of its own
        monkeypatch.setenv("ROUTETRACE_TARGET", server.target)
        monkeypatch.setattr(sys, "argv", [*words])
        with pytest.raises(SystemExit) as ended:
            routetrace_command()
        got, errors = ended.value.code, capfd.readouterr().err
    else:
        done = run(*words, ROUTETRACE_TARGET=server.target)
        got, errors = done.returncode, done.stderr
        if words[1] == "health":
            assert (done.stdout, len(errors.splitlines())) == ("", 1)
    assert got == code, errors
    assert expected.format(**names) in " ".join(re.sub("[│╭╮╰╯─]", " ", errors).split())
    assert "Traceback" not in errors


def test_an_unknown_setting_of_the_environment():
    done = run("routetrace-server", ROUTETRACE_DATADIR="/tmp")
    assert done.returncode == 2
    assert "unknown environment variables: ROUTETRACE_DATADIR" in done.stderr


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("typer", "routetrace", "cli"),
        ("rich", "routetrace", "cli"),
        ("pydantic_settings", "routetrace-server", "server"),
        ("pythonjsonlogger", "routetrace-server", "server"),
        ("prometheus_client", "routetrace-server", "server"),
    ],
)
def test_a_missing_extra_is_named(package, command, extra):
    call = f"import sys; sys.modules[{package!r}] = None; from {ENTRIES[command]} import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{call}; sys.exit(main())", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"{command}: {package} is not installed: pip install '.[{extra}]' in a checkout\n"
    )


def test_torch_that_is_missing_is_named(server, things, monkeypatch):
    trace = things.trace
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match="to_torch needs torch, which cannot be imported"):
        trace.to_torch()
