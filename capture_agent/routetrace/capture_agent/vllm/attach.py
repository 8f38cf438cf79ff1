"""Capture in one worker of vLLM: what is hooked, and when.

A worker loads its model, measures and compiles it, gets its KV cache, warms up, and steps. Routers
are bound right after loading, so that what is compiled has the capture in it; requests and slots
are known with the KV cache; the proof is a pass over a dummy batch after the warm-up, which replays
a graph where the engine uses graphs.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from routetrace.capture_agent.capturer import RoutingCapturer
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.vllm.routers import bind_routers
from routetrace.capture_agent.vllm.schedule import Event, Schedule, StepPlan
from routetrace.capture_agent.vllm.settings import Settings, attention_group, refuse_unsupported
from routetrace.capture_agent.vllm.worker import WorkerSide
from routetrace.v1.errors import InvalidArgument

_log = logging.getLogger(__name__)

# Schedulers of this process, by boot and engine.
_schedules: WeakValueDictionary[tuple[str, str], Schedule] = WeakValueDictionary()

# The worker of this process that was attached last.
_last: Attachment | None = None


def make_schedule(vllm_config: Any, settings: Settings, kv_cache_config: Any) -> Schedule:
    """The half of a scheduler."""
    group = attention_group(kv_cache_config)
    schedule = Schedule(
        settings.run,
        settings.engine_id,
        group[0] if group else None,
        drafts=vllm_config.speculative_config is not None,
    )
    _schedules[settings.boot_id, settings.engine_id] = schedule
    return schedule


def attachment_of(vllm_config: Any) -> Attachment:
    """The attachment of the worker that this configuration belongs to.

    Raises:
        InvalidArgument: if routetrace's plugin did not see it load its model.
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
        InvalidArgument: if the model, or the way in which it runs, can not be captured.
    """

    def __init__(self, worker: Any, settings: Settings) -> None:
        global _last  # noqa: PLW0603
        self._worker = worker
        self._config = worker.vllm_config
        self._settings = settings
        refuse_unsupported(self._config)
        runner = worker.model_runner
        self._capturer: RoutingCapturer = bind_routers(
            runner.get_model(), self._config, torch.device(runner.device)
        )
        _mark_compiled_code(self._config, self._capturer)
        self.side: WorkerSide | None = None
        self._wrap("initialize_from_config", before=self._start)
        self._wrap("compile_or_warm_up_model", after=self._prove)
        self._wrap("shutdown", before=lambda *_: self._close())
        for name in ("set_weight_version", "pause", "resume", "flush", "stats"):
            setattr(worker, f"routetrace_{name}", self._control(name))
        _last = self

    def belongs_to(self, vllm_config: Any) -> bool:
        """Whether it is of the engine with that configuration."""
        same: bool = vllm_config.compilation_config is self._config.compilation_config
        return same

    def begin_step(self) -> None:
        """A forward pass is about to start."""
        if self.side is not None:
            self.side.begin_step()

    def end_step(self, plan: StepPlan, request_ids: Sequence[str] | None = None) -> None:
        """A forward pass was launched, or a step without one is over.

        Args:
            plan: of the step.
            request_ids: its requests in the order of their rows, where vLLM told them.
        """
        if self.side is not None:
            told = request_ids
            self.side.end_step(plan, self._batch_order if told is None else lambda: told)

    def _batch_order(self) -> Sequence[str]:
        runner = self._worker.model_runner
        state = getattr(runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None)  # that of the step: model runner V2
        if batch is None:
            batch = runner.input_batch  # that of the engine: model runner V1
        order: Sequence[str] = batch.req_ids
        return order

    # ------------------------------------------------------------------ private

    def _wrap(
        self,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Wraps a method of this worker, not of its class."""
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
            self._capturer, self._agent_config(kv_cache_config), self._late_events
        )

    def _agent_config(self, kv_cache_config: Any) -> AgentConfig | None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_tp_group().rank_in_group:
            return None
        settings, stages = self._settings, get_pp_group()
        group = attention_group(kv_cache_config)
        return AgentConfig(
            engine_id=settings.engine_id,
            run=settings.run,
            layout=self._capturer.layout,
            shard=f"pp{stages.rank_in_group}" if stages.world_size > 1 else "",
            boot_id=settings.boot_id,
            block_size=group[1] if group else 0,
            num_blocks=kv_cache_config.num_blocks if group else 0,
            attributes={"engine": "vllm", "model": str(self._config.model_config.model)},
            **{"target": "", **settings.agent},
        )

    def _late_events(self) -> list[Event]:
        schedule = _schedules.get((self._settings.boot_id, self._settings.engine_id))
        return schedule.take_finished() if schedule else []

    def _prove(self) -> None:
        """Runs a dummy batch and looks whether every MoE layer wrote its ids.

        Raises:
            InvalidArgument: naming the layers that did not.
        """
        dummy = getattr(self._worker, "execute_dummy_batch", None)
        if dummy is None:
            _log.warning("routetrace: no dummy batch to prove capture with")
            return
        self._capturer.begin()
        dummy()
        layout = self._capturer.layout
        fired = set(self._capturer.fired(1))
        silent = [layer for layer, column in layout.column.items() if column not in fired]
        self._capturer.begin()
        if silent:
            raise InvalidArgument(
                field="model",
                value=f"layers {silent} wrote no ids",
                expected="every MoE layer to; see docs/vllm.md for what can be captured",
            )
        _log.info("routetrace: %d MoE layers are captured", len(layout.layer_ids))

    def _close(self) -> None:
        if self.side is not None:
            self.side.close()


def _mark_compiled_code(vllm_config: Any, capturer: RoutingCapturer) -> None:
    """Keeps compiled code with capture in it apart from code without, in vLLM's cache of both."""
    if isinstance(vllm_config.additional_config, dict):
        layout = capturer.layout
        mark = f"{layout.layer_ids} {layout.top_k} {capturer.max_num_tokens}"
        vllm_config.additional_config.setdefault("routetrace.compiled", mark)
