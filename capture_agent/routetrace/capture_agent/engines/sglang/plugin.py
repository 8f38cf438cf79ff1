"""Entry point that every process of SGLang runs (group sglang.srt.plugins).

It changes nothing where capture is off. Otherwise it hooks the model runner, so that a capture
starts with the capturer of its ranks, and the scheduler of the same process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.request_options import kv_cache_labels
from routetrace.capture_agent.engines.sglang import seams
from routetrace.capture_agent.engines.sglang.disaggregation import Role, hook_transfers
from routetrace.capture_agent.engines.sglang.settings import (
    MODELS,
    NGRAM,
    Settings,
    refuse_unsupported,
    settings_of,
)
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.common.model_hash import model_hash

_log = logging.getLogger(__name__)

# The latest capture of this process, and its model runner with the tap.
_capture: Any = None
_tapped: tuple[Any, Any] | None = None
_attached = False
# Whether the weights outlive the release of their memory.
_keeps_weights = False


def register() -> None:
    """Prepare this process.

    Raises:
        Refused: if a setting is wrong, or this version of SGLang cannot be captured from.
    """
    try:
        settings = settings_of()
    except InvalidArgument as error:
        raise seams.Refused(f"routetrace: {error}") from error
    if settings is None:
        return
    seams.check()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    after, around = HookType.AFTER, HookType.AROUND
    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{seams.SCHEDULER}.run_batch", _run_batch, around),
        (seams.WORKERS, _workers_made, after),
        (seams.ANSWERED, _answers_sent, after),
        (f"{seams.SCHEDULER}.flush_cache", _flushed, after),
        (f"{seams.REQUEST}.reset_for_retract", _retracted, after),
    ]
    # Aborts of requests that wait: where SGLang has a method for them, or as it sends them.
    abort = f"{seams.SCHEDULER}.send_abort_output"
    if seams.found(abort) is not None:
        hooks.append((abort, lambda _, __, output, req=None: _aborted(output, req), after))
    else:
        hooks.append((seams.SENDER, lambda _, __, output, req=None: _aborted(output, req), after))
    for seam, hook in (
        *((name, _loaded) for name in seams.LOADS),
        *((name, _written) for name in seams.WRITES),
        (seams.HOST_MADE, _host_made),
    ):
        if seams.found(seam) is not None:
            hooks.append((seam, hook, after))
    for source, whole in (("disk", True), ("ipc", True), ("distributed", False), ("tensor", False)):
        update = partial(_update, whole=whole)
        hooks.append((f"{seams.UPDATER}.update_weights_from_{source}", update, around))
    hooks += [
        (name, hook, after)
        for name, hook in (
            (seams.RECORDED, _recorded),
            (seams.BEGUN, _session_begun),
            (seams.ENDED, _session_ended),
            (seams.RENAMED, _renamed),
            (seams.RELEASED, _released),
            (seams.STORE_ATTACHED, _store_attached),
        )
        if seams.found(name) is not None
    ]
    if all(seams.found(name) is not None for name in (seams.STREAMER_MADE, seams.ANSWERS)):
        hooks += [(seams.STREAMER_MADE, _streamer_made, after), (seams.ANSWERS, _answered, after)]
    if settings.probe and seams.found(seams.GRAPHS) is not None:
        hooks.append((seams.GRAPHS, _probe, after))
    names = [name for name, *_ in hooks]

    def made(_: Any, runner: Any, *__: Any, **___: Any) -> None:
        seams.check_applied(names)
        try:
            _attach(runner, settings)
        except RouteTraceError as error:
            raise seams.Refused(f"routetrace: {error}") from error

    hooks.append((f"{seams.RUNNER}.init_routed_experts_capturer", made, after))
    for name, hook, kind in hooks:
        HookRegistry.register(name, hook, kind)


def _attach(runner: Any, settings: Settings) -> None:
    """Capture from a model runner, before its CUDA graphs are recorded."""
    global _capture, _tapped, _attached, _keeps_weights  # noqa: PLW0603
    if runner.is_draft_worker:
        return
    _attached = True
    from sglang.srt.runtime_context import get_parallel

    from routetrace.capture_agent.engines.sglang.capture import Capture
    from routetrace.capture_agent.engines.sglang.tap import Tap

    refuse_unsupported(runner.server_args)
    for name in ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"):
        if os.environ.get(name, "").lower() in ("1", "true"):
            raise InvalidArgument(field=name, value="on", expected="off: experts are made up")
    num_drafts = 1
    algorithm = getattr(runner.server_args, "speculative_algorithm", None)
    if algorithm in (NGRAM, *MODELS):
        num_drafts = int(runner.server_args.speculative_num_draft_tokens)
        from routetrace.capture_agent.engines.sglang.speculation import hook_verifications

        hook_verifications(algorithm, current)
    role = Role.of(runner.server_args)
    if role is Role.DECODE:
        backend = getattr(runner.server_args, "disaggregation_transfer_backend", None)
        hook_transfers(current, backend != "fake")
    layout = ModelLayout.from_config(runner.model_config.hf_config)
    tap = Tap(runner, layout, num_drafts)  # on every rank: DeepEP gathers ids from all
    _tapped = runner, tap
    parallel = get_parallel()
    if parallel.attn_tp_rank != 0:
        tap.ignore()
        return
    page = int(runner.page_size)
    config = AgentConfig(
        engine_id=settings.engine_id + _rank(runner, parallel),
        layout=layout,
        block_size=page,
        num_blocks=int(runner.max_token_pool_size) // page + 2,  # one is padding
        attributes={"engine": "sglang", "model": str(runner.server_args.model_path)},
        model=_model(runner.model_config),
        **{"target": "", **settings.agent},
    )
    args = runner.server_args
    labels = kv_cache_labels(str(args.kv_cache_dtype), str(runner.model_config.dtype))
    # Without a memory saver SGLang gives nothing back.
    _keeps_weights = not getattr(args, "enable_memory_saver", False) or bool(
        getattr(args, "enable_weights_cpu_backup", False)
    )
    _capture = Capture(tap, config, labels, role, getattr(args, "weight_version", None))
    # No pass has written to the KV cache yet.
    _capture.flushed(external=not getattr(args, "hicache_storage_backend", None))
    _log.info("routetrace: %d MoE layers are captured", len(layout.layer_ids))


def _model(config: Any) -> str:
    """Return the hash of the model of SGLang's `ModelConfig`; "" if there is none."""
    try:
        return model_hash(config.hf_config, getattr(config, "quantization", None))
    except Exception:  # rows are captured without it
        _log.warning("routetrace: the model has no hash", exc_info=True)
        return ""


def _rank(runner: Any, parallel: Any) -> str:
    """Return the suffix of the engine id that identifies this data-parallel rank."""
    args = runner.server_args
    replica = getattr(parallel, "dp_rank", getattr(runner, "dp_rank", None))
    if int(getattr(parallel, "attn_dp_size", 1)) > 1:
        replica = f"{replica or 0}-{parallel.attn_dp_rank}"
    return f"-dp{replica or 0}" if int(getattr(args, "dp_size", 1)) > 1 else ""


def _probe(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Check the layers of a model runner whose graphs are made."""
    global _tapped
    if _tapped is None or _tapped[0] is not runner:
        return
    from routetrace.capture_agent.engines.sglang.probe import probe

    tap, _tapped = _tapped[1], None
    try:
        probe(runner, tap)
    except RouteTraceError as error:
        raise seams.Refused(f"routetrace: {error}") from error


def _workers_made(*_: Any, **__: Any) -> None:
    if not _attached:
        raise seams.Refused(
            "routetrace: cannot capture from this server: its model runner makes no capturer of "
            "routed experts; docs/sglang.md lists what is refused, such as MLX"
        )


def _run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    if _capture is None:
        return original(scheduler, batch, *args, **kw)
    return _capture.run(lambda: original(scheduler, batch, *args, **kw), batch)


def _answers_sent(_: Any, __: Any, reqs: Any, *___: Any, **____: Any) -> None:
    if _capture is not None:
        _capture.answered(reqs)


def _flushed(done: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if _capture is not None and done:
        # A flush empties the host memory of HiCache, and nothing behind it.
        controller = getattr(scheduler.tree_cache, "cache_controller", None)
        _capture.flushed(external=not getattr(controller, "enable_storage", False))


def _store_attached(*_: Any, **__: Any) -> None:
    if _capture is not None:
        _capture.store_attached()


def _retracted(_: Any, req: Any, *__: Any, **___: Any) -> None:
    if _capture is not None:
        _capture.retracted(req)


def _aborted(output: Any, req: Any) -> None:
    if _capture is not None and type(output).__name__ == "AbortReq" and hasattr(req, "output_ids"):
        _capture.ended(req, "abort")


def _host_made(_: Any, controller: Any, *__: Any, **___: Any) -> None:
    if _capture is not None:
        _capture.follow(controller)


def _loaded(slots: Any, controller: Any, host_indices: Any = None, *_: Any, **__: Any) -> None:
    if _capture is not None and slots is not None:
        _capture.loaded(slots, host_indices, controller)


def _written(host: Any, controller: Any, device_indices: Any = None, *_: Any, **__: Any) -> None:
    if _capture is not None and host is not None:
        _capture.written(device_indices, host, controller)


def _update(
    original: Callable[..., Any], updater: Any, request: Any, *args: Any, whole: bool, **kw: Any
) -> Any:
    if _capture is None:
        return original(updater, request, *args, **kw)
    success = False
    _capture.weights.begin_call()
    try:
        result = original(updater, request, *args, **kw)
        success = _succeeded(result)
    finally:
        version = getattr(request, "weight_version", None)
        _capture.weights.end_call(version, success=success, whole=whole)
    return result


def _recorded(_: Any, __: Any, weight_version: Any = None, **___: Any) -> None:
    if _capture is not None:
        _capture.weights.report(weight_version)


def _session_begun(result: Any, *_: Any, **__: Any) -> None:
    if _capture is not None and _succeeded(result):
        _capture.weights.begin_session()


def _session_ended(result: Any, _: Any, request: Any = None, *__: Any, **___: Any) -> None:
    if _capture is not None:
        kept = not getattr(request, "abort", False)
        _capture.weights.end_session(success=kept and _succeeded(result))


def _renamed(_: Any, __: Any, request: Any, *___: Any, **____: Any) -> None:
    if _capture is not None and request.new_version is not None:
        _capture.weights.rename(request.new_version)


def _released(_: Any, __: Any, request: Any, *___: Any, **____: Any) -> None:
    """Note that the memory of the weights was given back; no tags are all."""
    tags = getattr(request, "tags", None) or ("weights",)
    if _capture is not None and not _keeps_weights and "weights" in tags:
        _capture.weights.lose()


def _succeeded(result: Any) -> bool:
    return bool(getattr(result, "success", True))


def _streamer_made(_: Any, scheduler: Any) -> None:
    streamer = scheduler.output_streamer
    if streamer.rust_server is None:  # which cannot send more
        type(streamer).has_additional_customized_info = True


def _answered(info: dict[str, Any], _: Any, reqs: list[Any]) -> dict[str, Any] | None:
    """Add the handles of their traces to the answers of requests that have ended."""
    if _capture is None or all(req.finished_reason is None for req in reqs):
        return None
    return {**info, "routetrace": [_capture.handles(req) for req in reqs]}


def current() -> Any:
    """Return the capture of this process; None without one."""
    return _capture
