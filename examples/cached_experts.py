"""A model whose experts come from the host: a few of them on the device, the same output.

Generates with a small Qwen3-MoE as it is, fits a forecast on the routing that was captured, and
generates for other prompts with ever fewer experts on the device, without and with the forecast.
Prints cached experts, hit rates, copied bytes, and whether the logits are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_moe import PROMPTS, build_model, encode

from routetrace.capture_agent import ModelLayout
from routetrace.capture_agent.engines.router_taps import RouterTaps
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.transformers import serve_experts


class Rows:
    """Keeps the rows [n, L, K] of every pass; `TransformersCapture` sends them to a server."""

    def __init__(self) -> None:
        self.passes: list[np.ndarray[Any, Any]] = []

    def before(self, inputs: object) -> None:
        """A pass begins."""

    def after(self, pending: Any) -> None:
        """Keep the rows of a pass."""
        self.passes.append(pending.rows().copy())

    def failed(self) -> None:
        """An exception was swallowed."""
        raise RuntimeError("a pass was not captured")


def generate(model: Any, prompts: Sequence[str], tokens: int) -> torch.Tensor:
    """Logits [tokens, batch, vocabulary] of greedy decoding."""
    input_ids, mask = encode(prompts)
    output = model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(output.logits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per prompt")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    args = parser.parse_args()

    model = build_model(num_layers=args.layers)
    model.set_experts_implementation("eager")
    layout = ModelLayout.from_config(model.config)
    seen, unseen = PROMPTS[:3], PROMPTS[3:5]

    rows = Rows()
    with RouterTaps(model, layout).attached(rows):
        generate(model, seen, args.tokens)
    forecast = ExpertForecast.fit(np.concatenate(rows.passes), num_experts=layout.num_experts)
    plain = generate(model, unseen, args.tokens)

    print("experts on the device    hit rate     MB copied   same logits")
    for capacity in (layout.num_experts, 16, 8, 1):
        for name, known in (("LRU", None), ("forecast", forecast)):
            with serve_experts(model, capacity=capacity, forecast=known) as served:
                logits = generate(model, unseen, args.tokens)
            stats = served.stats()
            hit_rate = stats.hits / (stats.hits + stats.misses)
            same = "yes" if torch.equal(logits, plain) else "NO"
            print(
                f"{capacity:4d} of {layout.num_experts}, {name:<10}"
                f"{hit_rate:12.1%}{stats.bytes_moved / 1e6:14.1f}{same:>14}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
