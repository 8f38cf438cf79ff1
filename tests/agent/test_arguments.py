"""Arguments of CaptureAgent: which are taken, and the errors of the others."""

from __future__ import annotations

import math
import os
import pickle
from functools import partial

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.codec.records import OP, FinishReason, OpKind
from routetrace.common.errors import (
    InvalidArgument,
)
from routetrace.common.security import Security
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.checked import LAYOUT, MODES, config_for, make_rows


class Tensor:
    """One that numpy cannot read: of a device, or with gradients."""

    def __array__(self, *args, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


TENSOR = Tensor()


def ended(agent):
    """Return the handle of a request that has ended."""
    handle = agent.begin("ended")
    agent.finish(handle, 0)
    return handle


@pytest.fixture(scope="module")
def idle_agent():
    """An agent whose server is not there, with a request under way."""
    config = AgentConfig(
        "127.0.0.1:1",
        "e",
        LAYOUT,
        background="thread",
        block_size=4,
        num_blocks=8,
        num_host_blocks=4,
    )
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
        ("prompt_token_ids", {"prompt_len": 2, "prompt_token_ids": [1, 1 << 32]}),
        ("prompt_token_ids", {"prompt_len": 1, "prompt_token_ids": [1.5]}),
        ("index", {"index": -1}),
        ("index", {"index": 1 << 62}),
        ("index", {"index": "0"}),
    ],
)
def test_begin_refuses(idle_agent, field, arguments):
    with pytest.raises(InvalidArgument) as caught:
        idle_agent.begin(**{"request_id": "new", **arguments})
    assert caught.value.field.partition("[")[0] == field


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("rows", lambda a, h: a.step(make_rows(2)[:, :2], [(h, 0, 2)])),
        ("rows", lambda a, h: a.step(make_rows(2)[0], [(h, 0, 3)])),
        ("rows", lambda a, h: a.step(make_rows(2).astype(float), [(h, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 0, 1)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 0, 2), (h, 2, 0)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 0, 3), (h, 2, -1)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, -1, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 1 << 31, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, (1 << 31) - 1, 2)])),
        ("spans", lambda a, h: a.step(make_rows(3), [(h, 0, 1), (h, (1 << 31) - 1, 2)])),
        ("spans", lambda a, h: a.skip([(h, (1 << 31) - 1, (1 << 31) - 1)])),
        ("spans", lambda a, h: a.skip([(h, 0, (1 << 31) + 1)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h + 99, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(0, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(-1, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 0, 1 << 62)] * 4 + [(h, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [(h, 0.0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), [h, 0, 2])),
        ("spans", lambda a, h: a.step(make_rows(2), [])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0, 32])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [0, -1])),
        ("handle", lambda a, h: a.finish(h + 99, 1)),
        ("handle", lambda a, h: a.rewind(-1, 1)),
        *(
            ("handle", partial(lambda call, wrong, a, _: call(a, wrong), call, wrong))
            for wrong in ("running", None, 1.0, [1], True, 1 << 200)
            for call in (
                lambda a, h: a.finish(h, 1),
                lambda a, h: a.rewind(h, 1),
                lambda a, h: a.preempt(h, 1),
                lambda a, h: a.resume(h, 0),
            )
        ),
        ("num_tokens", lambda a, h: a.finish(h, "5")),
        ("position", lambda a, h: a.rewind(h, 1.5)),
        ("version", lambda a, h: a.set_weight_version("3")),
        ("version", lambda a, h: a.set_weight_version(1.5)),
        ("version", lambda a, h: a.set_weight_version(True)),
        ("ttl_seconds", lambda a, h: a.begin("new", ttl_seconds=0)),
        ("trace_id", lambda a, h: a.begin("new", trace_id="")),
        ("block_ids", lambda a, h: a.begin("new", block_ids=[10**5000])),
        ("block_ids", lambda a, h: a.begin("new", block_ids=[0] * 9)),
        ("block_ids", lambda a, h: a.resume(h, 0, block_ids=[0] * 9)),
        ("block_ids", lambda a, h: a.add_blocks(h, [0] * 9)),
        ("block_ids", lambda a, h: a.add_blocks([h] * 9, [0] * 9)),
        ("reason", lambda a, h: a.finish(h, 1, reason="tired")),
        ("num_tokens", lambda a, h: a.finish(h, -1)),
        ("token_ids", lambda a, h: a.finish(h, 2, reason="stop", token_ids=[1])),
        ("position", lambda a, h: a.rewind(h, -1)),
        ("step", lambda a, h: a.rewind(h, 1, step=-1)),
        ("num_computed_tokens", lambda a, h: a.preempt(h, 1 << 40)),
        ("block_ids", lambda a, h: a.add_blocks(h, [9])),
        ("block_ids", lambda a, h: a.add_blocks(h, 1)),
        ("block_ids", lambda a, h: a.add_blocks([h, h], [1])),
        ("block_ids", lambda a, h: a.add_blocks([h, h], (b for b in [1]))),
        ("handles", lambda a, h: a.add_blocks([h, h + 99], [1, 2])),
        ("handles", lambda a, h: a.add_blocks("running", [1])),
        ("handles", lambda a, h: a.add_blocks([1], [1])),
        ("handles", lambda a, h: a.add_blocks(None, [1])),
        ("handles", lambda a, h: a.add_blocks(1.0, [1])),
        ("handles", lambda a, h: a.add_blocks([[1], [2, 3]], [1, 2])),
        ("ttl_seconds", lambda a, h: a.begin("x", ttl_seconds="")),
        ("ttl_seconds", lambda a, h: a.begin("x", ttl_seconds=False)),
        ("num_computed_tokens", lambda a, h: a.resume(h, 9, block_ids=[1, 2])),
        (
            "num_external_tokens",
            lambda a, h: a.resume(h, 8, block_ids=[1, 2], num_external_tokens=9),
        ),
        ("version", lambda a, h: a.set_weight_version(1 << 63)),
        ("version", lambda a, h: a.set_weight_version(-(1 << 63))),
        ("position", lambda a, h: a.rewind(ended(a), "1")),
        ("step", lambda a, h: a.rewind(ended(a), 1, step="1")),
        ("num_tokens", lambda a, h: a.finish(h, None, reason="tired")),
        ("block_ids", lambda a, h: a.mark_external(b"abc")),
        ("block_ids", lambda a, h: a.mark_external(b"abcd")),
        ("block_ids", lambda a, h: a.mark_external([True])),
        ("block_ids", lambda a, h: a.mark_external(1 << n for n in range(9))),
        ("block_ids", lambda a, h: a.mark_external([12])),
        ("block_ids", lambda a, h: a.add_blocks([h], [8])),
        ("block_ids", lambda a, h: a.resume(h, 0, block_ids=[8])),
        ("slots", lambda a, h: a.step_slots(make_rows(1), [32])),
        ("sources", lambda a, h: a.copy_blocks([12], [8])),
        ("sources", lambda a, h: a.copy_blocks(1, [8])),
        ("targets", lambda a, h: a.copy_blocks([1], [12])),
        ("targets", lambda a, h: a.copy_blocks([1], [-1])),
        ("targets", lambda a, h: a.copy_blocks([1, 2], [8])),
        ("targets", lambda a, h: a.copy_blocks([1], [8, 9])),
        ("targets", lambda a, h: a.copy_blocks([1, 2], [8, 8])),
        ("block_ids", lambda a, h: a.add_blocks(h, "1")),
        ("block_ids", lambda a, h: a.add_blocks([h], [[1], [2, 3]])),
        ("block_ids", lambda a, h: a.add_blocks([h], TENSOR)),
        ("handles", lambda a, h: a.add_blocks(TENSOR, [1])),
        ("handles", lambda a, h: a.add_blocks([[h]], [1])),
        ("handles", lambda a, h: a.add_blocks(True, [1])),
        ("rows", lambda a, h: a.step([[[1]], [[1, 2]]], [(h, 0, 2)])),
        ("rows", lambda a, h: a.step(TENSOR, [(h, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(2), TENSOR)),
        ("spans", lambda a, h: a.step(make_rows(0), [(h, 0, 2)])),
        ("spans", lambda a, h: a.step(make_rows(0), [(h, 0), (2,)])),
        ("spans", lambda a, h: a.skip([(h, 0), (2,)])),
        ("spans", lambda a, h: a.skip("spans")),
        ("spans", lambda a, h: a.skip(None)),
        ("spans", lambda a, h: a.skip(TENSOR)),
        ("slots", lambda a, h: a.step_slots(make_rows(2), [[0], [1, 2]])),
        ("slots", lambda a, h: a.step_slots(make_rows(2), None)),
        ("slots", lambda a, h: a.step_slots(make_rows(2), TENSOR)),
        ("token_ids", lambda a, h: a.finish(h, 2, token_ids=TENSOR)),
        ("labels", lambda a, h: a.begin("x", labels=0)),
        ("labels", lambda a, h: a.begin("x", labels="")),
        *(
            ("timeout", partial(lambda call, wrong, a, _: call(a, wrong), call, wrong))
            for wrong in ("x", math.nan, math.inf, -1, True, [1], 10**400)
            for call in (lambda a, t: a.close(timeout=t), lambda a, t: a.flush(timeout=t))
        ),
        ("timeout", lambda a, h: a.flush(timeout=None)),
        ("own_thread", lambda a, h: CaptureAgent(a.config, own_thread="no")),
        ("predecessor", lambda a, h: CaptureAgent(a.config, predecessor="e")),
        ("config", lambda a, h: CaptureAgent({"target": "h:1"})),
    ],
)
def test_calls_refuse(idle_agent, field, call):
    offered = idle_agent.stats().offered_rows
    with pytest.raises(InvalidArgument) as caught:
        call(idle_agent, idle_agent.running)
    assert caught.value.field.partition("[")[0] == field
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
    ids = set()
    for _ in range(2):
        with CaptureAgent(config) as agent:
            ids.add(agent.config.boot_id)
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


@pytest.mark.parametrize("make", [list, tuple, iter, np.array, lambda ids: (i for i in ids)])
def test_blocks_are_any_iterable(idle_agent, make):
    handle = idle_agent.begin(f"blocks {make}")
    idle_agent.add_blocks(handle, make([1, 2]))
    idle_agent.add_blocks([handle, handle], make([3, 4]))
    idle_agent.finish(handle, 1)


def test_what_exceeds_a_limit_says_which(idle_agent):
    position = (1 << 31) - 1
    spans = [(idle_agent.running, 0, 5), (idle_agent.running, position, 2)]
    for expected, call in (
        (
            f"spans is [{idle_agent.running}, {position}, 2]; expected (handle, position, count) "
            "with count >= 1 and positions in [0, 2147483648)",
            lambda: idle_agent.skip(spans),
        ),
        (
            "block_ids is 9 block ids; expected at most 8, the blocks of the engine",
            lambda: idle_agent.add_blocks(idle_agent.running, [0] * 9),
        ),
        (
            "block_ids is 9 block ids; expected at most 8, the blocks of the engine",
            lambda: idle_agent.add_blocks([idle_agent.running] * 9, np.zeros(9, int)),
        ),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert str(caught.value) == expected
    idle_agent.skip([(idle_agent.running, position, 1), (idle_agent.running, 0, 5)])
    idle_agent.add_blocks(idle_agent.running, range(8))
    with CaptureAgent(AgentConfig("127.0.0.1:1", "e", LAYOUT, background="thread")) as agent:
        agent.begin("r", num_computed_tokens=1 << 30, num_external_tokens=1 << 30)
        with pytest.raises(InvalidArgument, match="at most 2147483646 with num_external_tokens"):
            agent.begin("s", num_computed_tokens=position, num_external_tokens=2)
        agent.close(0)


def test_a_host_block_is_given_to_no_request(idle_agent):
    with pytest.raises(InvalidArgument) as caught:
        idle_agent.add_blocks(idle_agent.running, [1, 9])
    assert str(caught.value) == (
        "block_ids[1] is 9; expected a block of the engine, below 8; report copies of host blocks "
        "with copy_blocks"
    )
    idle_agent.mark_external([9])
    idle_agent.copy_blocks([1, 2], iter([9, 2]))


def test_a_wrong_handle_is_one_message(idle_agent):
    ended = idle_agent.begin("short")
    idle_agent.finish(ended, 0)
    rows = make_rows(1)
    for field, value, call in (
        ("handle", "'a' (str)", lambda: idle_agent.finish("a", 1)),
        ("handle", "77", lambda: idle_agent.finish(77, 1)),
        ("handle", f"{ended}", lambda: idle_agent.preempt(ended, 1)),
        ("handle", "None", lambda: idle_agent.rewind(None, 1)),
        ("handle", "True (bool)", lambda: idle_agent.preempt(True, 1)),
        ("handle", "77", lambda: idle_agent.rewind(77, 1)),
        ("handle", "1.0 (float)", lambda: idle_agent.resume(1.0, 0)),
        ("handles", "'a' (str)", lambda: idle_agent.add_blocks("a", [1])),
        ("handles", f"{ended}", lambda: idle_agent.add_blocks(ended, [1])),
        ("handles[1]", "77", lambda: idle_agent.add_blocks([idle_agent.running, 77], [1, 2])),
        ("spans[0][0]", "77", lambda: idle_agent.step(rows, [(77, 0, 1)])),
        ("spans[0][0]", "77", lambda: idle_agent.skip([(77, 0, 1)])),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        expected = "expected the value of begin() for a running request"
        assert str(caught.value) == f"{field} is {value}; {expected}"


def test_an_engine_without_slots_has_no_blocks():
    config = AgentConfig("127.0.0.1:1", "e", LAYOUT, background="thread", close_timeout_seconds=0)
    with CaptureAgent(config) as agent:
        handle = agent.begin("r", block_ids=())
        agent.preempt(handle, 0)
        agent.resume(handle, 0)
        for call in (
            lambda: agent.begin("x", block_ids=[0]),
            lambda: agent.add_blocks(handle, [0]),
            lambda: agent.add_blocks([handle], [0]),
            lambda: agent.step_slots(make_rows(1), [0]),
        ):
            with pytest.raises(InvalidArgument, match="block_size is 0; set block_size and num_b"):
                call()


@MODES
def test_rows_that_come_late_are_dropped_and_counted(server, mode):
    rows = make_rows(40)
    with CaptureAgent(config_for(server, background=mode)) as agent:
        a, b, c = (agent.begin(name) for name in "abc")
        assert agent.step(rows[:12], [(h, 0, 4) for h in (a, b, c)]) == 1
        agent.finish(a, 5)
        agent.preempt(b, 4)
        # What was on its way when the first ended and the second was preempted.
        assert agent.step(rows[12:17], [(a, 4, 1), (b, 4, 2), (c, 4, 2)]) == 2
        assert agent.step(rows[17:18], [(a, 5, 1)]) == 3
        again = agent.begin("a")
        agent.resume(b, 0)
        assert agent.step(rows[20:30], [(again, 0, 2), (b, 0, 6), (c, 6, 2)]) == 4
        # Learned late: the step after it took the place already. And of the last step: not so.
        agent.rewind(c, 5, step=2)
        agent.rewind(b, 5, step=4)
        with pytest.raises(InvalidArgument, match="expected the value of begin"):
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
        agent.resume(handle, 8, block_ids=[3, 4], num_external_tokens=8)
        agent.finish(handle, 13, reason="handoff")
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
        ("background", {"background": "fork"}),
        ("num_blocks", {"block_size": 16}),
        ("block_size", {"block_size": (1 << 16) + 1, "num_blocks": 1}),
        ("num_blocks", {"block_size": 1 << 16, "num_blocks": (1 << 9) + 1}),
        ("num_host_blocks", {"num_host_blocks": 1}),
        ("num_host_blocks", {"block_size": 1 << 16, "num_blocks": 1, "num_host_blocks": 1 << 9}),
        ("queue_bytes", {"queue_bytes": "1MiB"}),
        ("queue_bytes", {"queue_bytes": True}),
        ("linger_seconds", {"linger_seconds": "1"}),
        ("linger_seconds", {"linger_seconds": True}),
        ("layout", {"layout": "qwen"}),
        ("frame_rows", {"frame_rows": 0}),
        ("queue_bytes", {"queue_bytes": 10}),
        ("linger_seconds", {"linger_seconds": -1}),
        ("run", {"run": 0}),
        ("target", {"target": 0}),
        ("spill_dir", {"spill_dir": ""}),
        ("spill_dir", {"spill_dir": "/no/such/folder"}),
        ("spill_dir", {"spill_dir": b"/tmp"}),
        ("spill_dir", {"spill_dir": 0}),
        ("spill_dir", {"spill_dir": False}),
    ],
)
def test_settings_refuse(field, settings, monkeypatch):
    monkeypatch.delenv("ROUTETRACE_TARGET", raising=False)
    with pytest.raises(InvalidArgument) as caught:
        AgentConfig(**{"target": "h:1", "engine_id": "e", "layout": LAYOUT, **settings})
    assert caught.value.field.partition("[")[0] == field


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


def test_a_spill_directory_is_a_path_or_none(tmp_path):
    assert AgentConfig("h:1", "e", LAYOUT).spill_dir is None
    for given in (tmp_path, str(tmp_path)):
        assert AgentConfig("h:1", "e", LAYOUT, spill_dir=given).spill_dir == str(tmp_path)
    with pytest.raises(InvalidArgument, match=r"spill_dir is ''; expected a dir.*or give None"):
        AgentConfig("h:1", "e", LAYOUT, spill_dir="")


ENVIRON = {
    "ROUTETRACE_TARGET": "there:1",
    "ROUTETRACE_RUN": "theirs",
    "ROUTETRACE_ENGINE_ID": "their engine",
    "ROUTETRACE_TOKEN": "their-token",
    "ROUTETRACE_TLS": "1",
}


@pytest.fixture
def elsewhere(monkeypatch):
    """The environment of this process, which from_env(environ) must not look at."""
    for name in ENVIRON:
        monkeypatch.setenv(name, "1" if name.endswith("TLS") else f"here-{name[-2:]}:2")


def test_the_configuration_of_an_environment(elsewhere):
    config = AgentConfig.from_env(ENVIRON, layout=LAYOUT, frame_rows=32)
    assert (config.target, config.run, config.engine_id) == ("there:1", "theirs", "their engine")
    assert config.security == Security(tls=True, token="their-token")
    assert (config.layout, config.frame_rows) == (LAYOUT, 32)


def test_fields_win_over_the_environment(elsewhere):
    mine = Security(token="mine")
    given = {"target": "mine:3", "run": "mine", "engine_id": "e", "security": mine}
    # Variables that are not used are not checked either.
    config = AgentConfig.from_env({**ENVIRON, "ROUTETRACE_TLS": "maybe"}, layout=LAYOUT, **given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("unset", ["", None])
def test_fields_that_are_not_set_are_those_of_the_environment(elsewhere, unset):
    names = {"target", "run", "engine_id"}
    config = AgentConfig.from_env(ENVIRON, layout=LAYOUT, **dict.fromkeys(names, unset))
    assert (config.target, config.run, config.engine_id) == ("there:1", "theirs", "their engine")


def test_an_empty_environment_has_no_target(elsewhere):
    given = {"layout": LAYOUT, "engine_id": "e"}
    config = AgentConfig.from_env({}, target="h:1", **given)
    assert (config.run, config.security) == ("default", Security())
    with pytest.raises(InvalidArgument, match="target is not set"):
        AgentConfig.from_env({}, **given)
    with pytest.raises(InvalidArgument, match=r"engine_id is not set.*ROUTETRACE_ENGINE_ID"):
        AgentConfig.from_env({}, target="h:1", layout=LAYOUT)


@pytest.mark.parametrize(
    ("field", "environ", "overrides"),
    [
        ("layout", ENVIRON, {}),
        ("ROUTETRACE_TLS", {**ENVIRON, "ROUTETRACE_TLS": "maybe"}, {}),
        ("target", {**ENVIRON, "ROUTETRACE_TARGET": "http://h"}, {}),
        ("token", {**ENVIRON, "ROUTETRACE_TOKEN": "a b"}, {}),
        ("frame_rows", ENVIRON, {"layout": LAYOUT, "frame_rows": "32"}),
        ("environ", "ROUTETRACE_TARGET", {"layout": LAYOUT}),
        ("environ", 5, {"layout": LAYOUT}),
    ],
)
def test_an_environment_is_refused(field, environ, overrides):
    with pytest.raises(InvalidArgument) as caught:
        AgentConfig.from_env(environ, **overrides)
    assert caught.value.field == field


def test_the_environment_of_this_process(monkeypatch):
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    config = AgentConfig.from_env(layout=LAYOUT)
    assert config == AgentConfig.from_env(os.environ, layout=LAYOUT)
    assert config.engine_id == "their engine"


@pytest.mark.parametrize(
    ("call", "make"),
    [("AgentConfig.from_env", AgentConfig.from_env), ("CaptureAgent", CaptureAgent)],
)
def test_an_unknown_field_is_a_type_error_too(call, make):
    with pytest.raises(TypeError) as caught:
        make(target="h:1", engine_id="e", layout=LAYOUT, linger_second=1)
    assert isinstance(caught.value, InvalidArgument)
    assert f"{call}() got an unexpected keyword argument 'linger_second'" in str(caught.value)
    assert "did you mean 'linger_seconds'? expected one of target, engine_id," in str(caught.value)
