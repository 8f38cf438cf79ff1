"""Any value in place of any argument of a public call: it is taken, or an error of ours names it.

Each call of the table of signatures is made with right arguments once, and then with each argument
replaced by each value of a pool of values that are mostly wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import pytest

import routetrace.capture_agent as ca
import routetrace.client as rt
from routetrace.client import RouteTraceError
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.dialects import (
    miles,
    nemo_rl,
    prime_rl,
    sglang,
    skyrl,
    slime,
    verl,
    vllm,
)
from support.signatures import CALLS

LAYOUT = rt.ModelLayout((0, 2), 3, 8, 2)
TOKENS = np.arange(10)
ROWS = np.tile(np.array([[1, 2], [3, 4]], np.uint8), (9, 1, 1))

#: Mostly wrong; no number that would delete or wait for a trace of the tests.
POOL: tuple[Any, ...] = (
    None, True, -1, 2**70, 1.5, math.nan, math.inf, "", "x", "\ud800", "x" * 5000, b"x", (), [None],
    ["x"], [[1], [1, 2]], {}, {"x": 1}, {1: "x"}, object(), int, lambda: 0, np.float64(2.5),
    np.arange(3), np.zeros((2, 2)), np.array("x"), iter(()), rt.ReadOptions(), slice(1),
    {"x": 10**5000}, [10**5000], rt.TraceState.COMPLETE, 0.0,
)  # fmt: skip

#: What these keywords may be, in calls that take all of them.
READ: dict[str, Any] = {
    "missing": "raise", "wait_for": None, "timeout": 2.0, "policy": "latest",
    "prefix_rows": "never", "weight_version": None,
    "equal": "refuse",
}  # fmt: skip


class World:
    """A server with a trace, the objects of both packages, and names that are used up."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.client = rt.RouteClient(target, timeout=2)
        self.agent = self.new_agent("e0", block_size=4, num_blocks=64)
        self.agent.set_weight_version(0)  # an unknown one would be retired with any
        handle = self.agent.begin("done", prompt_token_ids=TOKENS[:4], block_ids=[0, 1, 2])
        self.agent.step(ROWS, [[handle, 0, 9]])
        self.agent.finish(handle, 10, token_ids=TOKENS)
        assert self.agent.flush(30)
        self.trace = self.client.get("done", wait_for="end")
        self.sample = rt.Sample.of("done", 10)
        self.batch = rt.MicroBatch.packed([self.sample])
        self.plan = rt.FetchPlan.make(LAYOUT, self.batch, rt.Rank(LAYOUT.layer_ids))
        self.rows = self.client.fetch(self.plan)
        self.numbers = itertools.count()

    def new_agent(self, engine_id: str, **fields: Any) -> ca.CaptureAgent:
        return ca.CaptureAgent(
            target=self.target, engine_id=engine_id, layout=LAYOUT, background="thread",
            close_timeout_seconds=1, **fields,
        )  # fmt: skip

    def begin(self) -> int:
        return self.agent.begin(f"r{next(self.numbers)}")

    def preempted(self) -> int:
        handle = self.begin()
        self.agent.preempt(handle, 0)
        return handle

    def close(self) -> None:
        self.agent.close(5)
        self.client.close()


class Call(NamedTuple):
    """A call, and arguments with which it works, made anew for each time."""

    of: Callable[[World], Callable[..., Any]]
    right: Callable[[World], dict[str, Any]]


def _client(name: str, **right: Any) -> Call:
    return Call(lambda w: getattr(w.client, name), lambda w: _made(w, right))


def _agent(name: str, **right: Any) -> Call:
    return Call(lambda w: getattr(w.agent, name), lambda w: _made(w, right))


def _trace(name: str, **right: Any) -> Call:
    return Call(lambda w: getattr(w.trace, name), lambda w: _made(w, right))


def _plain(of: Callable[..., Any], **right: Any) -> Call:
    return Call(lambda w: of, lambda w: _made(w, right))


def _made(world: World, right: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.make(world) if isinstance(value, Made) else value
        for name, value in right.items()
    }


class Made(NamedTuple):
    """Argument that the world has."""

    make: Callable[[World], Any]


_HANDLE = Made(World.begin)
_PART: dict[str, Any] = {"layer_ids": [0], "token_start": 1, "token_stop": 5}
_TABLE = {
    "client.RouteClient.__init__": _plain(
        rt.RouteClient, target="h:1", run="r", timeout=1.0, security=None, config=None,
        options=rt.ReadOptions(),
    ),
    "client.RouteClient.get": _client(
        "get", request_id="done", incarnation=1, num_tokens=None, token_ids=TOKENS,
        pin_memory=False, options=None, **_PART, **READ,
    ),
    "client.RouteClient.get_many": _client(
        "get_many", trace_ids=["done"], concurrency=1, errors="raise", pin_memory=False,
        progress=None, options=None, **_PART, **READ,
    ),
    "client.RouteClient.expert_load": _client(
        "expert_load", trace_ids=["done"], ranges=[(0, 5)], layer_ids=[0], concurrency=1,
        progress=None, options=None, **READ,
    ),
    "client.RouteClient.fetch": _client(
        "fetch", plan=Made(lambda w: w.plan), out=None, pin_memory=False, concurrency=1,
        options=None, **READ,
    ),
    "client.RouteClient.prefetch": _client(
        "prefetch", plans=Made(lambda w: [w.plan]), max_bytes=1, pin_memory=False, concurrency=1,
        progress=None, options=None, **READ,
    ),
    "client.RouteClient.follow": _client(
        "follow", trace_id="done", incarnation=1, options=None, **_PART, **READ
    ),
    "client.RouteClient.locate": _client(
        "locate",
        sequences=[TOKENS],
        weight_versions=[1],
        labels={"sample": "a"},
        indexes=[0],
        equal="refuse",
        timeout=1.0,
    ),
    "client.RouteClient.stat": _client("stat", trace_id="done", incarnation=1, timeout=1.0),
    "client.RouteClient.describe": _client(
        "describe", trace_id="done", incarnation=1, policy="latest", origins=True, timeout=1.0
    ),
    "client.RouteClient.explain": _client(
        "explain",
        trace_id="done",
        position=0,
        layer_id=0,
        incarnation=1,
        nonce=None,
        policy="latest",
        weight_version=None,
        timeout=1.0,
    ),
    "client.RouteClient.find": _client(
        "find", labels={"a": "b"}, states=["running"], limit=1, retirable_through=-9, timeout=1.0
    ),
    "client.RouteClient.delete": Call(
        lambda w: partial(_delete, w.client),
        lambda w: {"trace_id": "unknown", "missing_ok": True, "timeout": 1.0},
    ),
    "client.RouteClient.retire_through": _client("retire_through", weight_version=-9, timeout=1.0),
    "client.RouteClient.renew": _client("renew", trace_ids=["done"], ttl_seconds=900, timeout=1.0),
    "client.RouteClient.forget_engine": Call(
        lambda w: _refusing(w.client.forget_engine),
        lambda w: {"engine_id": "unknown", "timeout": 1.0},
    ),
    "client.RouteClient.server_info": _client("server_info", timeout=1.0),
    "client.RouteClient.agents": _client("agents", timeout=1.0),
    "client.RouteClient.history": _client("history", after=0, timeout=1.0),
    "client.RouteClient.report_routing": _client(
        "report_routing", trace_id="done", topk_ids=ROWS, valid=None, layer_ids=None,
        token_start=0, step=1, weight_version=1, reporter="trainer", incarnation=1, timeout=1.0,
    ),
    "client.RouteClient.reports": _client("reports", reporter="trainer"),
    "client.RouteClient.report_agreement": _client(
        "report_agreement", step=1, agreement=rt.Agreement(), weight_version=1,
        reporter="rank0", diagnosis="shifted", trace_ids=["done"], timeout=1.0,
    ),
    "client.RouteClient.agreement_history": _client(
        "agreement_history", start=0, stop=9, timeout=1.0
    ),
    "client.AgreementHistory.change": _plain(rt.AgreementHistory(()).change),
    "client.Agreement.metrics": _plain(rt.Agreement().metrics, prefix="a/", weight_version=1),
    "client.RouteClient.watch": Call(
        lambda w: lambda **options: next(w.client.watch(**options)), lambda w: {"timeout": 1.0}
    ),
    "client.RunHistory.commit_seconds": Call(
        lambda w: w.client.history().commit_seconds, lambda w: {"share": 0.5}
    ),
    "client.RouteClient.get_blocks": _client(
        "get_blocks", engine_id="e0", block_ids=[0, 1, 2], num_tokens=9, token_start=0,
        layer_ids=[0], missing="mask", timeout=1.0,
    ),
    "client.RouteClient.bind": _client(
        "bind", engine_id="e0", request_id="bound", block_ids=[0, 1, 2], num_tokens=10,
        num_computed_tokens=9, token_ids=TOKENS, step=None, trace_id="bound", prompt_len=4,
        labels={"a": "b"}, ttl_seconds=900, timeout=1.0,
    ),
    "client.RouteClient.close": _plain(lambda: None),
    "client.AsyncRouteClient.aclose": _plain(lambda: None),
    "client.ClientConfig.__init__": _plain(
        rt.ClientConfig, target="h:1", run="r", timeout=1.0, security=None, max_message_bytes=9,
        grpc_options={"grpc.x": 1},
    ),
    "client.ClientConfig.from_env": _plain(
        rt.ClientConfig.from_env, environ={"ROUTETRACE_TARGET": "h:1"}, run="r"
    ),
    "client.ReadOptions.__init__": _plain(rt.ReadOptions, **READ),
    "client.Trace.tokens": _trace("tokens", start=1, stop=5),
    "client.Trace.layers": _trace("layers", layer_ids=[2]),
    "client.Trace.split": _trace("split", prompt_len=4, num_output_tokens=3),
    "client.Trace.to_torch": _trace("to_torch", device=None, dtype=None),
    "client.Trace.routed_experts": _trace("routed_experts", fill=7),
    "client.Trace.require_valid": _trace("require_valid"),
    "client.Trace.verify_tokens": _trace("verify_tokens", token_ids=TOKENS),
    "client.Trace.validate": _trace("validate"),
    "client.Trace.equals": _trace("equals", other=Made(lambda w: w.trace)),
    "client.ExpertLoad.of": _plain(rt.ExpertLoad.of, trace=Made(lambda w: w.trace)),
    "client.Rows.layers": Call(lambda w: w.rows.layers, lambda w: {"layer_ids": [2]}),
    "client.Rows.to_torch": Call(
        lambda w: w.rows.to_torch, lambda w: {"device": None, "dtype": None}
    ),
    "client.Rows.per_sample": Call(lambda w: w.rows.per_sample, lambda w: {}),
    "client.SampleRows.of": _plain(
        rt.SampleRows.of, trace=Made(lambda w: w.trace), num_tokens=5
    ),
    "client.FetchPlan.make": _plain(
        rt.FetchPlan.make, layout=LAYOUT, batch=Made(lambda w: w.batch), rank=rt.Rank((0, 2))
    ),
    "client.FetchPlan.with_locations": _plain(
        rt.FetchPlan.make(
            LAYOUT, rt.MicroBatch.from_cu_seqlens(TOKENS, [0, 10]), rt.Rank((0, 2))
        ).with_locations,
        locations=rt.Locations([rt.Located("done", 1, 10, 10)]),
    ),
    "client.Sample.of": _plain(
        rt.Sample.of, trace_id="done", num_tokens=10, token_ids=TOKENS, padded_len=12, incarnation=1
    ),
    "client.Sample.turns": _plain(
        rt.Sample.turns, traces=[("done", 10)], token_ids=TOKENS, padded_len=12, incarnation=1
    ),
    "client.Sample.padding": _plain(rt.Sample.padding, length=3),
    "client.Segment.__init__": _plain(
        rt.Segment, trace_id="done", start=0, stop=3, at=0, incarnation=1, num_tokens=10
    ),
    "client.MicroBatch.packed": _plain(
        rt.MicroBatch.packed, samples=Made(lambda w: [w.sample]), align=2, total_len=16
    ),
    "client.MicroBatch.padded": _plain(
        rt.MicroBatch.padded, samples=Made(lambda w: [w.sample]), seq_len=16, padding_side="left",
        starts=None,
    ),
    "client.MicroBatch.from_mask": _plain(
        rt.MicroBatch.from_mask, input_ids=[TOKENS], attention_mask=[TOKENS > 2]
    ),
    "client.MicroBatch.from_position_ids": _plain(
        rt.MicroBatch.from_position_ids, input_ids=TOKENS, position_ids=TOKENS, num_tokens=8
    ),
    "client.MicroBatch.from_cu_seqlens": _plain(
        rt.MicroBatch.from_cu_seqlens, input_ids=TOKENS, cu_seqlens=[0, 4, 9]
    ),
    "client.Rank.__init__": _plain(
        rt.Rank, layer_ids=[0], cp_size=2, cp_rank=0, cp_layout="zigzag", sp_size=2, sp_rank=0,
        flatten="batch",
    ),
    "client.ModelLayout.__init__": _plain(
        rt.ModelLayout, layer_ids=[0], num_hidden_layers=3, num_experts=8, top_k=2,
        moe_layer_ids=[0, 2],
    ),
    "client.ModelLayout.from_config": _plain(
        rt.ModelLayout.from_config,
        config={"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8,
                "num_experts_per_tok": 2},
    ),
    "capture_agent.CaptureAgent.__init__": Call(
        lambda w: _closing(ca.CaptureAgent),
        lambda w: {
            "config": ca.AgentConfig(w.target, f"e{next(w.numbers)}", LAYOUT, background="thread"),
            "own_thread": False, "predecessor": None,
        },
    ),
    "capture_agent.CaptureAgent.begin": _agent(
        "begin", request_id=Made(lambda w: f"r{next(w.numbers)}"), trace_id="other", prompt_len=4,
        labels={"a": "b"}, ttl_seconds=900, num_computed_tokens=4, num_external_tokens=0,
        block_ids=[9], prompt_token_ids=TOKENS[:4],
        index=Made(lambda w: 1000 + next(w.numbers)),
    ),
    "capture_agent.CaptureAgent.step": _agent(
        "step", rows=ROWS, spans=Made(lambda w: [[w.begin(), 0, 9]])
    ),
    "capture_agent.CaptureAgent.skip": _agent("skip", spans=Made(lambda w: [[w.begin(), 0, 9]])),
    "capture_agent.CaptureAgent.step_slots": _agent("step_slots", rows=ROWS, slots=range(200, 209)),
    "capture_agent.CaptureAgent.add_blocks": _agent("add_blocks", handles=_HANDLE, block_ids=[9]),
    "capture_agent.CaptureAgent.rewind": _agent("rewind", handle=_HANDLE, position=0, step=1),
    "capture_agent.CaptureAgent.preempt": _agent("preempt", handle=_HANDLE, num_computed_tokens=0),
    "capture_agent.CaptureAgent.resume": _agent(
        "resume", handle=Made(World.preempted), num_computed_tokens=4, block_ids=[9],
        num_external_tokens=0, num_tokens=10,
    ),
    "capture_agent.CaptureAgent.finish": _agent(
        "finish", handle=_HANDLE, num_tokens=10, reason="abort", token_ids=TOKENS
    ),
    "capture_agent.CaptureAgent.mark_external": _agent("mark_external", block_ids=[60]),
    "capture_agent.CaptureAgent.copy_blocks": _agent(
        "copy_blocks", sources=[60, 61], targets=[61, 60]
    ),
    "capture_agent.CaptureAgent.reset_prefix_cache": _agent("reset_prefix_cache"),
    "capture_agent.CaptureAgent.reset_external_kv": _agent("reset_external_kv"),
    "capture_agent.CaptureAgent.set_weight_version": _agent("set_weight_version", version=0),
    "capture_agent.CaptureAgent.flush": _agent("flush", timeout=0.0),
    "capture_agent.CaptureAgent.stats": _agent("stats"),
    "capture_agent.CaptureAgent.close": Call(
        lambda w: _other_agent(w).close, lambda w: {"timeout": 1.0}
    ),
    "capture_agent.AgentConfig.from_env": _plain(
        ca.AgentConfig.from_env, environ={"ROUTETRACE_TARGET": "h:1"}, engine_id="e", layout=LAYOUT
    ),
    "capture_agent.AgentConfig.__init__": _plain(
        ca.AgentConfig, target="h:1", engine_id="e", layout=LAYOUT, run="r", shard="", boot_id="b",
        block_size=4, num_blocks=8, background="thread", attributes={"a": "b"}, frame_rows=9,
        codec="pack", linger_seconds=1.0, flush_interval_seconds=1.0, security=None,
        queue_bytes=1 << 20, spill_dir=None, spill_bytes=1 << 20, ring_bytes=1 << 20,
        close_timeout_seconds=1.0,
    ),
}  # fmt: skip
_DIALECTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": _plain(
        getattr(module, name), rows=Made(lambda w: w.trace)
    )
    for module, names in {
        verl: ("routed_experts", "replay_mask"),
        slime: ("rollout_routed_experts",),
        miles: ("rollout_routed_experts",),
        nemo_rl: ("routed_experts", "envelope"),
        skyrl: ("rollout_expert_indices", "packed"),
        prime_rl: ("routed_experts",),
        vllm: ("routed_experts",),
        sglang: ("routed_experts",),
    }.items()
    for name in names
}
TABLE = {**_TABLE, **_DIALECTS}


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call whose NotFound is a result."""

    def called(**arguments: Any) -> None:
        with suppress(rt.NotFound):
            call(**arguments)

    return called


def _delete(client: rt.RouteClient, trace_id: Any, **options: Any) -> int:
    return client.delete(trace_id, **options)


def _closing(make: Callable[..., Any]) -> Callable[..., Any]:
    def called(**arguments: Any) -> None:
        make(**arguments).close(1)

    return called


def _other_agent(world: World) -> ca.CaptureAgent:
    return world.new_agent(f"e{next(world.numbers)}")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server() as process:
        yield process


@pytest.fixture(scope="module")
def world(server: ServerProcess) -> Iterator[World]:
    made = World(server.target)
    yield made
    made.close()


def carry_out(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make a call, and consume its result."""
    result = call(**arguments)
    if isinstance(result, rt.Prefetch):
        with result:
            list(result)
    elif isinstance(result, GeneratorType):
        list(result)
    elif isinstance(result, rt.RouteClient):
        result.close()


def leak_of(call: Call, world: World, argument: str, value: Any) -> str:
    """Return the foreign error of a call with a value in place of an argument; "" if none."""
    try:
        carry_out(call.of(world), call.right(world) | {argument: value})
    except RouteTraceError as error:
        return "" if error.message else f"{argument}={value!r}: an error without a message"
    except Exception as error:
        return f"{argument}={value!r}: {type(error).__name__}: {error}"
    return ""


def test_every_public_call_has_a_row():
    assert set(_TABLE) == set(CALLS)


@pytest.mark.parametrize("name", TABLE)
def test_any_value_is_taken_or_named(world, name):
    call = TABLE[name]
    carry_out(call.of(world), call.right(world))
    leaks = [
        leak
        for argument in call.right(world)
        for value in POOL
        # A function that raises is an error of the caller.
        if not (argument == "progress" and callable(value))
        and (leak := leak_of(call, world, argument, value))
    ]
    assert not leaks, "\n".join(leaks)
