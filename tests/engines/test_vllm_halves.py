"""The two halves of capture in vLLM, against what vLLM's scheduler tells in its own words.

Real engines and vLLM's real scheduler drive them in vllm_runs; here are the protocols, one by one,
and what no engine does on demand: faults of ours, ends that nobody tells, bad options.
"""

from __future__ import annotations

import pickle
import threading
import time
import zlib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.vllm import plan as plans
from routetrace.capture_agent.engines.vllm import worker as worker_module
from routetrace.capture_agent.engines.vllm.inputs import Inputs
from routetrace.capture_agent.engines.vllm.options import options_of, split_request_id
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.worker import WorkerSide
from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import InvalidArgument, NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
BLOCK = 4

WARNING = "the weights of engine"

_numbers = count(1)


# ---------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("request_id", "sample", "name"),
    [
        ("cmpl-my-req-1-0-9dc7cdf0", None, "my-req-1"),
        ("cmpl-my-req-1-2-9dc7cdf0", None, "my-req-1-2"),
        ("1_cmpl-my-req-1-0-9dc7cdf0", 1, "my-req-1"),
        ("chatcmpl-r-9dc7cdf0", None, "r"),
        ("rollout-7-0a1b2c3d", None, "rollout-7"),
        ("0_rollout-7-0a1b2c3d", 0, "rollout-7"),
        ("17-0a1b2c3d", None, None),
        ("3_17-0a1b2c3d", 3, None),
    ],
)
def test_a_trace_is_called_as_the_user_called_the_request(request_id, sample, name):
    assert split_request_id(request_id) == (sample, name)


def test_ids_that_nobody_chose_name_no_trace():
    one, other = (options_of("0-0a1b2c3d", None, engine).trace_id for engine in ("a", "b"))
    assert one != other
    assert one == "a/0-0a1b2c3d"


def test_options_are_read_and_samples_told_apart():
    given = {
        "routetrace.trace_id": "t",
        "routetrace.group": "g",
        "routetrace.label.kind": 7,
        "routetrace.capture": 1,
        "routetrace.handoff": "true",
        "routetrace.ttl_seconds": 60,
        "kv_transfer_params": {"not": "ours"},
    }
    options = options_of("2_5-0a1b2c3d", given, "e")
    assert options.trace_id == "t/2"
    assert options.labels == {"group": "g", "kind": "7", "sample": "2"}
    assert (options.capture, options.handoff, options.ttl_seconds) == (True, True, 60)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trace_id", ""),
        ("trace_id", ["t"]),
        ("trace_id", "t" * 600),
        ("capture", "no"),
        ("handoff", 2),
        ("ttl_seconds", -1),
        ("ttl_seconds", "long"),
        ("lable.x", "y"),
    ],
)
def test_a_bad_option_is_named(key, value):
    with pytest.raises(InvalidArgument) as error:
        options_of("r-0a1b2c3d", {f"routetrace.{key}": value}, "e")
    assert key in error.value.field


# ---------------------------------------------------------------------------- an engine


class Request:
    """Fields of vLLM's Request that the plug-in reads."""

    def __init__(self, request_id, prompt, options=None):
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.prompt_embeds, self.mm_features, self.lora_request = None, [], None
        self.sampling_params = SimpleNamespace(extra_args=options)
        self.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        self.num_stale_output_tokens, self.drop_stale_output = 0, False

    def is_finished(self):
        return self.status.name.startswith("FINISHED")

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Engine:
    """A scheduler by hand, with a router that draws ids at random; the halves are real."""

    def __init__(self, target, *, drafts=False, linked=True, kv_cache_dtype="auto"):
        engine_id = f"e{next(_numbers)}"
        inputs = Inputs(kv_cache_dtype=kv_cache_dtype)
        self.schedule = Schedule("r", engine_id, 0, drafts=drafts, inputs=inputs)
        config = AgentConfig(
            target, engine_id, LAYOUT, run="r", background="thread", block_size=BLOCK,
            num_blocks=64, linger_seconds=0.01, flush_interval_seconds=0.01,
            model="0123456789abcdef",
        )  # fmt: skip
        self.config = config
        self.capturer = RoutingCapturer(LAYOUT, 64, "cpu")
        late = self.schedule.take_finished if linked else None
        self.side = WorkerSide(self.capturer, config, late)
        self.random = np.random.default_rng(0)
        self.rows = {}  # (request id, position) -> the row that was computed last
        self.known = set()

    def step(
        self,
        *spans,
        new=(),
        resumed=(),
        preempted=(),
        blocks=None,
        computed=None,
        late=None,
        **more,
    ):
        """Spans are (request, start, count); of new and resumed ones `blocks` are all, else more.

        `late` are first positions that the model knows, and the scheduler did not: then the model
        tells all of them.
        """
        blocks, computed = blocks or {}, computed or {}
        fresh, old = [], []
        for request, start, _ in spans:
            if request in new:
                self.schedule.lookup(request, computed.get(request.request_id, start))
                fresh.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        sampling_params=request.sampling_params,
                        block_ids=(blocks.get(request.request_id, []),),
                        num_computed_tokens=start,
                    )
                )
            else:
                if request in resumed:
                    self.schedule.lookup(request, computed.get(request.request_id, start))
                old.append((request, start))
        cached = SimpleNamespace(
            req_ids=[request.request_id for request, _ in old],
            num_computed_tokens=[start for _, start in old],
            new_block_ids=[
                (blocks[r.request_id],) if r.request_id in blocks else None for r, _ in old
            ],
            resumed_req_ids={request.request_id for request in resumed},
        )
        output = SimpleNamespace(
            scheduled_new_reqs=fresh,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: n for request, _, n in spans},
            preempted_req_ids={request.request_id for request in preempted},
            **more,
        )
        plan = pickle.loads(pickle.dumps(self.schedule.step(output)))
        self.side.begin_step()
        batch = list(spans)
        self.random.shuffle(batch)
        ids = self.draw(sum(n for _, _, n in batch))
        for column in range(len(LAYOUT.layer_ids)):
            self.capturer.capture(column, torch.from_numpy(ids[:, column]))
        positions = []
        for request, start, n in batch:
            first = (late or {}).get(request, start)
            for p in range(first, first + n):
                self.rows[request.request_id, p] = ids[len(positions)]
                positions.append(p)
        self.side.end_step(
            plan,
            lambda: [request.request_id for request, _, _ in batch],
            torch.tensor(positions) if late is not None else None,
        )

    def draw(self, n):
        first = self.random.integers(0, 16, (n, len(LAYOUT.layer_ids), 1))
        return (first + np.array([0, 5])) % 16

    def finish(self, request):
        return self.schedule.finish(request)

    def expected(self, request_id, *positions):
        return np.stack([self.rows[request_id, p] for p in range(*positions)])


class Stages(Engine):
    """Two stages of a pipeline, with a layer each, which get the same plans."""

    def __init__(self, target):
        super().__init__(target, linked=False)
        self.side.close()
        self.sides = []
        for stage, layer in enumerate(LAYOUT.layer_ids):
            layout = LAYOUT.select((layer,))
            config = replace(self.config, layout=layout, shard=f"pp{stage}", boot_id="boot")
            self.sides.append(WorkerSide(RoutingCapturer(layout, 64, "cpu"), config))
        self.side = SimpleNamespace(
            begin_step=lambda: [side.begin_step() for side in self.sides],
            end_step=lambda *step: [side.end_step(*step) for side in self.sides],
            flush=lambda timeout: all(side.flush(timeout) for side in self.sides),
            close=lambda: [side.close() for side in self.sides],
        )
        self.capturer = SimpleNamespace(
            capture=lambda stage, ids: self.sides[stage]._capturer.capture(0, ids)
        )

    def serve(self, *requests):
        """Compute requests of five tokens in one step, and end them in the next."""
        blocks = {r.request_id: [2 * i + 1, 2 * i + 2] for i, r in enumerate(requests)}
        self.step(*((r, 0, 5) for r in requests), new=requests, blocks=blocks)
        for request in requests:
            request.all_token_ids.append(1)
            self.finish(request)
        self.step()


@pytest.fixture(scope="module")
def server():
    with run_server() as one:
        yield one


@pytest.fixture
def engine(server):
    made = []

    def make(kind=Engine, **settings):
        made.append(kind(server.target, **settings))
        return made[-1]

    yield make
    for one in made:
        one.side.close()


@pytest.fixture
def client(server):
    with RouteClient(server.target, run="r") as one:
        yield one


def fresh(name, length=6, **options):
    """A request with a trace of its own."""
    number = next(_numbers)
    trace_id = f"{name}-{number}"
    given = {f"routetrace.{key}": value for key, value in options.items()}
    tokens = range(100 * number, 100 * number + length)
    request = Request(
        f"{name}-{number}-internal", tokens, {"routetrace.trace_id": trace_id, **given}
    )
    request.trace_id = trace_id
    return request


# ---------------------------------------------------------------------------- protocols


@pytest.mark.parametrize("protocol", ["resumed", "new"])
def test_a_preempted_request_comes_back_in_either_protocol(engine, client, protocol):
    e, a = engine(), fresh("a")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(7)
    e.step((a, 6, 1))
    a.all_token_ids.append(8)
    first = e.expected(a.request_id, 7)
    e.step(preempted=[a])
    again = {protocol: [a]}
    e.step((a, 4, 4), blocks={a.request_id: [1, 5]}, **again)
    a.all_token_ids.append(9)
    handle = e.finish(a)
    assert handle.pop("nonce") > 0
    assert handle == {"run": "r", "trace_id": a.trace_id, "num_tokens": 9}
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert trace.state is TraceState.COMPLETE
    assert np.array_equal(trace.topk_ids[:7], first)
    assert np.array_equal(trace.topk_ids, np.concatenate([first, [e.rows[a.request_id, 7]]]))


@pytest.mark.parametrize("preempted", [False, True])
def test_rows_on_kv_that_did_not_arrive_are_taken_back(engine, client, preempted):
    """vLLM throws the step's outcome away and computes what lacks again, like this step's part."""
    e, a = engine(), fresh("a", 14)
    blocks = {a.request_id: [1, 2, 3, 4]}
    e.step((a, 12, 2), new=[a], blocks=blocks, computed={a.request_id: 4})
    e.step((a, 8, 3))  # the second of two loaded blocks lacks
    if preempted:
        e.step(preempted=[a])
        # Its own block is found again, and so is the one that arrived.
        e.step((a, 11, 3), resumed=[a], blocks=blocks, computed={a.request_id: 11})
    else:
        e.step((a, 11, 3))
    a.all_token_ids.append(1)
    e.finish(a)
    assert e.side.flush(60)
    trace = client.get(a.trace_id, missing="mask")  # running: who computed the rest may tell
    assert trace.valid.all(axis=1).tolist() == [False] * 8 + [True] * 6
    np.testing.assert_array_equal(trace.topk_ids[8:], e.expected(a.request_id, 8, 14))
    assert {m.reason for m in trace.missing} == {"kv_unknown"}


def test_rejected_drafts_of_a_preempted_request_are_not_kept(engine, client):
    e, a = engine(drafts=True), fresh("a")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3]})
    a.all_token_ids.append(7)
    e.step((a, 6, 4))  # one token and three drafts, of which the first is accepted
    a.all_token_ids += [8, 9]
    kept = e.expected(a.request_id, 8)
    e.step(preempted=[a])
    e.step((a, 0, 9), new=[a], blocks={a.request_id: [4, 5, 6]})
    a.all_token_ids.append(10)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert np.array_equal(trace.topk_ids[:8], kept)
    assert np.array_equal(trace.topk_ids[8], e.rows[a.request_id, 8])


def test_drafts_may_be_judged_when_the_next_step_is_planned(engine, client):
    """Asynchronous scheduling: a plan takes the drafts of the step before for accepted."""
    e, a = engine(drafts=True), fresh("a")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3, 4, 5]}, late={})
    a.all_token_ids.append(7)
    e.step((a, 6, 4), late={})
    e.step((a, 10, 4), late={a: 7})  # all three were rejected
    a.all_token_ids.append(8)
    e.step((a, 11, 4), late={a: 9})  # two of three; the first three are known by now
    a.all_token_ids += [9, 10]
    kept = e.expected(a.request_id, 10)
    # A block is hit that holds accepted drafts, and one that held rejected ones.
    b = Request("b-internal", [*a.all_token_ids[:8], 5], {"routetrace.trace_id": a.trace_id + "b"})
    e.step((b, 8, 1), (a, 13, 4), new=[b], blocks={b.request_id: [1, 2, 6]}, late={a: 10})
    a.all_token_ids.append(11)
    assert len(a.all_token_ids) == 11
    for request, length in ((a, 11), (b, 9)):
        assert e.finish(request)["num_tokens"] == length
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert trace.state is TraceState.COMPLETE
    np.testing.assert_array_equal(trace.topk_ids, kept)
    other = client.get(a.trace_id + "b", wait_for="end", timeout=60)
    np.testing.assert_array_equal(other.topk_ids, kept[:8])


def test_drafts_that_nobody_judged_before_a_preemption_are_computed_again(engine, client):
    e, a = engine(drafts=True), fresh("a")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3, 4]}, late={})
    a.all_token_ids.append(7)
    e.step((a, 6, 4), late={})
    e.step((a, 10, 4), late={a: 7})
    a.all_token_ids.append(8)  # what the first of the two sampled; the other is in flight
    kept = e.expected(a.request_id, 8)
    a.num_stale_output_tokens = 4
    e.step(preempted=[a])
    a.all_token_ids += [9, 10]  # one of its drafts was accepted
    e.step((a, 0, 10), new=[a], blocks={a.request_id: [5, 6, 7]}, late={})
    a.all_token_ids.append(11)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert trace.state is TraceState.COMPLETE
    np.testing.assert_array_equal(trace.topk_ids[:8], kept)
    np.testing.assert_array_equal(trace.topk_ids[8:], e.expected(a.request_id, 8, 10))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_sample_that_vllm_drops_does_not_count(engine, client, drafts, in_flight):
    """`reset_prefix_cache(reset_running_requests=True)` drops what steps in flight sample."""
    e, a, b = engine(drafts=drafts > 0), fresh("a"), fresh("b")
    late = {} if drafts else None
    new = {"new": [a, b], "blocks": {a.request_id: [1, 2, 3], b.request_id: [4, 5]}}
    e.step((a, 0, 6), (b, 0, 6), late=late, **new)
    a.all_token_ids.append(7)  # that of b is dropped
    e.step((a, 6, 1 + drafts), late=late)
    kept = e.expected(a.request_id, 6)
    for request, n in ((a, 1 + drafts), (b, 6)):
        request.drop_stale_output, request.num_stale_output_tokens = True, n * in_flight
    e.schedule.reset(external=False)
    blocks = {a.request_id: [6, 7], b.request_id: [8, 9]}
    e.step((a, 0, 7), (b, 0, 6), resumed=[a, b], preempted=[a, b], blocks=blocks, late=late)
    for request in (a, b):
        request.all_token_ids.append(8)
        e.finish(request)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    np.testing.assert_array_equal(trace.topk_ids[:6], kept)
    np.testing.assert_array_equal(trace.topk_ids[6:], e.expected(a.request_id, 6, 7))
    trace = client.get(b.trace_id, wait_for="end", timeout=60)
    np.testing.assert_array_equal(trace.topk_ids, e.expected(b.request_id, 6))


@pytest.mark.parametrize("dropped", [False, True])
def test_before_0_27_placeholders_tell_whether_a_sample_in_flight_counts(engine, client, dropped):
    """Of steps that overlap: vLLM delivers it, unless a reset preempts, which drops it."""
    e, a = engine(), fresh("a")
    del a.num_stale_output_tokens, a.drop_stale_output
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3]})
    a.all_token_ids.append(7)
    a.num_output_placeholders = 1
    e.step((a, 6, 1))
    kept = e.expected(a.request_id, 7)
    if dropped:
        a.num_output_placeholders, a.async_tokens_to_discard = 0, 1
        e.schedule.preempt([a])
        e.schedule.reset(external=False)
        e.step((a, 0, 7), resumed=[a], blocks={a.request_id: [6, 7]})
    else:
        e.step(preempted=[a])
        a.all_token_ids.append(8)
        a.num_output_placeholders = 0
        e.step((a, 0, 8), resumed=[a], blocks={a.request_id: [6, 7]})
    a.all_token_ids.append(9)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert trace.state is TraceState.COMPLETE
    np.testing.assert_array_equal(trace.topk_ids[: 7 - dropped], kept[: 7 - dropped])
    np.testing.assert_array_equal(
        trace.topk_ids[7 - dropped :], e.expected(a.request_id, 7 - dropped, 8 - dropped)
    )


def test_a_reset_takes_blocks_before_others_get_them(engine, client):
    """Before 0.25 vLLM names requests that a reset has preempted in no step."""
    e, a, b = engine(), fresh("a"), fresh("b", 9)
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(7)
    e.schedule.preempt([a])
    e.schedule.reset(external=False)
    e.step((b, 0, 9), new=[b], blocks={b.request_id: [1, 2, 3]})
    b.all_token_ids.append(7)
    c = Request("c-internal", [*b.all_token_ids[:8], 5], {"routetrace.trace_id": b.trace_id + "c"})
    blocks = {a.request_id: [4, 5], c.request_id: [1, 2, 6]}
    e.step((a, 0, 7), (c, 8, 1), resumed=[a], new=[c], blocks=blocks)
    for request in (a, b, c):
        request.all_token_ids.append(8)
        e.finish(request)
    trace = client.get(b.trace_id + "c", wait_for="end", timeout=60)
    assert trace.state is TraceState.COMPLETE
    np.testing.assert_array_equal(trace.topk_ids[:8], e.expected(b.request_id, 8))


def test_a_preemption_that_fails_ends_what_is_under_way(engine, client, caplog):
    e, a, b = engine(), fresh("a"), fresh("b")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2]})
    del a.num_stale_output_tokens  # neither protocol
    e.schedule.preempt([a])
    assert "internal fault in capture" in caplog.text
    a.num_stale_output_tokens = 0
    e.step((a, 0, 6), resumed=[a], blocks={a.request_id: [3, 4]})
    e.step((b, 0, 6), new=[b], blocks={b.request_id: [5, 6]})
    b.all_token_ids.append(7)
    e.finish(b)
    trace = client.get(b.trace_id, wait_for="end", timeout=60)
    np.testing.assert_array_equal(trace.topk_ids, e.expected(b.request_id, 6))


@pytest.mark.parametrize("wrong", [12, 3])
def test_positions_that_can_not_be_are_not_believed(engine, client, caplog, wrong):
    """Above the plan, or of no run."""
    e, a = engine(drafts=True), fresh("a")
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3, 4]}, late={})
    a.all_token_ids.append(7)
    if wrong == 12:
        e.step((a, 6, 2), late={a: wrong})
    else:
        end_step, e.side.end_step = (
            e.side.end_step,
            lambda plan, batch, _: end_step(plan, batch, torch.tensor([wrong, wrong])),
        )
        e.step((a, 6, 2), late={})
    assert e.side.stats()["faults"] == 1
    assert "positions of the batch" in caplog.text


def test_a_prefix_hit_takes_the_rows_that_computed_its_blocks(engine, client):
    e, a = engine(), fresh("a", 9)
    e.step((a, 0, 9), new=[a], blocks={a.request_id: [1, 2, 3]})
    b = Request(
        "b-internal", [*a.prompt_token_ids[:8], 1, 2], {"routetrace.trace_id": a.trace_id + "b"}
    )
    e.step((b, 8, 2), (a, 9, 1), new=[b], blocks={b.request_id: [1, 2, 7]})
    b.all_token_ids.append(3)
    e.finish(b)
    trace = client.get(a.trace_id + "b", wait_for="end", timeout=60)
    assert np.array_equal(trace.topk_ids[:8], e.expected(a.request_id, 8))
    assert np.array_equal(trace.topk_ids[8:], e.expected(b.request_id, 8, 10))


@pytest.mark.parametrize("why", ["opt-out", "bad option", "copied", "loaded", "waits for KV"])
def test_blocks_that_are_not_followed_are_unknown_to_those_who_hit_them(engine, client, why):
    e, a = engine(), fresh("a", 9)
    e.step((a, 0, 9), new=[a], blocks={a.request_id: [1, 2, 3]})
    e.finish(a)
    # The blocks of the first are given to another, which fills them with something else.
    options = {"opt-out": {"capture": False}, "bad option": {"captrue": True}}.get(why, {})
    other, more = fresh("other", 9, **options), {}
    if why == "copied":
        more["kv_cache_block_copies"] = [SimpleNamespace(src_block_id=9, dst_block_id=1)]
        e.step(**more)
    elif why == "loaded":
        e.step(
            (other, 8, 1),
            new=[other],
            blocks={other.request_id: [1, 2, 3]},
            computed={other.request_id: 0},
        )
    elif why == "waits for KV":
        e.schedule.lookup(other, 0)
        e.schedule.allocate(other, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)))
        e.step()
    else:
        e.step((other, 0, 9), new=[other], blocks={other.request_id: [1, 2, 3]})
    hit = fresh("hit", 9)
    e.step((hit, 4, 5), new=[hit], blocks={hit.request_id: [1, 5, 6]})
    hit.all_token_ids.append(1)
    e.finish(hit)
    trace = client.get(hit.trace_id, wait_for="end", timeout=60, missing="mask")
    assert not trace.valid[:4].any()
    assert trace.valid[4:].all()
    assert {m.reason for m in trace.missing} == {"kv_unknown"}
    if why in {"opt-out", "bad option"}:
        assert e.finish(other) is None
        with pytest.raises(NotFound):
            client.get(other.trace_id)


def test_what_is_forgotten_comes_before_what_starts_in_the_same_step(engine, client):
    e, a, out = engine(), fresh("a", 5), fresh("out", 9, capture=False)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [3, 4]})
    e.finish(a)
    e.step((out, 0, 4), new=[out], blocks={out.request_id: [1]})
    # It gets the first one's block, and one that starts hits it, all in one step.
    hit = fresh("hit", 6)
    e.step(
        (out, 4, 5), (hit, 4, 2), new=[hit],
        blocks={out.request_id: [3, 5], hit.request_id: [3, 6]},
    )  # fmt: skip
    hit.all_token_ids.append(1)
    e.finish(hit)
    trace = client.get(hit.trace_id, wait_for="end", timeout=60, missing="mask")
    assert trace.valid.any(axis=1).tolist() == [False] * 4 + [True] * 2


def test_those_that_start_do_so_in_the_order_of_the_scheduler(engine, client):
    e, a = engine(), fresh("a", 6)
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(7)
    e.step(preempted=[a])
    hit = Request(
        "hit-internal", [*a.all_token_ids[:4], 1], {"routetrace.trace_id": a.trace_id + "h"}
    )
    # The one that comes back fills the block that the new one hits.
    e.step(
        (a, 0, 7), (hit, 4, 1), new=[hit], resumed=[a],
        blocks={a.request_id: [5, 6], hit.request_id: [5, 7]},
    )  # fmt: skip
    hit.all_token_ids.append(2)
    e.finish(hit)
    trace = client.get(a.trace_id + "h", wait_for="end", timeout=60)
    assert np.array_equal(trace.topk_ids[:4], np.stack([e.rows[a.request_id, p] for p in range(4)]))


def test_an_id_that_ends_and_begins_in_one_step_is_another_request(engine, client):
    e, a = engine(), fresh("a", 5)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(1)
    first = e.expected(a.request_id, 5)
    e.finish(a)
    b = Request(a.request_id, [9, 8, 7], {"routetrace.trace_id": a.trace_id + "b"})
    e.step((b, 0, 3), new=[b], blocks={b.request_id: [2]})
    b.all_token_ids.append(1)
    e.finish(b)
    assert np.array_equal(client.get(a.trace_id, wait_for="end", timeout=60).topk_ids, first)
    assert np.array_equal(
        client.get(a.trace_id + "b", wait_for="end", timeout=60).topk_ids,
        e.expected(b.request_id, 3),
    )


def test_a_row_too_many_does_not_count(engine, client):
    e, a = engine(), fresh("a", 5)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(1)
    e.step((a, 5, 1))
    a.status.name = "FINISHED_STOPPED"
    e.finish(a)  # the token of the step that was under way is not taken
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert (trace.num_tokens, len(trace), trace.finish_reason) == (6, 5, "stop")


def adapter(name, path="/adapters"):
    """Fields of vLLM's LoRARequest that the plug-in reads."""
    return SimpleNamespace(lora_name=name, lora_path=path)


@pytest.mark.parametrize(
    ("writer", "reader", "alike"),
    [
        (None, None, True),
        (adapter("math"), adapter("math"), True),
        (adapter("math"), adapter("code"), False),
        (adapter("math"), None, False),
        (None, adapter("math"), False),
        (adapter("math"), adapter("math", "/others"), False),
    ],
)
@pytest.mark.parametrize("one_trace", [False, True])
def test_rows_of_another_adapter_do_not_stand_in(engine, client, writer, reader, alike, one_trace):
    """KV of the same tokens from elsewhere: rows stand in if the adapter was the same.

    In one trace the KV was handed over by name, which digests of another adapter disprove.
    """
    name = {"transfer_id": f"t{next(_numbers)}", "handoff": "true"} if one_trace else {}
    one, other, a = engine(), engine(), fresh("a", 80, **name)
    for each in (one, other):
        each.side.set_weight_version(1)  # rows of weights that nobody told of never stand in
        each.schedule.reset(external=True)
    a.lora_request = writer
    one.step((a, 0, 60), new=[a], blocks={a.request_id: list(range(1, 16))})
    one.step((a, 60, 20), blocks={a.request_id: list(range(16, 21))})
    a.all_token_ids.append(1)
    one.finish(a)
    assert one.side.flush(60)
    trace_id = a.trace_id if one_trace else a.trace_id + "b"
    given = {f"routetrace.{key}": value for key, value in name.items() if key == "transfer_id"}
    b = Request("b-internal", a.prompt_token_ids, {"routetrace.trace_id": trace_id, **given})
    b.lora_request = reader
    other.step(
        (b, 72, 8), new=[b], blocks={b.request_id: list(range(1, 21))}, computed={b.request_id: 0}
    )
    b.all_token_ids.append(2)
    other.finish(b)
    assert other.side.flush(60)
    trace = client.get(trace_id, prefix_rows="any", missing="mask")
    assert trace.valid.all(axis=1).tolist() == [alike] * 72 + [True] * 8
    np.testing.assert_array_equal(trace.topk_ids[72:], other.expected(b.request_id, 72, 80))
    if alike:
        np.testing.assert_array_equal(trace.topk_ids[:72], one.expected(a.request_id, 72))
        assert trace.provenance[0] == (0, 72, "handoff" if one_trace else "prefix")


@pytest.mark.parametrize("reader", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_rows_of_another_kv_dtype_do_not_stand_in(engine, client, reader):
    """The rounding of KV changes the routing of later tokens."""
    one, other, a = engine(kv_cache_dtype="fp8"), engine(kv_cache_dtype=reader), fresh("a", 80)
    for each in (one, other):
        each.side.set_weight_version(1)
        each.schedule.reset(external=True)
    one.step((a, 0, 60), new=[a], blocks={a.request_id: list(range(1, 16))})
    one.step((a, 60, 20), blocks={a.request_id: list(range(16, 21))})
    a.all_token_ids.append(1)
    one.finish(a)
    assert one.side.flush(60)
    b = Request("b-internal", a.prompt_token_ids, {"routetrace.trace_id": a.trace_id + "b"})
    other.step(
        (b, 72, 8), new=[b], blocks={b.request_id: list(range(1, 21))}, computed={b.request_id: 0}
    )
    b.all_token_ids.append(2)
    other.finish(b)
    assert other.side.flush(60)
    trace = client.get(a.trace_id + "b", prefix_rows="any", missing="mask")
    assert trace.valid.all(axis=1).tolist() == [reader == "fp8_e4m3"] * 72 + [True] * 8
    assert trace.labels.get("kv_cache_dtype", "auto") == reader
    assert trace.verify_tokens(np.array(b.all_token_ids)) == len(trace.token_digests) > 0


@pytest.mark.parametrize("external", [True, False])
def test_rows_stand_in_for_kv_of_a_store_that_was_emptied(engine, client, external):
    """The version is told before the begin that it is of; so is a reset."""
    one, other, a, b = engine(), engine(), fresh("a", 80), fresh("b")
    for each in (one, other):  # other weights first
        each.side.set_weight_version(1)
        each.step((b, 0, 6), new=[b], blocks={b.request_id: [1, 2]})
        each.finish(b)
        each.side.set_weight_version(2)
        each.schedule.reset(external=external)
    one.step((a, 0, 60), new=[a], blocks={a.request_id: list(range(1, 16))})
    one.step((a, 60, 20), blocks={a.request_id: list(range(16, 21))})
    a.all_token_ids.append(1)
    one.finish(a)
    assert one.side.flush(60)
    c = Request("c-internal", a.prompt_token_ids, {"routetrace.trace_id": a.trace_id + "c"})
    other.step(
        (c, 72, 8), new=[c], blocks={c.request_id: list(range(1, 21))}, computed={c.request_id: 0}
    )
    c.all_token_ids.append(2)
    other.finish(c)
    assert other.side.flush(60)
    trace = client.get(a.trace_id + "c", prefix_rows="unique", missing="mask")
    assert trace.valid.all(axis=1).tolist() == [external] * 72 + [True] * 8
    if external:
        np.testing.assert_array_equal(trace.topk_ids[:72], one.expected(a.request_id, 72))


def test_tokens_of_an_adapter_can_be_verified(engine, client):
    e, a = engine(), fresh("a", 60)
    a.lora_request = adapter("math")
    e.step((a, 0, 60), new=[a], blocks={a.request_id: list(range(1, 16))})
    a.all_token_ids.append(1)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    assert trace.labels["adapter"] == "math=/adapters"
    tokens = np.array(a.all_token_ids)
    assert trace.verify_tokens(tokens) == len(trace.token_digests) > 0
    with pytest.raises(InvalidArgument, match="token_ids"):
        trace.verify_tokens(tokens + 1)


def prompt_of(change, **settings):
    """Tokens, for digests, that a plan holds of a request."""
    schedule = Schedule("r", "e", None, drafts=False, **settings)
    request = fresh("image", 70)
    request.prompt_token_ids = [5] * 70
    change(request)
    schedule.lookup(request, 0)
    data = SimpleNamespace(
        req_id=request.request_id,
        sampling_params=request.sampling_params,
        block_ids=([],),
        num_computed_tokens=0,
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[data],
        num_scheduled_tokens={request.request_id: 70},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        preempted_req_ids=set(),
    )
    [begin] = schedule.step(output).events
    return begin.prompt


def image(identifier, offset=3):
    """The change that gives a request an image."""
    place = SimpleNamespace(offset=offset, length=20)
    feature = SimpleNamespace(mm_position=place, identifier=identifier)
    return lambda request: setattr(request, "mm_features", [feature])


def test_images_that_differ_do_not_prove_the_same_tokens():
    assert prompt_of(image("cat")) == prompt_of(image("cat"))
    assert prompt_of(image("cat")) != prompt_of(image("dog"))
    assert prompt_of(image("cat")) != prompt_of(image("cat", offset=4))
    # Two identifiers of equal CRC-32: of a million images some hundred pairs have that.
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    assert prompt_of(image("plumless")) != prompt_of(image("buckeroo"))


def test_images_that_vllm_only_counts_prove_nothing():
    """Without caches each process counts its images from 0: two have one identifier."""
    assert prompt_of(image("renderer0-mm-1-image-0"), inputs=Inputs(named=False)) is None
    assert prompt_of(lambda request: None, inputs=Inputs(named=False))


def test_embeddings_prove_nothing_and_a_salt_changes_nothing():
    assert prompt_of(lambda request: setattr(request, "prompt_embeds", object())) is None
    plain = prompt_of(lambda request: None)
    assert prompt_of(lambda request: setattr(request, "cache_salt", "tenant")) == plain


# ---------------------------------------------------------------------------- control, faults


def test_rows_in_flight_keep_the_weights_that_computed_them(engine, client):
    e, a = engine(), fresh("a", 5)
    e.side.set_weight_version(3)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(1)
    e.side.set_weight_version(4)
    e.step((a, 5, 1))
    a.all_token_ids.append(2)
    e.finish(a)
    assert client.get(a.trace_id, wait_for="end", timeout=60).weight_versions == (
        (0, 5, 3),
        (5, 6, 4),
    )


def test_weights_that_nobody_told_of_have_no_version(engine, client, caplog):
    e, a = engine(), fresh("a", 5)
    weights = e.side._weights
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(1)
    e.side.set_weight_version(3)
    e.step((a, 5, 1))
    with weights.replacing():
        pass  # `model.load_weights`
    for position in (6, 7):
        a.all_token_ids.append(1)
        e.step((a, position, 1))
    weights.tell("4")
    a.all_token_ids.append(1)
    e.step((a, 8, 1), blocks={a.request_id: [3]})
    e.side.set_weight_version(None)
    a.all_token_ids.append(1)
    e.step((a, 9, 1))
    a.all_token_ids.append(1)
    e.finish(a)
    versions = client.get(a.trace_id, wait_for="end", timeout=60).weight_versions
    assert versions == ((0, 5, None), (5, 6, 3), (6, 8, None), (8, 9, 4), (9, 10, None))
    assert caplog.text.count(WARNING) == 1


def test_an_engine_whose_weights_never_change_is_not_warned_of(engine, caplog):
    e, a = engine(), fresh("a", 5)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    with e.side._weights.replacing():
        pass
    e.side.set_weight_version(3)  # told before the next pass
    a.all_token_ids.append(1)
    e.step((a, 5, 1))
    assert WARNING not in caplog.text


def test_what_torn_weights_compute_is_missing(engine, client):
    e, a = engine(), fresh("a", 5)
    e.side.set_weight_version(3)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    with e.side._weights.beginning():
        pass
    a.all_token_ids.append(1)
    e.step((a, 5, 1))
    with e.side._weights.ending():
        pass
    e.side.set_weight_version(4)
    a.all_token_ids.append(1)
    e.step((a, 6, 1))
    a.all_token_ids.append(1)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60, missing="mask")
    assert trace.valid.all(axis=1).tolist() == [True] * 5 + [False, True]
    assert {m.reason for m in trace.missing} == {"not_captured"}
    assert trace.weight_versions == ((0, 5, 3), (6, 7, 4))


def test_another_agent_is_told_the_weights(engine, client):
    e, under, after = engine(), fresh("under", 5), fresh("after", 5)
    e.side.set_weight_version(7)
    e.step((under, 0, 5), new=[under], blocks={under.request_id: [1, 2]})
    e.side.stats()
    e.side._agent.step = None
    under.all_token_ids.append(1)
    e.step((under, 5, 1))
    e.step((after, 0, 5), new=[after], blocks={after.request_id: [3, 4]})
    after.all_token_ids.append(1)
    e.finish(after)
    trace = client.get(after.trace_id, wait_for="end", timeout=60)
    assert trace.weight_versions == ((0, 5, 7),)
    assert e.side.stats()["faults"] == 1


def test_what_is_computed_in_a_pause_is_missing_and_unknown(engine, client):
    e, a = engine(), fresh("a", 4)
    e.step((a, 0, 4), new=[a], blocks={a.request_id: [1, 2, 3]})
    e.side.pause()
    assert e.side.stats()["paused"]
    e.step((a, 4, 4))
    e.side.resume()
    e.step((a, 8, 1))
    a.all_token_ids += [1] * 6
    hit = fresh("hit", 9)
    e.step((hit, 8, 1), new=[hit], blocks={hit.request_id: [1, 2, 9]})
    hit.all_token_ids.append(1)
    for request in (a, hit):
        e.finish(request)
    trace = client.get(a.trace_id, wait_for="end", timeout=60, missing="mask")
    assert trace.valid.all(axis=1).tolist() == [True] * 4 + [False] * 4 + [True]
    assert {m.reason for m in trace.missing} == {"not_captured"}
    trace = client.get(hit.trace_id, wait_for="end", timeout=60, missing="mask")
    assert trace.valid.all(axis=1).tolist() == [True] * 4 + [False] * 4 + [True]


def test_an_end_that_no_step_tells_is_told_when_the_engine_rests(engine, client):
    e, a, unlinked = engine(), fresh("a", 5), engine(linked=False)
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    a.all_token_ids.append(1)
    e.finish(a)
    assert client.get(a.trace_id, wait_for="end", timeout=60).state is TraceState.COMPLETE
    b = fresh("b", 5)
    unlinked.step((b, 0, 5), new=[b], blocks={b.request_id: [1, 2]})
    b.all_token_ids.append(1)
    unlinked.finish(b)
    time.sleep(0.3)
    assert client.stat(b.trace_id).state is TraceState.RUNNING
    unlinked.step()
    assert client.get(b.trace_id, wait_for="end", timeout=60).state is TraceState.COMPLETE


def test_requests_that_wait_when_the_engine_shuts_down_end(engine, client):
    e, runs, waits, ended = engine(), fresh("runs", 5), fresh("waits", 5), fresh("ended", 5)
    e.schedule.follow({r.request_id: r for r in (runs, waits, ended)})
    runs.status = waits.status = SimpleNamespace(name="WAITING")
    e.step((runs, 0, 5), (ended, 0, 5), new=[runs, ended],
           blocks={runs.request_id: [1, 2], ended.request_id: [3, 4]})  # fmt: skip
    ended.all_token_ids.append(1)
    e.finish(ended)  # vLLM keeps it while its blocks are sent
    e.schedule.shut_down()
    e.side.close()
    trace = client.get(waits.trace_id, wait_for="end", timeout=60, missing="mask")
    assert not trace.valid.any()
    assert {m.reason for m in trace.missing} == {"aborted"}
    assert client.stat(waits.trace_id).finish_reason == "abort"
    assert client.stat(ended.trace_id).num_incarnations == 1
    assert client.stat(runs.trace_id).finish_reason == "closed"


def test_an_agent_that_the_interpreter_closed_before_the_engine_is_no_fault(engine, caplog):
    e, waits = engine(), fresh("waits", 5)
    waits.status = SimpleNamespace(name="WAITING")
    e.side._agent.close()
    e.schedule.follow({waits.request_id: waits})
    e.schedule.shut_down()
    e.side.close()
    assert e.side.faults == 0
    assert [r.getMessage() for r in caplog.records if r.name.startswith("routetrace")] == [
        "routetrace: rows and ends after the close of the agent are not sent"
    ]


@pytest.mark.parametrize("where", ["worker", "before the pass", "scheduler"])
def test_a_fault_of_ours_costs_the_traces_under_way_and_nothing_else(engine, client, where):
    e, before, under = engine(), fresh("before", 5), fresh("under", 5)
    e.step((before, 0, 5), new=[before], blocks={before.request_id: [1, 2]})
    before.all_token_ids.append(1)
    e.finish(before)
    e.step((under, 0, 5), new=[under], blocks={under.request_id: [3, 4]})
    assert e.side.flush(60)
    under.all_token_ids.append(1)
    if where == "worker":
        e.side._agent.step = None  # not even callable
        e.step((under, 5, 1))
    elif where == "before the pass":

        def fail(*_):
            del e.capturer.begin
            raise MemoryError

        e.capturer.begin = fail
        e.step((under, 5, 1))
    else:
        broken, e.schedule._spans = e.schedule._spans, None
        e.step((under, 5, 1))
        e.schedule._spans = broken
    assert e.side.stats()["faults"] == 1
    # What is under way gets a block that was known, and is hit: nobody knows it now.
    under.all_token_ids += [1] * 3
    e.step((under, 6, 3), blocks={under.request_id: [1]})
    e.finish(under)
    after, hit = fresh("after", 5), fresh("hit", 5)
    e.step((after, 0, 5), new=[after], blocks={after.request_id: [6, 7]})
    e.step((hit, 4, 1), new=[hit], blocks={hit.request_id: [1, 9]})
    for request in (after, hit):
        request.all_token_ids.append(1)
        e.finish(request)
    assert client.get(before.trace_id, wait_for="end", timeout=60).state is TraceState.COMPLETE
    whole = client.get(after.trace_id, wait_for="end", timeout=60)
    assert np.array_equal(whole.topk_ids, e.expected(after.request_id, 5))
    assert not client.get(hit.trace_id, wait_for="end", timeout=60, missing="mask").valid[:4].any()
    cut = client.get(under.trace_id, wait_for="end", timeout=60, missing="mask")
    assert cut.state is TraceState.INCOMPLETE
    assert np.array_equal(
        cut.topk_ids[cut.valid], e.expected(under.request_id, len(cut))[cut.valid]
    )


@pytest.mark.parametrize("where", ["begin", "rows", "launch", "scheduler", "refused"])
def test_after_a_fault_in_one_stage_the_stages_still_report_the_same_requests(
    engine, client, where
):
    """Wherever it happens: begins of the plan under way reach that stage in part, or not at all."""
    e, before = engine(Stages), [fresh("before", 5) for _ in range(3)]
    e.serve(*before)
    assert e.side.flush(60)
    client.delete(*(request.trace_id for request in before))
    side, under = e.sides[0], [fresh("under", 5) for _ in range(3)]
    if where in ("begin", "refused"):
        begin, agent = side._agent.begin, side._agent

        def fail(request_id, **facts):
            if request_id != under[1].request_id:
                return begin(request_id, **facts)
            del agent.begin
            if where == "begin":
                raise MemoryError
            raise InvalidArgument(field="labels", value="", expected="fewer, at this stage alone")

        agent.begin = fail
    elif where == "rows":
        side._agent.step = None  # not even callable
    elif where == "launch":

        def fail(*_):
            del side._capturer.snapshot
            raise MemoryError

        side._capturer.snapshot = fail
    else:
        broken, e.schedule._spans = e.schedule._spans, None
    e.serve(*under)
    if where == "scheduler":
        e.schedule._spans = broken
    after = [fresh("after", 5) for _ in range(4)]
    e.serve(*after)
    again = fresh("again", 5)
    for _ in range(2):  # an id that was used before, too
        again.all_token_ids = again.prompt_token_ids[:]
        e.serve(again)
    assert e.side.flush(60)
    faults = {"scheduler": [2, 2], "refused": [0, 0]}.get(where, [1, 0])
    assert [side.faults for side in e.sides] == faults
    for request in (*after, again):
        trace = client.get(request.trace_id)
        assert trace.state is TraceState.COMPLETE
        np.testing.assert_array_equal(trace.topk_ids, e.expected(request.request_id, 5))


@pytest.mark.parametrize("what", ["flush", "weights"])
def test_a_fault_of_ours_does_not_reach_who_flushes_or_sets_the_weights(engine, client, what):
    e, under, after = engine(), fresh("under", 5), fresh("after", 5)
    e.capturer.device = torch.device("cuda")  # rows are on their way until something needs them
    courier = e.side._courier
    rest_s, courier._rest_s = courier._rest_s, 3600  # a rest delivers them, too
    e.step((under, 0, 5), new=[under], blocks={under.request_id: [1, 2]})
    e.side.stats()  # the step is taken
    assert e.side._agent.flush(60)  # the server knows its begin
    e.side._agent.step = None
    if what == "flush":
        assert e.side.flush(60)
    e.side.set_weight_version(7)  # does not wait for them
    e.step()
    assert e.side.stats()["faults"] == 1
    courier._rest_s = rest_s
    e.step((after, 0, 5), new=[after], blocks={after.request_id: [3, 4]})
    after.all_token_ids.append(1)
    e.finish(after)
    trace = client.get(after.trace_id, wait_for="end", timeout=60)
    assert np.array_equal(trace.topk_ids, e.expected(after.request_id, 5))
    assert trace.weight_versions == ((0, 5, 7),)
    assert not client.get(under.trace_id, wait_for="end", timeout=60, missing="mask").valid.any()
    with pytest.raises(InvalidArgument, match="version is 9223372036854775808"):
        e.side.set_weight_version(1 << 63)


def test_positions_of_a_pass_that_cannot_be_read_have_arrived_when_they_are_used(
    engine, client, monkeypatch
):
    """No event of the capturer follows their copy, which from a GPU is late without a wait."""
    to_host, waits = worker_module.to_host, []

    def late(positions, *, wait):
        waits.append(wait)
        return to_host(positions, wait=wait) if wait else np.full(len(positions), 1 << 40)

    monkeypatch.setattr(worker_module, "to_host", late)
    e, a = engine(drafts=True), fresh("a")

    def fail(*_):
        del e.capturer.begin
        raise MemoryError

    e.capturer.begin = fail
    e.step((a, 0, 6), new=[a], blocks={a.request_id: [1, 2, 3]}, late={})
    monkeypatch.undo()
    a.all_token_ids.append(7)
    e.step((a, 6, 1), late={})
    a.all_token_ids.append(8)
    e.finish(a)
    assert waits == [True]
    assert e.side.stats()["faults"] == 1
    trace = client.get(a.trace_id, wait_for="end", timeout=60, missing="mask")
    assert trace.valid.all(axis=1).tolist() == [False] * 6 + [True]


def test_an_engine_does_not_wait_for_its_agent(engine, client):
    e, a = engine(), fresh("a", 5)
    called, may_go_on, step = threading.Event(), threading.Event(), e.side._agent.step

    def slow(*args):
        called.set()
        assert may_go_on.wait(60)
        step(*args)

    e.side._agent.step = slow
    e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
    assert called.wait(60)
    a.all_token_ids.append(1)
    e.step((a, 5, 1))
    assert e.side._agent.stats().offered_rows == 0
    may_go_on.set()
    a.all_token_ids.append(1)
    e.finish(a)
    trace = client.get(a.trace_id, wait_for="end", timeout=60)
    np.testing.assert_array_equal(trace.topk_ids, e.expected(a.request_id, 6))


def test_a_step_that_is_launched_while_another_agent_takes_over_is_kept(
    engine, client, monkeypatch
):
    e, under, after = engine(), fresh("under", 5), fresh("after", 5)
    e.step((under, 0, 5), new=[under], blocks={under.request_id: [1, 2]})
    assert e.side.flush(60)
    taking_over, may_go_on, make = threading.Event(), threading.Event(), worker_module.CaptureAgent

    def slow(*args, **settings):
        taking_over.set()
        assert may_go_on.wait(60)
        return make(*args, **settings)

    monkeypatch.setattr(worker_module, "CaptureAgent", slow)
    e.side._agent.step = None  # not even callable
    under.all_token_ids.append(1)
    e.step((under, 5, 1))
    assert taking_over.wait(60)
    e.step((after, 0, 5), new=[after], blocks={after.request_id: [3, 4]})
    may_go_on.set()
    after.all_token_ids.append(1)
    e.finish(after)
    trace = client.get(after.trace_id, wait_for="end", timeout=60)
    np.testing.assert_array_equal(trace.topk_ids, e.expected(after.request_id, 5))
    assert e.side.stats()["faults"] == 1


EVENTS = [
    plans.Begin(3, "r-0", "t", 5, {"group": "g"}, 60, 4, 2, b"\1\0\0\0", None, "P/r", 7),
    plans.Ignore(1, "r-1", 4, b""),
    plans.AddBlocks(b"\3\0\0\0", b"\7\0\0\0"),
    plans.Preempt(3, 4),
    plans.Resume(3, 4, b"\7\0\0\0", 2, 9),
    plans.Finish(3, 9, "stop", b"\1\0\0\0", "E/r"),
    plans.External(b"\7\0\0\0", 2),
    plans.Reset(True),
    plans.StartOver(),
]


def test_plans_cross_processes_as_they_are():
    assert {type(event) for event in EVENTS} == set(get_args(plans.Event))
    plan = plans.StepPlan(EVENTS, b"\0" * 12, 7)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(plan, protocol))
        assert copy == plan
        assert [type(event) for event in copy.events] == [type(event) for event in EVENTS]


@pytest.mark.parametrize("where", ["worker", "scheduler"])
def test_faults_without_end_end_capture_and_not_the_engine(engine, monkeypatch, where):
    e = engine()
    if where == "worker":
        monkeypatch.setattr(e.capturer, "snapshot", None)
    else:
        monkeypatch.setattr(e.schedule, "_spans", None)
    for _ in range(6):
        a = fresh("a", 5)
        e.step((a, 0, 5), new=[a], blocks={a.request_id: [1, 2]})
        e.finish(a)
    assert e.side.stats() == {}  # takes the steps that were launched
    assert e.side.faults == 4
    assert e.side.flush(0)
