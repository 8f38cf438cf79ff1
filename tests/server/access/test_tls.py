"""TLS and client certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import AsyncRouteClient, RouteClient, Security
from routetrace.common import pem
from routetrace.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    RouteTraceError,
    Unavailable,
)
from routetrace.page.certificate import Certificate
from routetrace.server.access import tls
from routetrace.server.access.control import Access
from routetrace.server.access.pace import Pace
from routetrace.server.common.metrics import Metrics
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.testing import ServerProcess, run_server
from support.scrape import Scraped
from support.servers.guarded import DAY, GOOD, UTC, Pki, der, replace, served
from support.waiting import wait_for


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
            "TLS to plain text": (plain, ca, "does not speak TLS"),
        }

        # The last attempt may have too little time for a handshake; the error then names both.
        refused = Unavailable, DeadlineExceeded

        def sync(case: tuple[ServerProcess, dict[str, Any], str]) -> RouteTraceError:
            security = Security(**case[1], token="rt_secret")
            with RouteClient(case[0].target, security=security, timeout=2) as client:
                with pytest.raises(refused) as caught:
                    client.stat("r0")
                return caught.value

        async def aio(case: tuple[ServerProcess, dict[str, Any], str]) -> RouteTraceError:
            security = Security(**case[1], token="rt_secret")
            async with AsyncRouteClient(case[0].target, security=security, timeout=2) as client:
                with pytest.raises(refused) as caught:
                    await client.stat("r0")
                return caught.value

        async def all_aio() -> list[RouteTraceError]:
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
        # Counted, and no message was parsed.
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


def test_a_broken_certificate_on_disk_keeps_the_old_one_and_is_logged_once(
    pki: Pki, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(pki.server.cert.read_bytes())
    replace(key, pki.server.key.read_bytes())
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
    replace(key, pki.server.key.read_bytes())
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
        ("tokens_file", None, "No such file"),
        ("tls_cert", "nothing", "expected a PEM certificate"),
        ("tls_key", "nothing", "its PEM key"),
        ("tls_key", "other", "its PEM key"),
        ("tls_client_ca", "nothing", "certificates of authorities"),
        ("tokens_file", "nothing", "cannot be read"),
    ],
)
def test_the_server_does_not_start_with_files_that_it_can_not_use(
    pki: Pki, tmp_path: Path, setting: str, content: str | None, words: str
) -> None:
    (tmp_path / "tokens").write_text(GOOD)
    settings: dict[str, Any] = {
        **pki.server.of_server,
        "tls_client_ca": pki.ca,
        "tokens_file": tmp_path / "tokens",
    }
    settings[setting] = path = tmp_path / "bad"
    if content:
        replace(path, pki.client.key.read_bytes() if content == "other" else b"nothing")
    with pytest.raises(ConfigError, match=words) as caught:
        Access(ServerConfig(**settings), Metrics())
    assert str(path) in str(caught.value)
    if setting == "tls_cert" and content is None:
        with pytest.raises(RuntimeError, match=f"ended with code 2: .*{re.escape(str(path))}"):
            run_server(**settings)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o660, 0o440, 0o600, 0o400])
@pytest.mark.parametrize("owner", ["root", "its user"])
def test_a_key_that_others_can_read_is_refused(
    pki: Pki, tmp_path: Path, mode: int, owner: str
) -> None:
    cert, key = pki.server.cert, tmp_path / "key"
    replace(key, pki.server.key.read_bytes())
    user = 0 if owner == "root" else os.getuid() or 12345
    if key.stat().st_uid != user:
        if os.getuid():
            pytest.skip("only root can give a file away")
        os.chown(key, user, -1)
    key.chmod(mode)
    uses: list[tuple[str, Callable[[], object]]] = [
        ("tls_key", lambda: Access(ServerConfig(tls_cert=cert, tls_key=key), Metrics())),
        ("tls_key", lambda: Certificate(str(cert), str(key))),
        ("key_file", lambda: RouteClient("a:1", security={"cert_file": cert, "key_file": key})),
    ]
    for field, use in uses:
        # As PostgreSQL: a group may read what root owns, such as a Secret of Kubernetes.
        if mode in (0o600, 0o400) or (owner == "root" and mode in (0o640, 0o440)):
            use()
            continue
        with pytest.raises((ConfigError, InvalidArgument)) as caught:
            use()
        assert str(caught.value).removeprefix("tls: ") == (
            f"{field} is {key} with mode {mode:04o}; expected a private key that others cannot "
            f"read, of mode 0600 or less, or 0640 where root owns it; run chmod 600 {key}"
        )


def test_a_new_key_that_others_can_read_is_used_once_its_mode_is_right(
    pki: Pki, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    replace(cert, pki.server.cert.read_bytes())
    replace(key, pki.server.key.read_bytes())
    with run_server(tls_cert=cert, tls_key=key) as server:
        assert served(server.target) == der(pki.server)
        replace(key, pki.next_server.key.read_bytes())
        replace(cert, pki.next_server.cert.read_bytes())
        key.chmod(0o644)
        assert served(server.target) == der(pki.server)
        assert f"{key} with mode 0644" in server.log.read_text()
        key.chmod(0o600)
        assert served(server.target) == der(pki.next_server)


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
