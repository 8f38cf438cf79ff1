"""Clients follow a server that names the worker of their run, and come back if it is gone."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from routetrace.client import AsyncRouteClient, RouteClient
from routetrace.client._core import reads
from routetrace.client._core.assemble import Want
from routetrace.client._core.retry import Attempts, CallState
from routetrace.client._core.route import Route
from routetrace.client._core.steps import Open, Receive, Sleep
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    DeadlineExceeded,
    InvalidArgument,
    Moved,
    NotFound,
    Unavailable,
)
from routetrace.common.target import moved_target
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import ScriptedServer, truth
from support.servers.signposts import signposts
from support.waiting import wait_for

HOPS = 5


@pytest.fixture
def server():
    with ScriptedServer() as server:
        server.serve(*(truth(8 + i, trace_id=f"t{i}") for i in range(6)))
        yield server


@pytest.mark.parametrize("count", [1, HOPS])
def test_every_call_gets_there_and_only_the_first_is_sent_on(server, count):
    with signposts(count, server.target) as chain, RouteClient(chain[0].target) as client:
        first = client.get("t0")
        assert [s.asked for s in chain] == [1] * count
        assert [len(t) for t in client.get_many([f"t{i}" for i in range(6)])]
        assert len(list(client.follow("t1"))) >= 1
        assert np.array_equal(client.get("t0").topk_ids, first.topk_ids)
        assert [s.asked for s in chain] == [1] * count


@pytest.mark.parametrize("count", [1, HOPS])
async def test_the_same_on_an_event_loop(server, count):
    with signposts(count, server.target) as chain:
        async with AsyncRouteClient(chain[0].target) as client:
            assert len(await client.get("t0")) > 0
            traces = [t async for t in client.get_many([f"t{i}" for i in range(6)])]
            assert len(traces) == 6
            assert [s.asked for s in chain] == [1] * count


def test_a_batch_is_sent_on_as_one(server):
    with signposts(1, server.target) as [signpost], RouteClient(signpost.target) as client:
        assert len(list(client.get_many([f"t{i}" for i in range(6)], concurrency=12))) == 6
        assert signpost.asked == 1


@pytest.mark.parametrize("count", [1, 2])
def test_servers_that_name_each_other_are_an_error_after_five(count):
    with signposts(count) as chain, RouteClient(chain[0].target) as client:
        with pytest.raises(Moved, match="elsewhere"):
            client.get("t0")
        assert sum(s.asked for s in chain) == HOPS + 1
        with pytest.raises(Moved):
            client.delete("t0")  # not idempotent, and without effect so far


def test_a_worker_that_is_gone_is_looked_for_at_the_configured_target(server):
    with ScriptedServer() as other, signposts(1, other.target) as [signpost]:
        other.serve(truth(trace_id="t0"))
        with RouteClient(signpost.target, timeout=60) as client:
            client.get("t0")
            other.stop()
            signpost.to = f":{server.target.rpartition(':')[2]}"
            assert len(client.get("t1")) > 0
            assert signpost.asked == 2


def test_moved_names_a_port_of_the_target_that_answered(server):
    """The first of two targets is gone, and the second one, elsewhere, names a worker."""
    with ScriptedServer() as gone:
        away = f"localhost:{gone.target.rpartition(':')[2]}"
    with signposts(1, server.target) as [signpost]:
        with RouteClient(f"{away},{signpost.target}", timeout=60) as client:
            assert len(client.get("t0")) > 0
            assert client._config.route.target == server.target
            assert len(client.get("t1")) > 0
        assert signpost.asked == 1


async def test_the_next_target_serves_where_a_worker_is_gone(server):
    with ScriptedServer() as other, signposts(1, other.target) as [signpost]:
        other.serve(truth(trace_id="t0"))
        both = f"{signpost.target},{server.target}"
        async with AsyncRouteClient(both, timeout=60) as client:
            await client.get("t0")
            other.stop()
            assert len(await client.get("t1")) > 0
            assert signpost.asked == 1


def test_a_call_that_began_before_a_move_does_not_move_on_again():
    route = Route("a:1,b:1,c:1")
    for _ in range(3):
        route.failed(Failed(grpc.StatusCode.UNAVAILABLE))
    assert route.target == "b:1"
    route.failed(Failed(grpc.StatusCode.UNAVAILABLE, Moved("on", target=":2")))
    assert route.target == "b:2"


@pytest.mark.parametrize(
    ("target", "code", "answer", "to"),
    [
        ("a:1", grpc.StatusCode.UNAVAILABLE, Unavailable("starts"), "a:1"),
        ("a:1,b:1", grpc.StatusCode.UNAVAILABLE, Unavailable("stands by"), "b:1"),
        ("a:1,b:1", grpc.StatusCode.DEADLINE_EXCEEDED, None, "b:1"),
        ("a:1,b:1", grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded("late"), "a:1"),
        ("a:1,b:1", grpc.StatusCode.CANCELLED, None, "b:1"),
        ("a:1", grpc.StatusCode.CANCELLED, None, "a:1"),
        ("a:1,b:1", grpc.StatusCode.NOT_FOUND, NotFound("none"), "a:1"),
    ],
)
def test_failures_that_lead_to_the_next_target(target, code, answer, to):
    route = Route(target)
    route.failed(Failed(code, answer))
    assert route.target == to


HERE = Moved("it is there", field="trace_id", value="t0", target=":2")


def test_a_read_that_is_sent_on_takes_no_other_call_along():
    route = Route("a:1")
    route.failed(Failed(grpc.StatusCode.FAILED_PRECONDITION, HERE))
    assert route.target == "a:1"
    assert route.of(":2") == "a:2"


def opened(step):
    assert isinstance(step, Open)
    return step.worker, step.request.located


@pytest.mark.parametrize("as_error", [True, False])
def test_a_read_goes_to_the_worker_that_has_its_trace_until_that_fails(as_error):
    plan = reads.read("GetTrace", pb.GetTraceRequest(trace_id="t0"), Want("t0", None), 60)
    assert opened(next(plan)) == ("", False)
    call = plan.send(object())
    assert isinstance(call, Receive)
    # In a stream of many reads the error is a part of a message.
    moved = HERE if as_error else Failed(grpc.StatusCode.FAILED_PRECONDITION, HERE)
    pause = plan.throw(moved)
    assert isinstance(pause, Sleep)
    assert pause.seconds == 0
    assert opened(next(plan)) == (":2", True)
    assert isinstance(plan.throw(Failed(grpc.StatusCode.UNAVAILABLE)), Sleep)
    assert opened(next(plan)) == ("", False)


def test_a_read_after_a_wait_is_located_anew():
    request = pb.GetTraceRequest(trace_id="t0", wait_for=pb.WAIT_FOR_END)
    plan = reads.read_waiting(request, Want("t0", None), 60, 60)
    next(plan)
    plan.throw(HERE)
    assert opened(next(plan)) == (":2", True)
    assert opened(plan.throw(DeadlineExceeded("late"))) == ("", False)


class Failed(grpc.RpcError):
    def __init__(self, code, answer=None):
        self._code = code
        self._answer = answer

    def code(self):
        return self._code

    def details(self):
        return "" if self._answer is None else self._answer.message

    def trailing_metadata(self):
        if self._answer is None:
            return ()
        return ((ERROR_METADATA_KEY, self._answer.to_detail().SerializeToString()),)


def test_a_worker_that_cannot_be_reached_is_named():
    with ScriptedServer() as gone:
        target = gone.target
    with signposts(1, target) as [signpost], RouteClient(signpost.target, timeout=2) as client:
        with pytest.raises(Unavailable, match=f"(?s){target}.*worker of {signpost.target}"):
            client.get("t0")
        wait_for(lambda: signpost.asked >= 1, 60)


def test_a_port_that_is_none_is_an_error_and_not_a_retry(server):
    with signposts(1, server.target) as [signpost], RouteClient(signpost.target) as client:
        signpost.to = "elsewhere"
        with pytest.raises(InvalidArgument, match=r"ErrorDetail.target is elsewhere"):
            client.get("t0")


def test_a_worker_of_another_configured_server_is_followed(server):
    port = server.target.rpartition(":")[2]
    with signposts(1) as [signpost]:
        signpost.to = f"localhost:{port}"
        targets = f"{signpost.target},localhost:{signpost.port}"
        with RouteClient(targets, timeout=60) as client:
            assert len(client.get("t0")) > 0
            assert client._config.route.target == f"localhost:{port}"
            assert len(client.get("t1")) > 0
        assert signpost.asked == 1


def test_no_call_goes_to_a_host_that_is_not_configured(server):
    """A token goes along with each call."""
    port = server.target.rpartition(":")[2]
    with signposts(1) as [signpost], RouteClient(signpost.target, timeout=60) as client:
        signpost.to = f"localhost:{port}"
        with pytest.raises(InvalidArgument, match="expected localhost among its hosts"):
            client.get("t0")
        assert client._config.route.target == signpost.target
        assert not server.requests


def test_hops_count_from_the_last_other_failure():
    attempts = Attempts(600)
    for _ in range(3):
        for _ in range(HOPS):
            attempts.enter(CallState.UNDER_WAY)
            assert attempts.pause(Moved("on", target=":1")) == 0.0
        attempts.enter(CallState.UNDER_WAY)
        assert attempts.pause(Unavailable("away", retry_after=0.1)) > 0
    for _ in range(HOPS):
        attempts.enter(CallState.UNDER_WAY)
        attempts.pause(Moved("on", target=":1"))
    attempts.enter(CallState.UNDER_WAY)
    with pytest.raises(Moved):
        attempts.pause(Moved("on", target=":1"))
    assert attempts.state is CallState.FAILED


@pytest.mark.parametrize(
    ("target", "moved"),
    [
        ("host:7411", "host:7413"),
        ("10.0.0.1:1", "10.0.0.1:7413"),
        ("[::1]:7411", "[::1]:7413"),
        ("dns:///traces:7411", "dns:///traces:7413"),
        ("dns:///traces", "dns:///traces:7413"),
        ("dns://8.8.8.8/traces:1", "dns://8.8.8.8/traces:7413"),
        ("ipv4:10.0.0.1", "ipv4:10.0.0.1:7413"),
        ("ipv6:[::1]:7411", "ipv6:[::1]:7413"),
    ],
)
def test_targets_of_workers(target, moved):
    assert moved_target(target, ":7413") == moved


@pytest.mark.parametrize(
    ("targets", "to"),
    [
        ("a:1,b:1", "b:7413"),
        ("a:1,B.example:1", "b.example:7413"),
        ("a:1,10.0.0.2:1", "10.0.0.2:1"),
        ("[::1]:1,[fd00::2]:1", "[fd00::2]:7413"),
    ],
)
def test_workers_of_other_servers(targets, to):
    listed = targets.split(",")
    assert moved_target(listed[0], to, listed) == to


@pytest.mark.parametrize(
    "to",
    ["c:7413", "b.evil:7413", "b", "b:0", "b:1@c:7", "x.b:1", "dns:///b:1", "unix:b:1", "a,b:1"],
)
def test_hosts_that_are_not_configured(to):
    with pytest.raises(InvalidArgument):
        moved_target("a:1", to, ["a:1", "b:1", "dns:///c:1"])


@pytest.mark.parametrize(
    ("target", "to"),
    [
        ("unix:/run/routetrace", ":7413"),
        ("xds:///traces", ":7413"),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ":7413"),
        ("host:7411", "other:7413"),
        ("host:7411", ""),
        ("host:7411", ":0"),
        ("host:7411", ":65536"),
        ("host:7411", ":٣"),
        ("host:7411", ":7413\n"),
    ],
)
def test_targets_that_no_worker_can_have(target, to):
    with pytest.raises(InvalidArgument):
        moved_target(target, to)
