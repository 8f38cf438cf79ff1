"""Followers of traces that change while they are followed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from routetrace.client import RouteClient, Trace
from routetrace.common.errors import NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces.trace_index import MAX_SOURCES
from routetrace.server.testing import run_server
from support.agents.feeder import Feeder

LAYOUT = ModelLayout((1, 2), 3, 64, 2)


def rows_of(request: int, count: int) -> np.ndarray:
    """Rows whose every id names the request."""
    ids = np.array([2 * request, 2 * request + 1], np.uint8)
    return np.broadcast_to(ids, (count, 2, 2)).copy()


def requests_in(parts: list[Trace]) -> set[int]:
    return {int(i) // 2 for part in parts for i in part.topk_ids[part.valid].ravel()}


@pytest.mark.parametrize("dropped", ["another", "the followed one"])
def test_a_trace_that_drops_its_oldest_requests(dropped: str) -> None:
    """A trace keeps MAX_SOURCES requests under its id: the follower stays with its own."""
    with run_server() as server:
        feeder = Feeder(server.target, LAYOUT)
        followed = None
        if dropped == "the followed one":
            followed = feeder.begin("followed", trace_id="t", prompt_len=2)
        for number in range(MAX_SOURCES - 1):
            feeder.finish(feeder.begin(f"r{number}", trace_id="t", prompt_len=2), 3)
        if followed is None:
            followed = feeder.begin("followed", trace_id="t", prompt_len=2)
        feeder.step(rows_of(1, 3), [(followed, 0, 3)])
        feeder.flush()
        seen = threading.Event()
        parts: list[Trace] = []

        def follow(client: RouteClient) -> None:
            number = 1 if dropped == "the followed one" else None
            for part in client.follow("t", missing="mask", incarnation=number):
                parts.append(part)
                seen.set()

        with RouteClient(server.target, timeout=60) as client, ThreadPoolExecutor(1) as pool:
            done = pool.submit(follow, client)
            assert seen.wait(60)
            later = feeder.begin("later", trace_id="t", prompt_len=2)
            feeder.step(rows_of(2, 6), [(later, 0, 6)])
            feeder.finish(later, 7)
            feeder.flush()
            feeder.step(rows_of(1, 2), [(followed, 3, 2)])
            feeder.finish(followed, 6)
            feeder.flush()
            if dropped == "the followed one":
                with pytest.raises(NotFound, match="incarnation"):
                    done.result(60)
            else:
                done.result(60)
                assert parts[-1].num_tokens == 6
                assert {p for t in parts for p in range(t.token_start, t.token_stop)} == set(
                    range(5)
                )
        assert requests_in(parts) == {1}
        with RouteClient(server.target, timeout=60) as client:  # the numbers of others stay
            numbers = {MAX_SOURCES: 1, MAX_SOURCES + 1: 2}
            if dropped == "the followed one":
                del numbers[MAX_SOURCES]
            for number, request in numbers.items():
                trace = client.get("t", incarnation=number, missing="mask")
                assert (trace.incarnation, requests_in([trace])) == (number, {request})
            with pytest.raises(NotFound, match=f"2 to {MAX_SOURCES + 1}"):
                client.get("t", incarnation=1)
        feeder.close()
