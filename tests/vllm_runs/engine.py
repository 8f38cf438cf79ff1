"""An engine of vLLM with routetrace attached, and the requests that it was asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from vllm_runs.models import SPECIAL, VOCABULARY

#: How routetrace gets into the engine: as its KV connector, as a plugin beside another connector or
#: beside vLLM's own return of routed experts.
Way = Literal["connector", "plugin"]

BLOCK = 32
"""Tokens of a KV block: what attention on CPU wants."""
MAX_LEN = 256
"""Tokens of the longest request."""
STEP_TOKENS = 64
"""Tokens of a step: longer prompts are computed in chunks."""


@dataclass(frozen=True)
class Attachment:
    """Destination of the rows."""

    way: Way
    target: str
    run: str
    engine_id: str = "vllm-0"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of routetrace in the engine."""
        return {"target": self.target, "run": self.run, "engine_id": self.engine_id}

    def numbered(self, number: int) -> Attachment:
        """The same for one of several engines."""
        return replace(self, engine_id=f"vllm-{number}")

    def arguments(self, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Engine arguments that attach routetrace.

        Args:
            beside: another KV connector, as `kv_transfer_config`.
        """
        if self.way == "plugin":
            return {
                "additional_config": {"routetrace": self.settings},
                **({"kv_transfer_config": dict(beside)} if beside else {}),
            }
        ours = {
            "kv_connector": "RouteTraceConnector",
            "kv_connector_module_path": "routetrace.capture_agent.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": self.settings,
        }
        if not beside:
            return {"kv_transfer_config": ours}
        both = {"connectors": [ours, dict(beside)]}
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": both,
            "kv_load_failure_policy": beside.get("kv_load_failure_policy", "fail"),
        }
        return {"kv_transfer_config": several}


@dataclass
class Ask:
    """A request."""

    trace_id: str
    prompt: list[int]
    max_tokens: int = 24
    sampling: dict[str, Any] = field(default_factory=dict)
    """More arguments of SamplingParams."""
    words: dict[str, Any] = field(default_factory=dict)
    """Words to routetrace, without their "routetrace." ("group", "capture", ...)."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """What a router tells the engine's connector."""

    @property
    def extra_args(self) -> dict[str, Any]:
        """As they stand in the request."""
        words = {"trace_id": self.trace_id, **self.words}
        transfer = {"kv_transfer_params": self.transfer} if self.transfer else {}
        return {f"routetrace.{name}": value for name, value in words.items()} | transfer


@dataclass
class Answer:
    """Result of a request, and the expected shape of its trace."""

    trace_id: str
    tokens: list[int]
    """Prompt and output, as far as they were delivered."""
    prompt_len: int
    native: npt.NDArray[Any] | None = None
    """vLLM's own rows: [tokens - 1, hidden layers, top_k]."""
    handle: dict[str, Any] | None = None
    """What the response said of the trace."""
    has_handle: bool = True
    """Whether the response has room for it."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """What another connector said for the router."""
    incarnation: int | None = None
    """Number of the request, from 1, if others of the engine have its trace id."""
    newest: bool = True
    """Whether no later one has it."""
    labels: dict[str, str] = field(default_factory=dict)
    versions: tuple[tuple[int, int, int | None], ...] | None = None
    """(start, stop, weight version) of the rows, None where it is unknown; None: not looked at."""
    sources: tuple[tuple[int, int, str], ...] | None = None
    """(start, stop, provenance) of the rows; None: not looked at."""
    changed: tuple[int, ...] = ()
    """Weight versions under which `reference.change_weights` held."""
    loaded: int | None = None
    """Tokens whose KV came from an engine with other weights."""
    recomputed: bool = False
    """Whether everything was computed again when they changed."""
    may_lack: tuple[str, ...] = ()
    """Reasons for which rows may be missing here."""
    must_lack: tuple[int, int] | None = None
    """[start, stop) of rows that must be missing."""
    absent: bool = False
    """There must be no such trace."""
    optional: bool = False
    """There may be no such trace, as no row was ever computed."""
    broken: bool = False
    """Capture broke down under way: the rows before are there, and nobody tells of the end."""
    cut: bool = False
    """Aborted: the engine may have come further than what was delivered."""


class Prompts:
    """Random prompts, the same in each run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, length: int) -> list[int]:
        """So many token ids."""
        return [self._random.randrange(len(SPECIAL), VOCABULARY) for _ in range(length)]


def base_arguments(checkpoint: Path, native: bool) -> dict[str, Any]:
    """Engine arguments that all runs have in common."""
    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_LEN,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        "seed": 1,
        **({"enable_return_routed_experts": True} if native else {}),
    }


@dataclass(frozen=True)
class Setup:
    """Configuration of an engine."""

    checkpoint: Path
    attachment: Attachment
    native: bool
    """Whether vLLM is to return its own rows."""
    directory: Path
    """Empty; for whatever the engines leave on disk."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """More engine arguments."""

    def arguments(self, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Engine arguments.

        Args:
            beside: another KV connector, as `kv_transfer_config`.
        """
        base = base_arguments(self.checkpoint, self.native)
        return {**base, **self.attachment.arguments(beside), **self.more}


class Engine:
    """A synchronous engine: in this process, or with its core in others."""

    def __init__(self, setup: Setup, beside: Mapping[str, Any] | None = None) -> None:
        from vllm import LLM

        self.llm = LLM(**setup.arguments(beside))
        self.prompts = Prompts(0)
        self.delivered: dict[str, Answer] = {}
        self._core = self.llm.llm_engine
        self._asked: dict[str, Ask] = {}

    def add(self, ask: Ask) -> None:
        """Hand a request to the engine."""
        from vllm import SamplingParams

        sampling = {"temperature": 1.0, "ignore_eos": True, **ask.sampling}
        params = SamplingParams(
            max_tokens=ask.max_tokens, extra_args=ask.extra_args, detokenize=False, **sampling
        )
        internal = f"vllm-runs-{len(self._asked)}"
        self._core.add_request(internal, {"prompt_token_ids": ask.prompt}, params)
        self._asked[internal] = ask

    def step(self) -> list[Answer]:
        """One step; returns what has finished in it."""
        finished = []
        for output in self._core.step():
            ask = self._asked[output.request_id]
            for completion, answer in zip(output.outputs, answers(ask, output), strict=True):
                self.delivered[answer.trace_id] = answer
                if completion.finished():
                    finished.append(answer)
        return finished

    @property
    def busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._core.has_unfinished_requests())

    def drain(self) -> list[Answer]:
        """Step until nothing is left; return what has finished."""
        finished = []
        while self.busy:
            finished += self.step()
        return finished

    def run(self, asks: Iterable[Ask]) -> list[Answer]:
        """Run requests together, to their ends."""
        for ask in asks:
            self.add(ask)
        return self.drain()

    def abort(self, trace_id: str) -> Answer:
        """Abort a request; return what was delivered of it."""
        internal, ask = next((i, a) for i, a in self._asked.items() if a.trace_id == trace_id)
        self._core.abort_request([internal], internal=False)
        answer = self.delivered.get(trace_id)
        if answer is None:  # not one token: the prompt alone, as far as it was computed
            answer = Answer(trace_id, ask.prompt, len(ask.prompt), may_lack=("aborted",))
        answer.cut = True
        return answer

    def rpc(self, name: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of the workers, or a function in each of them."""
        return self.llm.collective_rpc(name, args=args)

    def agents(self) -> list[dict[str, Any]]:
        """Counters of the agents, of those workers that send."""
        self.rpc("routetrace_flush", 10.0)
        return [stats for stats in self.rpc("routetrace_stats") if stats]

    def close(self) -> None:
        """End the engine and its processes."""
        self._core.engine_core.shutdown()

    def count(self, name: str) -> float:
        """A counter of vLLM's metrics."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}")


def answers(ask: Ask, output: Any) -> list[Answer]:
    """The answers in a RequestOutput, one per completion."""
    prompt = list(output.prompt_token_ids)
    transfer = dict(output.kv_transfer_params or {})
    handle = transfer.pop("routetrace", None)
    several = ask.sampling.get("n", 1) > 1
    return [
        Answer(
            trace_id=f"{ask.trace_id}/{completion.index}" if several else ask.trace_id,
            tokens=prompt + list(completion.token_ids),
            prompt_len=len(prompt),
            native=completion.routed_experts,
            handle=handle,
            transfer=transfer,
            labels=labels_of(ask),
        )
        for completion in output.outputs
    ]


def labels_of(ask: Ask) -> dict[str, str]:
    """The labels that a trace of this request must have."""
    return {
        name.removeprefix("label."): str(value)
        for name, value in ask.words.items()
        if name in ("group", "session", "sample") or name.startswith("label.")
    }
