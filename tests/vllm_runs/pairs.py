"""Two engines under one run: as data parallel replicas, and as a prefill and a decode engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_runs.engine import BLOCK, Answer, Ask, Engine, Setup
from vllm_runs.scenarios import GREEDY, expect


class Pair:
    """Two engines, each with its core in a process of its own."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self.first = first
        self.second = second

    def agents(self) -> list[dict[str, Any]]:
        """Counters of their agents."""
        return self.first.agents() + self.second.agents()

    def close(self) -> None:
        """Ends both."""
        self.first.close()
        self.second.close()


def replicas(setup: Setup) -> Pair:
    """Two engines that share nothing."""
    first, second = (replace(setup, attachment=setup.attachment.numbered(i)) for i in (0, 1))
    return Pair(Engine(first), Engine(second))


def disaggregated(setup: Setup) -> Pair:
    """Two engines that hand KV over through vLLM's own example connector, on disk."""
    beside = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(setup.directory)},
    }
    first, second = (replace(setup, attachment=setup.attachment.numbered(i)) for i in (0, 1))
    return Pair(Engine(first, beside), Engine(second, beside))


def data_parallel(pair: Pair) -> list[Answer]:
    """Both at once, with the same prompts; and a rollout that moves from one to the other."""
    prompts = [pair.first.prompts.make(n) for n in (40, 70, 33)]
    for number, engine in enumerate((pair.first, pair.second)):
        for i, prompt in enumerate(prompts):
            engine.add(Ask(f"replica-{number}-{i}", prompt, words={"group": f"p{i}"}))
    done: list[Answer] = []
    while len(done) < 2 * len(prompts):
        done += pair.first.step() + pair.second.step()
    (begun,) = pair.first.run([Ask("moved", pair.first.prompts.make(50))])
    moved = pair.second.run([Ask("moved", begun.tokens)])
    return done + moved


def handover(pair: Pair) -> list[Answer]:
    """A prompt is computed by the one and goes on in the other, under one trace id.

    The blocks that the KV is loaded into held other requests before.
    """
    hits = pair.second.count("external_prefix_cache_hits")
    done = pair.second.run(Ask(f"before-{i}", pair.first.prompts.make(90)) for i in range(4))
    for i, length in enumerate((100, 110, 70)):  # the connector fails at full blocks
        name, prompt = f"handover-{i}", pair.first.prompts.make(length)
        handed = Ask(name, prompt, max_tokens=1, sampling=GREEDY, words={"handoff": True})
        (first,) = pair.first.run([handed])
        # The decode engine samples the first token again, or gets it as part of its prompt.
        prompt = first.tokens if i % 2 else prompt
        done += pair.second.run([Ask(name, prompt, sampling=GREEDY)])
    # Nobody tells of the routing behind this one.
    pair.second.llm.reset_prefix_cache()
    (alone,) = pair.second.run([Ask("alone", prompt)])
    alone.may_lack, alone.must_lack = ("kv_unknown",), (0, (len(prompt) - 1) // BLOCK * BLOCK)
    expect(pair.second.count("external_prefix_cache_hits") > hits, "no KV was handed over")
    return [*done, alone]
