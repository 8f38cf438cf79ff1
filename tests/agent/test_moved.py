"""Agents follow a server that names the worker of their run, and come back if it is gone."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.transport import sender
from routetrace.common.layout import ModelLayout
from support.servers.ingest_server import IngestServer
from support.servers.signposts import signposts
from support.waiting import wait_for

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
ROWS = np.tile(np.array([3, 1], np.uint8), (8, 2, 1))
HOPS = 5


def offer(agent: CaptureAgent, name: str) -> None:
    handle = agent.begin(name, prompt_len=len(ROWS))
    agent.step(ROWS, [(handle, 0, len(ROWS))])
    agent.finish(handle, len(ROWS) + 1, reason="stop")


def config_for(target: str) -> AgentConfig:
    return AgentConfig(
        target, "e0", LAYOUT, background="thread", linger_seconds=0.01, flush_interval_seconds=0.01
    )


@pytest.mark.parametrize("count", [1, HOPS])
def test_an_agent_is_sent_on_without_a_warning(count, caplog):
    with (
        IngestServer() as server,
        signposts(count, server.target) as chain,
        CaptureAgent(config_for(chain[0].target)) as agent,
    ):
        offer(agent, "a")
        assert agent.flush(60)
        server.check()
        assert server.rows == len(ROWS)
        assert [s.asked for s in chain] == [1] * count
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_agent_stays_with_its_worker_and_looks_for_another_if_it_is_gone(caplog):
    with (
        IngestServer() as server,
        signposts(1, server.target) as [signpost],
        CaptureAgent(config_for(signpost.target)) as agent,
    ):
        offer(agent, "a")
        assert agent.flush(60)
        server.stop()
        offer(agent, "b")
        wait_for(lambda: signpost.asked > 1, 60)  # another worker may serve the run now
        # It is named again and not there, which the log says.
        wait_for(lambda: "a worker of" in caplog.text, 60)
        server.start()
        assert agent.flush(60)
        assert server.rows == 2 * len(ROWS)
    told = "\n".join(r.getMessage() for r in caplog.records)
    assert f"(a worker of {signpost.target}; its port must be open, too)" in told


def test_moved_names_a_port_of_the_target_that_answered():
    """The first of two targets is gone, and the second one, elsewhere, names a worker."""
    with signposts(1) as [gone]:
        away = f"localhost:{gone.port}"
    with (
        IngestServer() as server,
        signposts(1, server.target) as [signpost],
        CaptureAgent(config_for(f"{away},{signpost.target}")) as agent,
    ):
        offer(agent, "a")
        assert agent.flush(60)
        assert server.rows == len(ROWS)
        assert signpost.asked == 1


def test_the_next_target_serves_where_a_worker_is_gone():
    with IngestServer() as gone, IngestServer() as server:
        with (
            signposts(1, gone.target) as [signpost],
            CaptureAgent(config_for(f"{signpost.target},{server.target}")) as agent,
        ):
            offer(agent, "a")
            assert agent.flush(60)
            gone.stop()
            offer(agent, "b")
            assert agent.flush(60)
        assert server.rows > 0


def test_servers_that_name_each_other_are_told(caplog):
    with signposts(2) as chain, CaptureAgent(config_for(chain[0].target)) as agent:
        offer(agent, "a")
        wait_for(lambda: sum(s.asked for s in chain) > HOPS + 1, 60)
        wait_for(lambda: "this run is elsewhere" in caplog.text, 60)
        agent.close(0)


def test_an_agent_never_goes_to_a_host_that_is_not_configured(caplog, monkeypatch):
    """Its token would go along; another of its servers may be the right one."""
    monkeypatch.setattr(sender, "_REFUSED_S", 0.05)
    with IngestServer() as other, IngestServer() as server, signposts(2) as chain:
        for signpost in chain:
            signpost.to = f"localhost:{other.target.rpartition(':')[2]}"
        targets = ",".join([*(s.target for s in chain), server.target])
        with CaptureAgent(config_for(targets)) as agent:
            offer(agent, "a")
            assert agent.flush(60)
        assert server.rows == len(ROWS)
        assert not other.rows
        assert [s.asked for s in chain] == [1, 1]
    assert "expected localhost among its hosts" in caplog.text


def test_an_agent_follows_to_another_of_its_servers():
    with IngestServer() as server, signposts(2) as [first, second]:
        first.to = f"localhost:{server.target.rpartition(':')[2]}"
        targets = f"{first.target},localhost:{second.port}"
        with CaptureAgent(config_for(targets)) as agent:
            offer(agent, "a")
            assert agent.flush(60)
        assert server.rows == len(ROWS)
        assert (first.asked, second.asked) == (1, 0)
