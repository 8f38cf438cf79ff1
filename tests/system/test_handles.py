"""A trace id that is used again: reading with a handle waits for its own request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.client import (
    DeadlineExceeded,
    FetchPlan,
    InvalidArgument,
    MicroBatch,
    NotFound,
    Rank,
    RouteClient,
    Sample,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 1), 2, 16, 2)
FIRST, SECOND = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9]


def rows(count: int, seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).random((count, 2, 16)).argsort(axis=2)
    return order[:, :, :2].astype(np.uint8)


@contextmanager
def place(data_dir) -> Iterator[tuple[CaptureAgent, RouteClient]]:
    with (
        run_server(data_dir=data_dir) as server,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
        RouteClient(server.target) as client,
    ):
        yield agent, client


def record(agent: CaptureAgent, tokens: list[int], seed: int, nonce: int | None) -> np.ndarray:
    handle = agent.begin("again", prompt_token_ids=tokens[:4], nonce=nonce)
    computed = rows(len(tokens) - 1, seed)
    agent.step(computed, [[handle, 0, len(computed)]])
    agent.finish(handle, len(tokens), token_ids=tokens)
    assert agent.flush()
    return computed


def test_a_read_with_the_handle_of_a_request_waits_for_it(tmp_path):
    with place(tmp_path) as (agent, client):
        first = record(agent, FIRST, 1, nonce=11)
        np.testing.assert_array_equal(client.get("again", nonce=11).topk_ids, first)
        with pytest.raises(NotFound, match="no engine request with nonce 12"):
            client.get("again", nonce=12)
        with pytest.raises(DeadlineExceeded):
            client.get("again", nonce=12, wait_for="end", timeout=0.2)
        second = []
        later = threading.Thread(target=lambda: second.append(record(agent, SECOND, 2, nonce=12)))
        later.start()
        trace = client.get("again", nonce=12, num_tokens=6, wait_for="end", timeout=60)
        later.join()
        np.testing.assert_array_equal(trace.topk_ids, second[0])
        assert trace.nonce == 12
        # The former one is there as before.
        np.testing.assert_array_equal(client.get("again", nonce=11).topk_ids, first)
        for nonce, tokens, computed in ((11, FIRST, first), (12, SECOND, second[0])):
            sample = Sample.of("again", token_ids=tokens, nonce=nonce)
            plan = FetchPlan.make(LAYOUT, MicroBatch.packed([sample]), Rank(LAYOUT.layer_ids))
            fetched = client.fetch(plan).topk_ids.transpose(1, 0, 2)
            np.testing.assert_array_equal(fetched[: len(computed)], computed)
            parts = [*client.follow("again", nonce=nonce)]
            np.testing.assert_array_equal(np.concatenate([p.topk_ids for p in parts]), computed)


def test_a_request_without_a_nonce_is_not_found_by_one(tmp_path):
    with place(tmp_path) as (agent, client):
        record(agent, FIRST, 1, nonce=None)
        with pytest.raises(NotFound, match="nonce 7"):
            client.get("again", nonce=7)
        assert client.get("again").nonce is None


@pytest.mark.parametrize("nonce", [0, -1, 2**53, "7", True])
def test_a_nonce_is_a_number_that_json_carries(tmp_path, nonce):
    client = RouteClient("127.0.0.1:1")
    for read in (
        lambda: client.get("r", nonce=nonce),
        lambda: [*client.follow("r", nonce=nonce)],
        lambda: Sample.of("r", 3, nonce=nonce),
    ):
        with pytest.raises(InvalidArgument, match="nonce"):
            read()
    with pytest.raises(InvalidArgument, match="nonce"):
        client.get("r", nonce=5, incarnation=1)
    client.close()
