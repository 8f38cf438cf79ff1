"""Attach capture to one worker of vLLM.

A worker loads its model, measures and compiles it, gets its KV cache, warms up, and steps. Routers
are bound right after loading, so that compiled code contains the capture; the worker's half starts
with the KV cache. The check is a pass over a dummy batch after the warm-up, which replays a graph
where the engine uses graphs. All tokens of such a batch may be padding, for which routers choose
-1: that counts as written.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.cells import OPERATOR
from routetrace.capture_agent.engines.vllm.inputs import Inputs
from routetrace.capture_agent.engines.vllm.plan import Event, StepPlan
from routetrace.capture_agent.engines.vllm.routers import Routers
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.settings import (
    Settings,
    attention_group,
    judges_drafts_late,
    refuse_unsupported,
)
from routetrace.capture_agent.engines.vllm.transfers import Transfers
from routetrace.capture_agent.engines.vllm.weights import (
    FOLLOW,
    Weights,
    follow_engine_core,
    watch,
)
from routetrace.capture_agent.engines.vllm.worker import WorkerSide
from routetrace.common.errors import InvalidArgument
from routetrace.common.model_hash import model_hash

_log = logging.getLogger(__name__)

# Schedulers of this process, by boot and engine.
_schedules: WeakValueDictionary[tuple[str, str], Schedule] = WeakValueDictionary()

# The latest attachment in this process.
_last: Attachment | None = None


def make_schedule(vllm_config: Any, settings: Settings, kv_cache_config: Any) -> Schedule:
    """Return the scheduler's half for one scheduler."""
    follow_engine_core()
    group = attention_group(kv_cache_config, vllm_config.parallel_config)
    schedule = Schedule(
        settings.run,
        settings.engine_id,
        group[0] if group else None,
        drafts=vllm_config.speculative_config is not None,
        inputs=Inputs.of(vllm_config),
    )
    schedule.reset(external=False)  # no pass has written to the KV cache yet
    _schedules[settings.boot_id, settings.engine_id] = schedule
    return schedule


def schedule_of(settings: Settings) -> Schedule | None:
    """Return the scheduler's half of an engine in this process; None if there is none."""
    return _schedules.get((settings.boot_id, settings.engine_id))


def join_connectors(vllm_config: Any, settings: Settings, connector: Any) -> None:
    """Have an engine's schedule name hand-overs of KV as its connector does, and give handles.

    Args:
        vllm_config: the engine's own. That of a child of a `MultiConnector` names no other child.
        settings: from it.
        connector: the engine's.
    """
    schedule = schedule_of(settings)
    if schedule is not None:
        schedule.transfers = Transfers.of(vllm_config)
        schedule.gives_handles = _merges(connector)
        if not schedule.gives_handles and settings.way == "connector":
            _log.warning(
                "routetrace: answers have no handles, since this version's MultiConnector takes "
                "the parameters of one connector alone: read by trace id and tokens"
            )


def _merges(connector: Any) -> bool:
    """Whether an answer can have our parameters beside those of another connector.

    The `MultiConnector` of vLLM before 0.25 raises where two connectors give any, and the engine
    ends.
    """
    put_together = getattr(type(connector), "_aggregate_request_finished", None)
    if put_together is None:
        return True  # one connector
    both = {"a": 1, "b": 2}
    parts = SimpleNamespace(_connectors=[*both], _extra_async_saves={}, _requests_to_connector={})
    try:
        answer = put_together(
            parts, SimpleNamespace(request_id=""), lambda name: (False, {name: both[name]})
        )
    except Exception:
        return False
    return bool(answer == (False, both))


def attachment_of(vllm_config: Any) -> Attachment:
    """Return the attachment of the worker with this configuration.

    Raises:
        InvalidArgument: if routetrace's plugin did not run when it loaded its model.
    """
    if _last is None or not _last.belongs_to(vllm_config):
        raise InvalidArgument(
            field="VLLM_PLUGINS",
            value="routetrace's plugin did not run in this worker",
            expected="'routetrace' among them, and a worker that is a WorkerBase",
        )
    return _last


class Attachment:
    """Capture in one worker.

    Args:
        worker: vLLM's worker, its model loaded.
        settings: from its configuration.

    Raises:
        InvalidArgument: if the model or its mode of execution cannot be captured.
    """

    def __init__(self, worker: Any, settings: Settings) -> None:
        global _last  # noqa: PLW0603
        self._worker = worker
        self._config = worker.vllm_config
        self._settings = settings
        refuse_unsupported(self._config)
        runner = worker.model_runner
        self._late_drafts = judges_drafts_late(self._config)
        if self._late_drafts and self._positions() is None:
            raise InvalidArgument(
                field="model_runner",
                value=type(runner).__name__,
                expected="one with the positions of its batch, or --no-async-scheduling: the "
                "scheduler does not know them before drafts are judged",
            )
        model = runner.get_model()
        self._routers = Routers(model, self._config, torch.device(runner.device))
        self._capturer = self._routers.capturer
        _mark_compiled_code(self._config, self._capturer)
        self.side: WorkerSide | None = None
        self._weights = Weights()
        self._updates = 0  # after which the routers were connected
        watch(worker, model, self._weights)
        setattr(worker, FOLLOW, self._weights.tell)
        self._wrap("initialize_from_config", before=self._start)
        # vLLM has bound its own return of routed experts by then.
        self._wrap("compile_or_warm_up_model", before=self._routers.keep, after=self._check)
        self._wrap("shutdown", before=lambda *_: self._close())
        for name in ("set_weight_version", "pause", "resume", "flush", "stats"):
            setattr(worker, f"routetrace_{name}", self._control(name))
        _last = self

    def belongs_to(self, vllm_config: Any) -> bool:
        """Whether its engine has that configuration."""
        same: bool = vllm_config.compilation_config is self._config.compilation_config
        return same

    def begin_step(self, plan: StepPlan) -> None:
        """Prepare for the forward pass of a step, which is about to start.

        Args:
            plan: of the step.
        """
        if self.side is not None:
            if self._weights.updates != self._updates:
                self._updates = self._weights.updates
                self._routers.keep()  # weights that are loaded in place may make new kernels
            self.side.begin_step(plan.num_tokens)

    def end_step(self, plan: StepPlan, request_ids: Sequence[str] | None = None) -> None:
        """End a step: its forward pass was launched, or it had none.

        Args:
            plan: of the step.
            request_ids: its requests in the order of their rows, where vLLM passed them.
        """
        if self.side is not None:
            given = request_ids
            order = self._batch_order if given is None else lambda: given
            self.side.end_step(plan, order, self._positions() if self._late_drafts else None)

    def _batch_order(self) -> Sequence[str]:
        runner = self._worker.model_runner
        state = getattr(runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None)  # that of the step: model runner V2
        if batch is None:
            batch = runner.input_batch  # that of the engine: model runner V1
        order: Sequence[str] = batch.req_ids
        return order

    def _positions(self) -> torch.Tensor | None:
        """Return the position of each row of the batch, as the model was given them."""
        runner = self._worker.model_runner
        buffers = getattr(runner, "input_buffers", runner)  # model runner V2, or V1
        positions = getattr(buffers, "positions", None)
        positions = getattr(positions, "gpu", positions)
        return positions if isinstance(positions, torch.Tensor) else None

    # ------------------------------------------------------------------ private

    def _wrap(
        self,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a method of this worker, not of its class."""
        inner = getattr(self._worker, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if before:
                before(*args, **kwargs)
            result = inner(*args, **kwargs)
            if after:
                after()
            return result

        setattr(self._worker, name, method)

    def _control(self, name: str) -> Callable[..., Any]:
        def control(*args: Any) -> Any:
            if self.side is None:
                raise RuntimeError("routetrace: the worker has no KV cache yet")
            return getattr(self.side, name)(*args)

        return control

    def _start(self, kv_cache_config: Any) -> None:
        self.side = WorkerSide(
            self._capturer, self._agent_config(kv_cache_config), self._late_events, self._weights
        )

    def _agent_config(self, kv_cache_config: Any) -> AgentConfig | None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_tp_group().rank_in_group:
            return None
        settings, stages = self._settings, get_pp_group()
        group = attention_group(kv_cache_config, self._config.parallel_config)
        return AgentConfig(
            engine_id=settings.engine_id,
            run=settings.run,
            layout=self._capturer.layout,
            shard=f"pp{stages.rank_in_group}" if stages.world_size > 1 else "",
            boot_id=settings.boot_id,
            block_size=group[1] if group else 0,
            num_blocks=kv_cache_config.num_blocks if group else 0,
            model=model_of(self._config.model_config),
            attributes={"engine": "vllm", "model": str(self._config.model_config.model)},
            **{"target": "", **settings.agent},
        )

    def _late_events(self) -> list[Event]:
        schedule = schedule_of(self._settings)
        return schedule.take_finished() if schedule else []

    def _check(self) -> None:
        """Run a dummy batch, and check that every MoE layer wrote its ids once.

        Raises:
            InvalidArgument: with the layers that did not, and their faults.
        """
        dummy = getattr(
            self._worker, "execute_dummy_batch", None
        )  # workers of others may have none
        if dummy is None:
            _log.warning("routetrace: capture is not checked: the worker has no dummy batch")
            return
        self._capturer.begin()
        dummy()
        layout = self._capturer.layout
        if faults := self._capturer.faults(1):
            layers = defaultdict(list)
            for column, fault in faults.items():
                layers[fault].append(layout.layer_ids[column])
            raise InvalidArgument(
                field="model",
                value="; ".join(f"layers {found} {fault}" for fault, found in layers.items()),
                expected="every MoE layer to write its ids once; docs/vllm.md lists the engines "
                "that are refused",
            )
        _log.info("routetrace: %d MoE layers are captured", len(layout.layer_ids))

    def _close(self) -> None:
        if self.side is not None:
            schedule = schedule_of(self._settings)
            if schedule is not None:  # one in another process cannot tell anything any more
                schedule.shut_down()
            self.side.close()


def model_of(model_config: Any) -> str:
    """Return the hash of a model; "" if it cannot be known."""
    try:
        return model_hash(model_config.hf_config, model_config.quantization)
    except Exception:
        _log.exception("routetrace: the model is not known")
        return ""


def _mark_compiled_code(vllm_config: Any, capturer: RoutingCapturer) -> None:
    """Separate compiled code with capture from code without in vLLM's cache."""
    if isinstance(vllm_config.additional_config, dict):
        layout = capturer.layout
        mark = f"{OPERATOR} {layout.layer_ids} {layout.top_k} {capturer.max_num_tokens}"
        vllm_config.additional_config.setdefault("routetrace.compiled", mark)
