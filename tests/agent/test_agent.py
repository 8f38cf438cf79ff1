"""CaptureAgent against a server that records: all that is reported arrives."""

from __future__ import annotations

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.codec.records import UNKNOWN_VERSION, FinishReason, TokenDigest
from routetrace.common.errors import (
    InvalidArgument,
)
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.checked import BIG, FULL, MODES, assert_kept, config_for, make_rows


@MODES
def test_a_request_from_begin_to_finish(server, mode):
    rows = make_rows(700)
    tokens = np.arange(1000, 1701)
    config = config_for(
        server, background=mode, block_size=16, num_blocks=64, run="r", shard="pp0", boot_id="boot"
    )
    with CaptureAgent(config) as agent:
        agent.set_weight_version(-7)
        handle = agent.begin(
            "a",
            trace_id="t",
            prompt_len=600,
            labels={"group": "g", "adapter": "math"},
            ttl_seconds=9,
            block_ids=range(38),
            prompt_token_ids=tokens[:600],
        )
        agent.step(rows[:600].astype(np.int64), [(handle, 0, 600)])
        agent.set_weight_version(1 << 40)
        agent.add_blocks(handle, np.arange(38, 45))
        for p in range(600, 700):
            agent.step(rows[p : p + 1], np.array([[handle, p, 1]]))
        agent.finish(handle, 701, reason="length", token_ids=tokens)
        # The name is free again at once.
        assert agent.begin("a") != handle
        assert agent.flush(20)
        assert_kept(agent.stats())
        assert agent.stats().acknowledged_rows == server.rows == 700
        assert agent.stats().chunks == len(server.chunks)
        report = agent.close()
    assert (report.acknowledged_rows, report.dropped_rows, report.unsent_rows) == (700, {}, 0)
    hello = server.hello
    assert (hello.run, hello.engine_id, hello.shard, hello.boot_id) == ("r", "e0", "pp0", "boot")
    request, again = server.model.requests
    assert [request.row(p) for p in range(701)] == [*(r.tobytes() for r in rows), None]
    versions = [request.attempts[0].rows[p][1] for p in range(700)]
    assert versions == [-7] * 600 + [1 << 40] * 100
    assert request.facts == pb.RequestBegin(
        trace_id="t", prompt_len=600, labels={"group": "g", "adapter": "math"}, ttl_seconds=9
    )
    assert (request.num_tokens, request.reason) == (701, FinishReason.LENGTH)
    assert request.digests[600] == TokenDigest("math").update(tokens[:600])
    assert set(request.digests) == {*range(64, 701, 64), 600, 701}
    assert (request.index, again.index) == (0, 1)
    assert (again.request_id, again.lost) == ("a", [(0, 0, pb.MISSING_REASON_AGENT_LOST)])


@MODES
def test_slots_and_events_of_the_engine(server, mode):
    rows = make_rows(50)
    config = config_for(server, background=mode, block_size=4, num_blocks=16)
    with CaptureAgent(config) as agent:
        agent.step_slots(rows[:40], np.arange(40))
        agent.mark_external([1, 2])
        agent.step_slots(rows[40:], np.arange(10, 20, dtype=np.uint8))
        assert agent.flush(20)
        assert_kept(agent.stats())
        known = {s: row.tobytes() for s, row in enumerate(rows[:40]) if not 4 <= s < 12}
        known.update((s, row.tobytes()) for s, row in enumerate(rows[40:], 10))
        assert {s: row for s, (row, _) in server.model.slots.items()} == known
        agent.reset_prefix_cache()
        assert agent.flush(20)
        assert server.model.slots == {}


@MODES
def test_a_step_that_is_skipped_is_missing_and_its_slots_are_unknown(server, mode):
    rows = make_rows(30)
    config = config_for(server, background=mode, block_size=4, num_blocks=16)
    with CaptureAgent(config) as agent:
        before = agent.begin("before", block_ids=[3, 4])
        agent.step(rows[:8], [(before, 0, 8)])
        agent.finish(before, 9)
        handle = agent.begin("a", prompt_len=4, block_ids=[1, 2, 3])
        assert agent.step(rows[8:12], [(handle, 0, 4)]) == 2
        assert agent.skip([(handle, 4, 3), (handle, 7, 1)]) == 3
        assert agent.skip([(before, 9, 1)]) == 4  # late: it has ended
        assert agent.skip([]) == 0
        assert agent.step(rows[12:14], [(handle, 8, 2)]) == 5
        with pytest.raises(InvalidArgument):
            agent.skip([(handle, -1, 1)])
        agent.finish(handle, 11)
        assert agent.flush(20)
        assert_kept(agent.stats())
        assert agent.stats().offered_rows == 14
    _, request = server.model.requests
    kept = [request.row(p) for p in range(10)]
    assert kept == [r.tobytes() for r in rows[8:12]] + [None] * 4 + [
        r.tobytes() for r in rows[12:14]
    ]
    lost = [(a, n, why) for a, n, why in request.lost if n]
    assert sum(n for _, n, _ in lost) == 4
    assert {why for _, _, why in lost} == {pb.MISSING_REASON_NOT_CAPTURED}
    # Slots 12, 13 hold the new rows; those of block 2, which was skipped, hold nothing.
    assert set(server.model.slots) == {4, 5, 6, 7, 12, 13, 16, 17, 18, 19}


def test_rows_that_no_router_chose_are_missing_and_never_data(server):
    rows = make_rows(20).astype(np.int32)
    rows[3, 1, 0] = -1  # not captured
    rows[4, 2, 2] = 300  # out of range, and fits the narrow dtype
    rows[5, 0, 0] = 1 << 20  # out of range, and does not
    rows[6, 0, :] = 0
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("r")
        agent.step(rows, [(handle, 0, 20)])
        agent.step(rows.astype(np.uint16), [(handle, 20, 20)])
        agent.finish(handle, 41)
        assert agent.flush(20)
        # Cut to 16 bits, -1 and 1 << 20 look like 65535 and 0; the first is found all the same.
        second = {p + 20 for p in (3, 4, 6)}
        request = server.model.requests[0]
        lost = request.lost_positions(pb.MISSING_REASON_INVALID_IDS)
        assert {3, 4, 5, 6} | second <= lost <= {3, 4, 5, 6, 25} | second
        assert set(request.attempts[0].rows) == set(range(40)) - lost
        assert_kept(agent.stats(), invalid_ids=len(lost))


@pytest.mark.parametrize("num_experts", [256, 65536])
def test_a_top_1_that_has_no_id_to_spare_loses_its_bad_rows_alone(server, num_experts):
    layout = ModelLayout((0,), 1, num_experts, 1)
    rows = np.arange(10).reshape(10, 1, 1)
    config = config_for(server, layout, block_size=4, num_blocks=16)
    with CaptureAgent(config) as agent:
        handle, other = agent.begin("r", prompt_len=20), agent.begin("other", prompt_len=10)
        agent.step(rows, [(handle, 0, 10)])
        bad = np.where((rows == 5) | (rows == 6), -1, rows)
        bad[9] = num_experts
        agent.step(np.concatenate([rows, bad]), [(other, 0, 10), (handle, 10, 10)])
        agent.step(rows[:2], [(other, 10, 1), (handle, 20, 1)])
        agent.step_slots(rows, np.arange(10))
        agent.step_slots(np.where(rows == 5, -1, rows), np.arange(4, 14))
        agent.step_slots(np.where(rows[4:6] == 5, -1, rows[4:6]), [0, 0])
        agent.step_slots(np.where(rows[5:7] == 5, -1, rows[5:7]), [1, 1])
        agent.finish(handle, 22)
        agent.finish(other, 12)
        assert agent.flush(20)
        request, whole = server.model.requests
        assert set(request.attempts[0].rows) == {*range(21)} - {15, 16, 19}
        assert request.lost_positions(pb.MISSING_REASON_INVALID_IDS) == {15, 16, 19}
        assert set(whole.attempts[0].rows) == set(range(11))
        assert not whole.lost
        assert set(server.model.slots) == {*range(1, 14)} - {9}
        assert server.model.slots[1] == (rows[6].astype(layout.dtype).tobytes(), UNKNOWN_VERSION)
        assert_kept(agent.stats(), invalid_ids=6)


@MODES
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, ">i4"])
def test_steps_that_go_on_from_the_last_one(server, mode, dtype):
    """Whatever comes in between; the engine uses its arrays again."""
    whole = make_rows(600).reshape(3, 200, 3, 3)
    bad = {(0, 77), (1, 30)}
    with CaptureAgent(config_for(server, background=mode)) as agent:
        handles = [agent.begin(name, prompt_len=3) for name in "abc"]
        spans = np.array([[handle, 0, 1] for handle in handles])
        rows = np.zeros((3, 3, 3), dtype)
        for p in range(120):
            rows[:] = whole[:, p]
            for i, q in bad:
                if p == q:
                    rows[i, 1] = 300 if i else rows[i, 0, 0]
            if p == 20:
                agent.set_weight_version(5)
            if p == 40:
                agent.begin("other")
            if p == 60:  # in order of other requests, and a view
                agent.step(rows[::-1], spans[::-1])
            elif p == 61:
                agent.step(np.asfortranarray(rows), spans)
            elif p == 62:
                agent.skip(spans)
            else:
                assert agent.step(rows, spans) == p + 1
            if p == 90:
                agent.finish(handles[2], 92)  # its rows are late from now on
            if p % 30 == 5:
                with pytest.raises(InvalidArgument):
                    agent.step(rows, spans[:2])
            spans[:, 1] += 1
        for handle in handles[:2]:
            agent.finish(handle, 121)
        assert agent.flush(20)
        assert agent.stats().dropped_rows["late"] == 29
        assert agent.stats().in_flight_rows == 0
    for i, request in enumerate(server.model.requests[:3]):
        kept = request.attempts[0].rows
        missing = {q for j, q in bad if i == j} | {62}
        assert set(kept) == set(range(120 if i < 2 else 91)) - missing
        assert all(data == whole[i, p].tobytes() for p, (data, _) in kept.items())
        assert {version for p, (_, version) in kept.items() if p >= 20} == {5}


def test_a_step_larger_than_the_ring_is_cut(server):
    config = config_for(server, BIG, ring_bytes=1 << 20, block_size=16, num_blocks=1024)
    rows = make_rows(4000, BIG)
    spans = np.zeros((3, 3), np.int64)
    with CaptureAgent(config) as agent:
        handles = [agent.begin(f"r{i}") for i in range(3)]
        spans[:] = [(handles[0], 0, 100), (handles[1], 7, 3800), (handles[2], 0, 100)]
        while agent.stats().acknowledged_rows + agent.stats().in_flight_rows == 0:
            agent.step(rows, spans)
        agent.flush(20)
    one = server.model.requests[1]
    kept = {p: row[0] for p, row in one.attempts[0].rows.items()}
    assert kept == {p: rows[93 + p].tobytes() for p in kept}
    assert set(kept) | one.lost_positions(FULL) == set(range(7, 3807))
    assert len(kept) > 1000


def test_drafts_that_the_ring_cuts_off_are_drafts_of_the_same_step(server):
    with CaptureAgent(config_for(server, BIG, ring_bytes=1 << 20)) as agent:
        other, handle = agent.begin("other"), agent.begin("r", prompt_len=100)
        agent.step(make_rows(100, BIG), [(handle, 0, 100)])
        assert agent.flush(20)
        n = agent._feed.room(3 * 2 * 8) - 3
        agent.step(make_rows(n + 6, BIG), [(other, 0, n), (handle, 100, 6)])
        assert agent.flush(20)
        request = server.model.request("r")
        assert (len(request.attempts[0].rows), request.drafts) == (106, 101)
        agent.step(make_rows(1, BIG), [(handle, 106, 1)])
        assert agent.flush(20)
        assert len(request.served()) == 107
