"""Tokens and certificates that are replaced under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import AsyncRouteClient, RouteClient, Security
from routetrace.common.errors import (
    Unavailable,
)
from routetrace.server.testing import run_server
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import Identity, Pki, der, entry, feed, replace, served
from support.waiting import wait_for


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
                runner.run(client.aclose())

    def _ingest(self) -> Iterator[None]:
        config = AgentConfig(
            target=self.target, engine_id="agent", layout=LAYOUT, background="thread",
            linger_seconds=0.01, flush_interval_seconds=0.005, security=self.security,
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
            (folder / name).touch(0o600)
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
        tokens_file=listed, metrics_listen="127.0.0.1:0",
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
