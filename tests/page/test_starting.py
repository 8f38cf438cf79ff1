"""`routetrace page`, `python -m routetrace.page`, addresses and certificates."""

from __future__ import annotations

import builtins
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from routetrace.common.errors import InvalidArgument, MissingDependency
from routetrace.page.config import PageConfig, split_address
from routetrace.page.serving import Page
from routetrace.page.start import start
from support.commands import commands
from support.pages import Browser, running_page
from support.servers.guarded import Identity, der, replace

MODULE = [sys.executable, "-m", "routetrace.page"]
COMMAND = [sys.executable, "-m", "routetrace.cli", "page"]


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
    with subprocess.Popen(
        [*words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.parametrize("words", [MODULE, COMMAND], ids=["module", "command"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_page_runs_until_it_is_stopped(server, words: list[str], end: int) -> None:
    with process(*words, "--target", server.target, "--listen", "127.0.0.1:0") as running:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        assert urlsplit(address).scheme == "http"
        browser = Browser(address)
        assert browser.call("/api/v1/session").json["target"] == server.target
        assert browser.trace("r", id="whole").status == 200
        running.send_signal(end)
        output, errors = running.communicate(timeout=60)
        assert running.returncode in (-end, 128 + end), errors
        assert "Traceback" not in errors
        assert output == ""


def test_the_command_says_where_in_json(server) -> None:
    words = [*COMMAND, "--json", "--target", server.target, "--listen", "localhost:0"]
    with process(*words, "--run", "r", "--run", "other") as running:
        assert running.stdout is not None
        said = json.loads(running.stdout.readline())
        assert said["target"] == server.target
        assert said["address"].startswith("http://localhost:")
        assert Browser(said["address"]).call("/api/v1/session").json["runs"] == ["r", "other"]


def test_a_port_that_is_taken(server, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = commands(monkeypatch, server.target, "r")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("page", "--listen", listen, code=1)
    assert done.stderr == (
        f"routetrace: cannot listen on {listen} (Address already in use); expected a free address "
        "of this machine\n"
    )


def test_wrong_options_are_named(server, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = commands(monkeypatch, server.target, "r")
    for words, said in (
        (["--listen", "0.0.0.0:0"], "listen is '0.0.0.0:0', which other machines can reach"),
        (["--listen", "7410"], "listen is '7410'; expected host:port"),
        (["--tls-cert", "c.pem"], "tls_key is empty; expected tls_cert and tls_key, or neither"),
        (["--tls-cert", "/no.pem", "--tls-key", "/no.key"], "tls_cert and tls_key cannot be used"),
        (["--host", "http://page"], "hosts is 'http://page'; expected host or host:port"),
        (["--target", "http://x"], "target is"),
        (["--run", ""], "run is ''; expected"),
    ):
        assert said in cli("page", *words, code=2).stderr


def test_other_machines_need_a_server_with_tokens(
    server, guarded, pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Page, "run", lambda page: page._socket.close())
    files = ("--tls-cert", str(pki.server.cert), "--tls-key", str(pki.server.key))
    words = ("page", "--listen", "0.0.0.0:0", *files)
    said = commands(monkeypatch, server.target, "r")(*words, code=2).stderr
    assert said == (
        "routetrace: listen is '0.0.0.0:0', which other machines can reach: expected tokens_file "
        "at the server, a loopback address, or insecure to be set\n"
    )
    commands(monkeypatch, server.target, "r")(*words, "--insecure")
    commands(monkeypatch, guarded.target, "r")(*words)


def test_without_the_extra_one_line_says_how_to_install(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def lacking(name: str, *more: Any, **further: Any) -> Any:
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *more, **further)

    for name in [n for n in sys.modules if n.split(".")[0] in ("starlette", "uvicorn")]:
        monkeypatch.delitem(sys.modules, name)
    kept = ("routetrace.page.config", "routetrace.page.start")
    for name in [n for n in sys.modules if n.startswith("routetrace.page.") and n not in kept]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(MissingDependency, match="is not installed") as caught:
        start(PageConfig(), print)
    assert caught.value.package in ("starlette", "uvicorn")
    done = commands(monkeypatch, server.target, "r")("page", code=1)
    assert done.stderr == (
        f"routetrace: {caught.value.package} is not installed: pip install '.[page]' in a "
        "checkout\n"
    )


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("[::1]:0", ("::1", 0)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "a", ":1", "a:", "a:65536", "::1:5", "a:1:2", "http://a:1", "a/b:1", "a b:1"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidArgument, match="expected host:port"):
        split_address(address)


def test_a_page_on_ipv6(server) -> None:
    with running_page(server.target, listen="[::1]:0") as address:
        assert address.startswith("http://[::1]:")
        assert Browser(address).call("/api/v1/session").status == 200


def served(address: str) -> bytes:
    """The certificate [DER] that a page shows."""
    url = urlsplit(address)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((url.hostname, url.port), timeout=30) as raw,
        context.wrap_socket(raw) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def test_a_certificate_is_replaced_while_the_page_runs(server, pki, tmp_path: Path) -> None:
    cert, key = tmp_path / "page.pem", tmp_path / "page.key"

    def put(identity: Identity) -> None:
        replace(key, identity.key.read_bytes())
        replace(cert, identity.cert.read_bytes())

    put(pki.server)
    settings = {"tls_cert": str(cert), "tls_key": str(key)}
    with running_page(server.target, **settings) as address:
        assert address.startswith("https://127.0.0.1:")
        browser = Browser(address, pki.ca)
        answer = browser.sign_in("any")  # the server needs none, and takes any
        assert "__Host-routetrace-" in answer.headers["Set-Cookie"]
        assert "; Secure" in answer.headers["Set-Cookie"]
        assert served(address) == der(pki.server)
        put(pki.next_server)
        assert served(address) == der(pki.next_server)
        replace(cert, b"broken")
        assert served(address) == der(pki.next_server)
        put(pki.server)
        assert served(address) == der(pki.server)
        assert browser.call("/api/v1/session").status == 200  # its connection stayed


def test_names_of_the_certificate_are_hosts(server, pki) -> None:
    ca = trustme.CA()
    identity = Identity(pki.ca.parent, "named", ca.issue_cert("page.example", "*.pages.example"))
    settings = {"tls_cert": str(identity.cert), "tls_key": str(identity.key)}
    with running_page(server.target, **settings) as address:
        root = pki.ca.parent / "named_ca"
        ca.cert_pem.write_to_path(str(root))
        port = urlsplit(address).port
        for host, status in (
            (f"page.example:{port}", 200), (f"a.pages.example:{port}", 200),
            ("page.example", 421), (f"example:{port}", 421),
        ):  # fmt: skip
            browser = Browser(address, root)
            browser.connection._context.check_hostname = False  # type: ignore[attr-defined]
            assert browser.call("/api/v1/session", headers={"Host": host}).status == status
