"""Access: TLS, client certificates, tokens, and their replacement."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import itertools
import logging
import os
import pickle
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import AsyncRouteClient, RouteClient, Security
from routetrace.common import pem
from routetrace.common import security as security_module
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    InvalidArgument,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    Unavailable,
    from_detail,
)
from routetrace.common.security import is_local
from routetrace.server.access import tls, tokens
from routetrace.server.access.control import _SCOPES as SCOPES
from routetrace.server.access.control import Access
from routetrace.server.access.pace import Pace
from routetrace.server.common.metrics import Metrics
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

UTC = datetime.timezone.utc
DAY = datetime.timedelta(days=1)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


# ------------------------------------------------------------------ what the tests are made of


class Identity:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, name: str, cert: trustme.LeafCert) -> None:
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        self.of_client = {"cert_file": str(self.cert), "key_file": str(self.key)}
        self.of_server = {"tls_cert": self.cert, "tls_key": self.key}


class Pki:
    """Two authorities, and what they have issued."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = trustme.CA(), trustme.CA()
        self.ca, self.other_ca, self.both = (folder / n for n in ("ca", "other_ca", "both"))
        ours.cert_pem.write_to_path(str(self.ca))
        theirs.cert_pem.write_to_path(str(self.other_ca))
        self.both.write_bytes(self.ca.read_bytes() + self.other_ca.read_bytes())
        past = {"not_before": datetime.datetime.now(UTC) - 9 * DAY}
        past["not_after"] = past["not_before"] + DAY

        def issue(name: str, ca: trustme.CA, *names: str, **dates: Any) -> Identity:
            return Identity(folder, name, ca.issue_cert(*names, **dates))

        self.server = issue("server", ours, "127.0.0.1", "localhost")
        self.expired_server = issue("expired_server", ours, "127.0.0.1", **past)
        self.next_server = issue("next_server", theirs, "127.0.0.1")
        self.client = issue("client", ours, "worker@example.org")
        self.expired_client = issue("expired_client", ours, "worker@example.org", **past)
        self.foreign_client = issue("foreign_client", theirs, "worker@example.org")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def entry(
    token: str,
    name: str,
    scopes: tuple[str, ...] = ("ingest", "read", "admin"),
    runs: tuple[str, ...] = ("*",),
    expires: datetime.datetime | None = None,
) -> str:
    """Entry of a token in a tokens file."""
    lines = [
        "[[token]]",
        f'name = "{name}"',
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"',
        f"scopes = {list(scopes)}",
        f"runs = {list(runs)}",
    ]
    if expires:
        lines.append(f"expires = {expires.isoformat()}")
    return "\n".join([*lines, ""])


def replace(path: Path, content: str | bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content if isinstance(content, bytes) else content.encode())
    part.replace(path)


@dataclass
class Guarded:
    """A server that asks for tokens, and a token for each kind of caller."""

    server: ServerProcess
    tokens: dict[str, str]

    def security(self, name: str) -> Security:
        return Security(token=self.tokens.get(name, name))

    def client(self, name: str, run: str = "mine") -> RouteClient:
        return RouteClient(self.server.target, run=run, security=self.security(name), timeout=20)

    def scrape(self) -> Scraped:
        return Scraped(self.server.metrics_target)

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Check that a call is counted as refused, and that none of its messages is parsed."""
        before = self.scrape()
        yield
        after = self.scrape()
        changes = {
            r: after.value("routetrace_denied_total", reason=r)
            - before.value("routetrace_denied_total", reason=r)
            for r in ("unauthenticated", "permission_denied", "handshake")
        }
        assert changes.pop(reason) >= 1
        assert set(changes.values()) == {0}
        parsed = "grpc_server_msg_received_total"
        assert after.value(parsed) == before.value(parsed)


def feed(target: str, security: Security, run: str, *ids: str) -> None:
    feeder = Feeder(target, LAYOUT, run=run, block_size=4, num_blocks=8, security=security)
    for name in ids:
        feeder.step(rows_of(LAYOUT, 9), [(handle := feeder.begin(name), 0, 9)])
        feeder.finish(handle, 10)
    feeder.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    named = {
        name: tokens.new_token()[0]
        for name in ("root", "reader", "feeder", "admin", "mine", "expired")
    }
    past = datetime.datetime.now(UTC) - DAY
    path = tmp_path_factory.mktemp("guarded") / "tokens.toml"
    path.write_text(
        entry(named["root"], "root")
        + entry(named["reader"], "reader", ("read",))
        + entry(named["feeder"], "feeder", ("ingest",))
        + entry(named["admin"], "admin", ("admin",))
        + entry(named["mine"], "mine", runs=("mine", "mine-*"))
        + entry(named["expired"], "expired", expires=past)
    )
    with run_server(tokens=path, metrics_listen="127.0.0.1:0", reflection=True) as server:
        guarded = Guarded(server, named)
        feed(server.target, guarded.security("root"), "mine", "r0")
        feed(server.target, guarded.security("root"), "theirs", "r0")
        yield guarded


def error_of(failed: Any) -> RouteTraceError:
    """The typed error that a failed call carries."""
    details = [value for key, value in failed.trailing_metadata() if key == ERROR_METADATA_KEY]
    return from_detail(pb.ErrorDetail.FromString(details[0]))


def call_raw(target: str, security: Security, method: str, message: bytes) -> Any:
    """Call a method with the bytes of a message, as they are; return how it failed."""
    with security.channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(method)(
            iter([message]), timeout=20, metadata=security.metadata()
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        return caught.value


# ------------------------------------------------------------------ tokens


def peak(server: ServerProcess) -> int:
    """The most memory [bytes] that a server has held so far."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10


HUGE = ["/routetrace.v1.IngestService/Ingest", "/routetrace.v1.TraceService/StatTrace"]


@pytest.mark.parametrize(
    ("method", "size"), [*((method, 100) for method in METHODS), *((m, 64 << 20) for m in HUGE)]
)
def test_without_a_token_no_message_is_parsed(guarded: Guarded, method: str, size: int) -> None:
    garbage = b"\xff" * size
    target = guarded.server.target
    memory = peak(guarded.server)
    for name, words in (
        ("rt_made-up", "is unknown"),
        ("expired", "token expired has expired"),
    ):
        with guarded.refusing("unauthenticated"):
            failed = call_raw(target, guarded.security(name), method, garbage)
            assert failed.code() is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error_of(failed), Unauthenticated)
            assert words in str(error_of(failed))
    with guarded.refusing("unauthenticated"):
        failed = call_raw(target, Security(), method, garbage)
        assert failed.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "the call has none" in str(error_of(failed))
    # Nor is it taken in at all.
    assert peak(guarded.server) - memory < 16 << 20
    # The same bytes with a token: it is the token that kept them from being looked at.
    failed = call_raw(target, guarded.security("root"), method, garbage)
    assert failed.code() not in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    )


@pytest.mark.parametrize("method", METHODS)
def test_without_its_scope_no_message_is_parsed(guarded: Guarded, method: str) -> None:
    assert method in SCOPES, "a method of the services without a scope of its own"
    refused = 0
    for name, scope in (("reader", "read"), ("feeder", "ingest"), ("admin", "admin")):
        if SCOPES[method] == scope:
            continue
        refused += 1
        with guarded.refusing("permission_denied"):
            failed = call_raw(guarded.server.target, guarded.security(name), method, b"\xff" * 99)
            assert failed.code() is grpc.StatusCode.PERMISSION_DENIED
            error = error_of(failed)
            assert isinstance(error, PermissionDenied)
            assert f"token {name} does not cover the scope" in str(error)
    assert refused == 2


def test_health_needs_no_token_and_reflection_any_and_the_unknown_admin(guarded: Guarded) -> None:
    target = guarded.server.target
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="routetrace.v1.TraceService")
        assert stub.Check(request, timeout=20).status == 1
        assert next(stub.Watch(request, timeout=20)).status == 1
    for version in ("v1alpha",):
        method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        assert call_raw(target, Security(), method, b"").code().name == "UNAUTHENTICATED"
        with guarded.security("feeder").channel(target, ()) as channel:
            metadata = guarded.security("feeder").metadata()
            call = channel.stream_stream(method)
            assert list(call(iter([b"\x3a\x00"]), metadata=metadata, timeout=20))
    for name, code in (("reader", "PERMISSION_DENIED"), ("admin", "UNIMPLEMENTED")):
        failed = call_raw(target, guarded.security(name), "/no.such.Service/Method", b"")
        assert failed.code().name == code


FOREIGN: dict[str, Callable[[RouteClient], Any]] = {
    "get": lambda c: c.get("r0"),
    "get_waiting": lambda c: c.get("r0", wait_for="end", timeout=5),
    "follow": lambda c: list(c.follow("r0")),
    "get_blocks": lambda c: c.get_blocks("e0", [0], 1),
    "stat": lambda c: c.stat("r0"),
    "find": lambda c: list(c.find()),
    "server_info": lambda c: c.server_info(),
    "agents": lambda c: list(c.agents()),
    "renew": lambda c: c.renew(["r0"], 1),
    "bind": lambda c: c.bind("e0", "r9", [0], 1),
    "delete": lambda c: c.delete("r0"),
    "retire": lambda c: c.retire_through(weight_version=99),
}


def test_a_token_of_one_run_does_nothing_to_another(guarded: Guarded) -> None:
    with guarded.client("root", "theirs") as root:
        before = root.stat("r0")
        before_rows = root.get("r0").topk_ids
        for name, call in FOREIGN.items():
            denied = guarded.scrape().value("routetrace_denied_total", reason="permission_denied")
            with guarded.client("mine", "theirs") as client:
                with pytest.raises(PermissionDenied, match=r"token mine .* run 'theirs'") as caught:
                    call(client)
                assert (caught.value.field, caught.value.value) == ("runs", "theirs"), name
            now = guarded.scrape().value("routetrace_denied_total", reason="permission_denied")
            assert now == denied + 1, name
        with pytest.raises(grpc.RpcError) as failed:
            feed(guarded.server.target, guarded.security("mine"), "theirs", "r1")
        assert isinstance(error_of(failed.value), PermissionDenied)
        assert [stat.trace_id for stat in root.find()] == ["r0"]
        after = root.stat("r0")
        for name in ("state", "num_tokens", "updated", "expires", "num_incarnations"):
            assert getattr(after, name) == getattr(before, name), name
        np.testing.assert_array_equal(root.get("r0").topk_ids, before_rows)
    # On its own run it does all of it; names that a pattern covers are its own too.
    with guarded.client("mine", "mine") as client:
        np.testing.assert_array_equal(client.get("r0").topk_ids, rows_of(LAYOUT, 9))
        client.server_info()
        client.renew(["r0"], 1000)
    feed(guarded.server.target, guarded.security("mine"), "mine-2", "r0")
    with guarded.client("mine", "mine-2") as client:
        client.delete("r0")
        assert list(client.find()) == []


def test_the_async_client_is_refused_alike(guarded: Guarded) -> None:
    async def refused(name: str, run: str) -> RouteTraceError:
        security = guarded.security(name)
        async with AsyncRouteClient(guarded.server.target, run=run, security=security) as client:
            with pytest.raises(RouteTraceError) as caught:
                await client.get("r0")
            return caught.value

    async def all_of_them() -> list[RouteTraceError]:
        return [await refused("mine", "theirs"), await refused("rt_x", "mine")]

    foreign, unknown = asyncio.run(all_of_them())
    assert isinstance(foreign, PermissionDenied)
    assert isinstance(unknown, Unauthenticated)


@dataclass
class Context:
    """As much of a call as is looked at."""

    metadata: Any

    def invocation_metadata(self) -> Any:
        return self.metadata


def outcome(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except Unauthenticated:
        return "unauthenticated"
    except PermissionDenied:
        return "permission_denied"
    return "in"


NAMES = st.text("ab-", min_size=1, max_size=4)


@settings(max_examples=40)
@given(data=st.data())
def test_access_is_what_the_file_says(data: st.DataObject) -> None:
    scopes = st.sets(st.sampled_from(["ingest", "read", "admin"]), min_size=1)
    runs = st.sets(NAMES | NAMES.map(lambda n: n + "*") | st.just("*"), min_size=1, max_size=3)
    held = data.draw(st.lists(st.tuples(scopes, runs, st.sampled_from([None, -1, 1])), min_size=1))
    now, metrics = datetime.datetime.now(UTC), Metrics()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for i, (s, r, days) in enumerate(held):
            end = now + days * DAY if days else None
            file.write(entry(f"rt_{i}", f"t{i}", tuple(s), tuple(r), end))
        file.flush()
        access = Access(ServerConfig(tokens=Path(file.name)), metrics)
    expected = {"unauthenticated": 0, "permission_denied": 0}
    for _ in range(10):
        i = data.draw(st.integers(0, len(held)))
        run, method = data.draw(NAMES), data.draw(st.sampled_from(sorted(METHODS)))
        scope = SCOPES[method]
        metadata = (("authorization", f"Bearer rt_{i}"),)
        allowed, patterns, days = held[i] if i < len(held) else (set(), set(), -1)
        covered = any(
            run.startswith(p[:-1]) if p.endswith("*") else run == p for p in patterns
        )  # what a pattern means, where it has one star and that is at its end

        of_token = "unauthenticated" if days == -1 else ""
        right = [
            of_token or ("in" if scope in allowed else "permission_denied"),
            of_token or ("in" if scope in allowed and covered else "permission_denied"),
        ]
        assert outcome(access.check_method, method, metadata) == right[0]
        assert outcome(access.check, Context(metadata), scope, run) == right[1]
        for reason in right:
            expected[reason] = expected.get(reason, 0) + 1
    for reason in ("unauthenticated", "permission_denied"):
        counted = metrics.registry.get_sample_value("routetrace_denied_total", {"reason": reason})
        assert counted == expected[reason]


def test_a_stream_ends_when_its_token_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_a", "a") + entry("rt_b", "b"))
    with run_server(tokens=path) as server:
        feeder = Feeder(
            server.target, LAYOUT, block_size=4, num_blocks=8, security=Security(token="rt_a")
        )
        feeder.step(rows_of(LAYOUT, 4), [(feeder.begin("r0"), 0, 4)])
        feeder.flush()
        security = Security(token="rt_a")
        with RouteClient(server.target, security=security, timeout=20) as client:
            assert client.stat("r0").num_rows == 4
            followed = client.follow("r0")
            assert len(next(followed).topk_ids) == 4
            replace(path, entry("rt_b", "b"))
            # Looked at once a second: a known token is not looked up anew for every message.
            wait_for(lambda: _refused(lambda: client.stat("r0")))
            with pytest.raises(Unauthenticated):
                next(followed)
        feeder.step(rows_of(LAYOUT, 4), [(0, 4, 4)])
        with pytest.raises(grpc.RpcError) as failed:
            feeder.flush()
        assert isinstance(error_of(failed.value), Unauthenticated)
        with RouteClient(server.target, security=Security(token="rt_b"), timeout=20) as client:
            assert client.stat("r0").num_rows == 4


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except Unauthenticated:
        return True
    return False


def test_a_new_token_is_good_at_once_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_a", "a"))
    known = tokens.Tokens(path)

    def name_of(token: str) -> str:
        return known.find([("authorization", f"bearer {token}")]).name

    assert name_of("rt_a") == "a"
    replace(path, entry("rt_b", "b"))
    assert name_of("rt_b") == "b"
    with pytest.raises(Unauthenticated):
        name_of("rt_a")
    for broken in ("", "[[token]]\nname = 3", "\0", entry("rt_c", "c") + entry("rt_c", "d")):
        caplog.clear()
        replace(path, broken)
        for _ in range(3):
            with pytest.raises(Unauthenticated):
                name_of("rt_c")
            assert name_of("rt_b") == "b"
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert "keeping" in record.getMessage()
    path.unlink()
    with pytest.raises(Unauthenticated):
        name_of("rt_c")
    assert name_of("rt_b") == "b"
    replace(path, entry("rt_c", "c"))
    assert name_of("rt_c") == "c"


GOOD = entry("rt_a", "a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no [[token]]"),
        ("tokens = 3\n" + GOOD, "unknown keys tokens"),
        ("[token]\nname='x'", "no [[token]]"),
        (GOOD + 'token = "rt_a"\n', "token 1: token is unknown"),
        (GOOD + 'owner = "x"\nage = 3\n', "age is unknown, owner is unknown"),
        (GOOD.replace("scopes", "scope"), "scope is unknown, scopes is missing"),
        (GOOD.replace('name = "a"\n', ""), "name is missing"),
        (GOOD.replace('"a"', '"a b"'), "name is 'a b'"),
        (GOOD.replace('"a"', '""'), "name is ''"),
        (re.sub("sha256 = .*", 'sha256 = "rt_a"', GOOD), "64 hexadecimal digits"),
        (re.sub('sha256 = "(.*)"', lambda m: f'sha256 = "{m[1].upper()}"', GOOD), "lower case"),
        (re.sub("scopes = .*", "scopes = []", GOOD), "scopes is '[]'"),
        (re.sub("scopes = .*", 'scopes = "read"', GOOD), "scopes is 'read'"),
        (re.sub("scopes = .*", 'scopes = ["read", "write"]', GOOD), "ingest, read, admin"),
        (re.sub("runs = .*", "runs = []", GOOD), "runs is '[]'"),
        (re.sub("runs = .*", 'runs = [""]', GOOD), "runs is"),
        (re.sub("runs = .*", "runs = [3]", GOOD), "runs is '[3]'"),
        (GOOD + "expires = 2030-01-01", "offset"),
        (GOOD + "expires = 2030-01-01T00:00:00", "offset"),
        (GOOD + 'expires = "2030-01-01T00:00:00Z"', "offset"),
        (GOOD + entry("rt_b", "a"), "token 2: name is 'a'"),
        (GOOD + entry("rt_a", "b"), "token 2: sha256: token a has the same"),
        ("[[token]\n", "cannot be read"),
    ],
)
def test_a_tokens_file_is_taken_at_its_word(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        tokens.read_tokens(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "rt_a" not in str(caught.value)


def test_a_tokens_file_that_all_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(GOOD)
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="chmod o-w"):
        tokens.read_tokens(path)
    path.chmod(0o664)
    assert len(tokens.read_tokens(path)) == 1


def test_the_token_command_makes_what_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "trainer.token", tmp_path / "tokens.toml"
    args = ["--name", "trainer", "--scope", "read", "--run", "exp-*", "--run", 'q"\\\u00fc']
    assert tokens.main_token([*args, "--expires", "2031-01-01T00:00:00Z", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert out.stat().st_mode & 0o777 == 0o600
    assert tokens.main_token(args[:6]) == 0
    second = capsys.readouterr()
    path.write_text(printed.out + second.out.replace('"trainer"', '"other"'))
    known = tokens.Tokens(path)
    found = known.find(Security(token_file=str(out)).metadata())
    assert found.runs == ("exp-*", 'q"\\\u00fc')
    assert found.scopes == {"read"}
    assert found.expires == datetime.datetime(2031, 1, 1, tzinfo=UTC).timestamp()
    assert known.find([("authorization", f"Bearer {second.err.strip()}")]).name == "other"
    assert out.read_text().strip() not in printed.out
    assert tokens.main_token([*args, "--out", str(out)]) == 1, "an older token is not written over"
    assert "exists" in capsys.readouterr().err
    for wrong in (["--name", "a b"], ["--scope", "write"], ["--expires", "2031-01-01"]):
        with pytest.raises(SystemExit):
            tokens.main_token([*args, *wrong])


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def mutual(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("mutual") / "tokens"
    path.write_text(entry("rt_secret", "a"))
    settings: dict[str, Any] = {"tls_client_ca": pki.ca, "tokens": path, **pki.server.of_server}
    with run_server(metrics_listen="127.0.0.1:0", **settings) as server:
        yield server


def handshakes(server: ServerProcess) -> float:
    return Scraped(server.metrics_target).value("routetrace_denied_total", reason="handshake")


@pytest.mark.slow
def test_connections_that_can_not_be_trusted_are_refused_and_say_why(
    pki: Pki, mutual: ServerProcess
) -> None:
    expired = run_server(metrics_listen="127.0.0.1:0", **pki.expired_server.of_server)
    plain = run_server()
    with expired, plain:
        ca = {"ca_file": str(pki.ca)}
        good = {**ca, **pki.client.of_client}
        cases: dict[str, tuple[ServerProcess, dict[str, Any], str]] = {
            "no certificate": (mutual, ca, "give one: see cert_file"),
            "an expired one": (mutual, {**ca, **pki.expired_client.of_client}, "has expired"),
            "a foreign one": (mutual, {**ca, **pki.foreign_client.of_client}, "may not take"),
            "plain text": (mutual, {}, "if the server speaks TLS"),
            "wrong CA": (mutual, {**good, "ca_file": str(pki.other_ca)}, "not of an authority in"),
            "system's CAs": (mutual, {"tls": True}, "see ca_file"),
            "wrong name": (mutual, {**good, "server_name": "elsewhere"}, "see server_name"),
            "expired server": (expired, ca, "has expired"),
            "TLS to plain text": (plain, ca, "the server does not speak TLS"),
        }

        def sync(case: tuple[ServerProcess, dict[str, Any], str]) -> Unavailable:
            security = Security(**case[1], token="rt_secret")
            with RouteClient(case[0].target, security=security, timeout=2) as client:
                with pytest.raises(Unavailable) as caught:
                    client.stat("r0")
                return caught.value

        async def aio(case: tuple[ServerProcess, dict[str, Any], str]) -> Unavailable:
            security = Security(**case[1], token="rt_secret")
            async with AsyncRouteClient(case[0].target, security=security, timeout=2) as client:
                with pytest.raises(Unavailable) as caught:
                    await client.stat("r0")
                return caught.value

        async def all_aio() -> list[Unavailable]:
            return await asyncio.gather(*map(aio, cases.values()))

        def parsed(server: ServerProcess) -> float:
            return Scraped(server.metrics_target).value("grpc_server_msg_received_total")

        before = [(s, handshakes(s), parsed(s)) for s in (mutual, expired)]
        with ThreadPoolExecutor(8) as pool:
            failures = [*pool.map(sync, cases.values()), *asyncio.run(all_aio())]
        for (name, (_, _, words)), failure in zip([*cases.items()] * 2, failures, strict=True):
            assert words in str(failure), name
            assert "rt_secret" not in str(failure)
            assert isinstance(failure.__cause__, grpc.RpcError)
        # Counted, and nobody had a message parsed.
        for (server, count, messages), at_least in zip(before, (14, 2), strict=True):
            wait_for(lambda s=server, n=count + at_least: handshakes(s) >= n)
            assert parsed(server) == messages
        # That was not the server's fault.
        with RouteClient(mutual.target, security=Security(**good, token="rt_secret")) as client:
            assert list(client.find()) == []


class Nothing(grpc.GenericRpcHandler):
    """Has every method, and none of them does a thing."""

    def service(self, details: Any) -> Any:
        async def unimplemented(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED")

        return grpc.unary_unary_rpc_method_handler(unimplemented)


def test_each_connection_that_brings_no_call_is_counted_once(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_GRACE_S", 0.5)
    metrics = Metrics()
    bad, good = 5, 4

    def counted() -> float | None:
        return metrics.registry.get_sample_value("routetrace_denied_total", {"reason": "handshake"})

    def visit(port: int) -> None:
        security = Security(ca_file=str(pki.ca))
        for i in range(good + bad):
            if i % 2:
                with security.channel(
                    f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
                ) as channel:
                    for _ in range(3):
                        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                            channel.unary_unary("/a.B/C")(b"", timeout=20)
            else:
                with socket.create_connection(("127.0.0.1", port)) as raw:
                    raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    assert not raw.recv(1000).startswith(b"HTTP")

    async def serve() -> None:
        access = Access(ServerConfig(**pki.server.of_server), metrics)
        server = grpc.aio.server(interceptors=access.interceptors(Pace()))
        server.add_generic_rpc_handlers((Nothing(),))
        port = server.add_secure_port("127.0.0.1:0", access.credentials())
        await server.start()
        await asyncio.to_thread(visit, port)
        while counted() != bad:
            assert counted() < bad
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)  # more than the grace: nothing else is counted
        await server.stop(0)

    asyncio.run(asyncio.wait_for(serve(), 30))
    assert counted() == bad


def served(target: str, identity: Identity | None = None) -> bytes:
    """The certificate [DER] that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if identity:
        context.load_cert_chain(identity.cert, identity.key)
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw) as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


def der(identity: Identity) -> bytes:
    first = re.search(
        "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----",
        identity.cert.read_text(),
        re.DOTALL,
    )
    assert first
    return ssl.PEM_cert_to_DER_cert(first[0])


def test_a_broken_certificate_on_disk_keeps_the_old_one_and_is_logged_once(
    pki: Pki, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki.server.cert.read_bytes())
    key.write_bytes(pki.server.key.read_bytes())
    with run_server(tls_cert=cert, tls_key=key, log_format="json") as server:

        def kept() -> int:
            return server.log.read_text().count("new certificate not loaded")

        for i, breakage in enumerate(
            (
                lambda: replace(cert, "no certificate"),
                lambda: replace(cert, pki.next_server.cert.read_bytes()),  # of another key
                key.unlink,
            )
        ):
            breakage()
            for _ in range(3):
                assert served(server.target) == der(pki.server)
            assert kept() == i + 1
        replace(key, pki.next_server.key.read_bytes())
        assert served(server.target) == der(pki.next_server)
        assert kept() == 3


async def test_grpc_is_given_a_certificate_only_when_it_is_another(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gRPC 1.85 dies of a replacement (SIGSEGV) while another handshake is about to use what is
    # replaced: of one at every handshake, within seconds. So: none without need, and with a pause.
    made: list[Any] = []
    slept: list[float] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda *a, **_: made.append(a))
    monkeypatch.setattr(time, "sleep", slept.append)
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki.server.cert.read_bytes())
    key.write_bytes(pki.server.key.read_bytes())
    Access(ServerConfig(tls_cert=cert, tls_key=key), Metrics()).credentials()
    ((first, fetch),) = made
    assert [fetch() for _ in range(3)] == [None] * 3
    replace(cert, pki.next_server.cert.read_bytes())
    assert [fetch() for _ in range(3)] == [None] * 3
    assert slept == []
    replace(key, pki.next_server.key.read_bytes())
    fetched = [fetch() for _ in range(3)]
    assert fetched[0] not in (None, first)
    assert fetched[1:] == [None, None]
    assert slept == [tls._PAUSE_S]


@pytest.mark.parametrize(
    ("setting", "content", "words"),
    [
        ("tls_cert", None, "No such file"),
        ("tls_key", None, "No such file"),
        ("tls_client_ca", None, "No such file"),
        ("tokens", None, "No such file"),
        ("tls_cert", "nothing", "expected a PEM certificate"),
        ("tls_key", "nothing", "its PEM key"),
        ("tls_key", "other", "its PEM key"),
        ("tls_client_ca", "nothing", "certificates of authorities"),
        ("tokens", "nothing", "cannot be read"),
    ],
)
def test_the_server_does_not_start_with_files_that_it_can_not_use(
    pki: Pki, tmp_path: Path, setting: str, content: str | None, words: str
) -> None:
    (tmp_path / "tokens").write_text(GOOD)
    settings: dict[str, Any] = {
        **pki.server.of_server,
        "tls_client_ca": pki.ca,
        "tokens": tmp_path / "tokens",
    }
    settings[setting] = path = tmp_path / "bad"
    if content:
        path.write_bytes(pki.client.key.read_bytes() if content == "other" else b"nothing")
    with pytest.raises(ConfigError, match=words) as caught:
        Access(ServerConfig(**settings), Metrics())
    assert str(path) in str(caught.value)
    if setting == "tls_cert" and content is None:
        with pytest.raises(RuntimeError, match=f"ended with code 2: .*{re.escape(str(path))}"):
            run_server(**settings)


@settings(max_examples=20)
@given(st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2090, 1, 1)), st.booleans())
def test_the_expiry_of_a_certificate_is_read_from_it(moment: datetime.datetime, rsa: bool) -> None:
    kind = trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA
    moment = moment.replace(microsecond=0)
    cert = AUTHORITY.issue_cert(
        "a", not_before=moment - DAY, not_after=moment, key_type=kind
    ).cert_chain_pems[0]
    assert pem.expiry(cert.bytes()) == moment.replace(tzinfo=UTC).timestamp()


AUTHORITY = trustme.CA()


@given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 255))
def test_what_is_no_certificate_has_no_expiry(junk: bytes, at: int, byte: int) -> None:
    good = ssl.PEM_cert_to_DER_cert(AUTHORITY.cert_pem.bytes().decode())
    broken = bytearray(good)
    broken[at % len(good)] ^= byte
    for damaged in (junk, good[: at % len(good)], bytes(broken)):
        with contextlib.suppress(ValueError):
            pem.expiry(ssl.DER_cert_to_PEM_cert(damaged).encode())
        with pytest.raises(ValueError, match="expected"):
            pem.expiry(damaged)


def test_the_server_tells_when_its_certificate_expires(pki: Pki) -> None:
    assert Access(ServerConfig(), Metrics()).certificate_expiry() is None
    access = Access(ServerConfig(**pki.expired_server.of_server), Metrics())
    expiry = access.certificate_expiry()
    assert expiry is not None
    assert time.time() - 9 * 86400 < expiry < time.time() - 7 * 86400


# ------------------------------------------------------------------ rotation under load


class Load:
    """Readers and an agent at work, until `stop`."""

    def __init__(self, target: str, security: Security) -> None:
        self.target, self.security = target, security
        self.failures: list[BaseException] = []
        self.done: dict[str, int] = {}
        self._stop = threading.Event()
        self.truth: dict[str, np.ndarray] = {}
        workers = (self._kept, self._fresh, self._aio, self._ingest)
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in workers]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], Iterator[None]]) -> None:
        name = work.__name__
        self.done[name] = 0
        try:
            for _ in work():
                self.done[name] += 1
                if self._stop.is_set():
                    return
        except BaseException as error:
            self.failures.append(error)

    def progress(self, calls: int = 5) -> None:
        """Until every worker has got on, with calls that began after this."""
        wait_for(lambda: len(self.done) == 4 or self.failures)
        before = dict(self.done)
        wait_for(
            lambda: self.failures or all(n >= before[w] + calls for w, n in self.done.items()), 60
        )
        assert not self.failures, self.failures

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.failures, self.failures

    def hammer(self, connect: Callable[..., object], identity: Identity) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                connect(self.target, identity)

    def _read(self, client: RouteClient) -> None:
        np.testing.assert_array_equal(client.get("r0").topk_ids, rows_of(LAYOUT, 9))

    def _kept(self) -> Iterator[None]:
        with RouteClient(self.target, security=self.security, timeout=20) as client:
            while True:
                self._read(client)
                yield

    def _fresh(self) -> Iterator[None]:
        while True:
            with RouteClient(self.target, security=self.security, timeout=20) as client:
                self._read(client)
            yield

    def _aio(self) -> Iterator[None]:
        with asyncio.Runner() if hasattr(asyncio, "Runner") else _Runner() as runner:
            client = AsyncRouteClient(self.target, security=self.security, timeout=20)
            try:
                while True:
                    runner.run(client.stat("r0"))
                    yield
            finally:
                runner.run(client.close())

    def _ingest(self) -> Iterator[None]:
        config = AgentConfig(
            target=self.target, engine_id="agent", layout=LAYOUT, mode="thread", linger_s=0.01,
            flush_interval_s=0.005, security=self.security,
        )  # fmt: skip
        with CaptureAgent(config) as agent:
            try:
                for i in itertools.count():
                    name, rows = f"a{i}", rows_of(LAYOUT, 5, i)
                    handle = agent.begin(name)
                    agent.step(rows, [(handle, 0, 5)])
                    agent.finish(handle, 6)
                    self.truth[name] = rows
                    assert agent.flush(30)
                    yield
            finally:
                agent.close()
                self.stats = agent.stats()


class _Runner:
    def __enter__(self) -> Any:
        self.loop = asyncio.new_event_loop()
        return self

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def __exit__(self, *_: object) -> None:
        self.loop.close()


@pytest.mark.slow
def test_everything_is_replaced_under_load_and_no_call_fails(pki: Pki, tmp_path: Path) -> None:
    here, there = tmp_path / "client", tmp_path / "server"
    folders = itertools.count()

    def publish(link: Path, **files: bytes) -> None:
        """All files at once, as Kubernetes does it: by a link that is renamed."""
        folder = tmp_path / f"v{next(folders)}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "link").replace(link)

    def identity(of: Identity) -> dict[str, bytes]:
        return {"cert": of.cert.read_bytes(), "key": of.key.read_bytes()}

    ca, other, both = (path.read_bytes() for path in (pki.ca, pki.other_ca, pki.both))
    token, listed = tmp_path / "token", tmp_path / "tokens.toml"
    publish(here, ca=ca, **identity(pki.client))
    publish(there, client_ca=ca, **identity(pki.server))
    token.write_text("rt_old")
    listed.write_text(entry("rt_old", "old"))
    security = Security(
        ca_file=str(here / "ca"), cert_file=str(here / "cert"), key_file=str(here / "key"),
        token_file=str(token),
    )  # fmt: skip
    with run_server(
        tls_cert=there / "cert", tls_key=there / "key", tls_client_ca=there / "client_ca",
        tokens=listed, metrics_listen="127.0.0.1:0",
    ) as server:  # fmt: skip
        feed(server.target, security, "default", "r0")
        load = Load(server.target, security)
        # Handshakes that never end in a call: gRPC must not be caught in the middle of one.
        hammers = [
            threading.Thread(target=load.hammer, args=(served, pki.client)) for _ in range(4)
        ]
        for hammer in hammers:
            hammer.start()
        try:
            load.progress()
            # Both sides trust the next authority before anything of it is shown.
            publish(here, ca=both, **identity(pki.client))
            publish(there, client_ca=both, **identity(pki.server))
            load.progress()
            publish(there, client_ca=both, **identity(pki.next_server))
            assert served(server.target, pki.client) == der(pki.next_server)
            load.progress()
            publish(here, ca=both, **identity(pki.foreign_client))
            load.progress()
            publish(here, ca=other, **identity(pki.foreign_client))
            publish(there, client_ca=other, **identity(pki.next_server))
            load.progress()
            # A token is listed before it is used, and no longer once it is not used any more.
            replace(listed, entry("rt_old", "old") + entry("rt_new", "new"))
            replace(token, "rt_new")
            load.progress()
            replace(listed, entry("rt_new", "new"))
            load.progress()
        finally:
            load.stop()
            for hammer in hammers:
                hammer.join(20)
        assert load.stats.acknowledged_rows == load.stats.offered_rows == 5 * len(load.truth)
        with RouteClient(server.target, security=security, timeout=20) as client:
            for name, rows in load.truth.items():
                np.testing.assert_array_equal(client.get(name).topk_ids, rows)
        # The old authority does not count any more.
        old = Security(ca_file=str(pki.other_ca), **pki.client.of_client, token="rt_new")
        with (
            RouteClient(server.target, security=old, timeout=2) as client,
            pytest.raises(Unavailable, match="may not take the certificate"),
        ):
            client.stat("r0")
        scraped = Scraped(server.metrics_target)
        ended = {
            (labels["grpc_method"], labels["grpc_code"]): value
            for labels, value in scraped.samples("grpc_server_handled_total")
            if labels["grpc_code"] != "OK" and value
        }
        # The agent's stream was opened with the old token; it goes on with the new one.
        assert ended.pop(("Ingest", "UNAUTHENTICATED"), 0) <= 1
        assert ended == {}


# ------------------------------------------------------------------ limits


def test_a_message_over_the_limit_is_refused_before_it_takes_memory() -> None:
    with run_server(max_chunk_bytes="1MiB") as server:
        before = peak(server)
        for method in HUGE:
            failed = call_raw(server.target, Security(), method, bytes(96 << 20))
            assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, method
            assert "larger than max" in failed.details()
        # Up to 1.78 at least, gRPC gathers the whole of a message before it looks at its length.
        if tuple(map(int, grpc.__version__.split(".")[:2])) >= (1, 85):
            assert peak(server) - before < 48 << 20
        with RouteClient(server.target, timeout=20) as client:
            assert list(client.find()) == []


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:7411", "10.0.0.1:1"])
def test_other_machines_are_served_with_tls_and_tokens_or_when_told_so(
    pki: Pki, tmp_path: Path, listen: str
) -> None:
    tls_on, tokens_on = pki.server.of_server, {"tokens": tmp_path / "tokens"}
    for lacking, held in (
        ("tls_cert and tokens", {}),
        ("tls_cert", tokens_on),
        ("tokens", tls_on),
        ("tokens", {**tls_on, "tls_client_ca": pki.ca}),
    ):
        with pytest.raises(ValueError, match=f"expected {lacking}, a loopback address"):
            ServerConfig(listen=listen, **held)
        assert ServerConfig(listen=listen, insecure=True, **held).insecure
    assert ServerConfig(listen=listen, **tls_on, **tokens_on).listen == listen


# ------------------------------------------------------------------ secrets


@pytest.mark.slow
def test_no_secret_is_logged_or_printed(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good, bad, foreign = (f"rt_{secrets.token_urlsafe(24)}" for _ in range(3))
    held = tmp_path / "token"
    held.write_text(good)
    listed = tmp_path / "tokens"
    listed.write_text(entry(good, "good") + entry(foreign, "foreign", runs=("other",)))
    keys = [
        line
        for identity in (pki.server, pki.client)
        for line in identity.key.read_text().splitlines()[1:-1]
    ]
    files = {"ca_file": str(pki.ca), **pki.client.of_client}
    told: list[object] = []
    with run_server(
        **pki.server.of_server, tls_client_ca=pki.ca, tokens=listed, log_level="debug",
        log_format="json", data_dir=tmp_path / "data",
    ) as server:  # fmt: skip
        for fields in ({"token": good}, {"token_file": str(held)}, {"token": bad},
                       {"token": foreign}):  # fmt: skip
            security = Security(**files, **fields)
            told += [security, pickle.loads(pickle.dumps(security)), vars(security).keys()]
            with RouteClient(server.target, security=security, timeout=5) as client:
                told += [client, client._config]
                with pytest.raises(RouteTraceError) as caught:
                    client.get("nothing")
                told += [caught.value, vars(caught.value), caught.value.__cause__]
            config = AgentConfig(
                target=server.target, engine_id="e", layout=LAYOUT, mode="thread",
                security=security, close_timeout_s=1,
            )  # fmt: skip
            told.append(config)
            with CaptureAgent(config) as agent:
                handle = agent.begin("r0")
                agent.step(rows_of(LAYOUT, 5), [(handle, 0, 5)])
                agent.finish(handle, 6)
                agent.flush(1)
                told += [agent, agent.stats()]
        listed.write_text(good)  # somebody mistakes one file for the other
        with (
            pytest.raises(RouteTraceError),
            RouteClient(server.target, security=Security(**files, token=bad), timeout=5) as client,
        ):
            client.get("nothing")
        log = server.log.read_text()
    assert "refused" in log, "debug logs are on"
    assert "new tokens not loaded" in log
    for wrong in (
        {"token": bad + "\n"},
        {"token": bad + "\u00e9"},
        {"token": good, "token_file": "x"},
    ):
        with pytest.raises(InvalidArgument) as refused:
            Security(**wrong)
        told += [refused.value, vars(refused.value)]
    held.write_text(bad + " and more")
    with pytest.raises(InvalidArgument) as refused:
        Security(token_file=str(held)).check("127.0.0.1:1")
    told += [refused.value, vars(refused.value)]
    text = log + caplog.text + "".join(f"{thing!r}\n{thing!s}\n" for thing in told)
    for secret in (good, bad, foreign, *keys):
        assert secret not in text


# ------------------------------------------------------------------ what clients are told


def test_the_environment_says_who_one_is(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
        monkeypatch.delenv(name)
    assert Security.from_environment() == Security()
    fields: dict[str, Any] = {
        "tls": True, "ca_file": "a", "cert_file": "b", "key_file": "c", "server_name": "d",
        "token_file": "e", "insecure": True,
    }  # fmt: skip
    for name, value in fields.items():
        variable = "INSECURE_CLIENT" if name == "insecure" else name.upper()
        monkeypatch.setenv(f"ROUTETRACE_{variable}", "yes" if value is True else value)
    assert Security.from_environment() == Security(**fields)
    monkeypatch.delenv("ROUTETRACE_TOKEN_FILE")
    monkeypatch.setenv("ROUTETRACE_TOKEN", "t")
    monkeypatch.setenv("ROUTETRACE_TLS", "off")
    fields |= {"tls": False, "token": "t", "token_file": ""}
    assert Security.from_environment() == Security(**fields)
    with pytest.raises(InvalidArgument, match=r"ca_file .* a: No such file"):
        RouteClient("127.0.0.1:1")
    with pytest.raises(InvalidArgument, match=r"ca_file .* a: No such file"):
        AsyncRouteClient("127.0.0.1:1")
    # What is given to the client stands in for all of it.
    assert "idle" in repr(RouteClient("127.0.0.1:1", security=Security()))
    monkeypatch.setenv("ROUTETRACE_TLS", "maybe")
    with pytest.raises(InvalidArgument, match="ROUTETRACE_TLS is maybe"):
        RouteClient("127.0.0.1:1")


@pytest.mark.parametrize("client", [RouteClient, AsyncRouteClient])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ca_file": "/missing"}, "ca_file"),
        ({"ca_file": "{junk}"}, "ca_file"),
        ({"ca_file": "{folder}"}, "ca_file"),
        ({"cert_file": "{cert}"}, "key_file"),
        ({"key_file": "{key}"}, "cert_file"),
        ({"cert_file": "{cert}", "key_file": "/missing"}, "cert_file"),
        ({"cert_file": "{cert}", "key_file": "{other_key}"}, "cert_file"),
        ({"cert_file": "{key}", "key_file": "{cert}"}, "cert_file"),
        ({"token_file": "/missing"}, "token_file"),
        ({"token_file": "{junk}"}, "token_file"),
        ({"token_file": "{empty}"}, "token_file"),
        ({"token_file": "{folder}"}, "token_file"),
        ({"token": "a b"}, "token"),
        ({"token": "a\r\nx: y"}, "token"),
        ({"token": "\u00e9"}, "token"),
        ({"token": "a" * 5000}, "token"),
        ({"token": "a", "token_file": "{good}"}, "token_file"),
        ({"server_name": "a"}, "server_name"),
    ],
)
def test_files_that_can_not_be_used_are_told_when_the_client_is_made(
    client: Any, fields: dict[str, str], field: str, pki: Pki, tmp_path: Path
) -> None:
    (tmp_path / "junk").write_bytes(b"\xff\0 x")
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "good").write_text("rt_x")
    places = {
        "junk": tmp_path / "junk", "empty": tmp_path / "empty", "good": tmp_path / "good",
        "folder": tmp_path, "cert": pki.client.cert, "key": pki.client.key,
        "other_key": pki.server.key,
    }  # fmt: skip
    fields = {name: value.format(**places) for name, value in fields.items()}
    with pytest.raises(InvalidArgument) as caught:
        client("127.0.0.1:1", security=Security(**fields))
    assert caught.value.field == field
    if field != "token":
        named = [value for value in fields.values() if value in str(caught.value)]
        assert named or field not in fields


def test_a_token_does_not_travel_in_plain_text(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("rt_x")
    for held in ({"token": "rt_x"}, {"token_file": str(tmp_path / "token")}):
        for client in (RouteClient, AsyncRouteClient):
            with pytest.raises(InvalidArgument, match="plain text"):
                client("10.0.0.1:7411", security=Security(**held))
            for good in ({"insecure": True}, {"tls": True}, {"ca_file": str(pki.ca)}):
                client("10.0.0.1:7411", security=Security(**held, **good))
            client("127.0.0.1:7411", security=Security(**held))
        with pytest.raises(InvalidArgument, match="plain text"):
            Security(**held).channel("10.0.0.1:7411", ())


LOCAL = ["127.0.0.1", "127.8.9.1", "localhost", "[::1]"]
ELSEWHERE = ["10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.example.org", "[::]",
             "0.0.0.0", "[fe80::1]"]  # fmt: skip


@given(
    st.lists(st.sampled_from(LOCAL + ELSEWHERE), min_size=1, max_size=3),
    st.sampled_from(["", "dns:", "dns:///", "dns://8.8.8.8/", "ipv4:", "ipv6:"]),
)
def test_only_targets_on_this_machine_count_as_such(hosts: list[str], scheme: str) -> None:
    target = scheme + ",".join(f"{host}:{7411 + i}" for i, host in enumerate(hosts))
    assert is_local(target) == all(host in LOCAL for host in hosts)


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("unix:/run/routetrace", True), ("unix-abstract:x", True), ("::1", True),
        ("localhost", True), ("", False), ("xds:///localhost", False), ("[::1]x:1", False),
        ("vsock:1:2", False),
    ],
)  # fmt: skip
def test_other_targets(target: str, local: bool) -> None:
    assert is_local(target) is local


def test_a_client_goes_on_with_what_it_has_while_files_are_broken(
    pki: Pki, mutual: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("routetrace.client._shells.channels._LOOK_S", 0.0)
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki.client.cert.read_bytes())
    key.write_bytes(pki.client.key.read_bytes())
    security = Security(
        ca_file=str(pki.ca), cert_file=str(cert), key_file=str(key), token="rt_secret"
    )
    with RouteClient(mutual.target, security=security, timeout=20) as client:

        def channels() -> list[Any]:
            return [c.channel for c in client._driver._connections._all]

        assert list(client.find()) == []
        (first,) = channels()
        following = client.follow("not-yet")
        replace(key, "broken")
        for _ in range(3):
            assert list(client.find()) == []
        assert channels() == [first]
        (record,) = caplog.records
        assert "keeping the old ones" in record.getMessage()
        replace(key, pki.client.key.read_bytes())
        assert list(client.find()) == []
        assert first not in channels()
        assert len(channels()) == 1
        following.close()


def test_a_call_under_way_keeps_its_channel_and_the_last_one_closes_it(
    pki: Pki, mutual: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("routetrace.client._shells.channels._LOOK_S", 0.0)
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki.client.cert.read_bytes())
    key.write_bytes(pki.client.key.read_bytes())
    security = Security(
        ca_file=str(pki.ca), cert_file=str(cert), key_file=str(key), token="rt_secret"
    )
    feeder = Feeder(mutual.target, LAYOUT, run="kept", security=security)
    handle = feeder.begin("r0")
    feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
    feeder.flush()

    def replaced() -> None:
        replace(cert, pki.client.cert.read_bytes())

    def finish() -> None:
        feeder.step(rows_of(LAYOUT, 5, 1), [(handle, 4, 5)])
        feeder.finish(handle, 10)
        feeder.close()

    with RouteClient(mutual.target, run="kept", security=security, timeout=20) as client:
        driver = client._driver
        parts = client.follow("r0")
        assert len(next(parts).topk_ids) == 4
        for _ in range(3):
            replaced()
            assert client.stat("r0").num_rows == 4
        assert len(driver._connections._all) == 2, "the one that is followed on, and the newest"
        finish()
        assert sum(len(part.topk_ids) for part in parts) == 5
        assert len(driver._connections._all) == 1

    async def aio() -> None:
        async with AsyncRouteClient(
            mutual.target, run="kept", security=security, timeout=20
        ) as client:
            parts = client.follow("r0")
            await anext(parts)
            for _ in range(3):
                replaced()
                assert (await client.stat("r0")).num_rows == 9
            assert len(client._driver._connections._all) == 2
            await parts.aclose()
            assert len(client._driver._connections._all) == 1

    asyncio.run(aio())


# ------------------------------------------------------------------ the page about it

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
@pytest.mark.slow
def test_what_the_page_says_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    flags: list[str] = []
    for head, block in re.findall(r"^([^\n]*)\n```sh\n(.*?)^```", PAGE, re.M | re.S):
        if head.startswith("<!-- not run"):
            continue
        lines = block.replace("\\\n", "").splitlines()
        flags = next(
            (line for line in lines if line.startswith("routetrace-server --")), ""
        ).split()
        made = [line for line in lines if not line.startswith("routetrace-server --")]
        subprocess.run(["bash", "-ec", "\n".join(made)], check=True, capture_output=True)
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "example.toml").write_text(example)
    assert [t.name for t in tokens.read_tokens(tmp_path / "example.toml").values()] == ["rollout"]
    settings = {
        flag[2:].replace("-", "_"): tmp_path / value
        for flag, value in zip(flags[1::2], flags[2::2], strict=True)
    }
    assert settings.keys() == {"data_dir", "tls_cert", "tls_key", "tls_client_ca", "tokens"}
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    with run_server(**settings) as server:
        target = server.target.replace("127.0.0.1", "localhost")
        names: dict[str, Any] = {}
        exec(snippet.replace("localhost:7411", target), names)
        with names["client"] as client:
            assert list(client.find()) == []
            client.retire_through(weight_version=1)
        for name, file in (("CA", "ca.pem"), ("CERT", "client.pem"), ("KEY", "client.key")):
            monkeypatch.setenv(f"ROUTETRACE_{name}_FILE", file)
        monkeypatch.setenv("ROUTETRACE_TOKEN_FILE", "rollout.token")
        with (
            RouteClient(target, run="exp-1") as client,
            pytest.raises(PermissionDenied, match="token rollout"),
        ):
            list(client.find())
        feed(target, Security.from_environment(), "exp-1", "r0")


def test_a_token_file_is_read_when_it_has_changed(tmp_path, monkeypatch):
    read, reads = security_module._read_token, []
    monkeypatch.setattr(
        security_module, "_read_token", lambda path: (reads.append(path), read(path))[1]
    )
    held, new = tmp_path / "token", tmp_path / "new"
    held.write_text("rt_one")
    security = Security(token_file=str(held))
    for _ in range(3):
        assert security.metadata() == (("authorization", "Bearer rt_one"),)
    assert len(reads) == 1
    new.write_text("rt_two")  # as long as the other
    new.rename(held)
    assert security.metadata() == (("authorization", "Bearer rt_two"),)
    held.unlink()
    with pytest.raises(InvalidArgument):
        security.metadata()
