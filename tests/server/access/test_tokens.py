"""Tokens: who may call what, and in which runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import Agreement, AsyncRouteClient, RouteClient, Security
from routetrace.common.errors import PermissionDenied, RouteTraceError, Unauthenticated
from routetrace.server.access import tokens
from routetrace.server.access.control import _SCOPES as SCOPES
from routetrace.server.access.control import Access
from routetrace.server.common.metrics import Metrics
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import (
    DAY,
    GOOD,
    HUGE,
    UTC,
    call_raw,
    entry,
    error_of,
    feed,
    peak,
    replace,
)
from support.waiting import wait_for

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


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
    with run_server(tokens_file=path, metrics_listen="127.0.0.1:0", reflection=True) as server:
        guarded = Guarded(server, named)
        feed(server.target, guarded.security("root"), "mine", "r0")
        feed(server.target, guarded.security("root"), "theirs", "r0")
        yield guarded


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
    "get_many": lambda c: list(c.get_many(["r0"])),
    "follow": lambda c: list(c.follow("r0")),
    "get_blocks": lambda c: c.get_blocks("e0", [0], 1),
    "stat": lambda c: c.stat("r0"),
    "describe": lambda c: c.describe("r0"),
    "explain": lambda c: c.explain("r0", 0),
    "find": lambda c: list(c.find()),
    "watch": lambda c: next(c.watch()),
    "server_info": lambda c: c.server_info(),
    "agents": lambda c: list(c.agents()),
    "history": lambda c: c.history(),
    "agreement_history": lambda c: c.agreement_history(),
    "report_agreement": lambda c: c.report_agreement(1, Agreement()),
    "renew": lambda c: c.renew(["r0"], ttl_seconds=1),
    "bind": lambda c: c.bind("e0", "r9", [0], 1),
    "delete": lambda c: c.delete("r0"),
    "retire": lambda c: c.retire_through(weight_version=99),
    "forget_engine": lambda c: c.forget_engine("e0"),
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
        for name in ("state", "num_tokens", "updated_at", "expires_at", "num_incarnations"):
            assert getattr(after, name) == getattr(before, name), name
        np.testing.assert_array_equal(root.get("r0").topk_ids, before_rows)
    # On its own run it does all of it; names that a pattern covers are its own too.
    with guarded.client("mine", "mine") as client:
        np.testing.assert_array_equal(client.get("r0").topk_ids, rows_of(LAYOUT, 9))
        client.server_info()
        client.renew(["r0"], ttl_seconds=1000)
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
        access = Access(ServerConfig(tokens_file=Path(file.name)), metrics)
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


def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_a", "a") + entry("rt_b", "b"))
    with run_server(tokens_file=path) as server:
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
