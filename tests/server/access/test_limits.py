"""Limits of what a caller may send, and secrets that no log and no error shows."""

from __future__ import annotations

import logging
import pickle
import secrets
from pathlib import Path

import grpc
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient, Security
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    InvalidArgument,
    RouteTraceError,
)
from routetrace.server.settings.config import ServerConfig
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import HUGE, Pki, call_raw, entry, peak

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


@pytest.mark.parametrize("size", [3, 50_000, 200_000])
def test_bytes_that_are_no_message_are_refused_by_type(
    size: int,
) -> None:
    with run_server() as server:
        for service in pb.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                failed = call_raw(server.target, Security(), path, b"\xff" * size)
                assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT, path
                assert method.input_type.name in failed.details()
                assert ERROR_METADATA_KEY in dict(failed.trailing_metadata())
        with RouteClient(server.target, timeout=20) as client:
            assert list(client.find()) == []
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:7411", "10.0.0.1:1"])
def test_other_machines_are_served_with_tls_and_tokens_or_when_told_so(
    pki: Pki, tmp_path: Path, listen: str
) -> None:
    tls_on, tokens_on = pki.server.of_server, {"tokens_file": tmp_path / "tokens"}
    for lacking, held in (
        ("tls_cert and tokens_file", {}),
        ("tls_cert", tokens_on),
        ("tokens_file", tls_on),
        ("tokens_file", {**tls_on, "tls_client_ca": pki.ca}),
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
        **pki.server.of_server, tls_client_ca=pki.ca, tokens_file=listed, log_level="debug",
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
                target=server.target, engine_id="e", layout=LAYOUT, background="thread",
                security=security, close_timeout_seconds=1,
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
