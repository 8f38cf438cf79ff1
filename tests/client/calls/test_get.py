"""RouteClient.get and AsyncRouteClient.get against a scripted server on a real socket."""

from __future__ import annotations

import random

import numpy as np
import pytest

from routetrace.client import ClientConfig, TraceState
from routetrace.common.errors import (
    Corrupt,
    Incomplete,
    InvalidArgument,
    NotFound,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import truth
from support.servers.scripted import INCOMPLETE, RUNNING, assert_rows


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
            prefix_rows=pb.PREFIX_ROWS_NEVER,
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
            prefix_rows="unique",
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
            prefix_rows=pb.PREFIX_ROWS_UNIQUE,
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
        """The agent was lost, or no engine went on: no known row is missing, the end is unknown."""
        facts = {"num_tokens": 0, "finish_reason": finish_reason}
        server.serve(truth(12, state=INCOMPLETE, **facts))
        for waiting in ({}, {"wait_for": "rows", "timeout": 0.1}):
            with pytest.raises(Incomplete, match="no reported end: rows from 12 on") as caught:
                client.get("req", **waiting)
            assert caught.value.missing == ()
        with pytest.raises(Incomplete, match="no reported end"):
            client.get("req", token_start=4)
        assert client.get("req", token_stop=12).coverage == 1.0
        trace = client.get("req", missing="mask")
        assert (len(trace), trace.coverage, trace.complete) == (12, 1.0, False)
        assert trace.finish_reason == (finish_reason or None)

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
        config = ClientConfig(target=server.target, max_message_bytes=10_000)
        with pytest.raises(InvalidArgument, match="max_message_bytes"):
            connect(None, config=config).get("req")

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
        ("get", ("a",), {"layer_ids": np.array(3)}, "layer_ids"),
        ("get", ("a",), {"layer_ids": list}, "layer_ids"),
        ("get", ("a",), {"layer_ids": 10**5000}, "layer_ids"),
        ("get", ("a",), {"token_start": 10**5000}, "token_start"),
        ("get", ("a",), {"missing": "ignore"}, "missing"),
        ("get", ("a",), {"policy": "newest"}, "policy"),
        ("get", ("a",), {"incarnation": 0}, "incarnation"),
        ("get", ("a",), {"timeout": 0}, "timeout"),
        ("get", ("a",), {"weight_version": "3"}, "weight_version"),
        ("get", ("a",), {"weight_version": 2**63}, "weight_version"),
        ("get", ("a",), {"weight_version": -(2**63)}, "weight_version"),
        ("get", ("a",), {"wait_for": "wait"}, "wait_for"),
        ("get", ("a",), {"token_ids": []}, "token_ids"),
        ("get", ("a",), {"token_ids": "abc"}, "token_ids"),
        ("get", ("a",), {"token_ids": [1, -2]}, "token_ids"),
        ("get", ("a",), {"token_ids": [[1, 2]]}, "token_ids"),
        ("get", ("a",), {"timeout": float("nan")}, "timeout"),
        ("follow", ("a",), {"timeout": -1}, "timeout"),
        ("follow", ("a",), {"layer_ids": []}, "layer_ids"),
        ("follow", ("a",), {"wait_for": "all"}, "wait_for"),
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
        ("delete", ("",), {}, "trace_ids"),
        ("retire_through", ("3",), {}, "weight_version"),
        ("retire_through", (-(2**63),), {}, "weight_version"),
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
        ("bind", ("e", "r", [1], 3), {"trace_id": ""}, "trace_id"),
        ("bind", ("e", "r", [1], 3), {"labels": {1: "b"}}, "labels"),
        ("bind", ("e", "r", [1], 3), {"token_ids": [[1], [2, 3]]}, "token_ids"),
        ("renew", ("abc",), {}, "trace_ids"),
        ("renew", (None,), {}, "trace_ids"),
        ("renew", (["a"],), {"ttl_seconds": -1}, "ttl_seconds"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(connect, method, args, kwargs, field):
    client = connect("127.0.0.1:1")
    with pytest.raises(InvalidArgument) as caught:
        getattr(client, method)(*args, **kwargs)
    named = "request_id" if (method, field) == ("get", "trace_id") else field
    assert caught.value.field.partition("[")[0] == named
    assert caught.value.expected
    assert isinstance(caught.value, ValueError)
    assert "idle" in repr(client)


@pytest.mark.parametrize(
    ("method", "args", "keyword", "said"),
    [
        ("get", ("a",), "wait", "did you mean 'wait_for'? "),
        ("get", ("a",), "tokens", "did you mean 'token_ids'? "),
        ("get", ("a",), "zzz", ""),
        ("get_many", (["a"],), "error", "did you mean 'errors'? "),
        ("get_many", (["a"],), "num_tokens", "did you mean 'token_stop'? "),
        ("fetch", ("a",), "outs", "did you mean 'out'? "),
        ("prefetch", (["a"],), "polcy", "did you mean 'policy'? "),
        ("follow", ("a",), "token_end", "did you mean 'token_stop'? "),
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
