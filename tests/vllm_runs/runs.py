"""Which engine runs which scenarios, in which version of vLLM and attached how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_runs import embedded, handovers, pairs, patches, scenarios, serving
from vllm_runs.engine import Engine, Setup, Way
from vllm_runs.models import DRAFT
from vllm_runs.scenarios import named

WAYS: tuple[Way, ...] = ("connector", "plugin")

#: Default model runner of the versions on CPU; on CUDA it is the second one in both. That one runs
#: in Triton's interpreter. Of 0.32.0, only it has vLLM's own return of routed experts; 0.30.0
#: refuses that return beside any KV connector.
RUNNERS = {"0.24.0": 1, "0.29.0": 1, "0.30.0": 1, "0.32.0": 2}

#: Versions whose experts on CPU choose by themselves, which `patches.route_apart` changes. Their
#: own return of routed experts refuses such kernels.
CHOOSE_INSIDE = ("0.24.0", "0.29.0")


@dataclass(frozen=True)
class Run:
    """An engine, or a few, and what is done to it."""

    name: str
    scenarios: Mapping[str, Callable[[Any], Any]]
    model: str = "qwen3_moe"
    draft: str = ""
    """The model that drafts, if one does."""
    build: Callable[[Setup], Any] = Engine
    more: Mapping[str, Any] = field(default_factory=dict)
    """More engine arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    runners: tuple[int, ...] = (1, 2)
    """Model runners that can do it on CPU."""
    native: bool = True
    """Whether vLLM's own rows are to be asked for."""
    trusted: bool = True
    """Whether they are right."""
    exact: bool = True
    """Whether the precision is Transformers', so that both must choose alike."""
    beside: bool = False
    """Whether there is another KV connector."""
    faults: bool = False
    """Whether capture breaks down on purpose."""
    prepare: Callable[[], None] | None = None
    """Called before vLLM starts."""
    ways: tuple[Way, ...] = WAYS
    inside: bool = False
    """Whether versions whose experts choose by themselves do it, too."""
    share: tuple[int, ...] = ()
    """Model runners whose versions do it in the share for CI, in one way."""

    def fits(self, version: str, way: Way) -> bool:
        """Whether a version does it, attached in this way."""
        return way in self.ways and (self.inside or version not in CHOOSE_INSIDE)

    def shared(self, version: str, way: Way) -> bool:
        """Whether it is in the share for CI, where it can in the way that has vLLM's own rows."""
        best = "plugin" if version == "0.30.0" else "connector"
        wanted = RUNNERS[version] in self.share and max(self.runners) >= RUNNERS[version]
        return wanted and way == best

    def runner(self, version: str) -> int:
        """The model runner that does it: the version's own one if that can."""
        own = RUNNERS[version]
        return own if own in self.runners else self.runners[0]

    def has_native(self, version: str, way: Way) -> bool:
        """Whether vLLM's own rows are there to compare with."""
        if version in CHOOSE_INSIDE:
            return False
        if version == "0.30.0":
            return self.native and way == "plugin" and not self.beside
        return self.native and self.runner(version) == 2


_ARCHITECTURE = named((scenarios.concurrent, scenarios.prefix, scenarios.chunked))
# Latent attention on CPU wants the real models' sizes; as plain attention any will do.
_NO_MLA = {"VLLM_MLA_DISABLE": "1"}
_SHARED_FAMILIES = {"ernie4_5_moe": (2,)}
_DRAFTED = named(
    (
        scenarios.drafted,
        scenarios.concurrent,
        scenarios.prefix,
        scenarios.stop,
        scenarios.abort,
        scenarios.preemption,
        scenarios.mixed,
    )
)
_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# Functions of ours are called in the workers.
_CALLS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
_SMALL = {"num_gpu_blocks_override": 14}
_DRAFT_MODEL = {
    "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3},
    **_SMALL,
}

RUNS = (
    Run(
        "engine",
        named(
            (
                scenarios.concurrent,
                scenarios.prefix,
                scenarios.one_trace,
                scenarios.chunked,
                scenarios.stop,
                scenarios.several,
                scenarios.abort,
                scenarios.retry,
                scenarios.epochs,
                scenarios.opt_out,
                scenarios.pause,
                scenarios.weights,
                scenarios.told,
                scenarios.reset,
                scenarios.refits,
                scenarios.late,
            )
        ),
        inside=True,
        share=(1, 2),
    ),
    Run(
        "small_cache",
        named((scenarios.preemption, scenarios.mixed)),
        more=_SMALL,
        inside=True,
        share=(1, 2),
    ),
    Run(
        "padding",  # to which routers give -1, as on CUDA
        named((scenarios.concurrent, scenarios.prefix, scenarios.chunked, scenarios.abort)),
        runners=(2,),
        prepare=patches.skip_padding,
        share=(1, 2),
    ),
    Run("mixtral", _ARCHITECTURE, "mixtral"),
    Run("olmoe", _ARCHITECTURE, "olmoe"),
    Run("glm4_moe", _ARCHITECTURE, "glm4_moe"),
    Run("qwen3_dense_layers", _ARCHITECTURE, "qwen3_moe_dense_layers"),
    Run("qwen3_300", _ARCHITECTURE, "qwen3_moe_300"),
    *(
        Run(family, _ARCHITECTURE, family, share=_SHARED_FAMILIES.get(family, ()))
        for family in ("qwen2_moe", "ernie4_5_moe", "granite_moe", "dots1", "flex_olmo")
    ),
    *(
        # From the second position on vLLM's attention on CPU differs from that of Transformers.
        Run(family, _ARCHITECTURE, family, env=_NO_MLA, exact=False, ways=("plugin",))
        for family in ("deepseek_v2", "deepseek_v3")
    ),
    Run(
        "gpt_oss",
        _ARCHITECTURE,
        "gpt_oss",
        more={"dtype": "bfloat16"},  # no other one runs on CPU
        exact=False,
        ways=("plugin",),
    ),
    Run(
        "drafts",
        named((scenarios.speculative,)),
        more={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
        prepare=patches.repair_drafts,
        runners=(1,),
        share=(1, 2),
    ),
    Run(
        "drafts_asynchronous",
        _DRAFTED,
        more=_DRAFT_MODEL,
        draft="qwen3_moe" + DRAFT,
        prepare=patches.schedule_ahead_with_drafts,
        runners=(1,),
        share=(1, 2),
    ),
    Run(
        "drafts_asynchronous_v2",
        _DRAFTED,
        more=_DRAFT_MODEL,
        draft="qwen3_moe" + DRAFT,
        prepare=patches.schedule_ahead,
        runners=(2,),
        native=False,  # refused beside a model that drafts
    ),
    Run(
        "mtp_asynchronous",
        _DRAFTED,
        "glm4_moe_mtp",
        more={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, **_SMALL},
        prepare=patches.schedule_ahead_with_drafts,
        runners=(1,),
    ),
    Run(
        "compiled",
        named((scenarios.concurrent, scenarios.prefix)),
        more={"enforce_eager": False},
        runners=(1,),
        trusted=False,  # vLLM's own rows are all zeros then
        inside=True,
        share=(1, 2),
    ),
    Run(
        "asynchronous",
        named(
            (
                scenarios.concurrent,
                scenarios.prefix,
                scenarios.chunked,
                scenarios.stop,
                scenarios.several,
                scenarios.abort,
                scenarios.preemption,
                scenarios.mixed,
            )
        ),
        more=_SMALL,
        runners=(2,),
        prepare=patches.schedule_ahead,
        share=(1, 2),
    ),
    Run(
        "processes",
        named((scenarios.control, scenarios.concurrent, scenarios.abort, scenarios.late)),
        env=_PROCESSES,
    ),
    Run(
        "tensor_parallel",
        named((scenarios.control, scenarios.concurrent, scenarios.prefix)),
        more={"tensor_parallel_size": 2},
        env={**_PROCESSES, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        share=(2,),
    ),
    Run(
        "tensor_parallel_ranks",
        named((scenarios.ranks,)),
        more={"tensor_parallel_size": 2},
        env={**_PROCESSES, **_CALLS, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        faults=True,
    ),
    Run("async_llm", named((embedded.embedded,)), build=embedded.Embedded, env=_PROCESSES),
    Run(
        "data_parallel",
        named((pairs.data_parallel,)),
        build=pairs.replicas,
        env=_PROCESSES,
    ),
    Run(
        "prefill_and_decode",
        named((pairs.handover,)),
        build=pairs.disaggregated,
        # The example connector saves a prompt that is computed in one step.
        more={"max_num_batched_tokens": 256, **_SMALL},
        env={**_PROCESSES, **_CALLS},
        native=False,  # has no rows of what came from elsewhere
        beside=True,
        share=(1, 2),
    ),
    Run(
        "nixl",
        named(
            (
                handovers.handed_over,
                handovers.two_prefills,
                handovers.retried,
                handovers.computed_itself,
                handovers.handed_back,
            )
        ),
        build=handovers.Trio,
        env={**_PROCESSES, **_CALLS},
        native=False,  # has no rows of what came from elsewhere
        beside=True,
        share=(2,),
    ),
    Run(
        "offloading",
        named((pairs.restored, pairs.refits)),
        build=pairs.offloading,
        more={"max_num_batched_tokens": 512},
        native=False,
        beside=True,
    ),
    Run(
        "http",
        named((serving.completions, serving.chat, serving.streams, serving.weight_version)),
        build=serving.Served,
        env={**_PROCESSES, "VLLM_SERVER_DEV_MODE": "1"},
        share=(2,),
    ),
)
