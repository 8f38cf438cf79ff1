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
from routetrace.capture_agent.engines.sglang.ranks import ranks_of
from routetrace.capture_agent.engines.sglang.settings import (
    MODELS,
    NGRAM,
    Settings,
    refuse_unsupported,
    settings_of,
)
from routetrace.common.errors import InvalidArgument
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
    wanted: list[tuple[seams.Seam, Callable[..., Any], Any]] = [
        (seams.PASS, _run_batch, around),
        (seams.WORKERS, _workers_made, after),
        (seams.ANSWERED, _answers_sent, after),
        (seams.ABORTED, lambda _, __, output, req=None: _aborted(output, req), after),
        (seams.FLUSHED, _flushed, after),
        (seams.RETRACTED, _retracted, after),
        *((seam, _loaded, after) for seam in seams.LOADS),
        *((seam, _written, after) for seam in seams.WRITES),
        (seams.HOST_MADE, _host_made, after),
        (seams.RECORDED, _recorded, after),
        (seams.BEGUN, _session_begun, after),
        (seams.ENDED, _session_ended, after),
        (seams.RENAMED, _renamed, after),
        (seams.RELEASED, _released, after),
        (seams.STORE_ATTACHED, _store_attached, after),
    ]
    for source, seam in seams.UPDATES.items():
        update = partial(_update, whole=source in ("disk", "ipc"))
        wanted.append((seam, update, around))
    if seams.ANSWERS.place is not None:
        wanted += [(seams.STREAMER_MADE, _streamer_made, after), (seams.ANSWERS, _answered, after)]
    if settings.probe:
        wanted.append((seams.GRAPHS, _probe, after))
    hooks = [
        (place, hook, kind) for seam, hook, kind in wanted if (place := seam.place) is not None
    ]
    names = [name for name, *_ in hooks]

    def made(_: Any, runner: Any, *__: Any, **___: Any) -> None:
        seams.check_applied(names)
        with seams.refusing():
            _attach(runner, settings)

    hooks.append((seams.CAPTURER_MADE.places[0], made, after))
    for name, hook, kind in hooks:
        HookRegistry.register(name, hook, kind)


def _attach(runner: Any, settings: Settings) -> None:
    """Capture from a model runner, before its CUDA graphs are recorded."""
    global _capture, _tapped, _attached, _keeps_weights  # noqa: PLW0603
    if runner.is_draft_worker:
        return
    _attached = True
    from routetrace.capture_agent.engines.sglang.capture import Capture
    from routetrace.capture_agent.engines.sglang.tap import Tap

    refuse_unsupported(runner.server_args)
    for name in ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"):
        if os.environ.get(name, "").lower() in ("1", "true"):
            raise InvalidArgument(field=name, value="on", expected="off: experts are made up")
    num_drafts = 1
    algorithm = runner.server_args.speculative_algorithm
    if algorithm in (NGRAM, *MODELS):
        num_drafts = int(runner.server_args.speculative_num_draft_tokens)
        from routetrace.capture_agent.engines.sglang.speculation import hook_verifications

        hook_verifications(algorithm, num_drafts, current)
    role = Role.of(runner.server_args)
    if role is Role.DECODE:
        hook_transfers(current, runner.server_args.disaggregation_transfer_backend != "fake")
    layout = ModelLayout.from_config(runner.model_config.hf_config)
    tap = Tap(runner, layout, num_drafts)  # on every rank: DeepEP gathers ids from all
    _tapped = runner, tap
    ranks = ranks_of(runner)
    if ranks.attention != 0:
        tap.ignore()
        return
    seams.tell_lost()
    page = int(runner.page_size)
    config = AgentConfig(
        engine_id=settings.engine_id + ranks.suffix,
        layout=layout,
        block_size=page,
        num_blocks=int(seams.value(seams.POOL_SIZE, runner)) // page + 2,  # one is padding
        attributes={"engine": "sglang", "model": str(runner.server_args.model_path)},
        model=_model(runner.model_config),
        **{"target": "", **settings.agent},
    )
    args = runner.server_args
    labels = kv_cache_labels(str(args.kv_cache_dtype), str(runner.model_config.dtype))
    # Without a memory saver SGLang gives nothing back.
    _keeps_weights = not args.enable_memory_saver or bool(args.enable_weights_cpu_backup)
    _capture = Capture(tap, config, labels, role, args.weight_version)
    peers = "remote_instance_weight_loader_start_seed_via_transfer_engine"
    if seams.RENAMED.place is None and getattr(args, peers):
        _capture.weights.distrust()  # another process may write them without notice
    # No pass has written to the KV cache yet.
    _capture.flushed(external=not args.hicache_storage_backend)
    _log.info("routetrace: %d MoE layers are captured", len(layout.layer_ids))


def _model(config: Any) -> str:
    """Return the hash of the model of SGLang's `ModelConfig`; "" if there is none."""
    try:
        return model_hash(config.hf_config, config.quantization)
    except Exception:  # rows are captured without it
        _log.warning("routetrace: the model has no hash", exc_info=True)
        return ""


def _probe(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Check the layers of a model runner whose graphs are made."""
    global _tapped
    if _tapped is None or _tapped[0] is not runner:
        return
    from routetrace.capture_agent.engines.sglang.probe import probe

    tap, _tapped = _tapped[1], None
    with seams.refusing():
        probe(runner, tap)


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
        controller = getattr(scheduler.tree_cache, "cache_controller", None)  # of HiCache alone
        _capture.flushed(external=controller is None or not controller.enable_storage)


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
        success = bool(result.success)
    finally:
        _capture.weights.end_call(request.weight_version, success=success, whole=whole)
    return result


def _recorded(_: Any, __: Any, weight_version: Any = None, **___: Any) -> None:
    if _capture is not None:
        _capture.weights.report(weight_version)


def _session_begun(result: Any, *_: Any, **__: Any) -> None:
    if _capture is not None and result.success:
        _capture.weights.begin_session()


def _session_ended(result: Any, _: Any, request: Any, *__: Any, **___: Any) -> None:
    if _capture is not None:
        # SGLang 0.5.23 and older have no way to give a session up.
        kept = not getattr(request, "abort", False)
        _capture.weights.end_session(success=bool(result.success and kept))


def _renamed(_: Any, __: Any, request: Any, *___: Any, **____: Any) -> None:
    if _capture is not None and request.new_version is not None:
        _capture.weights.rename(request.new_version)


def _released(_: Any, __: Any, request: Any, *___: Any, **____: Any) -> None:
    """Note that the memory of the weights was given back; no tags are all."""
    if _capture is not None and not _keeps_weights and "weights" in (request.tags or ("weights",)):
        _capture.weights.lose()


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
