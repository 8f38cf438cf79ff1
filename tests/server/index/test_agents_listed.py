"""The agents of a run as `ListAgents` describes them."""

from __future__ import annotations

import socket
from importlib.metadata import version

import grpc
import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import AgentStat, RouteClient
from routetrace.server.index.agents import MAX_ATTRIBUTE_LENGTH, MAX_ATTRIBUTES
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder, Stream
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for


@pytest.fixture(scope="module")
def server():
    with run_server(heartbeat_seconds=0.1) as process:
        yield process


def listed(client: RouteClient) -> dict[str, AgentStat]:
    return {f"{agent.engine_id}{agent.shard}": agent for agent in client.agents()}


def feed(feeder: Feeder, name: str, weight_version: int) -> int:
    feeder.set_weight_version(weight_version)
    handle = feeder.begin(name, prompt_len=3)
    feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
    feeder.flush()
    return handle


def test_connected_and_gone_agents(server):
    with RouteClient(server.target, run="agents") as client:
        assert list(client.agents()) == []
        first = Feeder(server.target, LAYOUT, run="agents", engine_id="e0")
        other = Feeder(server.target, LAYOUT, run="agents", engine_id="e1", shard="pp1")
        foreign = Feeder(server.target, LAYOUT, run="else", engine_id="e9")
        feed(foreign, "r", 99)
        start = client.server_info().started_at

        fresh = listed(client)
        assert set(fresh) == {"e0", "e1pp1"}, "agents of another run are not listed"
        assert fresh["e0"].connected
        assert fresh["e0"].weight_version is None
        assert fresh["e0"].offered_rows == fresh["e0"].running_requests == 0

        feed(first, "r0", 41)
        handle = feed(other, "r1", 38)
        beat = pb.Heartbeat(
            offered_rows=9, acknowledged_rows=4, in_flight_rows=2, queued_bytes=7, spilled_bytes=8,
            lag_ms=1500,
            dropped_rows={"queue_full": 2, "rewound": 1},
        )  # fmt: skip
        other.stream._out.put(pb.IngestRequest(heartbeat=beat))
        wait_for(lambda: listed(client)["e1pp1"].offered_rows)
        agent = listed(client)["e1pp1"]
        assert (agent.engine_id, agent.shard, agent.epoch) == (
            "e1",
            "pp1",
            other.stream.welcome.epoch,
        )
        assert (agent.offered_rows, agent.acknowledged_rows, agent.in_flight_rows) == (9, 4, 2)
        assert agent.dropped_rows == {"queue_full": 2, "rewound": 1}
        assert (agent.queued_bytes, agent.spilled_bytes, agent.running_requests) == (7, 8, 1)
        assert agent.lag_seconds == 1.5
        assert (agent.weight_version, agent.weight_version_lag) == (38, 3)
        assert listed(client)["e0"].weight_version_lag == 0
        assert start < agent.connected_at <= agent.seen_at <= client.server_info().now

        other.finish(handle, 5)
        other.close()
        wait_for(lambda: not listed(client)["e1pp1"].connected)
        gone = listed(client)["e1pp1"]
        assert (gone.offered_rows, gone.running_requests, gone.weight_version) == (9, 0, 38)
        first.close()
        wait_for(lambda: not listed(client)["e0"].connected)
        assert listed(client)["e1pp1"].weight_version_lag == 0, "the newest of connected agents"
        foreign.close()


def test_a_weight_version_that_goes_back_is_that_of_the_last_rows(server):
    with RouteClient(server.target, run="back") as client:
        feeder = Feeder(server.target, LAYOUT, run="back")
        feed(feeder, "r0", 7)
        feed(feeder, "r1", 0)
        assert listed(client)["e0"].weight_version == 0
        feeder.close()
        again = Feeder(server.target, LAYOUT, run="back", boot_id="next")
        assert listed(client)["e0"].weight_version is None, "a new epoch has no rows yet"
        again.close()


def test_an_agent_names_its_host_and_version(server):
    config = AgentConfig(
        target=server.target, run="named", engine_id="e", layout=LAYOUT, attributes={"model": "m"}
    )
    with RouteClient(server.target, run="named") as client, CaptureAgent(config) as agent:
        handle = agent.begin("r", prompt_len=3)
        agent.step(rows_of(LAYOUT, 3), np.array([[handle, 0, 3]]))
        agent.finish(handle, 4)
        agent.flush()
        wait_for(lambda: listed(client)["e"].acknowledged_rows == 3)
        named = {"host": socket.gethostname(), "routetrace": version("routetrace"), "model": "m"}
        assert listed(client)["e"].attributes == named


def test_drop_reasons_are_bounded(server):
    feeder = Feeder(server.target, LAYOUT, run="reasons", engine_id="e")
    dropped = {"queue_full": 2, **{f"made up {i}": 1 for i in range(1000)}}
    beat = pb.Heartbeat(offered_rows=9, dropped_rows=dropped)
    feeder.stream._out.put(pb.IngestRequest(heartbeat=beat))
    with RouteClient(server.target, run="reasons") as client:
        wait_for(lambda: listed(client)["e"].offered_rows)
        assert listed(client)["e"].dropped_rows == {"queue_full": 2, "other": 1000}
    feeder.close()


def test_attributes_are_bounded(server):
    long = {f"{i:03}" + "k" * 500: "v" * 500 for i in range(2 * MAX_ATTRIBUTES)}
    hello = pb.Hello(run="long", engine_id="e", layout=LAYOUT.to_proto(), attributes=long)
    stream = Stream(server.target, hello)
    with RouteClient(server.target, run="long") as client:
        kept = listed(client)["e"].attributes
    assert len(kept) == MAX_ATTRIBUTES
    assert {len(text) for pair in kept.items() for text in pair} == {MAX_ATTRIBUTE_LENGTH}
    stream.close()


def test_pages_hold_every_agent_once(server):
    streams = [
        Stream(server.target, pb.Hello(run="pages", engine_id=f"e{i}", layout=LAYOUT.to_proto()))
        for i in range(5)
    ]
    with grpc.insecure_channel(server.target) as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        names, token, sizes = [], "", []
        while True:
            page = stub.ListAgents(pb.ListAgentsRequest(run="pages", page_size=2, page_token=token))
            names += [agent.engine_id for agent in page.agents]
            sizes.append(len(page.agents))
            token = page.next_page_token
            if not token:
                break
        assert names == [f"e{i}" for i in range(5)]
        assert sizes == [2, 2, 1]
        with pytest.raises(grpc.RpcError, match="page_token"):
            stub.ListAgents(pb.ListAgentsRequest(run="pages", page_token="e3"))
    for stream in streams:
        stream.close()


def test_a_restart_keeps_weight_versions_and_says_that_it_saw_nothing(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        feeder = Feeder(server.target, LAYOUT)
        feed(feeder, "r", 12)
        feeder.close()
        assert server.stop() == 0
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        (agent,) = client.agents()
        assert (agent.connected, agent.connected_at, agent.seen_at) == (False, None, None)
        assert agent.weight_version == 12
