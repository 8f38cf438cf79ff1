"""CPU time of capture on an engine's own threads, step by step, after work that empties the caches.

A process of its own for `engine.py`, which may start one of another checkout beside it. It prints a
line of figures for each line on its input:

    python benchmarks/run.py areas.engine_steps TARGET REQUESTS

The engines' sides are fixed inputs: outputs of a scheduler whose requests grow by one token a step,
and rows that are on the host already. What kernels and copies of a device cost the CPU is left out,
but for a fill and what SGLang's tap does, which run on the CPU here. All else is as it is in an
engine: an agent's process on another core, and a server.

CPU time is that of the engine's thread, and that of all others in its process; "clock" is what the
calls took on the engine's thread, waits for other threads and processes included.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from measure import OWN_CORE, PEER_CORE, QWEN3, pin
from routetrace.capture_agent import AgentConfig
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.sglang import seams
from routetrace.capture_agent.engines.sglang.capture import Capture
from routetrace.capture_agent.engines.sglang.tap import Tap
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.worker import WorkerSide

Array = npt.NDArray[Any]

#: Steps of a round, and those before that are not counted.
STEPS, WARM = 60, 4

#: Memory that is read between two halves: more than a core's own caches.
ELSEWHERE = np.ones(1 << 20)
BUFFERS = torch.zeros(64, 8)


def other_work() -> None:
    """Leave a core's caches as a step of an engine does: full of other things."""
    ELSEWHERE.sum()
    sum({i: str(i) for i in range(2000)})
    for i in range(20):  # as a model's runner fills its buffers
        BUFFERS[:i].add_(1)
        BUFFERS[i : i + 9].fill_(i)


class Spent:
    """CPU and clock time of calls on this thread, in microseconds."""

    def __init__(self) -> None:
        self.cpu = self.clock = 0.0

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a call, and add its times."""
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = function(*args)
        self.cpu += (time.thread_time_ns() - cpu) / 1e3
        self.clock += (time.perf_counter_ns() - clock) / 1e3
        return result


class Engine(Protocol):
    """An engine whose steps are driven by hand."""

    def step(self) -> dict[str, Spent]:
        """Run a step; return what its parts took."""
        ...

    def rest(self) -> None:
        """Let the agent send all of it."""
        ...

    def close(self) -> None:
        """End it."""
        ...


# ---------------------------------------------------------------------------- vLLM


class Passes(RoutingCapturer):
    """Every forward pass chose the same rows, which are on the host when they are asked for.

    Args:
        rows: that it chose.
    """

    def __init__(self, rows: Array) -> None:
        super().__init__(QWEN3.layout, len(rows), "cpu")
        self.device = torch.device("cuda")  # so that rows are taken a step later
        self._buffer = self._buffer[:, :, :1].clone()  # a fill costs little but its call
        for slot in self._free:
            slot.send = lambda *_: None  # type: ignore[method-assign] # a kernel and a copy
            slot.receive = lambda num_rows: rows[:num_rows]  # type: ignore[method-assign]


class VllmRequests:
    """Outputs of vLLM's scheduler for requests that grow by one token, in blocks of 16.

    Args:
        m: requests.
        num_blocks: of the pool.
    """

    def __init__(self, m: int, num_blocks: int) -> None:
        self.names = [f"request-{i}-0a1b2c3d" for i in range(m)]
        self._at = np.arange(m) % 16
        self._blocks = itertools.cycle(range(num_blocks))

    def begin(self) -> Any:
        """The step in which they begin, each at another place of its first block."""
        new = [
            SimpleNamespace(
                req_id=name,
                sampling_params=None,
                block_ids=([next(self._blocks)],),
                num_computed_tokens=at,
            )
            for name, at in zip(self.names, self._at.tolist(), strict=True)
        ]
        return self._output(new, [], [], [])

    def go_on(self) -> Any:
        """A step."""
        self._at += 1
        at = self._at.tolist()
        blocks = [None if p % 16 else ([next(self._blocks)],) for p in at]
        return self._output([], self.names, at, blocks)

    def _output(self, new: list[Any], names: list[str], at: list[int], blocks: Any) -> Any:
        cached = SimpleNamespace(
            req_ids=list(names),
            num_computed_tokens=at,
            new_block_ids=blocks,
            resumed_req_ids=set[str](),
        )
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(self.names, 1),
            preempted_req_ids=set[str](),
        )


class Vllm:
    """Both halves in vLLM, with a new block for one request in 16.

    Args:
        config: of the agent.
        m: requests.
    """

    def __init__(self, config: AgentConfig, m: int) -> None:
        config = replace(config, block_size=16, num_blocks=1 << 16)
        self._side = WorkerSide(Passes(QWEN3.rows(m)), config)
        agent = self._side._agent
        assert agent is not None
        pin(PEER_CORE, agent.worker_pid)
        self._schedule = Schedule("", config.engine_id, 0, drafts=False)
        self._requests = VllmRequests(m, 1 << 16)
        for name in self._requests.names:
            request = SimpleNamespace(
                request_id=name,
                sampling_params=None,
                num_prompt_tokens=16,
                prompt_token_ids=[1] * 16,
                prompt_embeds=None,
                mm_features=(),
                lora_request=None,
            )
            self._schedule.lookup(request, 16)
        self._batch = list(self._requests.names)
        plan = self._schedule.step(self._requests.begin())
        self._side.begin_step(plan.num_tokens)
        self._side.end_step(plan, self._names)

    def _names(self) -> list[str]:
        return self._batch

    def step(self) -> dict[str, Spent]:
        """Run a step; return what each half took."""
        scheduler, worker = Spent(), Spent()
        other_work()
        output = self._requests.go_on()
        plan = scheduler.call(self._schedule.step, output)
        other_work()
        worker.call(self._side.begin_step, plan.num_tokens)
        other_work()
        worker.call(self._side.end_step, plan, self._names)
        return {"scheduler": scheduler, "worker": worker}

    def rest(self) -> None:
        """Let the agent send all of it."""
        self._side.flush(60)
        assert not self._side.faults

    def close(self) -> None:
        """End it."""
        self._side.close()


# ---------------------------------------------------------------------------- SGLang


class SglangRequest:
    """As much of SGLang's `Req` as is used."""

    finished_reason = bootstrap_host = None
    input_embeds = multimodal_inputs = positional_embed_overrides = lora_id = extra_key = None

    def __init__(self, rid: str, prompt_len: int) -> None:
        self.rid = rid
        self.origin_input_ids = [1] * prompt_len
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(custom_params=None)

    def finished(self) -> bool:
        """Whether it has ended: it has not."""
        return False


class SglangCapturer:
    """As much of SGLang's capturer as is used; its kernels run on the CPU."""

    num_layers, topk_size = len(QWEN3.layout.layer_ids), QWEN3.layout.top_k

    def __init__(self, *_: Any, **__: Any) -> None:
        shape = (8192, self.num_layers, self.topk_size)
        self.device_cache = SimpleNamespace(buffer=torch.empty(shape, dtype=torch.int32))

    def _get_local_slice(self, forward_batch: Any, *_: Any) -> torch.Tensor:
        n = forward_batch.out_cache_loc.shape[0]
        rows: torch.Tensor = self.device_cache.buffer[:n, :, : self.topk_size]
        return rows

    def on_forward_end(self, *_: Any, **__: Any) -> None:
        """SGLang's own method, which a tap replaces."""


def _mode(*, extends: bool) -> SimpleNamespace:
    return SimpleNamespace(
        is_idle=lambda: False, is_extend=lambda: extends, is_target_verify=lambda: False
    )


_DECODE, _EXTEND = _mode(extends=False), _mode(extends=True)


class Sglang:
    """The scheduler's thread of SGLang with overlap: a pass is launched, the last one arrives.

    Args:
        config: of the agent.
        m: requests.
        page: tokens of a page of its KV cache.
    """

    def __init__(self, config: AgentConfig, m: int, page: int) -> None:
        self._page, self._pages = page, itertools.cycle(range((1 << 20) // page))
        self._device = SglangCapturer()
        module = SimpleNamespace(
            RoutedExpertsCapturer=lambda *_, **__: self._device,
            get_global_experts_capturer=lambda: None,
            set_global_experts_capturer=lambda _: None,
        )
        setattr(seams, "found", lambda _: module)  # noqa: B010 # in place of SGLang's
        runner = SimpleNamespace(
            model=None,
            model_config=None,
            server_args=SimpleNamespace(disable_shared_experts_fusion=True),
            max_running_requests=m,
            device="cpu",
        )
        tap = Tap(runner, QWEN3.layout)
        take, self._rows = tap.on_forward_end, torch.from_numpy(QWEN3.rows(16 * m))
        self._slots = torch.empty(0, dtype=torch.int64)

        def arrived(hook: Callable[..., Any]) -> None:
            # What the device would have copied is there.
            take(
                lambda batch, rows, _, native: hook(
                    batch, self._rows[: len(rows)], self._slots, native
                )
            )

        tap.on_forward_end = arrived  # type: ignore[method-assign]
        config = replace(config, block_size=page, num_blocks=(1 << 20) // page)
        self._capture = Capture(tap, config)
        agent = self._capture._agent
        assert agent is not None
        pin(PEER_CORE, agent.worker_pid)
        lengths = 1 + np.arange(m) % 16
        self._reqs = [SglangRequest(f"r{i}-{page}", n) for i, n in enumerate(lengths.tolist())]
        self._at = lengths * 0
        self._next = np.zeros(m, np.int64)
        self._lengths = lengths
        self._under_way: tuple[Any, Any] = (None, None)
        self._launch(_EXTEND, Spent())
        cache = self._device.device_cache  # now no larger than a step: on a device a fill is cheap
        cache.buffer = cache.buffer[:m].clone()

    def _batch(self, mode: Any) -> Any:
        counts = self._lengths if mode is _EXTEND else np.ones(len(self._reqs), np.int64)
        slots = []
        for i, n in enumerate(counts.tolist()):
            for _ in range(n):
                if self._at[i] % self._page == 0:
                    self._next[i] = next(self._pages) * self._page
                slots.append(self._next[i])
                self._next[i] += 1
                self._at[i] += 1
        self._slots = torch.from_numpy(np.array(slots))
        for req in self._reqs:
            req.output_ids.append(1)
        return SimpleNamespace(
            reqs=list(self._reqs),
            forward_mode=mode,
            seq_lens_cpu=torch.from_numpy(self._at.copy()),
            prefix_lens=[0] * len(self._reqs),
            extend_lens=counts.tolist(),
        )

    def _launch(self, mode: Any, spent: Spent) -> tuple[Any, Any]:
        """Launch a pass; return the one that was under way, its output and its batch."""
        batch = self._batch(mode)
        forward = SimpleNamespace(
            forward_mode=mode, out_cache_loc=self._slots, out_cache_loc_virtual=None
        )
        launch = self._device.on_forward_end
        output = spent.call(self._capture.run, lambda: launch(forward, True, None), batch)
        last, self._under_way = self._under_way, (output, batch)
        return last

    def step(self) -> dict[str, Spent]:
        """Run a step; return what it took."""
        spent = Spent()
        other_work()
        output, batch = self._launch(_DECODE, spent)
        other_work()
        for req in batch.reqs:  # as SGLang appends what was sampled
            req.output_ids.append(1)
        spent.call(output.finalize)
        older = getattr(self._capture, "finished", None)  # of a checkout beside this one
        if older is not None:
            spent.call(older, batch)
        else:
            spent.call(self._capture.answered, batch.reqs)
        return {"scheduler": spent}

    def rest(self) -> None:
        """Let the agent send all of it."""
        self._capture.flush(60)
        assert not self._capture.faults

    def close(self) -> None:
        """End it."""
        self._capture.close()


def main() -> int:
    """Measure a round for each line on stdin."""
    target, m = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pin(OWN_CORE)
    torch.set_num_threads(1)
    name = f"steps-{os.getpid()}"
    config = AgentConfig(target=target, engine_id=name, layout=QWEN3.layout)
    engines: dict[str, Engine] = {
        "vLLM": Vllm(replace(config, engine_id=f"{name}-v"), m),
        "SGLang, pages of 16": Sglang(replace(config, engine_id=f"{name}-16"), m, 16),
        "SGLang, pages of 1": Sglang(replace(config, engine_id=f"{name}-1"), m, 1),
    }
    gc.freeze()  # as engines do
    for _ in sys.stdin:
        figures = {title: measured(engine) for title, engine in engines.items()}
        print(json.dumps(figures), file=answers, flush=True)
    for engine in engines.values():
        engine.close()
    return 0


def measured(engine: Engine) -> dict[str, float]:
    """Run a round; return medians of its steps, in microseconds."""
    for _ in range(WARM):
        engine.step()
    both, own = time.process_time_ns(), time.thread_time_ns()
    steps = [engine.step() for _ in range(STEPS)]
    engine.rest()
    others = time.process_time_ns() - both - (time.thread_time_ns() - own)
    found = {part: statistics.median(step[part].cpu for step in steps) for part in steps[0]}
    return found | {
        "all": statistics.median(sum(spent.cpu for spent in step.values()) for step in steps),
        "clock": statistics.median(sum(spent.clock for spent in step.values()) for step in steps),
        "others": others / 1e3 / STEPS,
    }


if __name__ == "__main__":
    sys.exit(main())
