"""vLLM's scheduler without a model: a million rows, each compared with what a fake model chose.

vLLM's own Scheduler, KVCacheManager and BlockPool decide what happens: prefix hits, chunks,
preemptions, blocks handed on. A fake model draws the experts of every row at random and samples
tokens at random. All of routetrace is real: its scheduler half in vLLM's scheduler, plans that are
pickled as an executor would, the worker half with a capturer, an agent process, a server process,
a client.

What must come out is worked out here without any of that, from three things only: which tokens the
model was fed, which row it chose for each, and which row computed what lies in each KV slot. A row
of another step, request or position is another one in all but one of some millions of cases.

    python -m vllm_runs.scheduler --rows 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from routetrace.capture_agent.capturer import RoutingCapturer
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.vllm.attach import _schedules
from routetrace.capture_agent.vllm.settings import settings_of
from routetrace.capture_agent.vllm.worker import WorkerSide
from routetrace.client import RouteClient, RoutingTrace, TraceState
from routetrace.server.testing import run_server
from routetrace.v1.layout import RoutingLayout

LAYOUT = RoutingLayout((1, 2, 4), 6, 16, 2)
BLOCK = 16
MAX_LEN = 400
NUM_SLOTS = MAX_LEN + 8
"""Positions of a request, those of rejected drafts included."""

#: In place of the number of a row: none was computed; nobody knows which one it was; it was not
#: captured. All are below the numbers of rows.
NOBODY, UNKNOWN, PAUSED = -1, -2, -3

#: Tokens that end an answer. The others are drawn from so many that none comes twice in a request:
#: a token tells a row of this pass from a row of a pass that was taken back.
STOP_TOKENS = list(range(64))
_TOKENS = (1000, 1 << 30)

#: Requests that are read at a time, and seconds in which they must have come to their end.
_READ_AT_ONCE = 192
_WAIT_S = 20.0

#: Rows of one engine before the next one is made.
_ROWS_PER_ROUND = 40_000

#: Steps without a token, one after the other, which waiting clients may bring about.
_MOST_IDLE = 1000

#: Faults that are told in words.
_TOLD = 6

Ints = np.ndarray


# ---------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Case:
    """How an engine is configured."""

    name: str
    protocol: int = 1
    """How preempted requests come back: 1 as resumed, 2 as if they were new."""
    way: Literal["connector", "plugin"] = "connector"
    asynchronous: bool = False
    """A step is scheduled before the outcome of the last one is known."""
    stages: int = 1
    """Of a pipeline; each has an agent."""
    drafts: int = 0
    """Most tokens that are drafted at a time."""
    policy: str = "fcfs"
    role: str = "kv_both"
    """Of the connector; consumers that overlap steps give blocks back late."""
    late: bool = False
    """Rows are on their way while the next step runs, as they are from a GPU."""
    sessions: bool = False
    """Clients stream their input."""
    loads: bool = False
    """Another connector brings KV from elsewhere."""

    @property
    def depth(self) -> int:
        """Most steps in flight."""
        return self.stages + self.asynchronous


CASES = (
    Case("V1"),
    Case("V2", protocol=2, late=True),
    Case("V1 asynchronous", asynchronous=True, late=True),
    Case("V2 asynchronous", protocol=2, asynchronous=True, role="kv_producer"),
    Case("V1 drafts", drafts=3),
    Case("V2 drafts", protocol=2, drafts=4, late=True),
    Case("V1 plugin", way="plugin"),
    Case("V2 plugin asynchronous", protocol=2, way="plugin", asynchronous=True, late=True),
    Case("V1 priorities", policy="priority"),
    Case("V2 priorities drafts", protocol=2, policy="priority", drafts=2, way="plugin"),
    Case("V1 pipeline", stages=2, late=True),
    Case("V2 pipeline asynchronous", protocol=2, stages=2, asynchronous=True, role="kv_producer"),
    Case("V1 sessions", sessions=True),
    Case("V2 sessions drafts", protocol=2, sessions=True, drafts=3),
    Case("V1 loads", loads=True),
    Case("V2 loads plugin asynchronous", protocol=2, loads=True, way="plugin", asynchronous=True),
    Case("V1 loads plugin priorities", loads=True, way="plugin", policy="priority"),
)


# ---------------------------------------------------------------------------- what is true


class Rows:
    """Every row that the fake model chose, by its number."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.ids = np.zeros((1 << 14, len(LAYOUT.layer_ids), LAYOUT.top_k), np.uint8)
        self.versions = np.zeros(1 << 14, np.int64)
        self.size = 0

    def choose(self, n: int) -> Ints:
        """Ids [n, L, 2] that a router could have chosen."""
        layers, experts = len(LAYOUT.layer_ids), LAYOUT.num_experts
        ids = np.empty((n, layers, 2), np.int64)
        ids[..., 0] = self._rng.integers(experts, size=(n, layers))
        ids[..., 1] = (ids[..., 0] + self._rng.integers(1, experts, size=(n, layers))) % experts
        return ids

    def keep(self, ids: Ints, version: int) -> Ints:
        """Numbers [n] of new rows, computed by a weight version."""
        first, self.size = self.size, self.size + len(ids)
        while self.size > len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.versions = np.concatenate([self.versions, np.zeros_like(self.versions)])
        self.ids[first : self.size] = ids
        self.versions[first : self.size] = version
        return np.arange(first, self.size)


class Attempt:
    """One pass over the positions of a request."""

    def __init__(self) -> None:
        self.numbers = np.full(NUM_SLOTS, NOBODY)
        """[NUM_SLOTS] of the row at each position, or why there is none."""
        self.fed = np.full(NUM_SLOTS, -1)
        """[NUM_SLOTS] the token that the row was computed for."""


@dataclass(eq=False)
class Life:
    """One engine request."""

    request_id: str
    trace_id: str
    shown: list[int]
    """What its client knows: prompt and answer."""
    max_tokens: int
    kept: bool = True
    """Whether its routing is to be kept."""
    labels: dict[str, str] = field(default_factory=dict)
    session: bool = False
    inputs: deque[list[int] | None] = field(default_factory=deque)
    """More input of a session, which its scheduler has not got to; None ends it."""
    chat: Chat | None = None
    reason: str = ""
    """How it ended."""
    ended_at: int = 0
    """Steps before it ended."""
    preempted: bool = False
    external: bool = False
    """Whether some of its KV came from elsewhere."""
    attempts: list[Attempt] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    fed: Ints = field(default_factory=lambda: np.full(NUM_SLOTS, -1))
    """[NUM_SLOTS] the tokens as the model knows them, drafts of the step that runs included."""


@dataclass(eq=False)
class Chat:
    """Turns of one conversation in one trace."""

    trace_id: str
    lives: list[Life] = field(default_factory=list)


@dataclass
class Expected:
    """What a reader must get."""

    numbers: Ints
    """[tokens - 1] of the rows, or below 0."""
    reasons: list[set[str]]
    """[tokens - 1] why a row may be missing; empty where it must be there."""


def expected(lives: Sequence[Life]) -> Expected:
    """The rows of a trace: of each position the first one that was computed for its token."""
    last = lives[-1]
    tokens = np.array(last.shown)
    numbers = np.full(len(tokens) - 1, NOBODY)
    seen = {code: np.zeros(len(numbers), bool) for code in (UNKNOWN, PAUSED)}
    for life in lives:
        stop = min(len(numbers), len(life.shown) - 1)
        for attempt in life.attempts:
            found = attempt.numbers[:stop]
            same = attempt.fed[:stop] == tokens[:stop]
            new = same & (found >= 0) & (numbers[:stop] < 0)
            numbers[:stop][new] = found[new]
            for code, where in seen.items():
                where[:stop] |= same & (found == code)
    reasons: list[set[str]] = [set() for _ in numbers]
    for position in np.flatnonzero(numbers < 0).tolist():
        why = reasons[position]
        if seen[UNKNOWN][position]:
            why.add("kv_unknown")
        if seen[PAUSED][position]:
            why.add("not_captured")
        if not why and last.reason == "abort":
            why.add("aborted")
    return Expected(numbers, reasons)


# ---------------------------------------------------------------------------- the engine


class Elsewhere(KVConnectorBase_V1):  # type: ignore[misc]
    """Another connector: some KV comes from elsewhere, at once or while the request waits."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.rng = random.Random(0)
        self.found: dict[str, tuple[int, int]] = {}
        """Of the last lookup: local tokens, and those behind them that come from elsewhere."""
        self.loading: dict[str, tuple[list[int], int, int]] = {}
        """Blocks of requests that wait, and the tokens in them that are on their way."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.found[request.request_id] = num_computed_tokens, 0
        waits = self.rng.random() < 0.5
        # Of a prompt that is all there the last token is computed again, where it waited.
        blocks = (request.num_prompt_tokens - (not waits) - num_computed_tokens) // BLOCK
        if blocks < 1 or self.rng.random() < 0.6:
            return 0, False
        tokens = self.rng.choice((blocks, self.rng.randint(1, blocks))) * BLOCK
        self.found[request.request_id] = num_computed_tokens, tokens
        return tokens, waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        local, tokens = self.found[request.request_id]
        if tokens and request.num_computed_tokens == 0:
            ids = list(blocks.get_block_ids()[0])
            self.loading[request.request_id] = ids, local, local + tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        # Who runs does not wait.
        for request_id in scheduler_output.num_scheduled_tokens:
            self.loading.pop(request_id, None)
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Engine:
    """vLLM's scheduler, a fake model, and routetrace around them."""

    def __init__(self, case: Case, seed: int, target: str, model: Path) -> None:
        self.case = case
        self.rng = rng = random.Random(f"engine {case.name} {seed}")
        self.rows = Rows(rng.getrandbits(60))
        self.counts: Counter[str] = Counter()
        self.run = f"{case.name} {seed}"
        self.engine_id = "e"
        self.lives: dict[str, Life] = {}
        """Requests that have not ended."""
        self.ended: list[Life] = []
        self.version = 0
        self.paused = False
        self.steps = 0
        self.faults: list[str] = []
        self._in_flight: deque[tuple[Any, list[str], list[list[int]]]] = deque()
        self._loads: dict[str, list[int]] = {}
        """Blocks that came from elsewhere within the step in which their request starts."""
        self._idle = 0  # steps without a token
        self._new_drafts: list[str] = []
        self._arrivals = count()

        most, seqs = rng.choice((48, 96, 256)), rng.choice((6, 20, 40))
        agent = {
            "target": target,
            "run": self.run,
            "engine_id": self.engine_id,
            "mode": rng.choice(("process", "thread")),
            "frame_rows": rng.choice((4, 32, 256)),
            "ring_bytes": 16 << 20,
        }
        config = _config(case, agent, model, most, seqs)
        # The longest request fits, and far fewer requests than may run at a time.
        num_blocks = NUM_SLOTS // BLOCK + seqs * rng.randrange(1, 9)
        config.cache_config.num_gpu_blocks = num_blocks
        self.slots = np.full(num_blocks * BLOCK, NOBODY)
        """The row that computed what lies in each KV slot, or why it is not known."""
        self.slot_tokens = np.full(num_blocks * BLOCK, -1)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = case.protocol == 2
        self.sides = list(self._sides(config, num_blocks, most))
        self.elsewhere: Elsewhere | None = None
        if case.loads:
            connector = self.scheduler.connector
            self.elsewhere = connector if case.way == "plugin" else connector._connectors[1]
            self.elsewhere.rng = rng

    def _sides(self, config: Any, num_blocks: int, most: int) -> Iterator[tuple[Any, list[int]]]:
        """The worker half of every stage, and its layers as columns of LAYOUT."""
        settings = settings_of(config)
        assert settings is not None
        schedule = _schedules[settings.boot_id, settings.engine_id]
        layers = np.array_split(range(len(LAYOUT.layer_ids)), self.case.stages)
        for stage, columns in enumerate(layers):
            layout = LAYOUT.select(tuple(LAYOUT.layer_ids[c] for c in columns))
            capturer = RoutingCapturer(layout, most, "cpu")
            if self.case.late:
                # From a GPU rows come with the next step.
                capturer.device = torch.device("cuda")
            agent = AgentConfig(
                engine_id=settings.engine_id,
                run=settings.run,
                layout=layout,
                shard=f"pp{stage}" if self.case.stages > 1 else "",
                boot_id=settings.boot_id,
                block_size=BLOCK,
                num_blocks=num_blocks,
                **settings.agent,
            )
            # Where the scheduler is not in the process of a worker, the engine runs an empty step.
            late = schedule.take_finished if self.case.stages == 1 else None
            yield (WorkerSide(capturer, agent, late), capturer), columns.tolist()

    # ------------------------------------------------------------------ what clients do

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.scheduler.has_unfinished_requests() or self._in_flight)

    def add(self, life: Life, options: dict[str, Any], **params: Any) -> None:
        """A request arrives."""
        self.lives[life.request_id] = life
        life.fed[: len(life.shown)] = life.shown
        priority = self.rng.randrange(3) if self.case.policy == "priority" else 0
        sampling = SamplingParams(
            max_tokens=life.max_tokens, extra_args=options or None, ignore_eos=True, **params
        )
        self.scheduler.add_request(self._request(life, life.shown, sampling, priority))

    def extend(self, life: Life, tokens: list[int] | None) -> None:
        """More input of a session; None ends it."""
        # A session that waits goes on at once, others when their answer is done.
        request = self.scheduler.requests[life.request_id]
        sampling = SamplingParams(max_tokens=life.max_tokens, ignore_eos=True)
        request = self._request(life, tokens or [1], sampling, 0, resumable=tokens is not None)
        waits = life.reason == "waits"
        self.scheduler.add_request(request)
        life.inputs.append(tokens)
        if waits:
            self._next_input(life)
            self._settle_aborted()

    def _request(
        self, life: Life, tokens: list[int], sampling: Any, priority: int, **more: Any
    ) -> Any:
        return Request(
            request_id=life.request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            priority=priority,
            arrival_time=float(next(self._arrivals)),
            **{"resumable": life.session, **more},
        )

    def abort(self, request_id: str) -> None:
        """A client goes away."""
        status = self.scheduler.requests[request_id].status
        self.counts[f"aborts of {status.name.lower()}"] += 1
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        self._end(self.lives[request_id], "abort")

    def reset(self) -> None:
        """The prefix cache is forgotten, also by requests that run."""
        held_back = self.scheduler.defer_block_free and self._in_flight
        if held_back or self.case.loads or any(life.session for life in self.lives.values()):
            return  # vLLM can not, while others than running requests have blocks
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.counts["resets"] += 1

    def set_weight_version(self, version: int) -> None:
        """The weights change."""
        self.version = version
        self.counts["versions"] += 1
        for (side, _), _ in self.sides:
            side.set_weight_version(version)

    def pause(self, paused: bool) -> None:
        """Capture stops, or goes on."""
        self.counts["pauses"] += paused and not self.paused
        self.paused = paused
        for (side, _), _ in self.sides:
            (side.pause if paused else side.resume)()

    # ------------------------------------------------------------------ steps

    def step(self, before_outcome: Callable[[], None] = lambda: None) -> None:
        """Schedules a step and runs it; tells the scheduler of the oldest one in flight."""
        output = self.scheduler.schedule()
        self._idle = 0 if output.total_num_scheduled_tokens else self._idle + 1
        if self._idle > _MOST_IDLE:
            raise RuntimeError(f"{self.run}: vLLM's scheduler is stuck")
        order, sampled = self._execute(output)
        self._in_flight.append((output, order, sampled))
        most = self.case.depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > most:
            before_outcome()
            self._learn(*self._in_flight.popleft())

    def _learn(self, output: Any, order: list[str], sampled: list[list[int]]) -> None:
        index = {r: i for i, r in enumerate(order)}
        known = {r: self.lives.get(r) for r in order}
        outcome = ModelRunnerOutput(
            req_ids=order,
            req_id_to_index=index,
            sampled_token_ids=[list(s) for s in sampled],
            kv_connector_output=self._loaded(output),
        )
        told = self.scheduler.update_from_output(output, outcome)
        for outputs in told.values():
            for answer in outputs.outputs:
                life = known[answer.request_id]
                assert life is not None
                life.shown += answer.new_token_ids
                if answer.finish_reason is not None:
                    self._stop(life, str(answer.finish_reason), answer.kv_transfer_params)
        if self.case.drafts:
            self._draft()

    def _loaded(self, output: Any) -> Any:
        """What arrived from elsewhere by now, and what did not."""
        if self.elsewhere is None:
            return None
        arrived, failed = set(), set()
        # vLLM loses count of tokens that are in flight where a load fails.
        fails = 0.2 if self.case.depth == 1 else 0.0
        for request_id, (blocks, start, stop) in list(self.elsewhere.loading.items()):
            if self.rng.random() < 0.3:
                arrived.add(request_id)
                del self.elsewhere.loading[request_id]
                self.counts["loads that were waited for"] += 1
                if self.rng.random() < fails:
                    failed.add(self.rng.choice(blocks[start // BLOCK : stop // BLOCK]))
        for request_id in output.num_scheduled_tokens:
            if blocks := self._loads.pop(request_id, None):
                self.counts["loads"] += 1
                if self.rng.random() < fails:
                    failed.add(self.rng.choice(blocks))
        self.counts["failed loads"] += len(failed)
        return KVConnectorOutput(finished_recving=arrived, invalid_block_ids=failed)

    def _stop(self, life: Life, reason: str, answer: dict[str, Any] | None) -> None:
        if life.session:
            life.reason = "waits"
            self._next_input(life)
            if life.reason != reason and life.request_id in self.scheduler.requests:
                return
        if self.case.way == "connector":
            handle = {
                "run": self.run,
                "trace_id": life.trace_id,
                "num_tokens": len(life.shown),
            }
            wanted = {"routetrace": handle} if life.kept else None
            if answer != wanted:
                self.faults.append(f"client was told {answer}, not {wanted}")
        self._end(life, reason)

    def _next_input(self, life: Life) -> None:
        """What a session does when its answer is done."""
        if not life.inputs:
            return
        tokens = life.inputs.popleft()
        life.reason = "" if tokens else "waits"
        if tokens:
            # The last token was sampled and never fed: it is given up.
            life.shown = [*life.shown[:-1], *tokens]
            self.counts["inputs"] += 1

    def _settle_aborted(self) -> None:
        """Sessions end without an output."""
        for life in list(self.lives.values()):
            if life.session and life.request_id not in self.scheduler.requests:
                self._end(life, "abort")

    def _end(self, life: Life, reason: str) -> None:
        life.reason, life.ended_at = reason, self.steps
        del self.lives[life.request_id]
        self.ended.append(life)

    def _draft(self) -> None:
        ids = [r for r in self._new_drafts if r in self.lives]
        drafts = [new_tokens(self.rng, self.rng.randint(0, self.case.drafts)) for _ in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    # ------------------------------------------------------------------ the model

    def _execute(self, output: Any) -> tuple[list[str], list[list[int]]]:
        """Runs a step; its requests in the order of the batch, and what each of them sampled."""
        self.steps += 1
        order = list(output.num_scheduled_tokens)
        self.rng.shuffle(order)
        plans = [self._plan(output) for _ in self.sides]
        if self.elsewhere is not None:
            for blocks, start, stop in self.elsewhere.loading.values():
                self._load(blocks, start, stop)
        starts, hits = self._schedule(output)
        total = output.total_num_scheduled_tokens
        for (side, _), _ in self.sides:
            side.begin_step()
        if total:
            self._forward(output, order, starts)
        for (side, _), _ in self.sides:
            side.end_step(plans.pop(), lambda: order)
        # After the step: requests that start together share what it computed.
        for life, computed in hits:
            self._hit(life, computed)
        self._new_drafts = []
        return order, [self._sample(r, output, starts[r]) for r in order]

    def _plan(self, output: Any) -> Any:
        """What a worker gets of the plan."""
        arrived = pickle.loads(pickle.dumps(output))
        if self.case.way == "plugin":
            return arrived.routetrace_plan
        if self.case.loads:
            return arrived.kv_connector_metadata.metadata[0].plan
        return arrived.kv_connector_metadata.plan

    def _schedule(self, output: Any) -> tuple[dict[str, int], list[tuple[Life, int]]]:
        """Keeps the block tables; first position of each request, and who hit how many tokens."""
        starts, hits = {}, []
        for request_id in output.preempted_req_ids or ():
            self.counts["preemptions"] += 1
            if life := self.lives.get(request_id):
                life.preempted = True
        for data in output.scheduled_new_reqs:
            life = self.lives[data.req_id]
            if life.attempts:
                self.counts["resumes" if life.preempted else "session turns"] += 1
            self._start(life, data.block_ids[0])
            prompt = data.prompt_token_ids
            life.fed[: len(prompt)] = prompt
            hits.append((life, data.num_computed_tokens))
            starts[data.req_id] = data.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            life, blocks = self.lives[request_id], cached.new_block_ids[i]
            starts[request_id] = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                self.counts["resumes"] += 1
                self._start(life, blocks[0])
                hits.append((life, starts[request_id]))
            elif blocks:
                life.blocks += blocks[0]
                self._reused(blocks[0])
        self.counts["hits"] += sum(computed > 0 for _, computed in hits)
        for life, computed in hits if self.elsewhere else ():
            local, tokens = self.elsewhere.found.pop(life.request_id)
            if tokens and computed > local:
                first, last = local // BLOCK, -(-computed // BLOCK)
                life.external = True
                self._load(life.blocks, local, computed)
                self._loads[life.request_id] = life.blocks[first:last]
        return starts, hits

    def _start(self, life: Life, blocks: list[int]) -> None:
        life.blocks = list(blocks)
        life.preempted = False
        life.attempts.append(Attempt())
        self._reused(blocks)

    def _load(self, blocks: list[int], start: int, stop: int) -> None:
        """KV of some tokens comes from elsewhere: nobody knows what computed it."""
        for block in blocks[start // BLOCK : -(-stop // BLOCK)]:
            self.slots[block * BLOCK : (block + 1) * BLOCK] = UNKNOWN
            self.slot_tokens[block * BLOCK : (block + 1) * BLOCK] = -1

    def _reused(self, blocks: Iterable[int]) -> None:
        firsts = np.array(blocks, np.int64) * BLOCK
        self.counts["blocks handed on"] += int((self.slots[firsts] != NOBODY).sum())

    def _slots(self, life: Life, start: int, stop: int) -> Ints:
        positions = np.arange(start, stop)
        return np.array(life.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK

    def _forward(self, output: Any, order: list[str], starts: dict[str, int]) -> None:
        """Every layer chooses experts for every token of the step."""
        rng, scheduled = self.rng, output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        padding = min(rng.choice((0, 0, 3)), self.sides[0][0][1].max_num_tokens - total)
        ids = self.rows.choose(total + padding)
        numbers = self.rows.keep(ids[:total], self.version)
        for (_, capturer), columns in self.sides:
            for column, layer in enumerate(columns):
                chosen = torch.from_numpy(ids[:, layer])
                if rng.random() < 0.1:  # a fused shared expert
                    chosen = torch.cat([chosen, torch.full((len(chosen), 1), 16)], dim=1)
                capturer.capture(column, chosen)
        at = 0
        for request_id in order:
            life, start, n = self.lives[request_id], starts[request_id], scheduled[request_id]
            stop = start + n
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            if drafts:
                life.fed[stop - len(drafts) : stop] = drafts
            mine = numbers[at : at + n]
            at += n
            attempt = life.attempts[-1]
            if self.paused:
                mine = np.where(attempt.numbers[start:stop] == UNKNOWN, UNKNOWN, PAUSED)
            if not life.kept:
                mine = np.full(n, UNKNOWN)
            attempt.numbers[start:stop] = mine
            attempt.fed[start:stop] = life.fed[start:stop]
            slots = self._slots(life, start, stop)
            self.slots[slots] = np.where(mine < 0, UNKNOWN, mine)
            self.slot_tokens[slots] = life.fed[start:stop]
        self.counts["steps"] += 1
        self.counts["computed rows"] += total

    def _hit(self, life: Life, computed: int) -> None:
        """Leading tokens of a request are in its blocks already."""
        slots = self._slots(life, 0, computed)
        others = self.slot_tokens[slots] != life.fed[:computed]
        if (others & (self.slot_tokens[slots] >= 0)).any():
            self.faults.append(f"vLLM hit blocks of other tokens for {life.request_id}")
        attempt = life.attempts[-1]
        attempt.numbers[:computed] = self.slots[slots]
        attempt.fed[:computed] = life.fed[:computed]
        self.counts["hit rows"] += computed

    def _sample(self, request_id: str, output: Any, start: int) -> list[int]:
        rng, life = self.rng, self.lives[request_id]
        stop = start + output.num_scheduled_tokens[request_id]
        if self.scheduler.requests[request_id].is_prefill_chunk:
            self.counts["chunks"] += 1
            return []
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        known = stop - len(drafts)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] >= 0 and rng.random() < 0.7:
            accepted += 1
        if life.session:
            # vLLM takes tokens for computed that it cut off, where an answer ends among drafts.
            begun = self.scheduler.requests[request_id].num_prompt_tokens
            accepted = max(0, min(accepted, begun + life.max_tokens - known - 1))
        self.counts["drafts"] += len(drafts)
        self.counts["rejected"] += len(drafts) - accepted
        last = rng.choice(STOP_TOKENS) if rng.random() < 0.02 else new_tokens(rng, 1)[0]
        sampled = [*drafts[:accepted], last]
        life.fed[known : known + len(sampled)] = sampled
        self._new_drafts.append(request_id)
        return sampled

    # ------------------------------------------------------------------ the end

    def flush(self) -> None:
        """Returns when the server has all that was told so far."""
        for (side, _), _ in self.sides:
            if not side.flush():
                self.faults.append("the agent could not be flushed")

    def close(self) -> None:
        """Notes what must not have happened; the agents end."""
        self.flush()
        for (side, _), _ in self.sides:
            stats = side.stats()
            dropped = {k: v for k, v in stats["dropped_rows"].items() if k != "rewound" and v}
            # What is late is late by right: the row behind a stop token, rows after an abort.
            dropped.pop("late", None)
            if stats["faults"] or dropped:
                self.faults.append(f"worker: {stats['faults']} faults, dropped {dropped}")
            side.close()
        self.scheduler.shutdown()


def new_tokens(rng: random.Random, n: int) -> list[int]:
    """Tokens that were never seen before."""
    return [rng.randrange(*_TOKENS) for _ in range(n)]


def _config(case: Case, agent: dict[str, Any], model: Path, most: int, seqs: int) -> Any:
    """vLLM's configuration of a case."""
    more: dict[str, Any] = {}
    ours = {
        "kv_connector": "RouteTraceConnector",
        "kv_connector_module_path": "routetrace.capture_agent.vllm",
        "kv_role": case.role,
        "kv_connector_extra_config": agent,
    }
    theirs = {
        "kv_connector": "Elsewhere",
        "kv_connector_module_path": "vllm_runs.scheduler",
        "kv_role": case.role,
        "kv_load_failure_policy": "recompute",
    }
    if case.way == "plugin":
        more["additional_config"] = {"routetrace": agent}
        if case.loads:
            more["kv_transfer_config"] = theirs
    elif case.loads:
        more["kv_transfer_config"] = {
            "kv_connector": "MultiConnector",
            "kv_role": case.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, theirs]},
        }
    else:
        more["kv_transfer_config"] = ours
    if case.drafts:
        more["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": case.drafts,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=most,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 20,
        enforce_eager=True,
        scheduling_policy=case.policy,
        **more,
    ).create_engine_config()
    # On CPU vLLM has neither; its scheduler has both.
    config.scheduler_config.async_scheduling = case.asynchronous
    config.parallel_config.pipeline_parallel_size = case.stages
    return config


# ---------------------------------------------------------------------------- the clients


class Clients:
    """What users do to an engine, at random."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(f"clients {engine.run}")
        self.open: list[Chat] = []
        """Conversations whose next turn has not begun."""
        self.absent: list[str] = []
        """Traces that must not be."""
        self.ready: list[list[Life]] = []
        """Requests of traces that have ended."""
        self._load = self.rng.choice((6, 24, 60))
        self._names = count()
        self._systems = [new_tokens(self.rng, self.rng.randrange(20, 200)) for _ in range(4)]
        self._past: deque[list[int]] = deque(maxlen=40)
        self._settled = 0

    def act(self) -> None:
        """Something happens between two steps."""
        engine, rng = self.engine, self.rng
        while len(engine.lives) < self._load and rng.random() < 0.6:
            self._ask()
        for life in [x for x in engine.lives.values() if x.session]:
            if rng.random() < 0.1 and not (life.inputs and life.inputs[-1] is None):
                self._input(life)
        if rng.random() < 0.02:
            self.abort()
        for request in list(engine.scheduler.requests.values()):
            # Its KV has arrived, for others to find, and it has not got to run.
            arrived = request.status == RequestStatus.WAITING and request.num_computed_tokens
            if arrived and not engine.case.sessions and rng.random() < 0.5:
                engine.abort(request.request_id)
                engine.counts["aborts after a load"] += 1
        if rng.random() < 0.005 and engine.case.depth == 1:
            self._replace()  # vLLM can not, while a step of the other one is in flight
        if rng.random() < 0.004:
            engine.reset()
        if rng.random() < 0.015:
            engine.set_weight_version(engine.version + rng.choice((1, 1, 7, -2)))
        if engine.paused and rng.random() < 0.3:
            engine.pause(False)
        elif rng.random() < 0.002:
            engine.pause(True)
        self.settle()

    def abort(self) -> Life | None:
        """A client goes away, if there is one."""
        lives = list(self.engine.lives.values())
        if not lives:
            return None
        life = self.rng.choice(lives)
        self.engine.abort(life.request_id)
        return life

    def _replace(self) -> None:
        """A request takes the name of one that goes away, in the step that tells of the end."""
        life = self.abort()
        if (
            life
            and life.request_id[1] != "_"
            and life.request_id not in self.engine.scheduler.requests
        ):
            prompt = life.shown[: MAX_LEN - 30]
            trace_id = f"again/{next(self._names)}"
            self._begin(life.request_id, trace_id, prompt, {"routetrace.trace_id": trace_id})
            self.engine.counts["names used again"] += 1

    def settle(self) -> None:
        """Looks which traces have ended."""
        ended = self.engine.ended[self._settled :]
        self._settled = len(self.engine.ended)
        for life in ended:
            if not life.attempts or not life.kept:
                self.absent.append(life.trace_id)
            elif life.chat is None:
                self.ready.append([life])
            elif life.reason != "abort" and len(life.shown) < 200 and self.rng.random() < 0.7:
                self.open.append(life.chat)
            else:
                self.ready.append(life.chat.lives)
            if life.reason != "abort":
                self._past.append(life.shown)
            # A turn that never began leaves the conversation as it was.
            if life.chat and not life.attempts and len(life.chat.lives) > 1:
                self.absent.pop()
                life.chat.lives.remove(life)
                self.ready.append(life.chat.lives)

    def hang_up(self) -> None:
        """No conversation goes on."""
        self.ready += [chat.lives for chat in self.open]
        self.open = []

    def leave(self) -> None:
        """The last client goes away in mid-answer; no step comes after it."""
        self._begin("last-01234567", "last", self._systems[0], {})
        for _ in range(4):
            self.engine.step()
        self.abort()

    # ------------------------------------------------------------------ requests

    def _ask(self) -> None:
        rng = self.rng
        kinds = ["new", "shared", "again", "turn", "samples", "chat", "next turn"]
        kind = rng.choices(kinds, (2, 4, 1, 3, 1, 1, 2))[0]
        tail = new_tokens(rng, rng.choice((1, 5, 20, 60)))
        if kind == "next turn" and self.open:
            chat = self.open.pop(rng.randrange(len(self.open)))
            prompt = [*chat.lives[-1].shown, *tail]
            self._begin(self._unique("cmpl-turn"), chat.trace_id, prompt, {}, chat)
            self.engine.counts["turns in one trace"] += 1
            return
        prompt = tail if len(tail) > 1 else [*tail, 5]
        if kind == "chat":
            trace_id = f"chat {next(self._names)}"
            self._begin(self._unique("x"), trace_id, prompt, {}, Chat(trace_id))
            return
        if kind in {"shared", "samples"}:
            prompt = [*rng.choice(self._systems), *prompt]
        if kind in {"again", "turn"} and self._past:
            past = rng.choice(self._past)
            prompt = past if kind == "again" else [*past, *prompt]
        n = rng.randint(2, 4) if kind == "samples" else 0
        self._named(prompt, n)

    def _named(self, prompt: list[int], n: int) -> None:
        """A request, or n samples of one, by one of the names that vLLM makes."""
        rng = self.rng
        name = f"traj-{next(self._names)}/turn-{rng.randrange(4)}"
        options: dict[str, Any] = {}
        form = rng.choice(("{}", "cmpl-{}-0", "chatcmpl-{}", "counter", "option"))
        if form == "option":
            options["routetrace.trace_id"] = name
            user = f"r{next(self._names)}"
        elif form == "counter":
            user = str(next(self._names))
        else:
            user = form.format(name)
        request_id = self._unique(user)
        if rng.random() < 0.06:
            options["routetrace.capture"] = rng.choice((False, 0, "false"))
        for i in range(n or 1):
            one = f"{i}_{request_id}" if n else request_id
            trace_id = f"{name}/{i}" if n else name
            if form == "counter":
                trace_id = f"{self.engine.engine_id}/{one}"
            self._begin(one, trace_id, prompt, {**options, "routetrace.group": name})

    def _unique(self, user: str) -> str:
        return f"{user}-{self.rng.randrange(1 << 32):08x}"

    def _begin(
        self,
        request_id: str,
        trace_id: str,
        prompt: list[int],
        options: dict[str, Any],
        chat: Chat | None = None,
    ) -> None:
        rng = self.rng
        prompt = prompt[: MAX_LEN - 12]
        room = MAX_LEN - len(prompt)
        life = Life(
            request_id,
            trace_id,
            list(prompt),
            max_tokens=min(rng.choice((1, 8, 30, 100)), room - 1),
            kept="routetrace.capture" not in options,
            chat=chat,
        )
        if chat:
            chat.lives.append(life)
            options["routetrace.trace_id"] = trace_id
        if group := options.get("routetrace.group"):
            life.labels["group"] = group
        params: dict[str, Any] = {}
        if chat is None and self._room_for_session() and rng.random() < 0.5:
            life.session = True
        elif rng.random() < 0.5:
            params["stop_token_ids"] = STOP_TOKENS
        if rng.random() < 0.04:
            params["skip_reading_prefix_cache"] = True
        self.engine.add(life, options, **params)

    def _room_for_session(self) -> bool:
        """Sessions that wait for input keep their blocks: vLLM hangs where all are taken so."""
        sessions = 1 + sum(life.session for life in self.engine.lives.values())
        room = (sessions + 1) * NUM_SLOTS < len(self.engine.slots)
        return self.engine.case.sessions and room

    def _input(self, life: Life) -> None:
        """A session gets more input, or ends."""
        rng = self.rng
        used = len(life.shown) + sum(len(t) + life.max_tokens for t in life.inputs if t)
        if life.reason != "waits":
            used += life.max_tokens
        tokens = new_tokens(rng, rng.choice((1, 3, 20)))
        more = used + len(tokens) + life.max_tokens < MAX_LEN - 8 and rng.random() < 0.8
        self.engine.extend(life, tokens if more else None)


# ---------------------------------------------------------------------------- the comparison


@dataclass
class Tally:
    """What was compared, and what was found."""

    requests: int = 0
    rows: int = 0
    """Rows that are there and right, or wrong."""
    wrong: int = 0
    lost: int = 0
    """Rows that are missing, and should not be."""
    missing: Counter[str] = field(default_factory=Counter)
    """Rows that must be missing, and are, by reason."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        self.requests += other.requests
        self.rows += other.rows
        self.wrong += other.wrong
        self.lost += other.lost
        self.missing += other.missing
        self.counts += other.counts
        self.faults += other.faults
        self.seconds += other.seconds
        return self

    def __str__(self) -> str:
        missing = " ".join(f"{n} {reason}" for reason, n in sorted(self.missing.items()))
        return (
            f"{self.requests} requests, {self.rows} rows compared, {self.wrong} wrong, "
            f"{self.lost} lost, missing by right: {missing or 'none'}; {self.seconds:.0f} s\n"
            f"    {' · '.join(f'{n} {name}' for name, n in sorted(self.counts.items()))}"
        )


def compare(tally: Tally, rows: Rows, lives: Sequence[Life], trace: RoutingTrace) -> None:
    """Compares a trace, cell by cell."""
    last, truth = lives[-1], expected(lives)
    faults = list(_facts(lives, truth, trace))
    tally.requests += len(lives)
    n = len(truth.numbers)
    if len(trace) != n or trace.layer_ids != LAYOUT.layer_ids:
        faults.append(f"{len(trace)} rows of layers {trace.layer_ids} instead of {n}")
    else:
        valid, there = trace.valid, truth.numbers >= 0
        right = np.zeros(n, bool)
        right[there] = (trace.topk_ids[there] == rows.ids[truth.numbers[there]]).all(axis=(1, 2))
        wrong = valid.any(axis=1) & ~(there & right)
        lost = there & ~valid.all(axis=1)
        tally.rows += int(valid.any(axis=1).sum())
        tally.wrong += int(wrong.sum())
        tally.lost += int(lost.sum())
        for name, where in (("wrong", wrong), ("lost", lost)):
            if where.any():
                p = int(where.argmax())
                row, there = trace.topk_ids[p].tolist(), valid[p].tolist()
                faults.append(
                    f"{int(where.sum())} {name} rows, the first at {p}: {row} "
                    f"(valid {there}) instead of row {truth.numbers[p]}"
                )
        for part in trace.missing:
            tally.missing[part.reason] += part.stop - part.start
            for p in range(part.start, part.stop):
                if part.reason not in truth.reasons[p] and not there[p]:
                    faults.append(f"{p} is missing as {part.reason}, not {truth.reasons[p]}")
                    break
        versions = np.full(n, np.iinfo(np.int64).min)
        for start, stop, version in trace.weight_versions:
            versions[start:stop] = version
        other = there & (versions != rows.versions[np.maximum(truth.numbers, 0)])
        if other.any():
            p = int(other.argmax())
            faults.append(
                f"weights {versions[p]} at {p} instead of {rows.versions[truth.numbers[p]]}"
            )
    tally.faults += [
        f"{last.trace_id!r} ({last.reason}, {len(last.attempts)} attempts): {fault}"
        for fault in faults
    ]


def _facts(lives: Sequence[Life], truth: Expected, trace: RoutingTrace) -> Iterator[str]:
    last = lives[-1]
    whole = bool((truth.numbers >= 0).all())
    state = TraceState.COMPLETE if whole else TraceState.INCOMPLETE
    if not whole and last.external:
        state = TraceState.RUNNING  # who computed the rest may still tell
    labels = dict(last.labels)
    if last.request_id[1:2] == "_":
        labels["sample"] = last.request_id[0]
    for name, value, wanted in (
        ("state", trace.state, state),
        ("num_tokens", trace.num_tokens, len(last.shown)),
        ("finish_reason", trace.finish_reason, last.reason),
        ("num_attempts", trace.num_attempts, len(last.attempts)),
        ("labels", trace.labels, labels),
        ("num_incarnations", trace.num_incarnations, 1),
    ):
        if value != wanted:
            yield f"{name} is {value}, not {wanted}"
    if not trace.verify_tokens(last.shown):
        yield "no digest of its tokens"


# ---------------------------------------------------------------------------- a run


def play(case: Case, seed: int, target: str, model: Path, num_rows: int) -> Tally:
    """Runs an engine until it has computed so many rows, and all its requests have ended."""
    tally = Tally()
    started = time.monotonic()
    engine = Engine(case, seed, target, model)
    clients = Clients(engine)

    def before_outcome() -> None:
        if clients.rng.random() < 0.01:
            clients.abort()

    with RouteClient(target, run=engine.run, timeout=_WAIT_S) as client:
        while engine.rows.size < num_rows and not tally.faults:
            clients.act()
            engine.step(before_outcome)
            if sum(map(len, clients.ready)) > _READ_AT_ONCE:
                _read(client, clients, engine, tally)
        while engine.busy:
            for life in [x for x in engine.lives.values() if x.session]:
                if not life.inputs or life.inputs[-1] is not None:
                    engine.extend(life, None)
            engine.step()
        clients.settle()
        clients.hang_up()
        clients.leave()
        if case.stages > 1:
            engine.step()  # nothing to do but to tell of the last end
        clients.settle()
        engine.steps += 1
        if not tally.faults:
            _read(client, clients, engine, tally)
        if not tally.faults:
            tally.faults += [f"there is a trace {t.request_id!r}" for t in client.find()]
    engine.close()
    tally.counts = engine.counts
    tally.counts["not kept"] = len(clients.absent)
    tally.faults += engine.faults
    tally.faults = [f"{case.name}, seed {seed}: {fault}" for fault in tally.faults]
    tally.seconds = time.monotonic() - started
    return tally


def _read(client: RouteClient, clients: Clients, engine: Engine, tally: Tally) -> None:
    """Reads and forgets traces whose end the worker was told of."""
    told = [lives for lives in clients.ready if lives[-1].ended_at < engine.steps]
    clients.ready = [lives for lives in clients.ready if lives[-1].ended_at >= engine.steps]
    ids = [lives[-1].trace_id for lives in told]
    if engine.case.loads:
        engine.flush()
    wait = None if engine.case.loads else _WAIT_S
    traces = client.get_many(ids, missing="mask", wait=wait, prefetch=16, errors="return")
    for lives, trace in zip(told, traces, strict=True):
        if isinstance(trace, RoutingTrace):
            compare(tally, engine.rows, lives, trace)
            client.delete(lives[-1].trace_id)
        else:
            tally.requests += len(lives)
            tally.faults.append(f"{lives[-1].trace_id!r}: {type(trace).__name__}: {trace}")
            return


def _write_model(folder: Path) -> Path:
    """What vLLM wants to know of a model."""
    facts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYOUT.num_hidden_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": LAYOUT.num_experts,
        "num_experts_per_tok": LAYOUT.top_k,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def main() -> int:
    """Returns 1 if a row is wrong or lost, or a trace does not end."""
    parser = argparse.ArgumentParser("python -m vllm_runs.scheduler", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="compared, at least so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--rounds", type=int, default=1 << 30, help="most engines of each case")
    parser.add_argument("--round-rows", type=int, default=_ROWS_PER_ROUND, help="of an engine")
    args = parser.parse_args()
    cases = [case for case in CASES if args.case in (case.name, "")]
    total = Tally()
    with tempfile.TemporaryDirectory() as folder, run_server() as server:
        model = _write_model(Path(folder))
        for case in cases:
            tally = Tally()
            for i in range(args.rounds):
                if tally.rows >= args.rows / len(cases) or tally.faults:
                    break
                tally += play(case, args.seed + i, server.target, model, args.round_rows)
            print(f"{case.name}: {tally}", flush=True)
            for fault in tally.faults[:_TOLD]:
                print(f"    FAULT {fault}", flush=True)
            total += tally
    print(f"\ntotal: {total}\n{len(total.faults)} faults")
    return 1 if total.faults or total.wrong or total.lost else 0


if __name__ == "__main__":
    sys.exit(main())
