"""Chunks that the server refuses with all their events: no row of another request in a trace."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent import agent as agent_module
from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument, NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((1, 2, 4), 6, 200, 3)
BLOCK = 4


def config_of(target: str) -> AgentConfig:
    """Of an agent that puts all calls between two flushes into one chunk."""
    return AgentConfig(
        target, "e", LAYOUT, background="thread", block_size=BLOCK, num_blocks=32,
        flush_interval_seconds=60, linger_seconds=60,
    )  # fmt: skip


def rows_of(request: int, count: int) -> np.ndarray:
    """Rows whose every id names the request: those of another one cannot be mistaken."""
    ids = np.arange(3, dtype=np.uint8) + 3 * request
    return np.broadcast_to(ids, (count, 3, 3)).copy()


def requests_in(trace: Any) -> set[int]:
    return set((trace.topk_ids[trace.valid] // 3).ravel().tolist())


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Labels that the agent lets through and the server refuses, as of two versions that differ."""
    monkeypatch.setattr(agent_module, "labels_of", dict)
    return {"a": "x" * 5000}


def test_a_lost_end_and_begin_do_not_join_two_requests(
    refused: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with run_server() as server:
        with CaptureAgent(config_of(server.target)) as agent:
            first = agent.begin("r", block_ids=[0, 1, 2])
            other = agent.begin("other", trace_id="t", labels={"k": "v"}, block_ids=[20, 21])
            agent.step(
                np.concatenate([rows_of(1, 10), rows_of(3, 2)]), [(first, 0, 10), (other, 0, 2)]
            )
            assert agent.flush(30)
            # One chunk: the end of the first, the begin of a second of the same id, new blocks.
            agent.finish(first, 11)
            second = agent.begin("r", labels=refused, block_ids=[4, 5, 6])
            agent.step(rows_of(2, 10), [(second, 0, 10)])
            assert agent.flush(30)
            agent.add_blocks(second, [7, 8])
            agent.step(
                np.concatenate([rows_of(2, 8), rows_of(3, 3)]), [(second, 10, 8), (other, 2, 3)]
            )
            agent.finish(second, 19)
            agent.finish(other, 6)
            # What the blocks hold is the second's, or unknown.
            third = agent.begin("third", num_computed_tokens=16, block_ids=[4, 5, 6, 7, 9])
            agent.step(rows_of(4, 1), [(third, 16, 1)])
            agent.finish(third, 18)
            assert agent.flush(30)
            assert agent.stats().dropped_rows == {"rejected": 10}
        with RouteClient(server.target, timeout=30) as client:
            found = [
                client.get("r", missing="mask", incarnation=number)
                for number in range(1, client.stat("r").num_incarnations + 1)
            ]
            # Nothing proves which attempt the rows of the second are of, nor that those of the
            # first stood: the chunk may have contained its preemption.
            assert set() == set().union(*map(requests_in, found))
            assert not any(trace.complete for trace in found)
            # One that the chunk did not name goes on, under its trace id and with its labels.
            trace = client.get("t", missing="mask")
            assert dict(trace.labels) == {"k": "v"}
            assert requests_in(trace) == {3}
            assert trace.valid[2:].all()
            assert requests_in(client.get("third", missing="mask")) <= {2, 4}
            with pytest.raises(NotFound):
                client.get("nothing")
    assert "chunk refused" in caplog.text


END = (1 << 31) - 1


@pytest.mark.parametrize(
    "call",
    [
        lambda agent, request: agent.step(rows_of(9, 2), [(request, END, 2)]),
        lambda agent, request: agent.skip([(request, END, END)]),
        lambda agent, request: agent.begin("many", block_ids=[0] * 33),
        lambda agent, request: agent.resume(request, 0, block_ids=[0] * 33),
        lambda agent, request: agent.add_blocks(request, [0] * 33),
        lambda agent, request: agent.mark_external([3] * 33),
    ],
    ids=["step", "skip", "begin", "resume", "add_blocks", "mark_external"],
)
def test_one_wild_call_costs_no_other_request_its_rows(call: Any) -> None:
    """It is refused where it is made: the server could refuse a whole chunk alone."""
    with run_server() as server:
        with CaptureAgent(config_of(server.target)) as agent:
            other, wild = agent.begin("other", block_ids=[0, 1]), agent.begin("wild")
            agent.step(rows_of(1, 4), [(other, 0, 4)])
            refused = None
            try:
                call(agent, wild)
            except InvalidArgument as error:
                refused = error.field
            agent.finish(other, 5)
            assert agent.flush(30)
            assert agent.stats().dropped_rows == {}
        assert refused in ("spans", "block_ids", None)
        with RouteClient(server.target) as client:
            assert requests_in(client.get("other")) == {1}


def test_blocks_that_are_named_again_and_again_are_of_nobody_once() -> None:
    """`mark_external` may name a block as often as it likes."""
    with run_server() as server:
        with CaptureAgent(config_of(server.target)) as agent:
            first = agent.begin("first", block_ids=[0, 1])
            agent.step(rows_of(1, 8), [(first, 0, 8)])
            agent.finish(first, 9)
            agent.mark_external([1] * 40)
            hit = agent.begin("hit", num_computed_tokens=8, block_ids=[0, 1, 2])
            agent.step(rows_of(2, 1), [(hit, 8, 1)])
            agent.finish(hit, 10)
        with RouteClient(server.target) as client:
            trace = client.get("hit", missing="mask")
        assert trace.valid.all(axis=1).tolist() == [True] * 4 + [False] * 4 + [True]


def test_a_lost_block_does_not_shift_the_blocks_after_it(refused: dict[str, str]) -> None:
    with run_server() as server:
        with CaptureAgent(config_of(server.target)) as agent:
            first = agent.begin("first", block_ids=[0])
            agent.step(rows_of(1, 4), [(first, 0, 4)])
            assert agent.flush(30)
            agent.add_blocks(first, [1])
            agent.begin("bad", labels=refused)
            assert agent.flush(30)
            agent.add_blocks(first, [2])
            # Position 4 is in block 1, and 8 in block 2.
            agent.step(rows_of(1, 4), [(first, 4, 4)])
            agent.step(rows_of(2, 4), [(first, 8, 4)])
            agent.finish(first, 13)
            third = agent.begin("third", num_computed_tokens=12, block_ids=[0, 1, 2, 3])
            agent.step(rows_of(4, 1), [(third, 12, 1)])
            agent.finish(third, 14)
            assert agent.flush(30)
        with RouteClient(server.target, timeout=30) as client:
            trace = client.get("third", missing="mask")
            for start, request in ((0, 1), (4, 1), (8, 2), (12, 4)):
                part = trace.tokens(start, min(start + 4, 13))
                assert requests_in(part) <= {request}
            assert trace.valid[12].all()
