"""Entry point that every process of vLLM runs (group vllm.general_plugins).

It changes nothing where capture is not configured. Otherwise it attaches workers when they load
their model, and, without the connector, follows the scheduler and the steps of the workers by
wrapping their public methods.
"""

from __future__ import annotations

import functools
from typing import Any

#: Attribute of vLLM's SchedulerOutput that carries the plan of a step.
_PLAN = "routetrace_plan"

#: Method of vLLM's VllmConfig that refuses connectors.
_CHECK = "_verify_kv_transfer_compat"

#: Connectors to host memory, and their managers, of which a reset leaves nothing.
_RESET = (
    ("OffloadingConnector", "CPUOffloadingManager"),
    ("SimpleCPUOffloadConnector", "NoneType"),
)

_WITHOUT_CONNECTOR = (
    "routetrace: the plugin needs no connector: replace --kv-transfer-config by "
    "--additional-config '{\"routetrace\": {...}}' with the same settings, or by "
    "ROUTETRACE_VLLM=1; see docs/vllm.md"
)


def register() -> None:
    """Prepare this process; idempotent."""
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase.__init__, "routetrace"):
        _attach_workers(WorkerBase)
        _follow_schedulers(Scheduler)
        _explain_refusal(VllmConfig)


def _attach_workers(worker_class: Any) -> None:
    make = worker_class.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from routetrace.capture_agent.engines.vllm.settings import settings_of

        make(self, *args, **kwargs)
        settings = settings_of(self.vllm_config)
        if settings is not None:
            _attach_with_model(self, settings)

    __init__.routetrace = True  # type: ignore[attr-defined]
    worker_class.__init__ = __init__


def _attach_with_model(worker: Any, settings: Any) -> None:
    inner = worker.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        from routetrace.capture_agent.engines.vllm.attach import Attachment

        result = inner(*args, **kwargs)
        attachment = Attachment(worker, settings)
        if settings.way == "plugin":
            _follow_steps(worker, attachment)
        return result

    worker.load_model = load_model


def _explain_refusal(config_class: Any) -> None:
    """Name the remedy where vLLM refuses the connector because of the CUDA allocator.

    vLLM checks that while its configuration is made, before any code of the connector runs.
    """
    inner = getattr(config_class, _CHECK, None)
    if inner is None:
        return

    @functools.wraps(inner)
    def check(self: Any) -> None:
        from routetrace.capture_agent.engines.vllm.settings import CONNECTOR

        try:
            inner(self)
        except ValueError as error:
            # Another connector beside ours would be refused without ours, too.
            ours = self.kv_transfer_config.kv_connector == CONNECTOR
            if ours and "expandable_segments" in str(error):
                raise ValueError(f"{error} {_WITHOUT_CONNECTOR}") from error
            raise

    setattr(config_class, _CHECK, check)


def _follow_steps(worker: Any, attachment: Any) -> None:
    inner = worker.execute_model

    def execute_model(scheduler_output: Any) -> Any:
        plan = getattr(scheduler_output, _PLAN, None)
        if plan is None:  # a step without a scheduler
            return inner(scheduler_output)
        attachment.begin_step(plan)
        result = inner(scheduler_output)
        attachment.end_step(plan)
        return result

    worker.execute_model = execute_model


def _follow_schedulers(scheduler_class: Any) -> None:
    make, schedule = scheduler_class.__init__, scheduler_class.schedule

    @functools.wraps(make)
    def __init__(  # noqa: N807
        self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from routetrace.capture_agent.engines.vllm.settings import settings_of

        make(self, vllm_config, kv_cache_config, *args, **kwargs)
        settings = settings_of(vllm_config)
        self.routetrace = self.routetrace_resets = None
        if settings is None:
            return
        from routetrace.capture_agent.engines.vllm.attach import (
            join_connectors,
            make_schedule,
            schedule_of,
        )

        if settings.way == "plugin":
            self.routetrace = make_schedule(vllm_config, settings, kv_cache_config)
        join_connectors(vllm_config, settings, self.connector)
        self.routetrace_resets = schedule_of(settings)
        if self.routetrace_resets is not None:
            self.routetrace_resets.follow(self.requests)
            _watch_lookups(self.connector, self.routetrace_resets)

    @functools.wraps(schedule)
    def schedule_and_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.routetrace is None:
            return schedule(self, *args, **kwargs)
        output = schedule(self, *args, **kwargs)
        setattr(output, _PLAN, self.routetrace.step(output, self.requests))
        return output

    scheduler_class.__init__ = __init__
    scheduler_class.schedule = schedule_and_plan
    _note_ends(scheduler_class)
    _note_resets(scheduler_class)


def _note_ends(scheduler_class: Any) -> None:
    update, finish = scheduler_class.update_from_output, scheduler_class.finish_requests

    @functools.wraps(update)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        if self.routetrace is not None:
            self.routetrace.finish_all(self.finished_req_ids)
        return result

    @functools.wraps(finish)
    def finish_requests(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.routetrace is None:
            return finish(self, request_ids, *args, **kwargs)
        if request_ids is None:
            request_ids = self.requests
        names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        # vLLM forgets those that were never scheduled.
        found = [request for name in names if (request := self.requests.get(name)) is not None]
        live = [request for request in found if not request.is_finished()]
        result = finish(self, names, *args, **kwargs)
        for request in live:
            self.routetrace.finish(request)
        return result

    scheduler_class.update_from_output = update_from_output
    scheduler_class.finish_requests = finish_requests


def _note_resets(scheduler_class: Any) -> None:
    inner = getattr(scheduler_class, "reset_prefix_cache", None)
    if inner is None:
        return

    @functools.wraps(inner)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = [*self.running]
        try:
            done = inner(self, *args, **kwargs)
        finally:  # before vLLM gives their blocks to others
            if self.routetrace_resets is not None:
                self.routetrace_resets.preempt(
                    request for request in running if request.status.name == "PREEMPTED"
                )
        if done and self.routetrace_resets is not None:
            stores = _stores_of(self.connector)
            told = any(args[1:2]) or kwargs.get("reset_connector", False)
            external = not stores or (told and all(map(_is_emptied, stores)))
            self.routetrace_resets.reset(external=external)
        return done

    scheduler_class.reset_prefix_cache = reset_prefix_cache


def _stores_of(connector: Any) -> list[Any]:
    """Return the connectors that may load KV from elsewhere."""
    from routetrace.capture_agent.engines.vllm.settings import CONNECTOR

    parts = getattr(connector, "_connectors", [connector])
    return [one for one in parts if one is not None and type(one).__name__ != CONNECTOR]


def _is_emptied(connector: Any) -> bool:
    """Whether a reset of a connector empties all its KV, which no other engine fills.

    vLLM takes a connector without a store that can be reset for one that was, and tiers behind
    host memory keep their KV.
    """
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    return (type(connector).__name__, type(manager).__name__) in _RESET


def _watch_lookups(connector: Any, half: Any) -> None:
    """Note which cached tokens are local, and the blocks of requests that wait for others.

    At the engine's own connector: a `MultiConnector` before 0.26 shows blocks to none of its
    connectors but the one that fills them.
    """
    if connector is None:
        return
    inner, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        half.lookup(request, num_computed_tokens)
        return inner(request, num_computed_tokens)

    def update_state_after_alloc(request: Any, blocks: Any, *args: Any, **kwargs: Any) -> Any:
        half.allocate(request, blocks)
        return allocated(request, blocks, *args, **kwargs)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc
