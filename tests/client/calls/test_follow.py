"""Followers of a request that runs."""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest

from routetrace.client import TraceState
from routetrace.common.errors import (
    Corrupt,
    DeadlineExceeded,
    Incomplete,
    Unavailable,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import Truth, truth
from support.servers.scripted import GONE, INCOMPLETE, RUNNING


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
            prefix_rows=pb.PREFIX_ROWS_NEVER,
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
            with pytest.raises(Incomplete, match="no reported end: rows from 6 on are unknown"):
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
