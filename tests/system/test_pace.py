"""Agents hold rows back until a reader waits for them: real agents, a real server, a client."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import DeadlineExceeded, InvalidArgument, RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 2), 4, 64, 2)
#: Far longer than any test: what arrives was asked for.
HOLD = {"linger_seconds": 3600, "flush_interval_seconds": 60}


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


@pytest.fixture
def run(request):
    """A run for each test, as demand outlasts the test before."""
    return request.node.name


@pytest.fixture
def client(server, run):
    with RouteClient(server.target, run=run) as client:
        yield client


def rows_of(n: int) -> np.ndarray:
    return np.tile(np.array([[[1, 2], [3, 4]]], np.uint8), (n, 1, 1))


def begun(server, run, name: str) -> tuple[CaptureAgent, int]:
    """An agent with a running request of that name, of which three rows came, and another one."""
    agent = CaptureAgent(
        AgentConfig(
            target=server.target,
            run=run,
            engine_id=name,
            layout=LAYOUT,
            background="thread",
            **HOLD,
        )
    )
    handle, other = agent.begin(name, prompt_len=3), agent.begin(f"{name}-other", prompt_len=3)
    agent.step(rows_of(4), [(handle, 0, 3), (other, 0, 1)])
    return agent, handle


def test_rows_are_held_back_and_a_follower_gets_them(server, run, client):
    agent, _ = begun(server, run, "followed")
    bystander, _ = begun(server, run, "bystander")
    with agent, bystander:
        time.sleep(1.5)  # longer than rows are held back once a reader waits
        assert {info.trace_id for info in client.find()} == set()
        # The request is reported, then its rows.
        part = next(iter(client.follow("followed", timeout=20, wait_for="rows")))
        assert len(part) == 3
        names = {info.trace_id for info in client.find()}
        assert names == {"followed", "followed-other", "bystander", "bystander-other"}
        assert client.stat("followed").num_rows == 3
        assert client.stat("bystander").num_rows == 0, "nobody waits for its rows"


def test_who_waits_for_the_end_gets_it(server, run, client):
    agent, handle = begun(server, run, "ended")
    with agent:
        got = []
        reader = threading.Thread(
            target=lambda: got.append(client.get("ended", wait_for="end", timeout=30))
        )
        reader.start()
        time.sleep(1)
        agent.finish(handle, 4)
        reader.join(60)
        assert [len(trace) for trace in got] == [3]


def test_who_waits_for_rows_gets_them(server, run, client):
    agent, _ = begun(server, run, "awaited")
    with agent:
        assert len(client.get("awaited", wait_for="rows", token_stop=3, timeout=20)) == 3


def test_the_last_request_that_ends_takes_everything_along(server, run, client):
    agent, handle = begun(server, run, "last")
    with agent:
        agent.finish(handle, 4)
        time.sleep(1)
        assert not any(info.trace_id == "last" for info in client.find())
        agent.finish(handle + 1, 2)
        wait_for(lambda: any(info.trace_id == "last" for info in client.find()))
        assert len(client.get("last")) == 3


def test_an_end_before_the_number_of_tokens_is_that_of_an_earlier_turn(server, run, client):
    """The next turn's begin waits for its chunk, while the trace is complete as of the last one."""
    agent, _ = begun(server, run, "bystander")  # else the last end would be sent at once
    tokens = np.arange(9)
    with agent:
        first = agent.begin("turn", prompt_len=3, prompt_token_ids=tokens[:3])
        agent.step(rows_of(4), [(first, 0, 4)])
        agent.finish(first, 5, token_ids=tokens[:5])
        assert agent.flush(20)
        second = agent.begin("turn", prompt_len=5, prompt_token_ids=tokens[:5])
        agent.step(rows_of(8), [(second, 0, 8)])
        agent.finish(second, 9, token_ids=tokens)

        assert len(client.get("turn", wait_for="end")) == 4
        for wait_for in ("end", "rows"):
            assert len(client.get("turn", wait_for=wait_for, num_tokens=5)) == 4
        assert len(client.get("turn", wait_for="end", num_tokens=9)) == 8
        assert len(client.get("turn", wait_for="rows", num_tokens=9)) == 8
        with pytest.raises(DeadlineExceeded, match="ended with 9 tokens, 10 expected"):
            client.get("turn", wait_for="end", num_tokens=10, timeout=0.5)
        with pytest.raises(InvalidArgument, match="num_tokens"):
            client.get("turn", num_tokens=9)
