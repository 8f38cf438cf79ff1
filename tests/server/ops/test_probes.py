"""HTTP probes at the metrics port, as Kubernetes sends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import prometheus_client

from routetrace.server.ops.endpoint import Endpoint, on_loop
from routetrace.server.testing import run_server
from support.scrape import http_status


def test_a_server_is_live_and_ready() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server:
        assert http_status(server.metrics_target, "/livez") == 200
        assert http_status(server.metrics_target, "/readyz") == 200
        assert http_status(server.metrics_target, "/metrics") == 200


async def test_a_probe_is_what_its_check_returns_on_the_loop() -> None:
    ready, where = [False], set()

    def check() -> bool:
        where.add(threading.get_ident())
        return ready[0]

    endpoint = Endpoint(
        prometheus_client.CollectorRegistry(), "127.0.0.1:0", {"/readyz": on_loop(check)}
    )
    try:
        assert await asyncio.to_thread(http_status, endpoint.address, "/readyz") == 503
        ready[0] = True
        assert await asyncio.to_thread(http_status, endpoint.address, "/readyz") == 200
        assert where == {threading.get_ident()}
    finally:
        await asyncio.to_thread(endpoint.close)


async def test_a_loop_that_does_not_answer_is_not_live() -> None:
    live = on_loop(lambda: True, seconds=0.05)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(live()))
    thread.start()
    thread.join()  # the loop does nothing meanwhile
    assert found == [False]
    assert await asyncio.to_thread(live)


def test_a_closed_loop_is_not_live() -> None:
    async def make() -> Callable[[], bool]:
        return on_loop(lambda: True)

    assert not asyncio.run(make())()
