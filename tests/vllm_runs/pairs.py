"""Two engines under one run: as data parallel replicas, and as a prefill and a decode engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_runs import scenarios
from vllm_runs.engine import BLOCK, Answer, Ask, Engine, Setup
from vllm_runs.scenarios import expect, update_weights


class Pair:
    """Two engines, each with its core in a process of its own."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self.first = first
        self.second = second

    def agents(self) -> list[dict[str, Any]]:
        """Counters of their agents."""
        return self.first.agents() + self.second.agents()

    def close(self) -> None:
        """End both."""
        self.first.close()
        self.second.close()


def replicas(setup: Setup) -> Pair:
    """Two engines that share nothing."""
    first, second = (replace(setup, attachment=setup.attachment.numbered(i)) for i in (0, 1))
    return Pair(Engine(first), Engine(second))


def disaggregated(setup: Setup) -> Pair:
    """Two engines that hand KV over through vLLM's own example connector, on disk."""
    beside = _beside(setup)
    first, second = (replace(setup, attachment=setup.attachment.numbered(i)) for i in (0, 1))
    return Pair(Engine(first, beside), Engine(second, beside))


def _beside(setup: Setup) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(setup.directory)},
    }


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
    """A prompt is computed by the one and goes on in the other, with other weights, in one trace.

    Both sample the first token of the answer. The blocks that the KV is loaded into held other
    requests before.
    """
    hits = pair.second.count("external_prefix_cache_hits")
    done = pair.second.run(Ask(f"before-{i}", pair.first.prompts.make(90)) for i in range(4))
    update_weights(pair.second, 1)
    sampled_alike = True
    for i, length in enumerate((100, 110, 70)):  # the connector fails at full blocks
        name, prompt = f"handover-{i}", pair.first.prompts.make(length)
        # The example connector names no hand-over.
        words = {"transfer_id": f"{name}-kv"}
        (first,) = pair.first.run(
            [Ask(name, prompt, max_tokens=1, words={**words, "handoff": True})]
        )
        # The decode engine samples the first token itself, or gets it as part of its prompt.
        given = i % 2 == 1
        (answer,) = pair.second.run([Ask(name, first.tokens if given else prompt, words=words)])
        sampled_alike &= answer.tokens[: length + 1] == first.tokens
        # The tokens after the last whole block were computed by both: the decode engine sampled
        # from its own.
        answer.loaded = (answer.prompt_len - 1) // BLOCK * BLOCK
        answer.versions = ((0, answer.loaded, None), (answer.loaded, len(answer.tokens) - 1, 1))
        answer.changed = (1,)
        done.append(answer)
    expect(not sampled_alike, "both engines sampled the same tokens")
    # Nobody tells of the routing behind this one: the weights are others.
    pair.second.llm.reset_prefix_cache()
    (alone,) = pair.second.run([Ask("alone", prompt)])
    alone.may_lack, alone.must_lack = ("kv_unknown",), (0, (len(prompt) - 1) // BLOCK * BLOCK)
    alone.loaded = alone.must_lack[1]
    alone.versions, alone.changed = ((alone.loaded, len(alone.tokens) - 1, 1),), (1,)
    expect(pair.second.count("external_prefix_cache_hits") > hits, "no KV was handed over")
    return [*done, alone]


def offloading(setup: Setup) -> Engine:
    """An engine that keeps KV on disk and loads it again, as offloading connectors do."""
    return Engine(setup, _beside(setup))


def restored(engine: Engine) -> list[Answer]:
    """Prompts whose KV was evicted and comes back from outside of the engine.

    Nothing proves which pass made it: those rows are missing.
    """
    prompts = [engine.prompts.make(n) for n in (100, 70, 129)]
    done = engine.run(Ask(f"offloaded-{i}", prompt) for i, prompt in enumerate(prompts))
    came = 0
    for again in ("restored", "restored-again"):
        # The last one has the three blocks of the first one, and another end.
        asks = [Ask(f"{again}-{i}", prompt) for i, prompt in enumerate(prompts)]
        asks.append(Ask(f"{again}-part", prompts[0][: 3 * BLOCK] + engine.prompts.make(11)))
        for ask in asks:
            engine.llm.reset_prefix_cache()
            hits = engine.count("external_prefix_cache_hits")
            (answer,) = engine.run([ask])
            # Which prompts the example connector finds differs from version to version.
            loaded = int(engine.count("external_prefix_cache_hits") - hits)
            if loaded:
                answer.may_lack, answer.must_lack = ("kv_unknown",), (0, loaded)
            came += loaded
            done.append(answer)
    expect(came >= 500, f"{came} tokens came back")
    return done


def refits(engine: Engine) -> list[Answer]:
    """Updates, whose resets the other connector must not take for a veto of ours.

    KV may come back from outside of the engine, whose rows are missing.
    """
    done = scenarios.refits(engine)
    for answer in done:
        answer.may_lack, answer.versions = ("kv_unknown",), None
    return done
