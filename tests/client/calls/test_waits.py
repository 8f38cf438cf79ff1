"""Reads that wait for a request's end, or for its rows."""

from __future__ import annotations

import re
import threading
import time

import grpc
import numpy as np
import pytest

from routetrace.client import TraceState
from routetrace.common.errors import (
    DeadlineExceeded,
    Incomplete,
    NotFound,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import fail, truth
from support.servers.scripted import GONE, INCOMPLETE, RUNNING, assert_rows


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
        with pytest.raises(DeadlineExceeded, match=r"did not end .* 0\.1 s \(12 rows") as caught:
            client.get("req", wait_for="end", timeout=0.1, missing=missing)
        assert (caught.value.trace_id, caught.value.waited_seconds) == ("req", 0.1)
        assert (caught.value.stat.num_rows, caught.value.stat.state) == (12, TraceState.RUNNING)
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
        with pytest.raises(
            DeadlineExceeded, match=r"'req' did not end .*: no such trace"
        ) as caught:
            client.get("req", wait_for="end", timeout=0.1)
        assert caught.value.stat is None
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
        with pytest.raises(Incomplete, match="has not ended: rows from 12 on are unknown"):
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
        with pytest.raises(Incomplete, match=r"\[0, 12\) of 3 layers 4..7: rejected"):
            client.get("req", wait_for="rows", timeout=0.1)

    def test_many(self, client, server):
        server.serve(truth(3, trace_id="a"), truth(3, trace_id="b", state=RUNNING))
        self.later(server, truth(5, trace_id="a"), truth(5, trace_id="b"))
        traces = list(client.get_many(["b", "a"], wait_for="rows"))
        assert [(t.trace_id, t.complete) for t in traces] == [("b", True), ("a", True)]

    @pytest.mark.parametrize("missing", ["raise", "mask"])
    @pytest.mark.parametrize(
        ("source", "asked", "lacking"),
        [
            (truth(12, state=RUNNING), {"token_stop": 15}, "[12, 15)"),
            (truth(12, state=RUNNING), {}, "[12, end)"),
            (truth(12, state=RUNNING, holes=[(3, 5)]), {}, "[3, end)"),
        ],
    )
    def test_they_do_not_come_in_time(self, client, server, source, asked, lacking, missing):
        """A wait that runs out is a DeadlineExceeded, with a mask too: rows may still come."""
        server.serve(source)
        words = re.escape(f"rows {lacking} of trace 'req' did not arrive within 0.2 s")
        with pytest.raises(DeadlineExceeded, match=words) as caught:
            client.get("req", wait_for="rows", timeout=0.2, missing=missing, **asked)
        assert caught.value.stat.num_rows == 12
        # On a slow machine the first call may be over before it gets anywhere.
        kinds = [r.wait_for for _, r in server.requests]
        assert kinds in ([pb.WAIT_FOR_UNSPECIFIED], [pb.WAIT_FOR_ROWS, pb.WAIT_FOR_UNSPECIFIED])

    @pytest.mark.parametrize(
        ("source", "asked", "reason"),
        [
            (truth(12, holes=[(3, 5)]), {}, r"is incomplete; missing positions \[3, 5\)"),
            (truth(12), {"weight_version": 3}, r"rows \[0, 12\) of .* were computed by .*, not 3"),
            (truth(12, state=INCOMPLETE, num_tokens=0), {}, "no reported end: rows from 12 on"),
            # It runs, but those were rejected.
            (truth(12, state=RUNNING, holes=[(3, 5)]), {"token_stop": 12}, r"positions \[3, 5\)"),
            (truth(12, state=RUNNING, holes=[(3, 5)], num_tokens=13), {}, r"positions \[3, 5\)"),
        ],
    )
    def test_they_cannot_come(self, client, server, source, asked, reason):
        server.serve(source)
        with pytest.raises(Incomplete, match=reason) as caught:
            client.get("req", wait_for="rows", timeout=0.2, **asked)
        assert caught.value.missing or caught.value.unknown_from == 12
        assert client.get("req", wait_for="rows", timeout=0.2, missing="mask", **asked)

    def test_they_have_as_long_as_the_call(self, connect, server):
        server.serve(truth(12, state=RUNNING))
        client = connect(server.target, timeout=600)
        with pytest.raises(DeadlineExceeded, match=r"rows \[12, end\) .* within 1 s"):
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
        with pytest.raises(DeadlineExceeded, match=r"'req' did not begin within 0\.1 s: "):
            client.get("req", wait_for="rows", timeout=0.1)

    def test_rows_that_are_lost_while_they_are_sent(self, client, server):
        """No use in waiting for those."""
        source = truth(12, holes=[(3, 5)])
        server.script["GetTrace"] = lambda request, context: iter(source.responses())
        with pytest.raises(Incomplete, match=r"\[3, 5\)") as caught:
            client.get("req", wait_for="rows")
        assert "waited" not in str(caught.value)
        assert server.counts["GetTrace"] == 1
