"""Names of SGLang that capture attaches to: one table, found by feature, not by version."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from routetrace.common.errors import RouteTraceError

_log = logging.getLogger(__name__)

#: Versions of SGLang that are tested, the oldest first.
TESTED = ("0.5.12", "0.5.15.post1", "0.5.16", "0.5.23")


class Refused(SystemExit):
    """The server cannot start with capture.

    SGLang only logs the exceptions of plugins, so this is none of those: without capture, a server
    with capture switched on must not start.
    """


@dataclass(frozen=True)
class Seam:
    """A name of SGLang, wherever a version has it."""

    places: tuple[str, ...]
    """Dotted names, the newest first; the first one that is found counts."""
    since: str = TESTED[0]
    """The first tested version that has it."""
    used_by: str = ""
    """Setting that is refused where it is absent; empty: each capture, unless `lost` is given."""
    lost: str | None = None
    """The feature that a version without it lacks. The log names it at start. Empty: no feature is
    missing."""

    @property
    def place(self) -> str | None:
        """The name that this version of SGLang has; None without any."""
        return next((name for name in self.places if _is_there(name)), None)

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return (self.place or self.places[0]).rpartition(".")[2]


def found(name: str) -> Any:
    """Return the attribute of a dotted name; None if this version of SGLang lacks it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _is_there(name: str) -> bool:
    if found(name) is not None:
        return True
    path, _, attribute = name.rpartition(".")
    holder = found(path)
    return holder is not None and hasattr(holder, attribute)  # a field whose default is None


def _seam(*places: str, since: str = TESTED[0], used_by: str = "", lost: str | None = None) -> Seam:
    return Seam(tuple(f"sglang.srt.{place}" for place in places), since, used_by, lost)


_RUNNER = "model_executor.model_runner.ModelRunner"
_CAPTURER = "state_capturer.routed_experts"
_SCHEDULER = "managers.scheduler.Scheduler"
_PARTS = "managers.scheduler_components"
_UPDATER = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = f"{_PARTS}.output_streamer.SchedulerOutputStreamer"
_CONTROLLER = "managers.cache_controller.HiCacheController"
_HYBRID = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_REQUEST = "managers.schedule_batch.Req"
_IO = "managers.io_struct"

# ------------------------------------------------- without these nothing is captured

HOOKS = _seam("plugins.hook_registry.HookRegistry.register")
CAPTURER_MADE = _seam(f"{_RUNNER}.init_routed_experts_capturer")
#: Number of slots of the largest pool.
POOL_SIZE = _seam(f"{_RUNNER}.max_token_pool_size", f"{_RUNNER}.effective_max_total_num_tokens")
CAPTURER = _seam(_CAPTURER)
#: What the tap uses of it.
CAPTURER_PARTS = (
    _seam(f"{_CAPTURER}.RoutedExpertsCapturer._get_local_slice"),
    _seam(f"{_CAPTURER}.RoutedExpertsCapturer.on_forward_end"),
    _seam(f"{_CAPTURER}.get_global_experts_capturer"),
    _seam(f"{_CAPTURER}.set_global_experts_capturer"),
)
PASS = _seam(f"{_SCHEDULER}.run_batch")
#: Fields of SGLang's batches and requests.
FIELDS = (
    *(
        _seam(f"managers.schedule_batch.ScheduleBatch.{name}")
        for name in ("forward_mode", "prefix_lens", "extend_lens", "seq_lens_cpu")
    ),
    _seam(f"{_REQUEST}.output_ids_through_stop"),
)
#: Ends when the model runners of a scheduler are made.
WORKERS = _seam(f"{_SCHEDULER}.init_model_worker")
#: Called with requests as their answers are sent, those included that have ended.
ANSWERED = _seam(f"{_STREAMER}.stream_output", f"{_SCHEDULER}.stream_output")
#: Called for requests that are aborted before their first pass, and for more.
ABORTED = _seam(
    f"{_SCHEDULER}.send_abort_output",
    f"{_PARTS}.output_sender.SenderWrapper.send_output",
    "managers.scheduler.SenderWrapper.send_output",
)
FLUSHED = _seam(f"{_SCHEDULER}.flush_cache")
RETRACTED = _seam(f"{_REQUEST}.reset_for_retract")
#: Rank of this process among those of attention.
ATTENTION_RANK = _seam("distributed.parallel_state.get_attn_tensor_model_parallel_rank")
#: Copies of KV from host memory to the device.
LOADED = _seam(f"{_CONTROLLER}.load")
#: Updates of weights, by their source.
UPDATES = {
    source: _seam(
        f"{_UPDATER}.update_weights_from_{source}", f"{_SCHEDULER}.update_weights_from_{source}"
    )
    for source in ("disk", "distributed", "tensor", "ipc")
}
#: Versions that trainers give in updates.
VERSIONS = tuple(
    _seam(f"{_IO}.{request}.weight_version")
    for request in (
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightsFromIPCReqInput",
    )
)
#: Gives memory back, that of the weights too.
RELEASED = _seam(f"{_UPDATER}.release_memory_occupation", f"{_SCHEDULER}.release_memory_occupation")

# ------------------------------------------------- needed by a setting

HICACHE, DP_ATTENTION = "--enable-hierarchical-cache", "--enable-dp-attention"
NGRAM, PAIRS = "--speculative-algorithm NGRAM", "--disaggregation-mode"
#: Copies of KV between the device and host memory, and what makes that memory known.
LOADS = LOADED, _seam(f"{_HYBRID}.load", used_by=HICACHE)
WRITES = tuple(_seam(f"{name}.write", used_by=HICACHE) for name in (_CONTROLLER, _HYBRID))
HOST_MADE = _seam(f"{_CONTROLLER}.__init__", used_by=HICACHE)
#: Attaches a store of HiCache to a running engine.
STORE_ATTACHED = _seam(f"{_SCHEDULER}.attach_hicache_storage_wrapped", used_by=HICACHE)
#: Ranks of data-parallel attention.
PARALLEL = _seam("runtime_context.get_parallel", since="0.5.15.post1", used_by=DP_ATTENTION)
#: Number of tokens of a pass before padding, None without: ranks pad to the longest batch.
NUM_TOKENS = _seam(
    "model_executor.forward_batch_info.ForwardBatch._original_num_tokens",
    since="0.5.23",
    used_by=DP_ATTENTION,
)
#: In a decode engine: allocates the slots of KV that it gets from a prefill engine, or had moved to
#: host memory.
RECEIVED = _seam(
    "disaggregation.decode.DecodePreallocQueue._pre_alloc", used_by="--disaggregation-mode decode"
)
#: The first version whose prefill and decode engines were compared is the first that has it.
PAIRED = _seam(f"{_SCHEDULER}.init_output_streamer", since="0.5.15.post1", used_by=PAIRS)
#: Where drafts follow earlier tokens: what moves the KV of accepted ones, and the worker. The first
#: version with that module is the first whose drafts a CPU runs: their rows were compared.
MOVED = _seam(
    "speculative.spec_utils.move_accept_tokens_to_target_kvcache",
    since="0.5.15.post1",
    used_by=NGRAM,
)
DRAFTED = _seam("speculative.ngram_worker.NGRAMWorker.forward_batch_generation", used_by=NGRAM)
COMPARED = _seam("speculative.eagle_worker_common", since="0.5.16", used_by=NGRAM)
#: Where a model drafts: the pass that verifies its drafts.
VERIFIED = _seam(
    "speculative.eagle_worker_common.run_eagle_verify",
    since="0.5.16",
    used_by="--speculative-algorithm of a model that drafts",
)

# ------------------------------------------------- what a version may lack

#: Called when all weights of an update are loaded, before the steps that can still fail.
RECORDED = _seam(
    f"{_UPDATER}.record_weight_version_after_update",
    since="0.5.23",
    lost="updates whose flush is refused: their weights are unknown",
)
#: The ends of a session of updates.
BEGUN, ENDED = (
    _seam(f"{_UPDATER}.{name}_weight_update", since="0.5.23", lost="") for name in ("begin", "end")
)
#: Called without an update: a trainer names the weights that it wrote itself.
RENAMED = _seam(
    f"{_SCHEDULER}.handle_update_weight_version",
    since="0.5.23",
    lost="/update_weight_version: only updates give versions",
)
#: Where answers can carry more: once the streamer exists, and for each answer.
STREAMER_MADE = _seam(f"{_SCHEDULER}.init_output_streamer", since="0.5.15.post1", lost="")
ANSWERS = _seam(
    f"{_STREAMER}.build_additional_customized_info",
    since="0.5.23",
    lost="handles in answers: read traces by their ids",
)
#: In a decode engine: asks the prefill engine to compute KV again.
RECOMPUTED = _seam(f"{_REQUEST}.build_rebootstrap_payload", since="0.5.16", lost="")
#: Makes the CUDA graphs, or what runs without them; the last step of a model runner's start.
GRAPHS = _seam(
    f"{_RUNNER}.init_cuda_graphs",
    since="0.5.15.post1",
    lost="the check of layers at start: look at the log of the first pass",
)

#: `bootstrap_host` of requests whose KV no engine computes (FAKE_BOOTSTRAP_HOST).
SYNTHETIC_HOST = "2.2.2.2"


def table() -> list[Seam]:
    """Return all seams."""
    named = [value for name, value in globals().items() if name.isupper() and name[0] != "_"]
    grouped = [value.values() if isinstance(value, dict) else value for value in named]
    flat = [each if isinstance(each, Iterable) else (each,) for each in grouped]
    return [seam for group in flat for seam in group if isinstance(seam, Seam)]


def used_by(setting: str) -> list[Seam]:
    """Return the seams that a setting needs."""
    return [seam for seam in table() if seam.used_by == setting]


def number() -> str:
    """Return the version of SGLang."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of unknown version"


def check() -> None:
    """Check that this version of SGLang has what each capture needs.

    Raises:
        Refused: naming what it lacks.
    """
    check_found([seam for seam in table() if not seam.used_by and seam.lost is None])


def check_found(seams: Iterable[Seam]) -> None:
    """Check that this version of SGLang has these seams.

    Raises:
        Refused: naming those that it lacks, who needs them, and the versions that have them.
    """
    if missing := [seam for seam in seams if seam.place is None]:
        names = ", ".join(seam.places[0] for seam in missing)
        needs = f", which {missing[0].used_by} needs" if missing[0].used_by else ""
        leave = ", or leave the setting out" if needs else ", or set ROUTETRACE_SGLANG=off"
        first = max(TESTED.index(seam.since) for seam in missing)
        raise Refused(
            f"routetrace: cannot capture from SGLang {number()}: it lacks {names}{needs}; "
            f"use SGLang {' or '.join(TESTED[first:])}{leave}; see docs/sglang.md"
        )


def tell_lost() -> None:
    """Log what this version of SGLang does not give."""
    lost = [seam.lost for seam in table() if seam.lost and seam.place is None]
    if lost:
        _log.warning("routetrace: SGLang %s does not give %s", number(), "; ".join(lost))


@contextmanager
def refusing() -> Iterator[None]:
    """Refuse the server where a step of its start fails, also for want of an attribute.

    Raises:
        Refused: with what failed.
    """
    try:
        yield
    except RouteTraceError as error:
        raise Refused(f"routetrace: {error}") from error
    except (ImportError, AttributeError) as error:
        raise Refused(
            f"routetrace: cannot capture from SGLang {number()}: {error}; use SGLang "
            f"{' or '.join(TESTED)}, or set ROUTETRACE_SGLANG=off; see docs/sglang.md"
        ) from error


def value(seam: Seam, holder: Any) -> Any:
    """Return the attribute of an object that a seam of its class names."""
    return getattr(holder, seam.attribute)


def check_applied(names: list[str]) -> None:
    """Check that SGLang has applied the hooks on these names; it only logs those that fail.

    Raises:
        Refused: naming those that are not applied.
    """
    if missing := [name for name in names if not hasattr(found(name), "__wrapped__")]:
        raise Refused(f"routetrace: SGLang did not apply the hooks on {', '.join(missing)}")
