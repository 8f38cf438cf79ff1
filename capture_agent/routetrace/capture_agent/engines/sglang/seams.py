"""Names of SGLang that capture attaches to, found by feature, not by version."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_SRT = "sglang.srt."
RUNNER = _SRT + "model_executor.model_runner.ModelRunner"
#: Makes the CUDA graphs, or what runs without them; the last step of a model runner's start.
GRAPHS = RUNNER + ".init_cuda_graphs"
BATCH = _SRT + "model_executor.forward_batch_info.ForwardBatch"
#: Its attribute with the number of its tokens before padding, None without: ranks of data-parallel
#: attention pad to the longest batch.
NUM_TOKENS = "_original_num_tokens"
CAPTURER = _SRT + "state_capturer.routed_experts"
SCHEDULER = _SRT + "managers.scheduler.Scheduler"
#: Ends when the model runners of a scheduler are made.
WORKERS = SCHEDULER + ".init_model_worker"
REQUEST = _SRT + "managers.schedule_batch.Req"
UPDATER = _SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
#: Called when all weights of an update are loaded, before the steps that can still fail.
RECORDED = UPDATER + ".record_weight_version_after_update"
#: The ends of a session of updates.
BEGUN, ENDED = UPDATER + ".begin_weight_update", UPDATER + ".end_weight_update"
#: Called without an update: a trainer names the weights that it wrote itself.
RENAMED = SCHEDULER + ".handle_update_weight_version"
#: Gives memory back, that of the weights too.
RELEASED = UPDATER + ".release_memory_occupation"
#: Attaches a store of HiCache to a running engine.
STORE_ATTACHED = SCHEDULER + ".attach_hicache_storage_wrapped"
SENDER = _SRT + "managers.scheduler_components.output_sender.SenderWrapper.send_output"
_CONTROLLERS = (
    _SRT + "managers.cache_controller.HiCacheController",
    _SRT + "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController",
)
#: Copies of KV between the device and host memory, and what makes that memory known.
LOADS = tuple(f"{name}.load" for name in _CONTROLLERS)
WRITES = tuple(f"{name}.write" for name in _CONTROLLERS)
HOST_MADE = f"{_CONTROLLERS[0]}.__init__"
#: Where answers can carry more: once the streamer exists, and for each answer.
STREAMER_MADE = SCHEDULER + ".init_output_streamer"
ANSWERS = (
    _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    ".build_additional_customized_info"
)
#: Called with requests as their answers are sent, those included that have ended.
ANSWERED = (
    _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
#: In a decode engine: allocates the slots of KV that it gets from a prefill engine, or had moved to
#: host memory; and asks the prefill engine to compute it again.
RECEIVED = _SRT + "disaggregation.decode.DecodePreallocQueue._pre_alloc"
RECOMPUTED = REQUEST + ".build_rebootstrap_payload"
#: `bootstrap_host` of requests whose KV no engine computes (FAKE_BOOTSTRAP_HOST).
SYNTHETIC_HOST = "2.2.2.2"
#: Where drafts are used: what moves the KV of accepted ones, and the worker.
MOVE = _SRT + "speculative.spec_utils.move_accept_tokens_to_target_kvcache"
NGRAM = _SRT + "speculative.ngram_worker.NGRAMWorker.forward_batch_generation"
#: Where a model drafts: the pass that verifies its drafts.
VERIFIED = _SRT + "speculative.eagle_worker_common.run_eagle_verify"

#: Attributes without which nothing can be captured.
_REQUIRED = (
    _SRT + "plugins.hook_registry.HookRegistry.register",
    RUNNER + ".init_routed_experts_capturer",
    CAPTURER + ".RoutedExpertsCapturer._get_local_slice",
    CAPTURER + ".RoutedExpertsCapturer.on_forward_end",
    CAPTURER + ".get_global_experts_capturer",
    CAPTURER + ".set_global_experts_capturer",
    SCHEDULER + ".run_batch",
    WORKERS,
    ANSWERED,
    SCHEDULER + ".flush_cache",
    REQUEST + ".reset_for_retract",
    REQUEST + ".output_ids_through_stop",
    _SRT + "runtime_context.get_parallel",
    SENDER,
    LOADS[0],
    *(
        f"{UPDATER}.update_weights_from_{source}"
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
)


class Refused(SystemExit):
    """The server cannot start with capture.

    SGLang only logs the exceptions of plugins, so this is none of those: without capture, a server
    with capture switched on must not start.
    """


def found(name: str) -> Any:
    """Return the attribute of a dotted name; None if this version of SGLang lacks it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def check() -> None:
    """Check that this version of SGLang has every seam.

    Raises:
        Refused: naming those that it lacks.
    """
    check_found(_REQUIRED)


def check_found(names: Iterable[str]) -> None:
    """Check that this version of SGLang has these names.

    Raises:
        Refused: naming those that it lacks.
    """
    if missing := [name for name in names if found(name) is None]:
        try:
            number = version("sglang")
        except PackageNotFoundError:
            number = "of unknown version"
        raise Refused(
            f"routetrace: cannot capture from SGLang {number}: it lacks {', '.join(missing)}; "
            "docs/sglang.md lists the versions that are tested"
        )


def check_applied(names: list[str]) -> None:
    """Check that SGLang has applied the hooks on these names; it only logs those that fail.

    Raises:
        Refused: naming those that are not applied.
    """
    if missing := [name for name in names if not hasattr(found(name), "__wrapped__")]:
        raise Refused(f"routetrace: SGLang did not apply the hooks on {', '.join(missing)}")
