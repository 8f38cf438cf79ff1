"""The capture agent against a strict ingest service: what arrives, and what is counted."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, AgentStats, CaptureAgent, link
from routetrace.capture_agent.transport import sender, stream
from routetrace.capture_agent.worker import Worker
from routetrace.codec.records import OP, FinishReason, OpKind, TokenDigest
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    Closed,
    Fenced,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from routetrace.common.layout import RoutingLayout
from routetrace.server.testing import run_server
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.routetrace_pb2_grpc import (
    IngestServiceServicer,
    add_IngestServiceServicer_to_server,
)
from support.servers.ingest_server import IngestServer
from support.shared_names import left_behind, shared_names
from support.waiting import keeps_to, wait_for

LAYOUT = RoutingLayout((1, 2, 4), 6, 300, 3)
BIG = RoutingLayout(tuple(range(40)), 40, 256, 8)  # 320 bytes a row
MODES = pytest.mark.parametrize("mode", ["thread", "process"])
FULL = pb.MISSING_REASON_QUEUE_FULL


@pytest.fixture
def server():
    with IngestServer() as ingest:
        yield ingest


def config_for(server: IngestServer, layout: RoutingLayout = LAYOUT, **settings) -> AgentConfig:
    settings = {"mode": "thread", "linger_s": 0.02, "flush_interval_s": 0.01, **settings}
    return AgentConfig(server.target, "e0", layout, **settings)


def make_rows(n: int, layout: RoutingLayout = LAYOUT, seed: int = 0) -> np.ndarray:
    first = np.random.default_rng(seed).integers(0, layout.num_experts, (n, len(layout.layer_ids)))
    ids = first[:, :, None] + 31 * np.arange(layout.top_k)
    return (ids % layout.num_experts).astype(layout.dtype)


def assert_kept(stats: AgentStats, **dropped: int) -> None:
    """Law 12, with nothing in flight and nothing dropped but that."""
    assert stats.in_flight_rows == 0
    assert stats.dropped_rows == dropped
    assert stats.offered_rows == stats.acknowledged_rows + sum(dropped.values())


# ---------------------------------------------------------------------- what arrives


@MODES
def test_a_request_from_begin_to_finish(server, mode):
    rows = make_rows(700)
    tokens = np.arange(1000, 1701)
    config = config_for(
        server, mode=mode, block_size=16, num_blocks=64, run="r", shard="pp0", boot_id="boot"
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
        agent.finish(handle, 701, "length", tokens)
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
    config = config_for(server, mode=mode, block_size=4, num_blocks=16)
    with CaptureAgent(config) as agent:
        agent.step_slots(rows[:40], np.arange(40))
        agent.external([1, 2])
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
    config = config_for(server, mode=mode, block_size=4, num_blocks=16)
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
    layout = RoutingLayout((0,), 1, num_experts, 1)
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
        assert server.model.slots[1] == (rows[6].astype(layout.dtype).tobytes(), 0)
        assert_kept(agent.stats(), invalid_ids=6)


@MODES
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, ">i4"])
def test_steps_that_go_on_from_the_last_one(server, mode, dtype):
    """Whatever comes in between; the engine uses its arrays again."""
    whole = make_rows(600).reshape(3, 200, 3, 3)
    bad = {(0, 77), (1, 30)}
    with CaptureAgent(config_for(server, mode=mode)) as agent:
        handles = [agent.begin(name, prompt_len=3) for name in "abc"]
        runs = np.array([[handle, 0, 1] for handle in handles])
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
                agent.step(rows[::-1], runs[::-1])
            elif p == 61:
                agent.step(np.asfortranarray(rows), runs)
            elif p == 62:
                agent.skip(runs)
            else:
                assert agent.step(rows, runs) == p + 1
            if p == 90:
                agent.finish(handles[2], 92)  # its rows are late from now on
            if p % 30 == 5:
                with pytest.raises(InvalidArgument):
                    agent.step(rows, runs[:2])
            runs[:, 1] += 1
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
    runs = np.zeros((3, 3), np.int64)
    with CaptureAgent(config) as agent:
        handles = [agent.begin(f"r{i}") for i in range(3)]
        runs[:] = [(handles[0], 0, 100), (handles[1], 7, 3800), (handles[2], 0, 100)]
        while agent.stats().acknowledged_rows + agent.stats().in_flight_rows == 0:
            agent.step(rows, runs)
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


# ---------------------------------------------------------------------- arguments


@pytest.fixture(scope="module")
def idle_agent():
    """An agent whose server is not there, with a request under way."""
    config = AgentConfig("127.0.0.1:1", "e", LAYOUT, mode="thread", block_size=4, num_blocks=8)
    agent = CaptureAgent(config)
    agent.running = agent.begin("running")
    yield agent
    agent.close(0)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 513}),
        ("request_id", {"request_id": 7}),
        ("request_id", {"request_id": "running"}),
        ("trace_id", {"trace_id": "x" * 513}),
        ("prompt_len", {"prompt_len": -1}),
        ("ttl_seconds", {"ttl_seconds": 1 << 32}),
        ("labels", {"labels": {"": "x"}}),
        ("labels", {"labels": {"a": 1}}),
        ("labels", {"labels": {str(i): "" for i in range(65)}}),
        ("labels", {"labels": {"a": "x" * 1024}}),
        ("block_ids", {"block_ids": [8]}),
        ("block_ids", {"block_ids": [-1]}),
        ("block_ids", {"block_ids": [0.5]}),
        ("num_computed_tokens", {"num_computed_tokens": 5, "block_ids": [1]}),
        ("num_computed_tokens", {"num_computed_tokens": -1}),
        ("num_external_tokens", {"num_external_tokens": -1}),
        (
            "num_external_tokens",
            {"num_external_tokens": 4, "num_computed_tokens": 3, "block_ids": [1]},
        ),
        ("request_id", {"request_id": b"x"}),
        ("prompt_len", {"prompt_len": True}),
        ("prompt_len", {"prompt_len": "3"}),
        ("ttl_seconds", {"ttl_seconds": "1h"}),
        ("labels", {"labels": ["a"]}),
        ("prompt_token_ids", {"prompt_len": 2, "prompt_token_ids": [1]}),
        ("prompt_token_ids", {"prompt_len": 0, "prompt_token_ids": [1]}),
        ("prompt_token_ids", {"prompt_token_ids": [[1]]}),
        ("prompt_token_ids", {"prompt_token_ids": 5}),
        ("prompt_token_ids", {"prompt_token_ids": [[1], [2, 3]]}),
        ("prompt_token_ids", {"prompt_token_ids": "abc"}),
        ("prompt_token_ids", {"prompt_len": 1, "prompt_token_ids": [-1]}),
        ("prompt_token_ids", {"prompt_len": 1, "prompt_token_ids": [1.5]}),
    ],
)
def test_begin_refuses(idle_agent, field, arguments):
    with pytest.raises(InvalidArgument) as caught:
        idle_agent.begin(**{"request_id": "new", **arguments})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("rows", lambda a, h: a.step(make_rows(2)[:, :2], [(h, 0, 2)])),
        ("rows", lambda a, h: a.step(make_rows(2)[0], [(h, 0, 3)])),
        ("rows", lambda a, h: a.step(make_rows(2).astype(float), [(h, 0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 0, 1)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 0, 2), (h, 2, 0)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 0, 3), (h, 2, -1)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, -1, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 1 << 31, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h + 99, 0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(0, 0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(-1, 0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 0, 1 << 62)] * 4 + [(h, 0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [(h, 0.0, 2)])),
        ("runs", lambda a, h: a.step(make_rows(2), [h, 0, 2])),
        ("runs", lambda a, h: a.step(make_rows(2), [])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0, 32])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0, -1])),
        ("handle", lambda a, h: a.finish(h + 99, 1)),
        ("handle", lambda a, h: a.rewind(-1, 1)),
        *(
            ("handle", partial(lambda call, wrong, a, _: call(a, wrong), call, wrong))
            for wrong in ("running", None, 1.0, [1])
            for call in (
                lambda a, h: a.finish(h, 1),
                lambda a, h: a.rewind(h, 1),
                lambda a, h: a.preempt(h, 1),
                lambda a, h: a.add_blocks(h, [1]),
                lambda a, h: a.resume(h, 0, []),
            )
        ),
        ("num_tokens", lambda a, h: a.finish(h, "5")),
        ("position", lambda a, h: a.rewind(h, 1.5)),
        ("version", lambda a, h: a.set_weight_version("3")),
        ("version", lambda a, h: a.set_weight_version(1.5)),
        ("version", lambda a, h: a.set_weight_version(True)),
        ("reason", lambda a, h: a.finish(h, 1, "tired")),
        ("num_tokens", lambda a, h: a.finish(h, -1)),
        ("token_ids", lambda a, h: a.finish(h, 2, "stop", [1])),
        ("position", lambda a, h: a.rewind(h, -1)),
        ("step", lambda a, h: a.rewind(h, 1, -1)),
        ("num_computed_tokens", lambda a, h: a.preempt(h, 1 << 40)),
        ("block_ids", lambda a, h: a.add_blocks(h, [9])),
        ("block_ids", lambda a, h: a.add_blocks(h, 1)),
        ("block_ids", lambda a, h: a.add_blocks_of([h, h], [1])),
        ("handle", lambda a, h: a.add_blocks_of([h, h + 99], [1, 2])),
        ("num_computed_tokens", lambda a, h: a.resume(h, 9, [1, 2])),
        ("num_external_tokens", lambda a, h: a.resume(h, 8, [1, 2], 9)),
        ("version", lambda a, h: a.set_weight_version(1 << 63)),
    ],
)
def test_calls_refuse(idle_agent, field, call):
    offered = idle_agent.stats().offered_rows
    with pytest.raises(InvalidArgument) as caught:
        call(idle_agent, idle_agent.running)
    assert caught.value.field == field
    assert idle_agent.stats().offered_rows == offered


def test_the_length_of_a_prompt_is_that_of_its_ids(server):
    with CaptureAgent(config_for(server)) as agent:
        agent.begin("counted", prompt_token_ids=range(70))
        agent.begin("empty", prompt_token_ids=[])
        agent.begin("given", prompt_len=3)
        agent.begin("unknown")
        assert agent.flush(20)
    assert [r.facts.prompt_len for r in server.model.requests] == [70, 0, 3, 0]


def test_each_agent_is_a_boot_of_its_own_unless_told(server):
    config = config_for(server)
    with CaptureAgent(config) as first, CaptureAgent(config) as second:
        ids = {first.config.boot_id, second.config.boot_id}
    assert len(ids) == 2
    assert all(ids)


def test_what_is_too_large_to_begin_did_not_begin(server):
    with CaptureAgent(config_for(server, ring_bytes=1 << 20)) as agent:
        with pytest.raises(InvalidArgument, match="ring_bytes"):
            agent.begin("r", prompt_len=200_000, prompt_token_ids=np.zeros(200_000, np.int64))
        agent.finish(agent.begin("r"), 1)
        assert agent.flush(20)
    assert [r.index for r in server.model.requests] == [0]


def test_a_handle_is_void_after_finish(idle_agent):
    old = idle_agent.begin("twice")
    idle_agent.finish(old, 0)
    new = idle_agent.begin("twice")
    for call in (
        lambda: idle_agent.finish(old, 1),
        lambda: idle_agent.preempt(old, 1),
        lambda: idle_agent.add_blocks(old, [1]),
    ):
        with pytest.raises(InvalidArgument):
            call()
    idle_agent.rewind(old, 0)  # which an asynchronous engine learns late
    idle_agent.finish(new, 0)


@MODES
def test_rows_that_come_late_are_dropped_and_counted(server, mode):
    rows = make_rows(40)
    with CaptureAgent(config_for(server, mode=mode)) as agent:
        a, b, c = (agent.begin(name) for name in "abc")
        assert agent.step(rows[:12], [(h, 0, 4) for h in (a, b, c)]) == 1
        agent.finish(a, 5)
        agent.preempt(b, 4)
        # What was on its way when the first ended and the second was preempted.
        assert agent.step(rows[12:17], [(a, 4, 1), (b, 4, 2), (c, 4, 2)]) == 2
        assert agent.step(rows[17:18], [(a, 5, 1)]) == 3
        again = agent.begin("a")
        agent.resume(b, 0, [])
        assert agent.step(rows[20:30], [(again, 0, 2), (b, 0, 6), (c, 6, 2)]) == 4
        # Learned late: the step after it took the place already. And of the last step: not so.
        agent.rewind(c, 5, step=2)
        agent.rewind(b, 5, step=4)
        with pytest.raises(InvalidArgument, match="expected handles that begin"):
            agent.step(rows[30:31], [(c + (1 << 20), 0, 1)])
        assert agent.flush(20)
        stats = agent.stats()
    assert stats.dropped_rows.pop("late") == 4
    assert set(stats.dropped_rows) <= {"rewound"}
    assert stats.offered_rows == stats.acknowledged_rows + 4 + sum(stats.dropped_rows.values())
    first, second, third, fourth = server.model.requests
    assert [len(first.attempts[0].rows), len(fourth.attempts[0].rows)] == [4, 2]
    assert [len(attempt.rows) for attempt in second.attempts] == [4, 5]
    assert third.row(7) == rows[29].tobytes()


def test_a_prefill_engine_hands_over(server):
    with CaptureAgent(config_for(server, block_size=4, num_blocks=8)) as agent:
        handle = agent.begin(
            "r", num_computed_tokens=12, num_external_tokens=8, block_ids=[0, 1, 2]
        )
        agent.preempt(handle, 12)
        agent.resume(handle, 8, [3, 4], num_external_tokens=8)
        agent.finish(handle, 13, "handoff")
        assert agent.flush(20)
    ops = [np.frombuffer(pb.ChunkHeader.FromString(c.header).ops, OP) for c in server.chunks]
    told = {OpKind(op["kind"]): (op["position"], op["count"]) for op in np.concatenate(ops)}
    assert told[OpKind.BEGIN] == (12, 8)
    assert told[OpKind.RESUME] == (8, 8)
    assert server.model.request("r").reason == FinishReason.HANDOFF


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("target", {"target": ""}),
        ("engine_id", {"engine_id": ""}),
        ("shard", {"shard": "x" * 600}),
        ("boot_id", {"shard": "pp0"}),
        ("boot_id", {"boot_id": "x" * 600}),
        ("mode", {"mode": "fork"}),
        ("num_blocks", {"block_size": 16}),
        ("block_size", {"block_size": (1 << 16) + 1, "num_blocks": 1}),
        ("num_blocks", {"block_size": 1 << 16, "num_blocks": (1 << 9) + 1}),
        ("queue_bytes", {"queue_bytes": "1MiB"}),
        ("queue_bytes", {"queue_bytes": True}),
        ("linger_s", {"linger_s": "1"}),
        ("linger_s", {"linger_s": True}),
        ("layout", {"layout": "qwen"}),
        ("frame_rows", {"frame_rows": 0}),
        ("queue_bytes", {"queue_bytes": 10}),
        ("linger_s", {"linger_s": -1}),
    ],
)
def test_settings_refuse(field, settings, monkeypatch):
    monkeypatch.delenv("ROUTETRACE_TARGET", raising=False)
    with pytest.raises(InvalidArgument) as caught:
        AgentConfig(**{"target": "h:1", "engine_id": "e", "layout": LAYOUT, **settings})
    assert caught.value.field == field


@pytest.mark.slow
def test_the_largest_engine_is_one_for_the_server_too():
    with run_server() as server:
        for number, (size, count) in enumerate([(1 << 16, 1 << 9), (1, 1 << 25)]):
            config = AgentConfig(
                server.target, f"e{number}", LAYOUT, block_size=size, num_blocks=count
            )
            with CaptureAgent(config) as agent:
                agent.finish(agent.begin("r"), 1)
                assert agent.flush(60)


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("ROUTETRACE_TARGET", "there:1")
    monkeypatch.delenv("ROUTETRACE_RUN", raising=False)
    assert AgentConfig("", "e", LAYOUT).target == "there:1"
    assert AgentConfig("here:1", "e", LAYOUT).target == "here:1"
    assert AgentConfig("", "e", LAYOUT).run == "default"
    monkeypatch.setenv("ROUTETRACE_RUN", "mine")
    config = AgentConfig("", "e", LAYOUT, attributes={"host": "h"})
    assert config.run == "mine"
    assert pickle.loads(pickle.dumps(config)) == config


# ---------------------------------------------------------------------- a server in trouble


def simulate(agent: CaptureAgent, seed: int, until=lambda sim: False) -> SmallEngine:
    """An engine with prefix caching, preemption and rejected drafts, until its work is done."""
    sim = SmallEngine(agent, LAYOUT, seed, num_blocks=24)
    for i in range(14):
        prompt = [sim.rng.randrange(3) for _ in range(sim.rng.randint(1, 14))]
        sim.submit(f"r{i}", prompt, sim.rng.randint(1, 10))
    while not until(sim) and sim.step():
        pass
    return sim


def assert_truth(server: IngestServer, sim: SmallEngine) -> None:
    assert {r.request_id for r in server.model.requests} == {r.name for r in sim.done}
    for request in sim.done:
        attempt = server.model.request(request.name).attempts[-1]
        rows = {**attempt.cached, **attempt.rows}
        truth = {
            p: entry and (entry[0].tobytes(), entry[1])
            for p, entry in request.attempts[-1].items()
            if p < len(request.tokens) - 1
        }
        assert rows == truth


def test_a_stream_that_breaks_again_and_again_loses_and_repeats_nothing(server):
    seen: list[int] = []

    def script(chunk: pb.Chunk):
        seen.append(chunk.sequence)
        if len(seen) % 3 == 0:
            return Unavailable("draining", retry_after=0.01)
        return pb.ErrorDetail(retry_after_ms=5) if len(seen) % 5 == 0 else None

    server.script = script
    config = config_for(server, block_size=4, num_blocks=24, flush_interval_s=0.001, linger_s=0)
    with CaptureAgent(config) as agent:
        sim = simulate(agent, 1, lambda sim: agent.flush(0.02) and False)
        assert agent.flush(20)
        stats = agent.stats()
    assert_kept(stats, **stats.dropped_rows)
    assert set(stats.dropped_rows) <= {"rewound"}
    assert stats.reconnects > 2
    assert len(seen) > len(server.chunks)
    assert_truth(server, sim)


def test_a_server_that_comes_late_and_goes_away(server):
    """Chunks that were stored but not acknowledged are not stored twice."""
    server.stop()
    config = config_for(server, block_size=4, num_blocks=24)
    with CaptureAgent(config) as agent:
        sim = simulate(agent, 2, lambda sim: len(sim.done) == 5)
        assert not agent.flush(0.05)
        assert agent.stats().in_flight_rows > 0
        server.start()
        assert agent.flush(20)
        server.stop()
        while sim.step():
            pass
        server.start()
        assert agent.flush(20)
        assert_truth(server, sim)
        assert agent.stats().in_flight_rows == 0


def test_a_server_that_lost_everything_is_told_who_lives(server):
    rows = make_rows(60)
    config = config_for(server, block_size=4, num_blocks=24, linger_s=0)
    with CaptureAgent(config) as agent:
        a = agent.begin("a", labels={"x": "y"}, prompt_len=20, block_ids=[0, 1])
        agent.add_blocks(a, [2, 3, 4])
        over = agent.begin("over")
        b = agent.begin("b", prompt_len=70, prompt_token_ids=range(70))
        agent.step(rows[:24], [(a, 0, 10), (b, 0, 10), (over, 0, 4)])
        agent.finish(over, 5)
        agent.preempt(b, 10)
        assert agent.flush(20)
        old = server.epoch
        server.stop()
        agent.add_blocks(a, [5])
        agent.step(rows[30:40], [(a, 10, 10)])
        c = agent.begin("c", num_computed_tokens=20, block_ids=[0, 1, 2, 3, 4])
        agent.step(rows[40:45], [(c, 20, 5)])
        server.forget()
        server.start()
        agent.resume(b, 0, [7, 8])
        agent.step(rows[50:60], [(b, 0, 10)])
        agent.finish(a, 21)
        assert agent.flush(20)
        assert_kept(agent.stats())
    assert server.epoch != old
    model = server.model
    assert [r.request_id for r in model.requests] == ["a", "b", "c"]
    again, resumed, fresh = model.requests
    assert again.facts.labels == {"x": "y"}
    assert again.lost == [(0, 10, pb.MISSING_REASON_AGENT_LOST)]
    assert {p: row[0] for p, row in again.attempts[0].rows.items()} == {
        p: rows[20 + p].tobytes() for p in range(10, 20)
    }
    assert (again.num_tokens, resumed.num_tokens) == (21, -1)
    # As the other shards of the engine know them.
    assert [r.index for r in model.requests] == [0, 2, 3]
    assert set(resumed.digests) == {64, 70}
    # What it reuses of a was computed before, and after.
    assert [fresh.row(p) is not None for p in range(25)] == [False] * 10 + [True] * 15
    assert [resumed.row(p) for p in range(10)] == [r.tobytes() for r in rows[50:60]]


def test_a_server_whose_store_went_back_in_time(server):
    """As one that acknowledges from memory: what it forgot is gone, and what follows is not."""
    rows = make_rows(30)
    with CaptureAgent(config_for(server, linger_s=0)) as agent:
        handle = agent.begin("a")
        for p in range(0, 20, 10):
            agent.step(rows[p : p + 10], [(handle, p, 10)])
            assert agent.flush(20)
        server.stop()
        with server.changed:
            server.chunks.pop()
            server.next_sequence -= 1
        server.start()
        agent.step(rows[20:30], [(handle, 20, 10)])
        assert agent.flush(20)
    request = server.model.request("a")
    assert set(request.attempts[0].rows) == set(range(20, 30))
    assert (0, 20, pb.MISSING_REASON_AGENT_LOST) in request.lost


def test_a_refused_chunk_is_replaced_by_one_without_rows(server):
    rows = make_rows(30)
    refused: list[int] = []

    def script(chunk: pb.Chunk):
        if chunk.payload and not refused:
            refused.append(chunk.sequence)
            return pb.ErrorDetail(kind=pb.ERROR_KIND_INVALID_ARGUMENT, message="do not like it")
        return None

    server.script = script
    config = config_for(server, block_size=4, num_blocks=24)
    with CaptureAgent(config) as agent:
        handle = agent.begin("a", block_ids=[0, 1, 2, 3])
        agent.step(rows[:10], [(handle, 0, 10)])
        agent.step_slots(rows[10:20], np.arange(40, 50))
        assert agent.flush(20)
        agent.step(rows[20:], [(handle, 10, 10)])
        agent.finish(handle, 21)
        assert agent.flush(20)
        assert refused
        assert_kept(agent.stats(), rejected=20)
    request = server.model.request("a")
    assert request.lost_positions(pb.MISSING_REASON_REJECTED) == set(range(10))
    assert set(request.attempts[0].rows) == set(range(10, 20))
    assert set(server.model.slots) == {10, 11, 12, 13, 14, 15} & set(server.model.slots)


def test_a_server_that_refuses_everything_ends_the_agent(server):
    server.script = lambda chunk: pb.ErrorDetail(kind=pb.ERROR_KIND_INVALID_ARGUMENT)

    def close() -> float:
        with CaptureAgent(config_for(server)) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            assert not agent.flush(20)
            agent.step(make_rows(10), [(handle, 10, 10)])
            assert_kept(agent.stats(), rejected=20)
            started = time.monotonic()
            assert agent.close().dropped_rows == {"rejected": 20}
            return time.monotonic() - started

    keeps_to(5, close)


@pytest.mark.parametrize("silent", ["twice", "one of two"])
def test_a_server_that_does_not_answer_the_hello_is_called_again(
    silent, server, monkeypatch, caplog
):
    monkeypatch.setattr(stream, "WELCOME_S", 0.3)
    held = threading.Event()
    hellos: list[str] = []

    def admit(hello, _):
        hellos.append(hello.engine_id)
        if silent == "one of two" or len(hellos) < 3:
            held.wait(60)

    server.admit = admit
    with IngestServer() as other:
        targets = server.target + (f",{other.target}" if silent == "one of two" else "")
        config = replace(config_for(server), target=targets)
        with CaptureAgent(config) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            agent.finish(handle, 11)
            assert agent.flush(30)
            assert_kept(agent.stats())
        held.set()
        model = (other if silent == "one of two" else server).model
        assert set(model.request("a").attempts[0].rows) == set(range(10))
        assert len(hellos) == (1 if silent == "one of two" else 3)
        assert caplog.text.count("no answer from") == 1
    server.stop()


def test_an_overloaded_server_gets_the_same_chunks_later(server):
    tries: list[bytes] = []

    def script(chunk: pb.Chunk):
        tries.append(chunk.SerializeToString())
        busy = Overloaded("busy", retry_after=0.02).to_detail()
        return busy if len(tries) < 4 else None

    server.script = script
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
        assert agent.flush(20)
        assert_kept(agent.stats())
    assert len(set(tries[:4])) == 1


@MODES
def test_a_newer_epoch_ends_the_agent(server, mode):
    with CaptureAgent(config_for(server, mode=mode)) as agent:
        handle = agent.begin("a")
        agent.step(make_rows(10), [(handle, 0, 10)])
        assert agent.flush(20)
        server.script = lambda chunk: Fenced(field="epoch", value=1, expected="2")
        agent.step(make_rows(10), [(handle, 10, 10)])
        assert not agent.flush(20)
        agent.step(make_rows(10), [(handle, 20, 10)])
        agent.finish(handle, 31)
        assert_kept(agent.stats(), fenced=20)
        report = agent.close()
    assert (report.acknowledged_rows, report.dropped_rows) == (10, {"fenced": 20})


@MODES
@pytest.mark.parametrize("waits", [True, False])
def test_an_agent_sends_after_the_end_of_the_one_that_it_replaces(server, mode, waits):
    """Else the older agent, where it connects last, would end the newer one."""
    refused: list[str] = []

    def admit(hello: pb.Hello, _):
        if hello.boot_id != "before" or len(refused) == 5:
            return None
        refused.append(hello.boot_id)
        return Overloaded("busy", retry_after=0.01)

    server.admit = admit
    senders: list[str] = []
    server.script = lambda chunk: senders.append(server.hello.boot_id)
    agents: list[CaptureAgent] = []
    for name in ("before", "after"):
        config = config_for(server, mode=mode, boot_id=name, close_timeout_s=60)
        agents.append(CaptureAgent(config, predecessor=agents[0] if agents else None))
        handle = agents[-1].begin(name)
        agents[-1].step(make_rows(10), [(handle, 0, 10)])
        agents[-1].finish(handle, 11)
    if waits:
        assert agents[1].flush(60)
    reports = [agent.close() for agent in reversed(agents)]
    rows = [(report.acknowledged_rows, report.dropped_rows) for report in reports]
    assert rows == [(10, {}), (10, {})]
    assert senders == ["before", "after"]
    assert (len(refused), server.welcomes) == (5, 2)


def test_memory_is_bounded_and_whole_requests_go_newest_first(server):
    server.stop()
    config = config_for(server, BIG, queue_bytes=1 << 20, frame_rows=64, linger_s=5)
    rows = make_rows(50, BIG)
    with CaptureAgent(config) as agent:
        first = agent.begin("first")
        agent.step(rows, [(first, 0, 50)])
        handles = []
        for i in range(150):
            handles.append(agent.begin(f"r{i}"))
            agent.step(rows, [(handles[-1], 0, 50)])
        agent.flush(0)
        wait_for(lambda: agent.stats().dropped_rows.get("queue_full", 0) > 50 * 50)
        agent.step(rows, [(first, 50, 50)])
        for handle in handles:
            agent.finish(handle, 51)
        agent.finish(first, 101)
        agent.flush(0)
        server.start()
        assert agent.flush(20)
        stats = agent.stats()
    requests = server.model.requests
    whole = [len(r.attempts[0].rows) == 50 for r in requests[1:]]
    told = [r.lost == [(0, 0, FULL)] for r in requests[1:]]
    assert all(a != b for a, b in zip(whole, told, strict=True))
    assert len(requests) == 151
    assert 10 < sum(whole) < 100
    dropped = 50 * sum(told) + (0 if len(requests[0].attempts[0].rows) == 100 else 50)
    assert_kept(stats, queue_full=dropped)


def test_even_events_are_bounded_while_the_server_is_away(server, monkeypatch):
    """Unreported rows leave slots unknown and count as dropped."""
    workers = []

    class Watched(Worker):
        def __init__(self, *args):
            super().__init__(*args)
            workers.append(self)

    monkeypatch.setattr(link, "Worker", Watched)
    rows = make_rows(30)
    config = config_for(server, queue_bytes=1 << 20, block_size=4, num_blocks=64)
    with CaptureAgent(config) as agent:
        kept = agent.begin("kept", block_ids=[0, 1, 2])
        agent.step(rows[:10], [(kept, 0, 10)])
        assert agent.flush(20)
        server.stop()
        for i in range(3000):
            # Computes into the block that was written for "kept".
            handle = agent.begin(f"r{i}", labels={"x": "y" * 1000}, block_ids=[0])
            agent.step(rows[20:24], [(handle, 0, 4)])
            agent.finish(handle, 5)
        ring = agent._link.ring
        wait_for(lambda: ring.read == ring.written)
        assert 0.9 * (1 << 20) < workers[0]._held() < 1.1 * (1 << 20)
        assert not agent.flush(0.5)
        server.start()
        assert agent.flush(20)
        agent.step(rows[10:12], [(kept, 10, 2)])
        late = agent.begin("late", num_computed_tokens=8, block_ids=[0, 1])
        agent.finish(late, 10)
        assert agent.flush(20)
        stats = agent.stats()
    *told, _ = server.model.requests
    assert len(told) < 1500
    assert len(told) + stats.unreported_requests == 3001
    assert all(len(r.attempts[0].rows) >= 4 or r.lost == [(0, 0, FULL)] for r in told)
    late_request = server.model.request("late")
    # Whoever was told of last wrote the first block, if that was after all were forgotten.
    assert all(late_request.row(p) in (None, rows[20 + p].tobytes()) for p in range(4))
    assert [late_request.row(p) for p in range(4, 8)] == [None] * 4
    assert_kept(stats, queue_full=stats.dropped_rows["queue_full"])


def test_a_chunk_is_never_larger_than_the_server_takes():
    with IngestServer(max_chunk_bytes=5000) as server:
        config = config_for(server, BIG)
        with CaptureAgent(config) as agent:
            handle = agent.begin("a")
            assert agent.flush(20)  # has heard of it
            agent.step(make_rows(600, BIG), [(handle, 0, 600)])
            assert agent.flush(20)
            assert_kept(agent.stats())
        assert len(server.chunks) > 30


# ---------------------------------------------------------------------- ends


def test_after_close(server):
    agent = CaptureAgent(config_for(server))
    handle = agent.begin("a")
    agent.step(make_rows(10), [(handle, 0, 10)])
    report = agent.close()
    assert report.acknowledged_rows == 10
    assert agent.close() == report
    assert agent.stats().acknowledged_rows == 10
    assert server.model.request("a").lost == [(10, 0, pb.MISSING_REASON_AGENT_LOST)]
    for call in (
        lambda: agent.begin("b"),
        lambda: agent.step(make_rows(1), [(handle, 10, 1)]),
        lambda: agent.finish(handle, 11),
        agent.flush,
    ):
        with pytest.raises(Closed):
            call()


@MODES
def test_close_keeps_to_its_time_and_says_what_was_not_sent(server, mode):
    server.hold.clear()

    def close() -> float:
        with CaptureAgent(config_for(server, mode=mode)) as agent:
            handle = agent.begin("a")
            agent.step(make_rows(10), [(handle, 0, 10)])
            started = time.monotonic()
            report = agent.close(1.0)
            taken = time.monotonic() - started
        assert (report.acknowledged_rows, report.dropped_rows, report.unsent_rows) == (0, {}, 10)
        assert_kept(agent.stats(), unsent=10)
        return taken

    keeps_to(4, close)


def test_a_stopped_background_costs_steps_and_is_told_when_it_runs_again(server):
    rows = make_rows(1000, BIG)
    config = config_for(server, BIG, mode="process", ring_bytes=2 << 20)
    with CaptureAgent(config) as agent:
        first, second = agent.begin("first"), agent.begin("second")
        assert agent.flush(20)
        os.kill(agent.worker_pid, signal.SIGSTOP)
        for p in range(10):
            agent.step(rows, [(first, 500 * p, 500), (second, 500 * p, 500)])
        agent.rewind(second, 4000)
        agent.step(rows[:10], [(second, 4000, 10)])
        agent.set_weight_version(3)
        os.kill(agent.worker_pid, signal.SIGCONT)
        assert agent.flush(20)
        agent.step(rows[:20], [(first, 5000, 10), (second, 4010, 10)])
        agent.finish(first, 5011)
        agent.finish(second, 4021)
        assert agent.flush(20)
        stats = agent.stats()
        assert_kept(stats, queue_full=stats.dropped_rows["queue_full"])
    a, b = server.model.requests
    kept = set(a.attempts[0].rows)
    assert 0 < len(kept) < 5010
    assert kept | a.lost_positions(FULL) == set(range(5010))
    assert not kept & a.lost_positions(FULL)
    assert set(b.attempts[0].rows) | b.lost_positions(FULL) >= set(range(4020))
    assert {p: b.row(p) for p in range(4010, 4020)} == {
        4000 + p: rows[p].tobytes() for p in range(10, 20)
    }


def test_a_killed_background_is_counted_and_never_waited_for(server):
    before = shared_names()
    agent = CaptureAgent(config_for(server, mode="process", ring_bytes=1 << 20))
    handle = agent.begin("a")
    agent.step(make_rows(10), [(handle, 0, 10)])
    assert agent.flush(20)
    os.kill(agent.worker_pid, signal.SIGKILL)
    for p in range(10, 5010, 1000):
        agent.step(make_rows(1000), [(handle, p, 1000)])
    assert not agent.flush(20)
    for i in range(2000):  # more than fits anywhere
        agent.finish(agent.begin(f"r{i}", labels={"x": "y" * 1000}), 1)
    agent.step(make_rows(10), [(handle, 5010, 10)])
    assert_kept(agent.stats(), **agent.stats().dropped_rows)
    report = agent.close()
    assert report.acknowledged_rows == 10
    assert sum(report.dropped_rows.values()) == 5010
    assert report.dropped_rows["agent_lost"] > 0
    wait_for(lambda: not left_behind(before, [os.getpid()]))


ENGINE = """
import gc, os, signal, sys, time
import numpy as np
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import RoutingLayout
target, elsewhere, mode, how = sys.argv[1:]
layout = RoutingLayout((1, 2, 4), 6, 300, 3)
agent = CaptureAgent(AgentConfig(target, "e0", layout, mode=mode, close_timeout_s=20))
handle = agent.begin("a")
rows = np.arange(9, dtype=np.uint16).reshape(1, 3, 3).repeat(10, axis=0)
agent.step(rows, [(handle, 0, 10)])
child = 0
if how == "killed":
    # Even with a child that holds on to everything, behind Python's back.
    import ctypes
    child = ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(agent.worker_pid, child, flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "collected":
    del agent
    gc.collect()
    time.sleep(0.1)
if how == "forked":
    assert agent.flush(20)
    child = os.fork()
    if child == 0:
        agent.begin("b")
        agent.step(rows, [(123, 0, 10)])
        agent.finish(0, 5)
        assert not agent.flush(1)
        assert agent.stats().offered_rows == 0
        assert agent.close().unsent_rows == 0
        other = CaptureAgent(AgentConfig(elsewhere, "e1", layout, mode=mode))
        other.begin("other")
        ok = other.flush(20)
        other.close()
        del agent
        gc.collect()
        sys.exit(0 if ok else 3)
    assert os.waitpid(child, 0)[1] == 0
    agent.step(rows, [(handle, 10, 10)])
    assert agent.flush(20)
    assert agent.stats().acknowledged_rows == 20
"""


def run_engine(server: IngestServer, other: IngestServer, mode: str, how: str, errors: Path) -> int:
    """Run ENGINE until its background has ended too; the exit status."""
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, server.target, other.target, mode, how],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout as stdout:
        pid, child = map(int, stdout.readline().split())
    try:
        code = process.wait(60)
        server.wait_for(lambda: server.model.requests and server.model.requests[0].lost, 30)
        wait_for(lambda: is_zombie(pid), 20)  # else the background lives on
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    return code


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes")
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("process", "killed"),
        ("process", "exits"),
        ("thread", "exits"),
        ("process", "collected"),
        ("process", "forked"),
        ("thread", "forked"),
    ],
)
def test_the_engine_just_ends(server, mode, how, tmp_path):
    """Reported rows arrive, and neither processes nor shared memory remain."""
    before = shared_names()
    with IngestServer() as elsewhere:
        code = run_engine(server, elsewhere, mode, how, tmp_path / "stderr")
        if how == "forked":
            assert [r.request_id for r in elsewhere.model.requests] == ["other"]
    errors = (tmp_path / "stderr").read_text()
    assert code == (-signal.SIGKILL if how == "killed" else 0), errors
    request = server.model.requests[0]
    expected = 20 if how == "forked" else 10
    assert len(request.attempts[0].rows) == expected
    assert request.lost == [(expected, 0, pb.MISSING_REASON_AGENT_LOST)]
    wait_for(lambda: not left_behind(before, []))
    assert "Traceback" not in errors
    assert "leaked" not in errors


def test_a_flush_does_not_wait_for_a_background_that_was_given_up(server, monkeypatch):
    with CaptureAgent(config_for(server)) as agent:
        waits = []
        monkeypatch.setattr(agent._link, "wait", waits.append)
        agent._abandoned = True
        assert not agent.flush(2)
        assert not waits


def test_close_writes_the_backlog_under_the_lock(server, monkeypatch):
    """As flush() of another thread does: two at once would swap events."""
    held = []
    agent = CaptureAgent(config_for(server))
    drain = agent._feed.drain
    monkeypatch.setattr(
        agent._feed, "drain", lambda: held.append(agent._lock._is_owned()) or drain()
    )
    agent.close()
    assert held
    assert all(held)


def test_an_error_detail_that_does_not_parse_is_an_error_like_others(caplog):
    class Proxy(IngestServiceServicer):
        calls = 0

        def Ingest(self, requests, context):
            Proxy.calls += 1
            next(requests)
            context.set_trailing_metadata(((ERROR_METADATA_KEY, b"\xff\xff\xff"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "of a proxy")

    server = grpc.server(ThreadPoolExecutor(2))
    add_IngestServiceServicer_to_server(Proxy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    config = AgentConfig(f"127.0.0.1:{port}", "e", LAYOUT, mode="thread")
    try:
        with CaptureAgent(config) as agent:
            wait_for(lambda: Proxy.calls > 1)
            agent.close(0)
    finally:
        server.stop(0)
    assert any("of a proxy" in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if record.exc_info]


def test_nothing_is_said_to_the_server_during_a_fork(server, caplog):
    """gRPC's threads go on in the child: what they know there, they must not be able to say."""
    with CaptureAgent(config_for(server)) as agent:
        handle = agent.begin("a")
        assert agent.flush(20)
        sender._before_fork()
        sender._before_fork()  # another thread forks as well
        sender._after_fork_in_parent()
        agent.step(make_rows(3), [(handle, 0, 3)])
        agent.finish(handle, 4)
        assert not agent.flush(0.5)
        assert server.welcomes == 1
        sender._after_fork_in_parent()
        assert agent.flush(20)
        assert server.welcomes == 2
        stats = agent.stats()
    assert_kept(stats)
    assert stats.acknowledged_rows == 3
    assert not caplog.records


def test_the_background_has_names(server):
    with CaptureAgent(config_for(server)) as agent:
        assert agent.flush(20)
        names = {thread.name for thread in threading.enumerate()}
    assert {"routetrace-worker", "routetrace-sender"} <= names
