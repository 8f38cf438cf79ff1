"""The snippets of docs/trainers.md run as they stand, one after the other.

That for Megatron-Core runs in `make test-trainers`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.servers.client_server import rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text("utf-8")
SNIPPETS = [
    (section.split("\n", 1)[0], code)
    for section in re.split(r"^## ", PAGE, flags=re.M)
    for code in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
]

PROMPT, NEW = 70, 12


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def rollouts() -> Iterator[dict[str, Any]]:
    """Names that the page assumes: rollouts of a model whose routing a server holds."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_moe import build_model

    sys.path.remove(str(ROOT / "examples"))
    model = build_model(num_layers=3)
    prompts = torch.randint(1, 256, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    with run_server() as server:
        config = AgentConfig(
            target=server.target, engine_id="e", layout=ModelLayout.from_config(model.config)
        )
        with CaptureAgent(config) as agent:
            output = TransformersCapture(model.eval(), agent).generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                request_ids=["rollout-0", "rollout-1"],
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
            )
            assert agent.flush(30)
        with torch.no_grad():
            logp = model(output).logits[:, :-1].log_softmax(-1)
        names: dict[str, Any] = {
            "model": model.train(),
            "config": model.config,
            "target": server.target,
            "rollouts": {"rollout-0": output[0], "rollout-1": output[1]},
            "loss_of": loss_of,
            "rollout_logp": logp.gather(-1, output[:, 1:, None])[..., 0],
        }
        yield names
        names["client"].close()


class FrameworkReplay:
    """Stands for slime's RoutingReplay."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record(self, rows: Any) -> None:
        self.recorded.append(rows)


@pytest.fixture(scope="module")
def frameworks() -> Iterator[dict[str, Any]]:
    """The same for frameworks: two requests, and what stands for the framework's own objects."""
    layout = ModelLayout((1, 2, 4), 6, 16, 4)
    replays = [FrameworkReplay(), FrameworkReplay()]
    lazy: list[Any] = []
    with run_server() as server, RouteClient(server.target) as client:
        config = AgentConfig(
            target=server.target, engine_id="e", layout=layout, background="thread"
        )
        with CaptureAgent(config) as agent:
            for name, tokens in (("g0-s0", 9), ("g0-s1", 7)):
                handle = agent.begin(name, prompt_len=3)
                agent.step(rows_of(layout, tokens - 1, tokens), [(handle, 0, tokens - 1)])
                agent.finish(handle, tokens)
            assert agent.flush(30)
        yield {
            "client": client,
            "layout": layout,
            "model": None,
            "sample": SimpleNamespace(),
            "message": {},
            "choice_message": {},
            "trajectory": {},
            "generator_output": {},
            "RoutedExperts": lambda data, shape, dtype: (data, shape, dtype),
            "RoutingReplay": SimpleNamespace(
                all_routing_replays=replays, register_lazy_resource=lazy.append
            ),
            "iter_model_routers": lambda model: [],
        }
        for routing in lazy:
            assert replays[0].recorded[0].materialize_for_routing_replay("forward").shape[1] == 4
            routing.close()


def run_snippets(names: dict[str, Any], wanted: Callable[[str], bool]) -> None:
    chosen = [(section, code) for section, code in SNIPPETS if wanted(section)]
    assert chosen
    for section, code in chosen:
        exec(compile(code, f"docs/trainers.md, {section}", "exec"), names)


def test_snippets_of_plans_and_transformers_run(rollouts):
    run_snippets(rollouts, lambda section: section not in ("Frameworks", "Megatron-Core"))


def test_snippets_for_frameworks_run(frameworks):
    run_snippets(frameworks, lambda section: section == "Frameworks")


def test_the_page_names_its_sections():
    """Links within the page lead somewhere."""
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= headings
