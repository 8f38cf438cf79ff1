"""stat, list, blocks, bind, renew and delete."""

from __future__ import annotations

import numpy as np
import pytest

from routetrace.client import TraceState
from routetrace.client.alignment import compare_tokens
from routetrace.codec.records import token_digests
from routetrace.common.errors import (
    Incomplete,
    InvalidArgument,
    NotFound,
)
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, fail, truth
from support.servers.scripted import RUNNING, assert_rows


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


def test_facts_print_as_one_line(client, server):
    info = truth(12, incarnation=2, num_incarnations=3).info
    server.script["StatTrace"] = lambda request, context: pb.StatTraceResponse(info=info)
    found = client.stat("req")
    assert repr(found) == "<TraceStat 'req' complete: 12 rows, incarnation 2 of 3>"


@pytest.mark.parametrize(("limit", "calls"), [(1, 1), (3, 1), (4, 2), (7, 3), (9, 3), (5000, 3)])
def test_at_most_so_many_are_found(client, server, limit, calls):
    infos = [truth(i, trace_id=f"r{i}").info for i in range(7)]

    def handler(request, context):
        at = int(request.page_token or 0)
        more = at + 3 < len(infos)
        return pb.ListTracesResponse(
            traces=infos[at : at + 3], next_page_token=str(at + 3) if more else ""
        )

    server.script["ListTraces"] = handler
    found = list(client.find(limit=limit))
    assert [s.trace_id for s in found] == [f"r{i}" for i in range(7)][:limit]
    assert server.counts["ListTraces"] == calls
    assert server.requests[0][1].page_size == min(limit, 1000)
    for wrong in (0, -1, "3", True):
        with pytest.raises(InvalidArgument, match="limit is"):
            client.find(limit=wrong)


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
    assert client.delete("req") == 1
    assert client.retire_through(-3) == (4, 0)
    assert client.renew(["a", "b"], ttl_seconds=60) == 2
    assert [r for _, r in server.requests] == [
        pb.DeleteTraceRequest(run="default", trace_id="req"),
        pb.RetireTracesRequest(run="default", through_weight_version=-3),
        pb.RenewLeaseRequest(run="default", trace_ids=["a", "b"], ttl_seconds=60),
    ]


def test_many_are_deleted_in_their_order(client, server):
    def handler(request, context):
        if request.trace_id == "gone":
            fail(context, NotFound("no such trace"))
        return pb.DeleteTraceResponse()

    server.script["DeleteTrace"] = handler
    assert client.delete("a", "gone", "b", missing_ok=True) == 2
    with pytest.raises(NotFound):
        client.delete("c", "gone", "d")
    assert [r.trace_id for _, r in server.requests] == ["a", "gone", "b", "c", "gone"]
    for wrong in ((), ("a", ""), (["a", "b"],)):
        with pytest.raises(InvalidArgument, match="trace_ids"):
            client.delete(*wrong)
    with pytest.raises(InvalidArgument, match=r"missing_ok is 1 \(int\); expected bool"):
        client.delete("a", missing_ok=1)
    assert server.counts["DeleteTrace"] == 5
