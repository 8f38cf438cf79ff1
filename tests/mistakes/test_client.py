"""Mistakes of callers of the client: the class of each error, and every word of it."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import routetrace.client
from routetrace.trainers import megatron
from routetrace.trainers.dialects import verl
from routetrace.trainers.replay import replay
from support.mistakes import LAYOUT, Case, World, check, world
from support.models.tiny_models import tiny_model

# Names that messages show.
LAYOUT_CLASS = "ModelLayout"
TRACE_CLASS = "Trace"
ROWS_CLASS = "Rows"
PLAN_CLASS = "FetchPlan"
PER_SAMPLE = f"rows.per_sample() for {ROWS_CLASS}"
NOT_SUPPORTED = "ModelNotSupported InvalidArgument"

IA, INCOMPLETE, UNAVAILABLE = "InvalidArgument", "Incomplete", "Unavailable"
LATE, NOT_FOUND, MISSING = "DeadlineExceeded", "NotFound", "MissingDependency ImportError"

# Untyped: most calls have arguments of wrong types.
rt: Any = routetrace.client
routed_experts: Any = verl.routed_experts

SAMPLE = rt.Sample.of("done", 10)
BATCH = rt.MicroBatch.packed([SAMPLE])
RANK = rt.Rank([1, 2, 3])
PLAN = rt.FetchPlan.make(LAYOUT, BATCH, RANK)
PLAN_32 = rt.FetchPlan.make(rt.ModelLayout((1, 2, 3), 4, 32, 2), BATCH, RANK)


@pytest.fixture(scope="module")
def things() -> Iterator[World]:
    with world() as made:
        yield made


def server_of(client: Any) -> str:
    return repr(client).split()[1]


def get_from(w: World, target: str, **options: Any) -> object:
    return w.connect(target, **options).get("done")


def missing_types(w: World) -> object:
    try:
        return w.client.get("done", weight_version=99)
    except rt.Incomplete as error:
        return type(error.missing), {type(m) for m in error.missing}


def to_cuda(w: World) -> object:
    with patch.object(torch.cuda, "is_available", return_value=False):
        return w.trace.to_torch("cuda")


def without_megatron(_: World) -> object:
    with patch.dict(sys.modules, {"megatron": None, "megatron.core": None}):
        return megatron.local_rank(torch.nn.Linear(1, 1))


def as_context(w: World) -> None:
    client: Any = rt.AsyncRouteClient(w.target)
    with client:
        pass


# fmt: off
CASES = [
    Case(1, "no-target", lambda w: rt.RouteClient(), IA,
         "target is not set; expected host:port; pass target= or set ROUTETRACE_TARGET"),
    Case(2, "host-alone", lambda w: server_of(w.connect("localhost")), "", "localhost:7411"),
    Case(3, "ipv6-alone", lambda w: server_of(w.connect("[::1]")), "", "[::1]:7411"),
    Case(4, "target-with-scheme", lambda w: w.connect("http://h:1"), IA,
         "target is 'http://h:1'; expected host:port without a scheme; use 'h:1'"),
    Case(5, "target-with-path", lambda w: w.connect("h:1/"), IA,
         "target is 'h:1/'; expected host:port without a path; use 'h:1'"),
    Case(6, "port-out-of-range", lambda w: w.connect("h:99999"), IA,
         "port is 99999; expected a number in 1..65535"),
    Case(7, "target-is-int", lambda w: w.connect(7911), IA,
         "target is 7911 (int); expected str host:port"),
    Case(8, "target-is-bytes", lambda w: w.connect(b"h:1"), IA,
         "target is b'h:1' (bytes); expected str host:port"),
    Case(9, "unknown-host", lambda w: get_from(w, "no.such.host.invalid:7411"), UNAVAILABLE,
         "cannot resolve 'no.such.host.invalid'; check the host name and DNS"),
    Case(10, "closed-port", lambda w: get_from(w, w.dead, timeout=1.5), UNAVAILABLE,
         "cannot connect to {dead} (connection refused); is routetrace-server running there?"),
    Case(11, "http-1", lambda w: get_from(w, w.web), UNAVAILABLE,
         "{web} speaks HTTP/1, not gRPC; is this the metrics port?"),
    Case(12, "no-answer", lambda w: get_from(w, w.silent, timeout=1.5), LATE,
         "no answer from {silent} within 1.5 s; check that it is a routetrace-server"),
    Case(13, "tls-to-plain",
         lambda w: get_from(w, w.target, security=rt.Security(tls=True)), UNAVAILABLE,
         "{target} does not speak TLS; leave tls off, or start the server with tls_cert"),
    Case(14, "timeout-is-str", lambda w: w.connect(timeout="5"), IA,
         "timeout is '5' (str); expected a number of seconds above 0"),
    Case(14, "timeout-is-none", lambda w: w.connect(timeout=None), IA,
         "timeout is None; expected a number of seconds above 0"),
    Case(15, "timeout-is-inf", lambda w: w.connect(timeout=float("inf")), IA,
         "timeout is inf; expected a finite number of seconds above 0, up to 31536000"),
    Case(15, "timeout-is-too-long", lambda w: w.connect(timeout=1e12), IA,
         "timeout is 1000000000000.0; expected a finite number of seconds above 0, up to 31536000"),
    Case(16, "timeout-is-bool", lambda w: w.connect(timeout=True), IA,
         "timeout is True (bool); expected a number of seconds above 0"),
    Case(17, "run-is-int", lambda w: w.connect(run=3), IA, "run is 3 (int); expected str"),
    Case(18, "run-is-bytes", lambda w: w.connect(run=b"x"), IA,
         "run is b'x' (bytes); expected str"),
    Case(19, "run-is-empty", lambda w: w.connect(run=""), IA,
         "run is ''; expected 1 to 512 characters"),
    Case(20, "max-message-bytes-is-str",
         lambda w: rt.ClientConfig(target="h", max_message_bytes="1"), IA,
         "max_message_bytes is '1' (str); expected int above 0"),
    Case(21, "grpc-options-are-list", lambda w: rt.ClientConfig(target="h", grpc_options=[1]), IA,
         "grpc_options is a list; expected a mapping of str to str or int"),
    Case(21, "grpc-options-are-str", lambda w: rt.ClientConfig(target="h", grpc_options="ab"), IA,
         "grpc_options is 'ab' (str); expected a mapping of str to str or int"),
    Case(22, "security-is-str", lambda w: w.connect(security="s3cret"), IA,
         "security is a str; expected Security; use Security(token=...), or a mapping of its "
         "fields"),
    Case(23, "no-token-file",
         lambda w: w.connect(security=rt.Security(token_file="/no/such")), IA,
         "token_file '/no/such' cannot be read (no such file or directory)"),
    Case(24, "id-is-empty", lambda w: w.client.get(""), IA,
         "request_id is ''; expected 1 to 512 characters"),
    # Before sending: the port is closed.
    Case(25, "id-is-too-long", lambda w: w.connect(w.dead).get("x" * 600), IA,
         re.compile(r"request_id is '?x+.*; expected 1 to 512 characters")),
    Case(26, "unknown-id", lambda w: w.client.get("nope"), NOT_FOUND,
         "trace 'nope' is not in run 'default'; check run=, or wait_for=\"end\" if it has not "
         "begun"),
    Case(27, "layer-ids-are-int", lambda w: w.client.get("done", layer_ids=5), IA,
         "layer_ids is 5 (int); expected a sequence of int; use [5]"),
    Case(28, "dense-layer", lambda w: w.client.get("done", layer_ids=[0]), IA,
         "layer_ids [0] are not MoE layers; expected ids among [1, 2, 3]; ids count dense layers"),
    Case(29, "missing-is-ignore", lambda w: w.client.get("done", missing="ignore"), IA,
         "missing is 'ignore'; expected 'raise' or 'mask'"),
    Case(29, "missing-is-bool", lambda w: w.client.get("done", missing=True), IA,
         re.compile(r"missing is True( \(bool\))?; expected 'raise' or 'mask'")),
    Case(30, "unknown-keyword", lambda w: w.client.get("done", wait="5"), f"{IA} TypeError",
         re.compile(r".*\bwait\b.*")),
    Case(31, "wait-for-is-bool", lambda w: w.client.get("done", wait_for=True), IA,
         re.compile(r"wait_for is True( \(bool\))?; expected 'rows', 'end' or None")),
    Case(32, "other-version", lambda w: w.client.get("done", weight_version=99), INCOMPLETE,
         "rows [0, 9) of trace 'done' were computed by an unknown version, not 99"),
    Case(33, "unknown-incarnation", lambda w: w.client.get("done", incarnation=7), NOT_FOUND,
         "trace 'done' has no incarnation 7; it has 1"),
    Case(34, "not-ended", lambda w: w.client.get("running"), INCOMPLETE,
         "trace 'running' has not ended: rows from 4 on are unknown; use wait_for=\"end\" or "
         'missing="mask"'),
    Case(35, "no-end-in-time",
         lambda w: w.client.get("running", wait_for="end", timeout=1), LATE,
         "trace 'running' did not end within 1 s (4 rows so far)"),
    Case(36, "no-rows-in-time",
         lambda w: w.client.get("running", wait_for="rows", timeout=2), LATE,
         "rows [4, end) of trace 'running' did not arrive within 2 s"),
    Case(37, "missing-ranges", missing_types, "", (tuple, {rt.MissingRange})),
    Case(38, "client-pickles", lambda w: len(pickle.loads(pickle.dumps(w.client)).get("done")), "",
         9),
    Case(39, "equal-by-identity", lambda w: w.trace == w.trace, "", False),
    Case(39, "equals", lambda w: w.trace.equals(w.trace), "", True),
    Case(40, "trace-indexed", lambda w: w.trace[0], "TypeError",
         f"{TRACE_CLASS} is not indexable; use topk_ids[i] or tokens(i, i + 1)"),
    Case(40, "trace-iterated", lambda w: iter(w.trace), "TypeError",
         f"'{TRACE_CLASS}' object is not iterable"),
    Case(41, "trace-as-array", lambda w: np.asarray(w.trace), IA,
         re.compile(r"(.+ )?ids without validity; use topk_ids and valid")),
    Case(42, "split-at-str", lambda w: w.trace.split("4"), IA,
         "prompt_len is '4' (str); expected int from 0 on"),
    Case(43, "unknown-device", lambda w: w.trace.to_torch("gpu"), IA,
         "device is 'gpu'; expected a torch device"),
    Case(43, "no-cuda", to_cuda, MISSING, re.compile(r".*\bCUDA\b.*")),
    Case(44, "dtype-is-str", lambda w: w.trace.to_torch(dtype="int64"), IA,
         "dtype is 'int64' (str); expected torch.dtype; use torch.int64"),
    Case(45, "ids-are-str", lambda w: w.client.get_many("done"), IA,
         "trace_ids is a str; expected an iterable of str; use ['done']"),
    Case(46, "ids-are-none", lambda w: w.client.get_many(None), IA,
         "trace_ids is None; expected an iterable of str"),
    Case(46, "ids-are-int", lambda w: w.client.get_many(5), IA,
         "trace_ids is 5 (int); expected an iterable of str"),
    Case(47, "plan-is-str", lambda w: w.client.fetch("done"), IA,
         f"plan is a str; expected {PLAN_CLASS}; use get() for a trace id"),
    Case(48, "plan-of-another-model", lambda w: w.client.fetch(PLAN_32), IA,
         "plan has num_experts 32, trace 'done' has 16"),
    Case(49, "layout-and-batch-swapped", lambda w: rt.FetchPlan.make(BATCH, LAYOUT, RANK), IA,
         f"layout is a MicroBatch; expected {LAYOUT_CLASS}"),
    Case(50, "batch-is-list", lambda w: rt.FetchPlan.make(LAYOUT, [SAMPLE], RANK), IA,
         "batch is a list; expected MicroBatch; use MicroBatch.packed(samples)"),
    Case(51, "rank-of-int", lambda w: rt.Rank(3), IA,
         "layer_ids is 3 (int); expected a sequence of int; use [3], or () if nothing routes"),
    Case(51, "rank-of-none", lambda w: rt.Rank(None), IA,
         "layer_ids is None; expected a sequence of int; use () if nothing routes"),
    Case(52, "rank-of-str", lambda w: rt.Rank("12"), IA,
         "layer_ids is a str; expected a sequence of int; use () if nothing routes"),
    Case(53, "ragged-tokens", lambda w: rt.Sample.of("a", token_ids=[[1], [2, 3]]), IA,
         "token_ids is ragged; expected one dimension of integers in [0, 2**32)"),
    Case(54, "samples-are-ids", lambda w: rt.MicroBatch.packed(["a"]), IA,
         "samples[0] is a str; expected Sample; use Sample.of('a', num_tokens)"),
    Case(54, "samples-are-a-sample", lambda w: rt.MicroBatch.packed(SAMPLE), IA,
         re.compile(r"samples is a Sample; expected .+")),
    Case(55, "plans-are-a-plan", lambda w: w.client.prefetch(PLAN), IA,
         f"plans is a {PLAN_CLASS}; expected an iterable of {PLAN_CLASS}; use [plan]"),
    Case(56, "follow-in-time", lambda w: list(w.client.follow("running", timeout=1)), LATE,
         "trace 'running' did not end within 1 s"),
    Case(57, "states-are-str", lambda w: list(w.client.find(states="complete")), IA,
         "states is a str; expected an iterable of str; use ['complete']"),
    Case(58, "labels-are-list", lambda w: list(w.client.find(labels=["a"])), IA,
         "labels is a list; expected a mapping of str to str; for example {'group': 'g0'}"),
    Case(59, "label-is-int", lambda w: list(w.client.find(labels={"a": 1})), IA,
         "labels['a'] is 1 (int); expected str"),
    Case(60, "renewed-ids-are-str", lambda w: w.client.renew("done", ttl_seconds=10), IA,
         "trace_ids is a str; expected an iterable of str; use ['done']"),
    Case(61, "engine-without-slots", lambda w: w.client.get_blocks("e1", [0], 4), IA,
         "engine 'e1' reports no KV slots; set block_size and num_blocks"),
    Case(62, "with-of-async-client", as_context, "TypeError",
         "use 'async with' for AsyncRouteClient"),
    Case(72, "layer-ids-are-list", lambda w: rt.ModelLayout([1, 2], 4, 16, 2).layer_ids, "",
         (1, 2)),
    Case(72, "layout-is-hashable", lambda w: len({rt.ModelLayout([1, 2], 4, 16, 2)}), "", 1),
    Case(73, "num-experts-is-str", lambda w: rt.ModelLayout((1,), 4, "8", 2), IA,
         "num_experts is '8' (str); expected int above 0"),
    Case(74, "config-is-str", lambda w: rt.ModelLayout.from_config("Qwen/Qwen3"), NOT_SUPPORTED,
         "config is a str; expected a config or a mapping; use AutoConfig.from_pretrained(...)"),
    Case(74, "config-is-model", lambda w: rt.ModelLayout.from_config(tiny_model("qwen3_moe")[0]),
         NOT_SUPPORTED, "config is a Qwen3MoeForCausalLM; expected a config; use model.config"),
    Case(75, "rows-are-str", lambda w: routed_experts("done"), IA,
         f"rows is a str; expected {TRACE_CLASS} or SampleRows; use {PER_SAMPLE}"),
    Case(75, "rows-of-a-rank", lambda w: routed_experts(w.client.fetch(PLAN)), IA,
         f"rows is a {ROWS_CLASS}; expected {TRACE_CLASS} or SampleRows; use {PER_SAMPLE}"),
    Case(76, "sample-is-too-long", lambda w: verl.batch([w.trace], [0], 8), IA,
         "samples[0] has 10 tokens; expected at most seq_len = 8"),
    Case(77, "no-model", lambda w: replay("qwen3", w.trace.topk_ids), IA,
         "model is a str; expected a transformers MoE model"),
    Case(77, "trace-is-no-rows", lambda w: replay(tiny_model("qwen3_moe")[0], w.trace), IA,
         f"topk_ids is a {TRACE_CLASS}; expected Rows, or an array with layer_ids; "
         "use client.fetch(plan), or collate(traces, ...)"),
    Case(78, "no-megatron", without_megatron, MISSING,
         re.compile(r"megatron-core 0\.16\.1 or newer is required \(.+\); pip install .+")),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_mistake_is_told(case: Case, things: World) -> None:
    check(case, things)
