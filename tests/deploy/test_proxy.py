"""docker/proxy in front of real servers, with the settings of the manifests.

Where HAProxy is not installed, none of it runs; test_exposure.py reads the manifests everywhere.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neighbours.raw_http2 import EMPTY, RawConnection, request_headers
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.errors import Unauthenticated
from routetrace.common.layout import ModelLayout
from routetrace.server.access.partition import place
from routetrace.server.store.object.bucket import open_bucket
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.composed import ROOT
from support.proxied import FOLDER, HAPROXY, Proxy
from support.scrape import Scraped
from support.servers.fake_s3 import FakeS3
from support.servers.object_servers import ObjectServer, owned_by
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(not HAPROXY, reason="haproxy is not installed")

#: Addresses of pods, which have their servers at 127.0.0.1.
HOSTS = ("127.0.0.2", "127.0.0.3")
TOKEN = "t" * 40
LAYOUT = ModelLayout((0, 1), 2, 16, 2)
WORKERS = 2
RUNS = ["a", "b", "c", "d"]
WATCH = "/grpc.health.v1.Health/Watch"


class Files:
    """Certificates, and the tokens of a user and of servers among themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "ca.crt")
        self.issue()
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        (folder / "tokens.toml").write_text(
            f'[[token]]\nname = "t"\nsha256 = "{digest}"\n'
            'scopes = ["ingest", "read", "admin"]\nruns = ["*"]\n'
        )
        (folder / "token").write_text(TOKEN)
        self.settings: dict[str, Any] = {
            "tls_cert": folder / "tls.crt",
            "tls_key": folder / "tls.key",
            "tokens_file": folder / "tokens.toml",
        }

    def issue(self) -> None:
        """A new certificate and its key, as Kubernetes replaces them."""
        issued = self._authority.issue_cert(*HOSTS, "localhost")
        for name, blob in (
            ("tls.key", issued.private_key_pem),
            ("tls.crt", issued.cert_chain_pems[0]),
        ):
            part = self.folder / f"{name}.part"
            part.touch(0o600)
            blob.write_to_path(part)
            part.replace(self.folder / name)

    def security(self, token: str = TOKEN) -> dict[str, str]:
        return {"ca_file": str(self.folder / "ca.crt"), "token": token}

    def proxy(self, host: str, port: int, folder: Path = FOLDER) -> Proxy:
        """The proxy of the manifest, of a pod with this address and first port."""
        text = (ROOT / "docker/kubernetes/server.yaml").read_text("utf-8")
        (found,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet")
        (sidecar,) = found["spec"]["template"]["spec"]["initContainers"]
        environ = {one["name"]: one.get("value", "") for one in sidecar["env"]}
        listen = environ["ROUTETRACE_PROXY_LISTEN"].replace("$(POD_IP)", host)
        pem, ca_file = (Path(environ[f"ROUTETRACE_PROXY_{name}"]).name for name in ("PEM", "CA"))
        return Proxy(
            listen.replace("7411", f"{port}-{port + WORKERS - 1}"),
            environ["ROUTETRACE_PROXY_SERVER"],
            self.folder / pem,
            self.folder / ca_file,
            self.folder / f"proxy-{host}.log",
            folder,
        )


class Pod:
    """A server on loopback, where `files.proxy(HOSTS[0], port)` reaches it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.files = Files(folder)
        self.port = free_ports(WORKERS)
        self.server: ServerProcess = run_server(
            data_dir=folder / "data", port=self.port, **self.files.settings, **settings
        )
        self.target = f"{HOSTS[0]}:{self.port}"

    def proxy(self, folder: Path = FOLDER) -> Proxy:
        return self.files.proxy(HOSTS[0], self.port, folder)

    def client(self, run: str, token: str = TOKEN) -> RouteClient:
        return RouteClient(self.target, run=run, security=self.files.security(token))

    def channel(self) -> grpc.Channel:
        authority = (self.files.folder / "ca.crt").read_bytes()
        return grpc.secure_channel(self.target, grpc.ssl_channel_credentials(authority))

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *details: object) -> None:
        self.server.__exit__(*details)


def write(target: str, files: Files, run: str, engine_id: str, rows: np.ndarray) -> None:
    """Write a trace with the name of its engine."""
    config = AgentConfig(
        target=target, run=run, engine_id=engine_id, layout=LAYOUT, background="thread",
        security=files.security(),
    )  # fmt: skip
    with CaptureAgent(config) as agent:
        handle = agent.begin(engine_id, prompt_len=len(rows))
        agent.step(rows, [(handle, 0, len(rows))])
        agent.finish(handle, len(rows) + 1)
        assert agent.flush(60)


@pytest.fixture(name="pod")
def _pod(tmp_path: Path) -> Iterator[Pod]:
    with Pod(tmp_path, metrics_listen=f"127.0.0.1:{free_ports(1)}") as pod:
        yield pod


def rows_of(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((9, 2, 16)).argsort(axis=2)[:, :, :2].astype(LAYOUT.dtype)


def test_each_worker_is_reached_through_the_proxy(tmp_path: Path) -> None:
    assert {place(run, WORKERS) for run in RUNS} == set(range(WORKERS))
    with Pod(tmp_path, workers=WORKERS) as pod, pod.proxy():
        for seed, run in enumerate(RUNS):
            write(pod.target, pod.files, run, "r", rows_of(seed))
            with pod.client(run) as client:
                trace = client.get("r", wait_for="end", timeout=60)
            np.testing.assert_array_equal(trace.topk_ids, rows_of(seed))
        for token in ("", "x" * 40):
            with pod.client("a", token) as client, pytest.raises(Unauthenticated):
                client.get("r")


def watches(pod: Pod) -> float:
    """How many began at the server."""
    scraped = Scraped(pod.server.metrics_target)
    return scraped.value("grpc_server_started_total", grpc_method="Watch")


def test_an_address_holds_a_part_of_the_health_watches(pod: Pod) -> None:
    with pod.proxy():
        crowd = RawConnection(pod.target, str(pod.files.folder / "ca.crt"), "127.0.0.3")
        assert crowd.open(request_headers(WATCH), 200, message=EMPTY) == 200
        wait_for(lambda: crowd.refused == 200 - 128)
        with pod.channel() as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=60
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            wait_for(lambda: watches(pod) == 128 + 1)
        crowd.close()


@pytest.mark.slow
def test_servers_that_share_a_run_call_each_other_through_their_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    files = Files(tmp_path)
    with ExitStack() as parts:
        s3 = parts.enter_context(FakeS3())
        targets = []
        for host in HOSTS:
            server = ObjectServer(
                tmp_path, s3.endpoint, workers=WORKERS, spread_runs='["*"]',
                peer_token_file=tmp_path / "token", peer_ca_file=tmp_path / "ca.crt",
                **files.settings,
            )  # fmt: skip
            port = int(server.target.rpartition(":")[2])
            targets.append(f"{host}:{port}")
            server.settings["advertise"] = targets[-1]
            parts.enter_context(server)
            parts.enter_context(files.proxy(host, port))
        bucket = open_bucket("s3://bucket/runs", s3.endpoint)
        wait_for(lambda: all(len(owned_by(bucket, WORKERS, one)) == 1 for one in targets), 120)
        target = ",".join(targets)
        for seed, engine_id in enumerate(RUNS):
            write(target, files, "shared", engine_id, rows_of(seed))
        # Some engine's rows are in either server, and each answers for all of them.
        assert {place(f"shared\n{engine_id}", WORKERS) for engine_id in RUNS} == {0, 1}
        for order in (targets, targets[::-1]):
            security = files.security()
            with RouteClient(",".join(order), run="shared", security=security) as client:
                assert {stat.trace_id for stat in client.find()} == {*RUNS}
                for seed, engine_id in enumerate(RUNS):
                    trace = client.get(engine_id, wait_for="end", timeout=60)
                    np.testing.assert_array_equal(trace.topk_ids, rows_of(seed))


@pytest.mark.slow
def test_new_files_are_read_and_calls_go_on(pod: Pod) -> None:
    folder = shutil.copytree(FOLDER, pod.files.folder / "proxy")

    def served() -> int:
        context = ssl.create_default_context(cafile=pod.files.folder / "ca.crt")
        with (
            socket.create_connection((HOSTS[0], pod.port), 30) as raw,
            context.wrap_socket(raw, server_hostname=HOSTS[0]) as secured,
        ):
            return int(secured.getpeercert()["serialNumber"], 16)

    with pod.proxy(folder), pod.channel() as channel, pod.client("a") as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(client.get, "r", wait_for="end", timeout=120)
            seen = served()
            pod.files.issue()
            wait_for(lambda: served() != seen, 60)
            # A pair that does not fit changes nothing, and the next one is taken.
            seen = served()
            (pod.files.folder / "tls.key").write_text("no key")
            log = pod.files.folder / f"proxy-{HOSTS[0]}.log"
            wait_for(
                lambda: f"private key from file '{pod.files.folder}/tls.key'" in log.read_text(), 60
            )
            assert served() == seen
            pod.files.issue()
            wait_for(lambda: served() != seen, 60)
            write(pod.target, pod.files, "a", "r", rows_of(1))
            np.testing.assert_array_equal(reading.result().topk_ids, rows_of(1))
        pod.server.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
