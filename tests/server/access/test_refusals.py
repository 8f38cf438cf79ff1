"""Messages of refusals, as clients get them, and the page about access."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import AsyncRouteClient, RouteClient, Security
from routetrace.common import security as security_module
from routetrace.common.errors import (
    InvalidArgument,
    PermissionDenied,
)
from routetrace.common.security import is_local
from routetrace.server.access import tokens
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import Pki, feed, replace

# ------------------------------------------------------------------ errors at clients


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
    with pytest.raises(InvalidArgument, match=r"ca_file 'a' cannot be read .no such file"):
        RouteClient("127.0.0.1:1")
    with pytest.raises(InvalidArgument, match=r"ca_file 'a' cannot be read .no such file"):
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
    replace(key, pki.client.key.read_bytes())
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
    replace(key, pki.client.key.read_bytes())
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
    assert settings.keys() == {"data_dir", "tls_cert", "tls_key", "tls_client_ca", "tokens_file"}
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
