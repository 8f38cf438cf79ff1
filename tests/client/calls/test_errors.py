"""Errors of calls, and calls that are made again."""

from __future__ import annotations

import random
import threading

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client._core.retry import retry_pause
from routetrace.common import errors
from routetrace.common.errors import (
    Corrupt,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.testing import free_ports
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import ScriptedServer, fail, truth
from support.servers.scripted import GONE, assert_rows
from support.waiting import wait_for, with_time


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
    words = "no answer from " if kind is DeadlineExceeded else f"{code.name}: so"
    with pytest.raises(kind, match=words) as caught:
        client.stat("req")
    assert type(caught.value) is kind
    assert server.counts["StatTrace"] == 1


def test_a_call_that_the_server_cancelled_is_named_in_words(client, server):
    # As gRPC ends calls that a server which stops has not begun.
    # A bind is not sent again, so that no other attempt has the last word.
    failing(server, "BindRequest", status(grpc.StatusCode.CANCELLED, "CANCELLED"), then=None)
    with pytest.raises(Unavailable) as caught:
        client.bind("engine", "req", [0], 1)
    said = f"{server.target} cancelled the call: the server stopped, or had too many calls"
    assert str(caught.value) == said


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

    def test_a_port_without_a_server(self, connect):
        with pytest.raises(Unavailable) as caught:
            connect("127.0.0.1:1", timeout=1).get("req")
        assert isinstance(caught.value.__cause__, grpc.RpcError)
        assert caught.value.target == "127.0.0.1:1"
        assert caught.value.attempts > 1

    def test_a_server_that_drains(self, client, server):
        error = Unavailable("it stops", retry_after=0)
        failing(server, "StatTrace", lambda context: fail(context, error), then=None)
        with pytest.raises(Unavailable) as caught:
            client.stat("req")
        assert (caught.value.target, caught.value.attempts) == (server.target, 1)

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

    def test_time_that_runs_out_hides_no_earlier_failure(self, client, server):
        release = threading.Event()

        def hang(request, context):
            release.wait(GONE)

        failing(server, "StatTrace", status(grpc.StatusCode.UNAVAILABLE, "cut"), then=hang)

        def late(seconds: float) -> DeadlineExceeded:
            with pytest.raises(DeadlineExceeded) as caught:
                client.stat("req", timeout=seconds)
            if caught.value.earlier is None:  # not even the first attempt had its answer
                raise caught.value
            return caught.value

        try:
            error = with_time(late, 0.5)
        finally:
            release.set()
        assert "an earlier attempt failed: " in str(error)
        assert "cut" in str(error)
        assert "cut" in str(error.earlier)

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
        assert 0.75 * retry_after <= pause <= left / 2
        assert pause <= 1.25 * max(2.0, retry_after)
        later = retry_pause(error, attempt + 1, 1000, jitter)
        assert later is not None
        assert later >= pause
    else:
        assert left < 2 * retry_after


@given(st.floats(0.01, 10), st.floats(0, 100), st.floats(0, 0.999))
def test_attempts_go_on_until_no_other_one_fits(retry_after, seconds, jitter):
    """The log line says for how long: with 4 s, the last attempt was after 1.5 to 2.7."""
    error, left, attempts = Unavailable("x", retry_after=retry_after), seconds, 1
    while (pause := retry_pause(error, attempts, left, jitter)) is not None:
        left, attempts = left - pause, attempts + 1
    assert left < 2 * retry_after
    assert attempts < 10 + seconds / (0.75 * min(2.0, retry_after))
