"""Cost of capture in a decode step: a CUDA graph of MoE layers with it and without it.

python benchmarks/capture_cuda.py [--device cuda] [--layers 48] [--tokens 1 64 256]

Prints microseconds a step, and compares rows with what the routers returned; ends with 1 if one is
wrong. On the CPU there is no graph, and the layers run as they are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from routetrace.capture_agent.engines.capturer import PendingRows, RoutingCapturer
from routetrace.common.layout import ModelLayout

Read = Callable[[int, torch.Tensor], object]
_REPEATS = 7


class Layers:
    """MoE layers whose experts are stood in for by one dense pair of matrices."""

    def __init__(self, layout: ModelLayout, width: int, tokens: int, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layout = layout
        self.x = torch.randn(tokens, width, dtype=dtype, device=device)
        num_layers, experts = len(layout.layer_ids), layout.num_experts
        self.gates = torch.randn(num_layers, width, experts, dtype=dtype, device=device)
        self.up = torch.randn(width, 2 * width, dtype=dtype, device=device) / width**0.5
        self.down = torch.randn(2 * width, width, dtype=dtype, device=device) / width**0.5
        self.ids: list[torch.Tensor] = []

    def __call__(self, read: Read) -> None:
        x, self.ids = self.x, []
        for column, gate in enumerate(self.gates):
            ids = (x @ gate).softmax(-1).topk(self.layout.top_k).indices
            read(column, ids)
            self.ids.append(ids)
            x = torch.nn.functional.normalize(x + (x @ self.up).relu() @ self.down) * x.shape[1]

    def recorded(self, read: Read) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """The step as an engine runs it, and where each layer leaves its ids."""
        if self.x.device.type != "cuda":
            return lambda: self(read), self.ids
        # Not on another stream: a kernel there can make all later ones of the process slower,
        # with capture and without.
        self(read)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self(read)
        return graph.replay, self.ids


class Steps:
    """Steps of one kind: with a capturer, or without."""

    def __init__(self, layers: Layers, capturer: RoutingCapturer | None) -> None:
        self.layers, self.capturer = layers, capturer
        read: Read = capturer.capture if capturer else lambda _column, _ids: None
        self.replay, self.ids = layers.recorded(read)
        self.pending: deque[PendingRows] = deque()

    def step(self) -> None:
        """One step; rows are taken one step late, as engines that do not wait take them."""
        if self.capturer is None:
            self.replay()
            return
        self.capturer.begin(len(self.layers.x))
        self.replay()
        self.pending.append(self.capturer.snapshot(len(self.layers.x)))
        if len(self.pending) == 2:
            self.pending.popleft().rows()

    def time(self, steps: int) -> float:
        """Microseconds a step."""
        _synchronize(self.layers)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        _synchronize(self.layers)
        return (time.perf_counter() - start) / steps * 1e6

    def wrong_rows(self, steps: int) -> int:
        """Steps with inputs of their own, row by row against what the routers returned."""
        assert self.capturer is not None
        wrong = 0
        for _ in range(steps):
            self.layers.x.normal_()
            self.capturer.begin(len(self.layers.x))
            self.replay()
            rows = self.capturer.snapshot(len(self.layers.x)).rows()
            ids = self.ids or self.layers.ids
            expected = torch.stack(ids, dim=1).cpu().numpy()
            wrong += int((rows != expected).any(axis=(1, 2)).sum())
        return wrong


def _synchronize(layers: Layers) -> None:
    if layers.x.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    layout = ModelLayout(
        tuple(range(options.layers)), options.layers, options.experts, options.top_k
    )
    capturer = RoutingCapturer(layout, options.max_num_tokens, options.device)
    print(f"{options.device}, {options.layers} layers, width {options.width}")
    print("tokens   without us   with us   more %   rows compared   wrong")
    all_wrong = 0
    for tokens in options.tokens:
        layers = Layers(layout, options.width, tokens, options.device)
        without, with_it = Steps(layers, None), Steps(layers, capturer)
        compared = max(1, options.steps // 10)
        wrong = with_it.wrong_rows(compared)
        # In turns, so that what else the machine does meets both.
        times = [
            (without.time(options.steps), with_it.time(options.steps)) for _ in range(_REPEATS)
        ]
        before, after = (statistics.median(column) for column in np.array(times).T.tolist())
        print(
            f"{tokens:6} {before:12.1f} {after:9.1f} {100 * (after / before - 1):8.2f}"
            f" {compared * tokens:15} {wrong:7}"
        )
        all_wrong += wrong
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
