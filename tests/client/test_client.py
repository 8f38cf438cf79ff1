"""RouteClient and AsyncRouteClient against a scripted server on a real socket."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import aclosing
from importlib import metadata

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import routetrace.client
from routetrace.client import AsyncRouteClient, ReadOptions, RouteClient, RoutingTrace, TraceState
from routetrace.client._core import retry as _retry
from routetrace.client._core.retry import retry_pause, to_error
from routetrace.client.alignment import compare_tokens
from routetrace.codec.records import token_digests
from routetrace.common import errors
from routetrace.common.errors import (
    Closed,
    Corrupt,
    DeadlineExceeded,
    Fenced,
    Incomplete,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.common.security import Security
from routetrace.server.testing import free_ports
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, ScriptedServer, Truth, fail, truth
from support.waiting import wait_for

RUNNING, INCOMPLETE = pb.TRACE_STATE_RUNNING, pb.TRACE_STATE_INCOMPLETE
GONE = 5.0  # seconds in which something must have happened


class Blocking:
    """AsyncRouteClient with the face of RouteClient, so that one test serves both."""

    def __init__(self, client: AsyncRouteClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return self._iterate(result) if inspect.isasyncgen(result) else self._run(result)

        return call

    def __repr__(self) -> str:
        return repr(self._client).replace("Async", "")

    def close(self) -> None:
        self._run(self._client.close())
        self._run(self._loop.shutdown_asyncgens())

    def _run(self, awaitable):
        return self._loop.run_until_complete(awaitable)

    def _iterate(self, values):
        try:
            while True:
                yield self._run(anext(values))
        except StopAsyncIteration:
            return
        finally:
            self._run(values.aclose())


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def connect(request):
    made = []

    def connect(target, **kwargs):
        if request.param == "sync":
            client = RouteClient(target, **kwargs)
        else:
            client = Blocking(AsyncRouteClient(target, **kwargs))
        made.append(client)
        return client

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect, server):
    return connect(server.target, timeout=GONE)


def assert_rows(trace: RoutingTrace, source: Truth) -> None:
    assert np.array_equal(trace.valid, source.valid)
    assert np.array_equal(trace.topk_ids[trace.valid], source.ids[source.valid])


def failing(server, method, *failures, then):
    """Let the first calls of a method fail."""
    left = list(failures)

    def handler(request, context):
        if left:
            left.pop(0)(context)
        return then(request, context)

    server.script[method] = handler


def status(code, details=""):
    return lambda context: context.abort(code, details)


# ------------------------------------------------------------------ get


class TestGet:
    def test_all_of_it(self, client, server):
        source = truth(300)
        server.serve(source)
        trace = client.get("req")
        assert_rows(trace, source)
        assert trace.state is TraceState.COMPLETE
        [(_, request)] = server.requests
        assert request == pb.GetTraceRequest(
            run="default",
            trace_id="req",
            policy=pb.READ_POLICY_AS_SAMPLED,
            prefix_rows=pb.PREFIX_ROWS_SAME_VERSION,
        )

    def test_what_is_asked_for_is_what_is_sent(self, connect, server):
        source = truth(30)
        source.info.run, source.info.incarnation = "r2", 3
        server.serve(source)
        trace = connect(server.target, run="r2").get(
            "req",
            layer_ids=[2, 7],
            token_start=4,
            token_stop=9,
            policy="latest",
            prefix_rows="any_version",
            weight_version=7,
            incarnation=3,
        )
        assert trace.layer_ids == (2, 7)
        assert (trace.token_start, trace.token_stop) == (4, 9)
        assert np.array_equal(trace.topk_ids, source.ids[4:9][:, [1, 4]])
        [(_, request)] = server.requests
        assert request == pb.GetTraceRequest(
            run="r2",
            trace_id="req",
            token_start=4,
            token_stop=9,
            layer_ids=[2, 7],
            policy=pb.READ_POLICY_LATEST,
            prefix_rows=pb.PREFIX_ROWS_ANY_VERSION,
            weight_version=7,
            incarnation=3,
        )

    def test_random_traces(self, client, server):
        rng = random.Random(1)
        for _ in range(10):
            source = truth(rng.randint(1, 60), rng=rng)
            server.script["GetTrace"] = lambda r, c, s=source: iter(s.responses(r, rng))
            assert_rows(client.get("req", missing="mask"), source)

    def test_missing_rows(self, client, server):
        server.serve(truth(12, holes=[(3, 5)]))
        with pytest.raises(Incomplete, match=r"\[3, 5\) of 5 layers 1..7") as caught:
            client.get("req")
        assert [(m.start, m.stop) for m in caught.value.missing] == [(3, 5)]
        trace = client.get("req", missing="mask")
        assert trace.coverage == 10 / 12

    @pytest.mark.parametrize("finish_reason", ["", "handoff"])
    def test_an_end_that_is_not_known(self, client, server, finish_reason):
        """The agent was lost, or nobody went on: no known row is missing, and yet it is not all."""
        facts = {"num_tokens": 0, "finish_reason": finish_reason}
        server.serve(truth(12, state=INCOMPLETE, **facts))
        for waiting in ({}, {"wait_for": "rows", "timeout": 0.1}):
            with pytest.raises(Incomplete, match="from 12 on: the end is not known") as caught:
                client.get("req", **waiting)
            assert caught.value.missing == ()
        with pytest.raises(Incomplete, match="the end is not known"):
            client.get("req", token_start=4)
        assert client.get("req", token_stop=12).coverage == 1.0
        trace = client.get("req", missing="mask")
        assert (len(trace), trace.coverage, trace.complete) == (12, 1.0, False)
        assert trace.finish_reason == finish_reason

    def test_rows_of_one_weight_version(self, client, server):
        source = truth(12, holes=[(3, 3), (8, 10)])
        for piece, version in zip(source.pieces, (0, 5, 0, 0), strict=True):
            piece.version = version
        server.serve(source)
        trace = client.get("req", weight_version=0, missing="mask")
        assert trace.valid[:, 0].tolist() == [True] * 3 + [False] * 7 + [True] * 2
        assert [(m.start, m.stop) for m in trace.missing] == [(3, 8), (8, 10)]
        assert trace.missing[0].reason == "other_version"
        assert trace.missing[1].reason != "other_version"
        assert trace.weight_versions == ((0, 3, 0), (10, 12, 0))
        with pytest.raises(Incomplete, match=r"\[3, 8\) .*: other_version"):
            client.get("req", weight_version=0)
        with pytest.raises(Incomplete):
            client.get("req", weight_version=-1)
        assert len(client.get("req", weight_version=5, token_start=3, token_stop=8)) == 5
        [*_, kept] = client.get_many(["req"], weight_version=0, token_start=10)
        assert kept.weight_versions == ((10, 12, 0),)
        asked = [r.weight_version for _, r in server.requests]
        assert asked == [0, 0, -1, 5, 0]
        assert all(r.HasField("weight_version") for _, r in server.requests)

    def test_a_server_that_does_not_know_of_weight_versions(self, client, server):
        source = truth(12)
        server.script["GetTrace"] = lambda request, context: iter(source.responses())
        with pytest.raises(Corrupt, match="weight version 7, asked for 3"):
            client.get("req", weight_version=3)

    def test_incarnations(self, client, server):
        server.serve(*(truth(n, incarnation=n, num_incarnations=2) for n in (2, 5)))
        for asked, got in ((None, 5), (2, 2), (5, 5)):
            trace = client.get("req", incarnation=asked)
            assert (trace.incarnation, trace.num_incarnations, len(trace)) == (got, 2, got)
        with pytest.raises(NotFound):
            client.get("req", incarnation=3)

    def test_not_found(self, client, server):
        server.serve()
        with pytest.raises(NotFound) as caught:
            client.get("req")
        assert (caught.value.field, caught.value.value) == ("trace_id", "req")
        assert isinstance(caught.value, LookupError)
        assert server.counts["GetTrace"] == 1

    def test_messages_above_4_mib(self, client, server):
        source = truth(2)

        def handler(request, context):
            # Nothing compresses to so much: labels stand in for a large payload.
            info = pb.TraceInfo()
            info.CopyFrom(source.info)
            info.labels["large"] = "x" * (5 << 20)
            messages = source.responses(request)
            messages[0].info.CopyFrom(info)
            yield from messages

        server.script["GetTrace"] = handler
        assert_rows(client.get("req"), source)

    def test_messages_above_the_limit(self, connect, server):
        server.serve(truth(12, labels={"large": "x" * 20_000}))
        with pytest.raises(InvalidArgument, match="max_message_bytes"):
            connect(server.target, max_message_bytes=10_000).get("req")

    def test_answers_that_do_not_parse(self, client, server):
        server.script["GetTrace"] = lambda request, context: iter([b"\xff\xff"])
        with pytest.raises(Corrupt):
            client.get("req")
        server.script["StatTrace"] = lambda request, context: b"\xff\xff"
        with pytest.raises(Corrupt):
            client.stat("req")

    def test_facts_that_cannot_be(self, client, server):
        server.script["StatTrace"] = lambda request, context: pb.StatTraceResponse(
            info=pb.TraceInfo(trace_id="req", state=RUNNING)
        )
        with pytest.raises(Corrupt, match="num_experts"):
            client.stat("req")


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "field"),
    [
        ("get", ("",), {}, "trace_id"),
        ("get", (7,), {}, "trace_id"),
        ("get", ("a",), {"token_start": -1}, "token_start"),
        ("get", ("a",), {"token_start": 1.5}, "token_start"),
        ("get", ("a",), {"token_start": 5, "token_stop": 5}, "token_stop"),
        ("get", ("a",), {"token_start": 5, "token_stop": 4}, "token_stop"),
        ("get", ("a",), {"token_stop": 0}, "token_stop"),
        ("get", ("a",), {"token_stop": 2**32}, "token_stop"),
        ("get", ("a",), {"layer_ids": [3, 2]}, "layer_ids"),
        ("get", ("a",), {"layer_ids": [2, 2]}, "layer_ids"),
        ("get", ("a",), {"layer_ids": []}, "layer_ids"),
        ("get", ("a",), {"missing": "ignore"}, "missing"),
        ("get", ("a",), {"policy": "newest"}, "policy"),
        ("get", ("a",), {"incarnation": 0}, "incarnation"),
        ("get", ("a",), {"timeout": 0}, "timeout"),
        ("get", ("a",), {"weight_version": "3"}, "weight_version"),
        ("get", ("a",), {"weight_version": 2**63}, "weight_version"),
        ("get", ("a",), {"wait_for": "wait"}, "wait_for"),
        ("get", ("a",), {"timeout": float("nan")}, "timeout"),
        ("follow", ("a",), {"timeout": -1}, "timeout"),
        ("follow", ("a",), {"layer_ids": []}, "layer_ids"),
        ("follow", ("a",), {"wait_for": "end"}, "wait_for"),
        ("follow", ("a",), {"weight_version": 0.5}, "weight_version"),
        ("get_many", (["a"],), {"prefetch": 0}, "prefetch"),
        ("get_many", (["a"],), {"weight_version": "3"}, "weight_version"),
        ("get_blocks", ("e", [1], 3), {"missing": "wait"}, "missing"),
        ("get_many", (["a"],), {"errors": "ignore"}, "errors"),
        ("get_many", (["a"],), {"token_start": -1}, "token_start"),
        ("get_blocks", ("", [1], 3), {}, "engine_id"),
        ("get_blocks", ("e", [-1], 3), {}, "block_ids"),
        ("get_blocks", ("e", [1], -3), {}, "num_tokens"),
        ("bind", ("e", "", [1], 3), {}, "request_id"),
        ("bind", ("e", "r", [1], 0), {}, "num_tokens"),
        ("bind", ("e", "r", [1], 3), {"step": -1}, "step"),
        ("bind", ("e", "r", [1], 3), {"step": 2**62 + 1}, "step"),
        ("bind", ("e", "r", [1], 2**22 + 1), {}, "num_tokens"),
        ("get_blocks", ("e", [1], 2**22 + 1), {}, "num_tokens"),
        # The wire says "all of them" with 0.
        ("bind", ("e", "r", [1], 3), {"num_computed_tokens": -1}, "num_computed_tokens"),
        ("bind", ("e", "r", [1], 3), {"num_computed_tokens": 3}, "num_computed_tokens"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [1, 2]}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [1, 2, -3]}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [1, 2, 2**32]}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [1, 2, 0.5]}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [[1, 2, 3]]}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": "abc"}, "token_ids"),
        ("bind", ("e", "r", [1], 3), {"token_ids": []}, "token_ids"),
        ("stat", ("",), {}, "trace_id"),
        ("find", (), {"states": ["done"]}, "states"),
        ("delete", ("",), {}, "trace_id"),
        ("retire_through", ("3",), {}, "weight_version"),
        ("renew", (["a", ""],), {}, "trace_ids"),
        # Wrong types.
        ("get", (None,), {}, "trace_id"),
        ("get", (b"a",), {}, "trace_id"),
        ("get", ("x" * 513,), {}, "trace_id"),
        ("renew", (["x" * 513],), {}, "trace_ids"),
        ("bind", ("x" * 513, "r", [1], 3), {}, "engine_id"),
        ("bind", ("e", "r", [1], 3), {"labels": {"a": "x" * 1024}}, "labels"),
        ("get", ("a",), {"timeout": True}, "timeout"),
        ("get", ("a",), {"timeout": 1e12}, "timeout"),
        ("get", ("a",), {"weight_version": True}, "weight_version"),
        ("get", ("a",), {"weight_version": 1.5}, "weight_version"),
        ("get", ("a",), {"token_start": True}, "token_start"),
        ("get", ("\ud800",), {}, "trace_id"),
        ("get", ("a",), {"layer_ids": 3}, "layer_ids"),
        ("get", ("a",), {"layer_ids": "3"}, "layer_ids"),
        ("get", ("a",), {"layer_ids": [None]}, "layer_ids"),
        ("get", ("a",), {"timeout": "5"}, "timeout"),
        ("get", ("a",), {"timeout": float("inf")}, "timeout"),
        ("get", ("a",), {"missing": None}, "missing"),
        ("get", ("a",), {"policy": ["latest"]}, "policy"),
        ("get", ("a",), {"prefix_rows": False}, "prefix_rows"),
        ("get", ("a",), {"wait_for": 60}, "wait_for"),
        ("get", ("a",), {"options": {"missing": "mask"}}, "options"),
        ("get_many", ("abc",), {}, "trace_ids"),
        ("get_many", (5,), {}, "trace_ids"),
        ("fetch", ("a",), {}, "plan"),
        ("prefetch", (7,), {}, "plans"),
        ("prefetch", (["a"],), {}, "plan"),
        ("get_blocks", ("e", 5, 3), {}, "block_ids"),
        ("get_blocks", ("e", [1], "3"), {}, "num_tokens"),
        ("get_blocks", ("e", [1], 3), {"timeout": "5"}, "timeout"),
        ("stat", ("a",), {"timeout": "5"}, "timeout"),
        ("find", (), {"labels": ["a"]}, "labels"),
        ("find", (), {"labels": {"a": 1}}, "labels"),
        ("find", (), {"states": "done"}, "states"),
        ("find", (), {"states": 1}, "states"),
        ("bind", ("e", "r", [1], 3), {"trace_id": None}, "trace_id"),
        ("bind", ("e", "r", [1], 3), {"labels": {1: "b"}}, "labels"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [[1], [2, 3]]}, "token_ids"),
        ("renew", ("abc",), {}, "trace_ids"),
        ("renew", (None,), {}, "trace_ids"),
        ("renew", (["a"], -1), {}, "ttl_seconds"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(connect, method, args, kwargs, field):
    client = connect("127.0.0.1:1")
    with pytest.raises(InvalidArgument) as caught:
        getattr(client, method)(*args, **kwargs)
    assert caught.value.field == field
    assert caught.value.expected
    assert isinstance(caught.value, ValueError)
    assert "idle" in repr(client)


@pytest.mark.parametrize(
    ("method", "args", "keyword", "said"),
    [
        ("get", ("a",), "wait", "did you mean 'wait_for'? "),
        ("get", ("a",), "token_end", "did you mean 'token_stop'? "),
        ("get", ("a",), "tokens", "did you mean 'token_stop'? "),
        ("get", ("a",), "zzz", ""),
        ("get_many", (["a"],), "error", "did you mean 'errors'? "),
        ("get_many", (["a"],), "num_tokens", "did you mean 'token_stop'? "),
        ("fetch", ("a",), "outs", "did you mean 'out'? "),
        ("prefetch", (["a"],), "polcy", "did you mean 'policy'? "),
        ("follow", ("a",), "weight_versions", "did you mean 'weight_version'? "),
    ],
)
def test_an_unknown_keyword_is_named_with_its_call(connect, method, args, keyword, said):
    client = connect("127.0.0.1:1")
    with pytest.raises(InvalidArgument) as caught:
        getattr(client, method)(*args, **{keyword: "end"})
    text = f"{method}() got an unexpected keyword argument {keyword!r}; {said}expected one of "
    assert caught.value.message.startswith(text)
    assert caught.value.field == keyword
    assert "wait_for" in caught.value.expected
    assert isinstance(caught.value, TypeError), "as Python says it"
    assert "idle" in repr(client)


# ------------------------------------------------------------------ errors and retries


@pytest.mark.parametrize(
    "kind",
    [
        errors.InvalidArgument,
        errors.NotFound,
        errors.Corrupt,
        errors.Fenced,
        errors.OutOfSequence,
        errors.Unauthenticated,
        errors.PermissionDenied,
    ],
)
@pytest.mark.parametrize("method", ["GetTrace", "StatTrace"])
def test_typed_errors_cross_the_wire(client, server, kind, method):
    sent = kind("it is so", field="trace_id", value="x", expected="y")
    failing(server, method, lambda context: fail(context, sent), then=None)
    with pytest.raises(kind, match="it is so") as caught:
        client.get("req") if method == "GetTrace" else client.stat("req")
    assert type(caught.value) is kind
    assert (caught.value.field, caught.value.value, caught.value.expected) == ("trace_id", "x", "y")
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert not isinstance(caught.value, grpc.RpcError)
    assert server.counts[method] == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.DATA_LOSS, Corrupt),
        (grpc.StatusCode.FAILED_PRECONDITION, Fenced),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (grpc.StatusCode.UNIMPLEMENTED, InvalidArgument),
        (grpc.StatusCode.UNKNOWN, RouteTraceError),
        (grpc.StatusCode.INTERNAL, RouteTraceError),
    ],
)
def test_bare_statuses(client, server, code, kind):
    failing(server, "StatTrace", status(code, "so"), then=None)
    with pytest.raises(kind, match=f"{code.name}: so") as caught:
        client.stat("req")
    assert type(caught.value) is kind
    assert server.counts["StatTrace"] == 1


PASSING = {
    "unavailable": status(grpc.StatusCode.UNAVAILABLE),
    "cancelled": status(grpc.StatusCode.CANCELLED),
    "exhausted": status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"),
    "overloaded": lambda context: fail(context, Overloaded("busy", retry_after=0.01)),
    "draining": lambda context: fail(context, Unavailable("draining", retry_after=0.01)),
}


class TestRetries:
    @pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
    def test_passing_failures(self, client, server, failure):
        source = truth(12)
        failing(server, "GetTrace", failure, failure, then=lambda r, c: iter(source.responses()))
        assert_rows(client.get("req"), source)
        failing(
            server, "StatTrace", failure, then=lambda r, c: pb.StatTraceResponse(info=source.info)
        )
        assert client.stat("req").num_rows == 12
        assert server.counts == {"GetTrace": 3, "StatTrace": 2}

    def test_streams_that_break_are_read_anew(self, client, server):
        source = truth(200, rng=random.Random(3))
        assert len(source.responses()) > 5
        breaks = iter(range(1, 6))

        def handler(request, context):
            stop = next(breaks)
            for i, message in enumerate(source.responses(request)):
                if i == stop and stop < 4:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                yield message

        server.script["GetTrace"] = handler
        assert_rows(client.get("req", missing="mask"), source)
        assert server.counts["GetTrace"] == 4

    def test_streams_without_an_end_are_read_anew(self, client, server):
        source = truth(40)
        count = iter(range(9))
        server.script["GetTrace"] = lambda r, c: iter(
            source.responses()[: 1 if next(count) < 2 else 99]
        )
        assert_rows(client.get("req"), source)
        assert server.counts["GetTrace"] == 3

    def test_until_the_deadline(self, client, server):
        failing(server, "GetTrace", *[PASSING["unavailable"]] * 99, then=None)
        late = DeadlineExceeded  # on a slow machine, of the last attempt
        with pytest.raises((Unavailable, late)):
            client.get("req", timeout=1)
        assert server.counts["GetTrace"] < 10
        failing(server, "StatTrace", *[PASSING["overloaded"]] * 99, then=None)
        with pytest.raises((Overloaded, late)):
            client.stat("req", timeout=0.3)

    def test_no_attempt_follows_that_the_deadline_leaves_no_room_for(self, client, server):
        too_long = Overloaded("full", retry_after=100)
        passing = [PASSING["unavailable"]] * 2
        failing(server, "GetTrace", *passing, lambda c: fail(c, too_long), then=None)
        with pytest.raises(Overloaded):
            client.get("req", timeout=60)
        assert server.counts["GetTrace"] == 3

    @pytest.mark.parametrize("retry_after", [0, 100])
    def test_what_no_retry_can_help_with(self, client, server, retry_after):
        error = Overloaded("full", retry_after=retry_after)
        failing(server, "StatTrace", lambda context: fail(context, error), then=None)
        with pytest.raises(Overloaded) as caught:
            client.stat("req")
        assert caught.value.retry_after == retry_after
        assert server.counts["StatTrace"] == 1

    def test_nobody_there(self, connect):
        with pytest.raises(Unavailable) as caught:
            connect("127.0.0.1:1", timeout=1).get("req")
        assert isinstance(caught.value.__cause__, grpc.RpcError)

    def test_a_server_that_starts_later(self, connect, caplog):
        port = free_ports(1)
        late: list[ScriptedServer] = []
        source = truth(12)

        def start():
            wait_for(lambda: "cannot connect" in caplog.text)
            late.append(ScriptedServer(port))
            late[0].serve(source)

        starting = threading.Thread(target=start)
        starting.start()
        try:
            assert_rows(connect(f"127.0.0.1:{port}", timeout=20).get("req"), source)
        finally:
            starting.join()
            late[0].stop()

    def test_a_server_that_hangs(self, client, server):
        release = threading.Event()

        def hang(request, context):
            release.wait(GONE)
            return iter(())

        server.script["GetTrace"] = server.script["StatTrace"] = hang
        try:
            with pytest.raises(DeadlineExceeded) as caught:
                client.get("req", timeout=0.1)
            assert isinstance(caught.value, TimeoutError)
            with pytest.raises(DeadlineExceeded):
                client.stat("req", timeout=0.1)
        finally:
            release.set()

    def test_binding_is_repeated_only_if_it_was_refused(self, client, server):
        then = lambda r, c: pb.BindRequestResponse(trace=truth(3).info)  # noqa: E731
        failing(server, "BindRequest", PASSING["unavailable"], then=then)
        with pytest.raises(Unavailable):
            client.bind("e0", "r", [1], 4)
        assert server.counts["BindRequest"] == 1
        failing(server, "BindRequest", PASSING["overloaded"], then=then)
        assert client.bind("e0", "r", [1], 4).num_rows == 3


@given(
    st.sampled_from([NotFound, Corrupt, DeadlineExceeded, Unavailable, Overloaded]),
    st.floats(0, 10),
    st.integers(1, 10_000),
    st.floats(0, 100),
    st.floats(0, 0.999),
)
def test_retry_pauses(kind, retry_after, attempt, left, jitter):
    kwargs = {"retry_after": retry_after} if kind in (Unavailable, Overloaded) else {}
    error = kind("x", **kwargs)
    pause = retry_pause(error, attempt, left, jitter)
    if not kwargs or retry_after == 0:
        assert pause is None
    elif pause is not None:
        assert 0.75 * retry_after <= pause < left / 2
        assert pause <= 1.25 * max(2.0, retry_after)
        later = retry_pause(error, attempt + 1, 1000, jitter)
        assert later is not None
        assert later >= pause
    else:
        assert left <= 2.5 * max(2.0, retry_after)


# ------------------------------------------------------------------ waiting


class TestWait:
    def test_the_server_waits(self, client, server):
        source = truth(12)
        ended = threading.Event()

        def handler(request, context):
            assert request.wait_for == pb.WAIT_FOR_END
            threading.Timer(0.1, ended.set).start()
            ended.wait(GONE)
            yield from source.responses(request)

        server.script["GetTrace"] = handler
        assert_rows(client.get("req", wait_for="end", timeout=GONE), source)
        assert server.counts["GetTrace"] == 1

    @pytest.mark.parametrize("missing", ["raise", "mask"])
    def test_it_does_not_end_in_time(self, client, server, missing):
        source = truth(12, state=RUNNING)
        hang = threading.Event()

        def handler(request, context):
            if request.wait_for:
                hang.wait(GONE)
            yield from source.responses(request)

        server.script["GetTrace"] = handler
        with pytest.raises(DeadlineExceeded, match=r"after 0\.1 s: it is running, with 12 rows"):
            client.get("req", wait_for="end", timeout=0.1, missing=missing)
        hang.set()
        # On a slow machine the first call may be over before it gets anywhere.
        assert [bool(r.wait_for) for _, r in server.requests] in (
            [False],
            [True, False],
        )

    def test_it_never_appears(self, client, server):
        hang = threading.Event()

        def handler(request, context):
            if request.wait_for:
                hang.wait(GONE)
            fail(context, NotFound("no such trace"))
            yield

        server.script["GetTrace"] = handler
        with pytest.raises(DeadlineExceeded, match=r"'req'.* the server does not know it"):
            client.get("req", wait_for="end", timeout=0.1)
        hang.set()

    def test_it_ended_at_the_last_moment(self, client, server):
        source = truth(12)
        hang = threading.Event()

        def handler(request, context):
            messages = source.responses(request)
            yield messages[0]
            if request.wait_for:
                hang.wait(GONE)  # sending takes longer than `wait`
            yield from messages[1:]

        server.script["GetTrace"] = handler
        assert_rows(client.get("req", wait_for="end", timeout=0.2), source)
        hang.set()

    def test_a_running_trace_is_incomplete_without_waiting(self, client, server):
        server.serve(truth(12, state=RUNNING))
        with pytest.raises(Incomplete, match="running; missing positions from 12 on"):
            client.get("req")
        assert client.get("req", token_stop=8).token_stop == 8
        assert not client.get("req", missing="mask").complete


class TestWaitForRows:
    """wait_for="rows"."""

    def later(self, server, *truths):
        """Serve these a moment after a call that waits has come in."""

        def serve():
            while not any(r.wait_for for _, r in server.requests):
                time.sleep(0.01)
            server.serve(*truths)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        return thread

    @pytest.mark.parametrize("timeout", [None, GONE])
    @pytest.mark.parametrize("before", [(), (truth(5, state=RUNNING),)])
    def test_rows_of_a_running_request(self, client, server, before, timeout):
        source = truth(10, state=RUNNING)
        server.serve(*before)
        self.later(server, source)
        trace = client.get("req", token_start=2, token_stop=8, wait_for="rows", timeout=timeout)
        assert np.array_equal(trace.topk_ids, source.ids[2:8])
        assert (trace.state, trace.complete) == (TraceState.RUNNING, False)
        [(_, request)] = server.requests
        assert request.wait_for == pb.WAIT_FOR_ROWS

    def test_to_the_end(self, client, server):
        source = truth(12)
        server.serve(truth(12, state=RUNNING))  # all rows are there, but who knows?
        self.later(server, source)
        assert client.get("req", wait_for="rows").complete
        assert server.counts["GetTrace"] == 1

    def test_rows_of_an_ended_request_that_come_late(self, client, server):
        server.serve(truth(12, holes=[(3, 5)], state=RUNNING, num_tokens=13))
        self.later(server, truth(12))
        assert client.get("req", wait_for="rows").complete
        assert server.counts["GetTrace"] == 1

    def test_layers_of_which_all_rows_are_there(self, client, server):
        source = truth(12, stages=[(1, 2), (4, 5, 7)], state=RUNNING, num_tokens=13)
        source.pieces[1].there = False
        server.serve(source)
        trace = client.get("req", layer_ids=[1, 2], wait_for="rows")
        assert (trace.coverage, trace.state) == (1.0, TraceState.RUNNING)
        with pytest.raises(Incomplete, match=r"\[0, 12\) of 3 layers 4..7: .*; waited 0.1 s"):
            client.get("req", wait_for="rows", timeout=0.1)

    def test_many(self, client, server):
        server.serve(truth(3, trace_id="a"), truth(3, trace_id="b", state=RUNNING))
        self.later(server, truth(5, trace_id="a"), truth(5, trace_id="b"))
        traces = list(client.get_many(["b", "a"], wait_for="rows"))
        assert [(t.trace_id, t.complete) for t in traces] == [("b", True), ("a", True)]

    @pytest.mark.parametrize(
        ("source", "asked", "reason"),
        [
            (
                truth(12, state=RUNNING),
                {"token_stop": 15},
                r"'req' is running; missing positions \[12, 15\) of 5 layers 1..7: not_yet",
            ),
            (truth(12, state=RUNNING), {}, "is running; missing positions from 12 on: the end"),
            (truth(12, holes=[(3, 5)]), {}, r"is incomplete; missing positions \[3, 5\)"),
            (truth(12), {"weight_version": 3}, r"\[0, 12\) of 5 layers 1..7: other_version"),
            (truth(12, state=INCOMPLETE, num_tokens=0), {}, "from 12 on: the end is not known"),
        ],
    )
    def test_they_do_not_come_in_time(self, client, server, source, asked, reason):
        server.serve(source)
        with pytest.raises(Incomplete, match=f"{reason}.*; waited 0.2 s") as caught:
            client.get("req", wait_for="rows", timeout=0.2, **asked)
        assert caught.value.missing or "the end is not known" in str(caught.value)
        # On a slow machine the first call may be over before it gets anywhere.
        kinds = [r.wait_for for _, r in server.requests]
        assert kinds in ([pb.WAIT_FOR_UNSPECIFIED], [pb.WAIT_FOR_ROWS, pb.WAIT_FOR_UNSPECIFIED])

    def test_they_have_as_long_as_the_call(self, connect, server):
        server.serve(truth(12, state=RUNNING))
        client = connect(server.target, timeout=600)
        with pytest.raises(Incomplete, match="the end is not known; waited 1 s"):
            client.get("req", wait_for="rows", timeout=1)

    def test_they_come_at_the_last_moment(self, client, server):
        source = truth(12)

        def handler(request, context):
            if request.wait_for:
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "over")
            yield from source.responses(request)

        server.script["GetTrace"] = handler
        assert_rows(client.get("req", wait_for="rows", timeout=0.5), source)

    def test_it_never_appears(self, client, server):
        server.serve()
        with pytest.raises(
            DeadlineExceeded, match=r"'req' lacked rows after 0\.1 s: the server does not"
        ):
            client.get("req", wait_for="rows", timeout=0.1)

    def test_rows_that_are_lost_while_they_are_sent(self, client, server):
        """No use in waiting for those."""
        source = truth(12, holes=[(3, 5)])
        server.script["GetTrace"] = lambda request, context: iter(source.responses())
        with pytest.raises(Incomplete, match=r"\[3, 5\)") as caught:
            client.get("req", wait_for="rows")
        assert "waited" not in str(caught.value)
        assert server.counts["GetTrace"] == 1


# ------------------------------------------------------------------ follow


class TestFollow:
    def messages(self, source):
        """One row a message, in order."""
        for start in range(len(source.ids)):
            cut = Truth(source.ids, source.layout, source.pieces, source.info)
            request = pb.GetTraceRequest(token_start=start, token_stop=start + 1)
            [message] = [m for m in cut.responses(request) if m.payload]
            spans = bytearray(message.spans)
            spans[8:12] = start.to_bytes(4, "little")
            yield pb.GetTraceResponse(
                info=source.info if start == 0 else None,
                spans=bytes(spans),
                frame_lengths=message.frame_lengths,
                payload=message.payload,
            )

    def end(self, source):
        info = pb.TraceInfo()
        info.CopyFrom(source.info)
        info.state, info.num_tokens = pb.TRACE_STATE_COMPLETE, len(source.ids) + 1
        return pb.GetTraceResponse(
            end=pb.ReadEnd(info=info, token_stop=len(source.ids), num_spans=len(source.ids))
        )

    def test_rows_arrive_before_the_end(self, client, server):
        source = truth(6, state=RUNNING)
        taken = [threading.Event() for _ in range(6)]

        def handler(request, context):
            assert request.follow
            assert not request.wait_for
            for message, event in zip(self.messages(source), taken, strict=True):
                yield message
                assert event.wait(GONE)  # not before the client has it
            yield self.end(source)

        server.script["GetTrace"] = handler
        parts = []
        for part in client.follow("req"):
            parts.append(part)
            if len(part):
                taken[part.token_start].set()
        assert [(p.token_start, p.token_stop) for p in parts] == [
            *((i, i + 1) for i in range(6)),
            (6, 6),
        ]
        assert [p.state for p in parts] == [TraceState.RUNNING] * 6 + [TraceState.COMPLETE]
        assert np.array_equal(np.concatenate([p.topk_ids for p in parts]), source.ids)

    def test_what_is_asked_for(self, client, server):
        source = truth(6, incarnation=3)
        server.serve(source)
        trace, *rest = client.follow("req", weight_version=7, incarnation=3, token_start=2)
        assert len(trace) + sum(map(len, rest)) == 4
        [(_, request)] = server.requests
        assert request == pb.GetTraceRequest(
            run="default",
            trace_id="req",
            token_start=2,
            policy=pb.READ_POLICY_AS_SAMPLED,
            incarnation=3,
            follow=True,
            weight_version=7,
            prefix_rows=pb.PREFIX_ROWS_SAME_VERSION,
        )

    @pytest.mark.parametrize("incarnation", [None, 2])
    def test_another_engine_goes_on(self, client, server, incarnation):
        """A decode engine takes over: what the prefill engine computed is a part of that."""
        source = truth(6, state=RUNNING, incarnation=2, finish_reason="handoff")

        def handler(request, context):
            messages = list(self.messages(source))
            yield from messages[:4]
            source.info.incarnation, source.info.finish_reason = 1, ""  # its agent was heard first
            for message in messages[4:]:
                message.info.CopyFrom(source.info)
                yield message
            yield self.end(source)

        server.script["GetTrace"] = handler
        parts = client.follow("req", incarnation=incarnation)
        if incarnation:
            with pytest.raises(Corrupt, match="incarnation 1, asked for 2"):
                list(parts)
            return
        parts = list(parts)
        assert [p.incarnation for p in parts] == [2] * 4 + [1] * 3
        assert np.array_equal(np.concatenate([p.topk_ids for p in parts]), source.ids)

    @pytest.mark.parametrize("missing", ["raise", "mask"])
    def test_an_end_that_is_not_known(self, client, server, missing):
        source = truth(6, state=RUNNING)

        def handler(request, context):
            yield from self.messages(source)
            end = self.end(source)
            end.end.info.state, end.end.info.num_tokens = INCOMPLETE, 0
            yield end

        server.script["GetTrace"] = handler
        parts = client.follow("req", missing=missing)
        assert [next(parts).token_stop for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        if missing == "raise":
            with pytest.raises(Incomplete, match="from 6 on: the end is not known"):
                next(parts)
            return
        last = next(parts)
        assert (last.state, last.complete) == (TraceState.INCOMPLETE, False)

    def test_a_connection_that_breaks(self, client, server):
        source = truth(6, state=RUNNING)

        def handler(request, context):
            if server.counts["GetTrace"] < 3:
                context.abort(grpc.StatusCode.UNAVAILABLE, "early")
            messages = self.messages(source)
            yield next(messages)
            yield next(messages)
            context.abort(grpc.StatusCode.UNAVAILABLE, "late")

        server.script["GetTrace"] = handler
        parts = client.follow("req")
        assert [next(parts).token_stop, next(parts).token_stop] == [1, 2]
        with pytest.raises(Unavailable, match="late"):
            next(parts)
        assert server.counts["GetTrace"] == 3

    def test_closing_ends_the_call(self, client, server):
        source = truth(6, state=RUNNING)
        gone = threading.Event()

        def handler(request, context):
            context.add_callback(gone.set)
            yield next(self.messages(source))
            gone.wait(GONE)

        server.script["GetTrace"] = handler
        parts = client.follow("req")
        assert next(parts).token_stop == 1
        parts.close()
        assert gone.wait(GONE)

    def test_its_own_time_limit(self, client, server):
        source = truth(6, state=RUNNING)
        hang = threading.Event()

        def handler(request, context):
            yield next(self.messages(source))
            hang.wait(GONE)

        server.script["GetTrace"] = handler
        with pytest.raises(DeadlineExceeded):
            list(client.follow("req", timeout=0.2))
        hang.set()


# ------------------------------------------------------------------ get_many


class TestGetMany:
    def sources(self, count):
        return [truth(i % 7 + 1, rng=random.Random(i), trace_id=f"r{i}") for i in range(count)]

    @pytest.mark.parametrize("prefetch", [1, 3, 100])
    def test_in_the_order_of_the_ids(self, client, server, prefetch):
        sources = self.sources(20)
        server.serve(*sources)
        random.Random(0).shuffle(sources)
        ids = (s.info.trace_id for s in sources)
        traces = list(client.get_many(ids, prefetch=prefetch, missing="mask", token_stop=1))
        assert [t.trace_id for t in traces] == [s.info.trace_id for s in sources]
        for trace, source in zip(traces, sources, strict=True):
            assert np.array_equal(trace.valid[0], source.valid[0])

    def test_so_many_at_once(self, client, server):
        source = truth(3)
        together = threading.Barrier(4)
        active, most = set(), []

        def handler(request, context):
            active.add(request.trace_id)
            most.append(len(active))
            together.wait(GONE)
            messages = source.responses()
            for m in messages:
                if m.HasField("info"):
                    m.info.trace_id = request.trace_id
                if m.HasField("end"):
                    m.end.info.trace_id = request.trace_id
            active.discard(request.trace_id)
            return iter(messages)

        server.script["GetTrace"] = handler
        assert len(list(client.get_many([f"r{i}" for i in range(12)], prefetch=4))) == 12
        assert max(most) == 4

    def test_ids_are_taken_as_it_gets_on(self, client, server):
        sources = self.sources(20)
        server.serve(*sources)
        taken = []

        def ids():
            for s in sources:
                taken.append(s.info.trace_id)
                yield s.info.trace_id

        traces = client.get_many(ids(), prefetch=3, missing="mask")
        assert not taken
        next(traces)
        assert len(taken) == 3
        next(traces)
        assert len(taken) == 4
        traces.close()

    def test_errors_at_their_turn(self, client, server):
        sources = self.sources(4)
        server.serve(*sources)
        ids = ["r0", "r1", "unknown", "", "r2"]
        traces = client.get_many(ids, missing="mask")
        assert [next(traces).trace_id for _ in range(2)] == ["r0", "r1"]
        with pytest.raises(NotFound):
            next(traces)
        got = list(client.get_many(ids, missing="mask", errors="return"))
        assert [type(g) for g in got] == [
            RoutingTrace,
            RoutingTrace,
            NotFound,
            InvalidArgument,
            RoutingTrace,
        ]

    def test_closing_ends_what_is_under_way(self, client, server):
        server.serve(*self.sources(1))
        answer = server.script["GetTrace"]
        started, gone = threading.Semaphore(0), threading.Semaphore(0)

        def handler(request, context):
            if request.trace_id != "r0":
                over = threading.Event()
                context.add_callback(over.set)
                started.release()
                assert over.wait(GONE)
                gone.release()
            return answer(request, context)

        server.script["GetTrace"] = handler
        traces = client.get_many(["r0", "r1", "r2"], missing="mask", wait_for="end", timeout=600)
        assert next(traces).trace_id == "r0"
        assert started.acquire(timeout=GONE)
        assert started.acquire(timeout=GONE)
        traces.close()
        assert gone.acquire(timeout=GONE)
        assert gone.acquire(timeout=GONE)


# ------------------------------------------------------------------ the other calls


def test_stat(client, server):
    source = truth(
        12, holes=[(3, 5)], incarnation=2, num_incarnations=1, num_attempts=3, finish_reason="abort"
    )
    server.script["StatTrace"] = lambda request, context: pb.StatTraceResponse(
        info=source.info,
        missing=[pb.MissingRange(start=3, stop=5, reason=pb.MISSING_REASON_QUEUE_FULL)],
    )
    stat = client.stat("req", incarnation=2)
    assert (stat.trace_id, stat.state, stat.num_rows) == ("req", TraceState.INCOMPLETE, 12)
    assert (stat.incarnation, stat.num_incarnations, stat.num_attempts) == (2, 1, 3)
    assert stat.finish_reason == "abort"
    assert stat.labels == {"group": "g1"}
    assert stat.layout == LAYOUT
    assert [(m.start, m.stop, m.layer_ids, m.reason) for m in stat.missing] == [
        (3, 5, LAYOUT.layer_ids, "queue_full")
    ]
    [(_, request)] = server.requests
    assert request == pb.StatTraceRequest(run="default", trace_id="req", incarnation=2)


def test_find(client, server):
    infos = [truth(3, trace_id=f"r{i}").info for i in range(7)]

    def handler(request, context):
        at = int(request.page_token or 0)
        return pb.ListTracesResponse(
            traces=infos[at : at + 3], next_page_token=str(at + 3) if at + 3 < 7 else ""
        )

    server.script["ListTraces"] = handler
    states = ["running", TraceState.COMPLETE]
    found = client.find(labels={"group": "g1"}, states=states)
    assert next(found).trace_id == "r0"
    assert server.counts["ListTraces"] == 1  # pages are asked for as they are needed
    rest = list(found)
    assert [s.trace_id for s in rest] == [f"r{i}" for i in range(1, 7)]
    assert rest[0].missing is None
    first = server.requests[0][1]
    assert dict(first.labels) == {"group": "g1"}
    assert list(first.states) == [RUNNING, pb.TRACE_STATE_COMPLETE]


@pytest.mark.parametrize("holes", [(), [(3, 5)]])
@pytest.mark.parametrize("state", [pb.TRACE_STATE_UNSPECIFIED, pb.TRACE_STATE_INCOMPLETE])
def test_get_blocks(client, server, holes, state):
    source = truth(12, holes=holes)
    source.info.CopyFrom(
        pb.TraceInfo(run="default", layout=LAYOUT.to_proto(), engine_ids=["e0"], state=state)
    )

    def handler(request, context):
        asked = pb.GetTraceRequest(
            token_start=request.token_start,
            token_stop=request.num_tokens,
            layer_ids=request.layer_ids,
        )
        return iter(source.responses(asked, make=pb.GetBlocksResponse))

    server.script["GetBlocks"] = handler
    trace = client.get_blocks("e0", [4, 2], 12, missing="mask")
    assert_rows(trace, source)
    assert (trace.trace_id, trace.engine_ids) == ("", ("e0",))
    assert trace.complete == (not holes)
    trace = client.get_blocks("e0", [4, 2], 9, token_start=5, layer_ids=[2])
    assert np.array_equal(trace.topk_ids, source.ids[5:9, 1:2])
    assert len(client.get_blocks("e0", [4], 3, token_start=8)) == 0
    if holes:
        with pytest.raises(Incomplete):
            client.get_blocks("e0", [4, 2], 12)
    assert list(server.requests[0][1].block_ids) == [4, 2]


def test_bind(client, server):
    server.script["BindRequest"] = lambda r, c: pb.BindRequestResponse(trace=truth(12).info)
    stat = client.bind(
        "e0",
        "r1",
        [5, 3],
        13,
        num_computed_tokens=9,
        token_ids=range(13),
        step=9,
        trace_id="req",
        prompt_len=4,
        labels={"group": "g1"},
        ttl_seconds=60,
    )
    assert stat.num_rows == 12
    assert server.requests[0][1] == pb.BindRequestRequest(
        run="default",
        engine_id="e0",
        request_id="r1",
        block_ids=[5, 3],
        num_tokens=13,
        num_computed_tokens=9,
        token_digests=token_digests(np.arange(13)).tobytes(),
        step=9,
        begin=pb.RequestBegin(trace_id="req", prompt_len=4, labels={"group": "g1"}, ttl_seconds=60),
    )


def test_digests_of_bound_tokens_include_the_adapter(client, server):
    def handler(request, context):
        info = truth(12, token_digests=request.token_digests, labels=request.begin.labels).info
        return pb.BindRequestResponse(trace=info)

    server.script["BindRequest"] = handler
    digests = []
    for adapter in ("math", "code"):
        labels = {"adapter": adapter}
        stat = client.bind("e0", "r1", [5, 3], 13, token_ids=range(13), labels=labels)
        assert compare_tokens(np.arange(13), stat).confirmed == 1
        digests.append(bytes(server.requests[-1][1].token_digests))
    plain = token_digests(np.arange(13)).tobytes()
    assert len({plain, *digests}) == 3
    assert digests[0] == token_digests(np.arange(13), key="math").tobytes()


@pytest.mark.parametrize("dtype", [None, "uint8", "int64", "uint64"])
def test_bound_tokens_can_be_verified(client, server, dtype):
    tokens = [i % 251 for i in range(200)]

    def handler(request, context):
        return pb.BindRequestResponse(
            trace=truth(199, token_digests=request.token_digests, incarnation=4).info
        )

    server.script["BindRequest"] = handler
    server.script["GetTrace"] = lambda r, c: iter(truth(199, token_digests=sent).responses(r))
    token_ids = np.array(tokens, dtype) if dtype else tokens
    stat = client.bind("e0", "req", range(20), 200, token_ids=token_ids)
    assert stat.token_digests["position"].tolist() == [64, 128, 192, 200]
    assert stat.incarnation == 4
    sent = stat.token_digests.tobytes()
    assert client.get("req").verify_tokens(tokens) == 4
    [(_, request), _] = server.requests
    assert not request.HasField("num_computed_tokens")
    client.bind("e0", "req", range(20), 200)
    assert server.requests[-1][1].token_digests == b""


def test_forgetting(client, server):
    server.script["DeleteTrace"] = lambda r, c: pb.DeleteTraceResponse()
    server.script["RetireTraces"] = lambda r, c: pb.RetireTracesResponse(num_retired=4)
    server.script["RenewLease"] = lambda r, c: pb.RenewLeaseResponse(num_renewed=2)
    assert client.delete("req") is None
    assert client.retire_through(-3) == 4
    assert client.renew(["a", "b"], 60) == 2
    assert [r for _, r in server.requests] == [
        pb.DeleteTraceRequest(run="default", trace_id="req"),
        pb.RetireTracesRequest(run="default", through_weight_version=-3),
        pb.RenewLeaseRequest(run="default", trace_ids=["a", "b"], ttl_seconds=60),
    ]


# ------------------------------------------------------------------ life of a client


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("traces", "traces:7411"),
        ("traces:1", "traces:1"),
        ("10.0.0.1", "10.0.0.1:7411"),
        ("[::1]", "[::1]:7411"),
        ("[::1]:80", "[::1]:80"),
        ("dns:///traces:80", "dns:///traces:80"),
        ("unix:/run/traces.sock", "unix:/run/traces.sock"),
        ("ipv4:10.0.0.1:80,10.0.0.2:80", "ipv4:10.0.0.1:80,10.0.0.2:80"),
    ],
)
def test_targets(connect, target, address):
    assert f" {address} run=" in repr(connect(target))


@pytest.mark.parametrize(
    "target",
    [
        *("", "http://traces:7411", "grpc://traces", "traces:", "traces:0", "traces:65536"),
        *("traces:x", "::1", "traces:7411/", "a b", ":7411", 7411, b"traces"),
    ],
)
def test_wrong_targets(connect, target):
    with pytest.raises(InvalidArgument, match="such as traces:7411") as caught:
        connect(target)
    assert caught.value.field == "target"


def test_every_error_is_public():
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    names = [kind.__name__ for kind in kinds if not kind.__name__.startswith("_")]
    assert len(names) == 14
    for name in names:
        assert getattr(routetrace.client, name) is getattr(errors, name)


def test_options_and_keywords_are_one(client, server):
    options = ReadOptions(policy="latest", weight_version=3, missing="mask")
    server.serve(truth(3))
    for asked in (
        {"options": options},
        {"policy": "latest", "weight_version": 3, "missing": "mask"},
        {"options": ReadOptions(policy="latest", weight_version=4), "weight_version": 3}
        | {"missing": "mask"},
    ):
        client.get("req", **asked)
    requests = [request for _, request in server.requests]
    assert requests[0] == requests[1] == requests[2]
    assert requests[0].weight_version == 3


def test_a_misspelled_option_is_refused(client):
    with pytest.raises(TypeError, match="weight_versions"):
        client.get("req", weight_versions=3)


def test_the_version():
    assert routetrace.client.__version__ == metadata.version("routetrace")


def test_configuration(connect, server, monkeypatch):
    monkeypatch.delenv("ROUTETRACE_TARGET", raising=False)
    with pytest.raises(InvalidArgument, match=r"target .* ROUTETRACE_TARGET"):
        connect(None)
    for field, wrong in [
        ("timeout", 0),
        ("timeout", "5"),
        ("max_message_bytes", -1),
        ("max_message_bytes", "1"),
        ("run", 7),
        ("run", b"x"),
        ("run", ""),
        ("run", "x" * 513),
        ("timeout", True),
        ("timeout", 1e12),
        ("channel_options", 5),
        ("channel_options", ["grpc.x"]),
        ("channel_options", [(1, 2)]),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            connect("x:1", **{field: wrong})
        assert caught.value.field == field
    monkeypatch.setenv("ROUTETRACE_TARGET", server.target)
    monkeypatch.setenv("ROUTETRACE_RUN", "from-env")
    server.script["DeleteTrace"] = lambda r, c: pb.DeleteTraceResponse()
    connect(None).delete("a")
    connect(None, run="mine").delete("a")
    assert [r.run for _, r in server.requests] == ["from-env", "mine"]


def test_a_copy_of_a_client(server):
    server.serve(truth(3))
    settings = {"run": "r", "timeout": 7, "security": Security(token="rt_x")}
    with RouteClient(server.target, **settings) as client:
        client.get("req")
        data = pickle.dumps(client)
    with pickle.loads(data) as copy:
        assert repr(copy) == f"<RouteClient {server.target} run='r' idle>"
        assert len(copy.get("req")) == 3
        assert copy._config == client._config

    async def main():
        async with AsyncRouteClient(server.target, **settings) as client:
            copy = pickle.loads(pickle.dumps(client))
            assert len(await copy.get("req")) == 3
            await copy.close()
            assert len(await client.get("req")) == 3

    asyncio.run(main())


def test_states_of_a_client(connect, server):
    server.serve(truth(3))
    client = connect(server.target, run="r")
    assert repr(client) == f"<RouteClient {server.target} run='r' idle>"
    with pytest.raises(NotFound):
        client.get("unknown")
    assert repr(client).endswith("open>")
    client.close()
    client.close()
    assert repr(client).endswith("closed>")
    for call in (
        lambda: client.get("req"),
        lambda: client.stat("req"),
        lambda: list(client.get_many(["req"])),
        lambda: next(client.follow("req")),
    ):
        with pytest.raises(Closed):
            call()


def test_context_managers(server):
    server.serve(truth(3))
    with RouteClient(server.target) as client:
        client.get("req")
    assert "closed" in repr(client)

    async def main():
        async with AsyncRouteClient(server.target) as client:
            await client.get("req")
        assert "closed" in repr(client)

    asyncio.run(main())


@pytest.fixture
def hanging(server):
    """A server whose reads hang; a semaphore of those that started."""
    started, release = threading.Semaphore(0), threading.Event()

    def handler(request, context):
        started.release()
        release.wait(GONE)
        return iter(())

    server.script["GetTrace"] = server.script["StatTrace"] = handler
    yield started
    release.set()


@pytest.mark.parametrize("call", ["get", "stat", "get_many"])
def test_closing_ends_what_is_under_way(server, hanging, call):
    client = RouteClient(server.target, timeout=60)
    outcome = []

    def run():
        try:
            list(client.get_many(["a", "b"])) if call == "get_many" else getattr(client, call)("a")
        except RouteTraceError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert hanging.acquire(timeout=GONE)
    client.close()
    thread.join(GONE)
    assert outcome == [Closed]


@pytest.fixture
def paused(monkeypatch):
    """Set as a call begins to pause between two attempts."""
    begun, pause_of = threading.Event(), _retry.retry_pause

    def retry_pause(*args):
        begun.set()
        return pause_of(*args)

    monkeypatch.setattr(_retry, "retry_pause", retry_pause)
    return begun


def test_closing_ends_a_pause_between_attempts(server, paused):
    server.script["StatTrace"] = lambda _, c: fail(c, Overloaded("full", retry_after=30))
    # So long that another attempt is worth the pause, whatever its jitter.
    client = RouteClient(server.target, timeout=600)
    outcome = []

    def run():
        try:
            client.stat("a")
        except RouteTraceError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert paused.wait(GONE)
    client.close()
    thread.join(GONE)
    assert outcome == [Closed]


async def test_closing_ends_a_pause_between_attempts_of_a_task(server, paused):
    server.script["StatTrace"] = lambda _, c: fail(c, Overloaded("full", retry_after=300))
    client = AsyncRouteClient(server.target, timeout=6000)
    task = asyncio.create_task(client.stat("a"))
    assert await asyncio.to_thread(paused.wait, GONE)
    await client.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(task, GONE)


@pytest.mark.parametrize("call", ["get", "stat", "get_many"])
async def test_closing_ends_tasks(server, hanging, call):
    client = AsyncRouteClient(server.target, timeout=60)

    async def run():
        if call == "get_many":
            return [t async for t in client.get_many(["a", "b"])]
        return await getattr(client, call)("a")

    task = asyncio.create_task(run())
    assert await asyncio.to_thread(hanging.acquire, timeout=GONE)
    await client.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(task, GONE)


@pytest.mark.parametrize("call", ["get", "get_many"])
async def test_cancelling_a_task_cancels_the_call(server, call):
    started, gone = threading.Event(), threading.Event()

    def handler(request, context):
        context.add_callback(gone.set)
        started.set()
        gone.wait(GONE)
        return iter(())

    server.script["GetTrace"] = handler
    async with AsyncRouteClient(server.target, timeout=60) as client:

        async def run():
            if call == "get_many":
                return [t async for t in client.get_many(["a"])]
            return await client.get("a")

        task = asyncio.create_task(run())
        assert await asyncio.to_thread(started.wait, GONE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gone.wait, GONE)


def test_one_async_client_on_several_loops(server):
    source = truth(3)
    server.serve(source)
    client = AsyncRouteClient(server.target)
    for _ in range(3):
        assert_rows(asyncio.run(client.get("req")), source)
    asyncio.run(client.close())


async def test_many_tasks_share_a_client(server):
    sources = [truth(5, trace_id=f"r{i}", rng=random.Random(i)) for i in range(20)]
    server.serve(*sources)
    async with AsyncRouteClient(server.target) as client:
        traces = await asyncio.gather(
            *(client.get(s.info.trace_id, missing="mask") for s in sources)
        )
        for trace, source in zip(traces, sources, strict=True):
            assert_rows(trace, source)
        async with aclosing(client.get_many(["r0", "r1"], missing="mask")) as many:
            assert (await anext(many)).trace_id == "r0"


def test_many_threads_share_a_client(server):
    sources = [truth(5, trace_id=f"r{i}", rng=random.Random(i)) for i in range(20)]
    server.serve(*sources)
    wrong = []
    with RouteClient(server.target) as client:

        def run(source):
            try:
                assert_rows(client.get(source.info.trace_id, missing="mask"), source)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(s,)) for s in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


FORK = """
import asyncio, os, sys
from routetrace.client import AsyncRouteClient, RouteClient

target, parent_uses, child_uses = sys.argv[1:]

def use(kind, client):
    trace = client.get("req") if kind == "sync" else asyncio.run(client.get("req"))
    assert len(trace) == 12

def make(kind):
    return (RouteClient if kind == "sync" else AsyncRouteClient)(target, timeout=30)

client = make(parent_uses)
use(parent_uses, client)
if parent_uses == "async":
    asyncio.run(client.close())
if not (pid := os.fork()):
    if parent_uses == child_uses == "sync":
        assert "idle" in repr(client)
        use("sync", client)
        assert "open" in repr(client)
    use(child_uses, make(child_uses))
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
if parent_uses == "sync":
    use("sync", client)  # the child did not end its parent's connection
"""


@pytest.mark.parametrize("parent_uses", ["sync", "async"])
@pytest.mark.parametrize("child_uses", ["sync", "async"])
def test_a_forked_child_makes_its_own_connection(server, parent_uses, child_uses):
    server.serve(truth(12))
    subprocess.run(
        [sys.executable, "-c", FORK, server.target, parent_uses, child_uses],
        check=True,
        timeout=60,
    )


def test_asyncio_that_would_hang_after_a_fork_is_refused(server):
    server.serve(truth(12))
    code = """
    import asyncio, os, sys
    from routetrace.client import AsyncRouteClient
    from routetrace.common.errors import Unavailable

    async def main():
        client = AsyncRouteClient(sys.argv[1])
        await client.get("req")
        if not (pid := os.fork()):
            for child in (client, AsyncRouteClient(sys.argv[1])):
                try:
                    child.get("req").send(None)
                except Unavailable as error:
                    assert "fork" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        await client.get("req")
        await client.close()

    asyncio.run(main())
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), server.target], check=True, timeout=60
    )


def test_dead_clients_do_not_trouble_a_fork():
    code = """
    import gc, os
    from routetrace.client import RouteClient
    from routetrace.client._shells import fork as _fork
    for _ in range(5):
        RouteClient("127.0.0.1:1")
    gc.collect()
    assert not _fork._all
    if not (pid := os.fork()):
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


# ------------------------------------------------------------------ the surface


def _public(cls):
    return {
        name: member
        for name, member in vars(cls).items()
        if (callable(member) and not name.startswith("_")) or name == "__init__"
    }


def test_both_clients_are_the_same():
    sync, aio = _public(RouteClient), _public(AsyncRouteClient)
    assert list(sync) == list(aio)
    for name in sync:
        assert inspect.signature(sync[name]).parameters == inspect.signature(aio[name]).parameters
        assert sync[name].__doc__ == aio[name].__doc__, name
        returned = inspect.signature(sync[name]).return_annotation
        streams = "Generator" in returned or "Prefetch" in returned
        assert inspect.iscoroutinefunction(aio[name]) != (streams or name == "__init__"), name
        returns = [inspect.signature(f[name]).return_annotation for f in (sync, aio)]
        assert returns[0].replace(", None, None]", "]") == returns[1].replace("Async", "").replace(
            ", None]", "]"
        )
    # They differ in what they say of threads, loops and forks.
    docs = [c.__doc__.split("\n\n")[2:] for c in (RouteClient, AsyncRouteClient)]
    assert docs[0] == docs[1] != []


def test_public_names():
    assert list(_public(RouteClient)) == [
        "__init__",
        "close",
        "get",
        "get_many",
        "fetch",
        "prefetch",
        "follow",
        "get_blocks",
        "stat",
        "find",
        "bind",
        "delete",
        "forget_engine",
        "retire_through",
        "renew",
        "server_info",
        "agents",
    ]


def test_details_that_do_not_parse_do_not_hide_the_status():
    class Failed(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.NOT_FOUND

        def details(self):
            return "so"

        def trailing_metadata(self):
            return ((errors.ERROR_METADATA_KEY, b"\xff\xff"),)

    error = to_error(Failed())
    assert type(error) is NotFound
    assert "so" in error.message
