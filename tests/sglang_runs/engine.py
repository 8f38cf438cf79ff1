"""SGLang's own scheduler, caches, pools and model in this process."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",  # without a kernel
    "TRITON_INTERPRET": "1",  # kernels of drafts that have no other form
}

#: Arguments of all runs, of SGLang's `ServerArgs`.
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "log_level": "error",
    "mem_fraction_static": 0.3,
    "context_length": 512,
}

#: Further ones, for drafts that follow earlier tokens.
DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 6,
    "speculative_ngram_max_bfs_breadth": 1,
}

#: Further ones, for drafts of a model.
MODEL_DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def prepare(target: str, **settings: Any) -> None:
    """Turn capture on in this process and load SGLang's plugins, ours among them.

    Args:
        target: of the server.
        settings: of the agent.
    """
    os.environ.update(ENVIRONMENT, ROUTETRACE_TARGET=target, ROUTETRACE_SGLANG=json.dumps(settings))
    spare_models("qwen3_moe", "qwen3_moe_mtp")
    from sglang.srt.plugins import load_plugins

    load_plugins()


class _Over(Exception):
    """The loop of a scheduler ends."""


class Engine:
    """One scheduler, whose loop runs when it is called.

    Args:
        model: directory of the model.
        arguments: of SGLang's `ServerArgs`, beside those of all runs.
    """

    def __init__(self, model: Path, **arguments: Any) -> None:
        given = ARGUMENTS | {"model_path": str(model)} | arguments
        self.scheduler = _start(given)
        self.answers: dict[str, SimpleNamespace] = {}
        self._intake: list[Any] = []
        self._each: Callable[[], bool] = lambda: False
        scheduler = self.scheduler
        streamer = getattr(scheduler, "output_streamer", scheduler)  # itself in 0.5.12
        streamer.send_to_detokenizer = SimpleNamespace(send_output=self._answered)
        # Its method stays SGLang's own, on which a plugin may have a hook.
        self.sender = getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer
        self.sender.socket = None
        self.updater = getattr(scheduler, "weight_updater", scheduler)
        if hasattr(scheduler, "ingest_requests"):
            scheduler.ingest_requests = self._ingest
        elif hasattr(scheduler, "recv_requests"):  # 0.5.12
            scheduler.recv_requests = self._receive
        else:
            # Its class has slots, and is frozen.
            type(scheduler.request_receiver).recv_requests = lambda _: self._receive()

    def send(self, *requests: Any) -> None:
        """Hand requests to the scheduler in the next pass of its loop."""
        self._intake.extend(requests)

    def run(self, each: Callable[[], bool]) -> None:
        """Run the loop.

        Args:
            each: called once in every pass of the loop, before requests are taken in; returns
                whether the loop ends.
        """
        self._each = each
        self.scheduler.gracefully_exit = False
        with suppress(_Over):
            self.scheduler.run_event_loop()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._intake and self.scheduler.is_fully_idle()

    def _receive(self) -> list[Any]:
        if self._each():
            self.scheduler.gracefully_exit = True
            if hasattr(self.scheduler, "recv_requests"):  # 0.5.12, whose loop has no end
                raise _Over
        taken, self._intake = self._intake, []
        return taken

    def _ingest(self, stop_at_pause: bool = False) -> list[Any]:
        taken = self._receive()
        if taken:
            self.scheduler.process_input_requests(taken)
        return taken

    def _answered(self, output: Any, *_: Any, **__: Any) -> None:
        if not hasattr(output, "finished_reasons"):
            return
        for i, rid in enumerate(output.rids):
            answer = self.answers.setdefault(rid, SimpleNamespace(rows=None, reason=None, cached=0))
            if output.routed_experts and output.routed_experts[i] is not None:
                answer.rows = np.asarray(output.routed_experts[i])
            if output.finished_reasons[i] is not None:
                answer.reason = output.finished_reasons[i]
                answer.cached = output.cached_tokens[i]


def request(
    rid: str,
    tokens: Sequence[int],
    max_tokens: int,
    options: Mapping[str, Any] | None = None,
    stop: Sequence[int] = (),
    **given: Any,
) -> Any:
    """Return a request as SGLang's tokenizer process would send it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_tokens,
        temperature=0,
        ignore_eos=not stop,
        stop_token_ids=list(stop) or None,
        custom_params=None if options is None else {"routetrace": dict(options)},
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=_ids(TokenizedGenerateReqInput, tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **given,
    )


def _ids(kind: Any, tokens: Sequence[int]) -> Any:
    """Return token ids as a version's requests have them: 0.5.12 has lists."""
    named = str(kind.__annotations__["input_ids"])
    return array("q", tokens) if "array" in named else list(tokens)


def spare_models(*used: str) -> None:
    """Keep SGLang from importing all models that it has, which takes long."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    names = {path.stem for path in folder.iterdir()} - {"__init__", "registry", "utils", *used}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names))


def _start(given: Mapping[str, Any]) -> Any:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(**given)
    if hasattr(args, "resolve_once"):
        from sglang.srt.runtime_context import SpawnRanks, publish

        args.resolve_once()
        args.check_server_args()
        ports = PortArgs.init_new(args)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        return Scheduler(args, ports)
    args.check_server_args()
    ranks = dict.fromkeys(
        ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0
    )
    return Scheduler(args, PortArgs.init_new(args), **ranks, dp_rank=None)
