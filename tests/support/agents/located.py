"""Runs whose token ids are located: calls to the model, and to agents and clients of a server."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np

from oracle.located import AMBIGUOUS, NOT_FOUND, Answer, Found, Request, Run, Tokens, same
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((0, 1), 2, 64, 2)
SHARDS = {"e0": {"": (0, 1)}, "e1": {"": (0, 1)}, "two": {"a": (0,), "b": (1,)}}
"""Layers by shard of each engine."""
LONG = 60
"""Seconds that no call waits where all goes well."""

names = count(1)


class Place:
    """A run: the model, and agents and a client of a server if there is one."""

    def __init__(
        self, target: str | None, stack: ExitStack, engines: Sequence[str] = ("e0",), seed: int = 0
    ) -> None:
        self.target, self.stack = target, stack
        self.model, self.run = Run(), f"run-{next(names)}"
        self.requests: list[Request] = []
        self.version: int | None = None
        self.rows: dict[Request, np.ndarray] = {}
        self.numbers = np.random.default_rng(seed)
        self.agents: dict[str, list[CaptureAgent]] = {engine: [] for engine in engines}
        self._handles: dict[Request, list[int]] = {}
        self._prompts: dict[Request, int] = {}
        if target is not None:
            self.client = stack.enter_context(RouteClient(target, run=self.run, timeout=LONG))
            for engine in engines:
                self.agents[engine] = [*map(stack.enter_context, self.shards(engine))]

    def shards(self, engine: str, **settings: Any) -> Iterator[CaptureAgent]:
        for shard, layers in SHARDS[engine].items():
            yield CaptureAgent(
                AgentConfig(
                    self.target or "", engine, LAYOUT.select(layers), run=self.run, shard=shard,
                    boot_id="boot", background="thread", flush_interval_seconds=0.01, **settings,
                )
            )  # fmt: skip

    def begin(
        self, tokens: Sequence[int], prompt: int, trace: str, *, engine: str = "e0",
        labels: dict[str, str] | None = None, named: bool = True, tells: bool = True,
    ) -> Request:  # fmt: skip
        """Begin a request and compute its prompt.

        Args:
            named: whether the agent is given the length of the prompt.
            tells: whether it is given the ids of the prompt.
        """
        tokens = tuple(tokens)
        one = Request(engine, trace, tokens, prompt if named else 0, labels or {})
        self.model.begin(one, tells=named and tells)
        self.requests.append(one)
        order = self.numbers.random((len(tokens) - 1, 2, 64)).argsort(axis=2)
        self.rows[one] = order[:, :, :2].astype(np.uint8)
        self._prompts[one] = prompt
        self._handles[one] = [
            agent.begin(
                f"r{len(self.requests)}", trace_id=trace, labels=one.labels,
                prompt_len=prompt if named else None,
                prompt_token_ids=tokens[:prompt] if named and tells else None,
            )
            for agent in self.agents[engine]
        ]  # fmt: skip
        self._step(one, 0, prompt)
        return one

    def end(self, one: Request, reason: str = "stop", *, tells: bool = True) -> None:
        """Compute the answer of a request, and end it."""
        self._step(one, self._prompts[one], len(one.tokens) - 1)
        for agent, handle in zip(self.agents[one.engine], self._handles[one], strict=True):
            told = one.tokens if tells else None
            agent.finish(handle, len(one.tokens), reason=reason, token_ids=told)
            assert agent.flush(LONG)
        self.model.finish(one, reason, tells=tells)

    def whole(
        self, tokens: Sequence[int], prompt: int, trace: str, reason: str = "stop", **how: Any
    ) -> None:
        self.end(self.begin(tokens, prompt, trace, **how), reason)

    def delete(self, trace: str) -> None:
        del self.model.traces[trace]
        if self.target is not None:
            self.client.delete(trace)

    def _step(self, one: Request, start: int, stop: int) -> None:
        if self.version is not None and start < stop:
            one.versions.add(self.version)
        for agent, handle in zip(self.agents[one.engine], self._handles[one], strict=True):
            rows = self.rows[one][start:stop, list(agent.config.layout.layer_ids)]
            agent.set_weight_version(self.version)
            if len(rows):
                agent.step(rows, [(handle, start, len(rows))])
            assert agent.flush(LONG)

    def locate(self, sequences: Sequence[Sequence[int]], **how: Any) -> list[Answer]:
        """Return the model's answers; the server's are the same."""
        sequences = [tuple(tokens) for tokens in sequences]
        answers = self.model.locate(sequences, **how)
        if self.target is not None:
            assert self.answers(self.client.locate(sequences, **how)) == answers
            self._read(answers)
        return answers

    @staticmethod
    def answers(found: Any) -> list[Answer]:
        """The answers of the client as the model has them."""
        empty = dict.fromkeys(found.not_found, NOT_FOUND)
        empty |= dict.fromkeys(found.ambiguous, AMBIGUOUS)
        assert len(empty) == len(found.not_found) + len(found.ambiguous)
        assert empty.keys() == {i for i, one in enumerate(found) if one is None}
        return [
            empty[i]
            if one is None
            else Found(one.trace_id, one.incarnation, one.num_tokens, one.proven, one.num_equal)
            for i, one in enumerate(found)
        ]

    def _read(self, answers: Sequence[Answer]) -> None:
        """Read the rows of requests that were found."""
        for found in {one for one in answers if isinstance(one, Found)}:
            trace = self.model.traces[found.trace_id]
            one, stop = trace[found.incarnation - 1], min(found.proven, found.num_tokens - 1)
            read = self.client.get(
                found.trace_id, incarnation=found.incarnation, missing="mask", token_stop=stop
            )
            prompt, rows = one.prompt_len, self.rows[one]
            assert read.valid[prompt:].all()
            np.testing.assert_array_equal(read.topk_ids[prompt:], rows[prompt:stop])
            # The prompt may have rows of the requests that this one continues.
            equal = {x: same(x.tokens, one.tokens) for x in trace if x is not one}
            if not any(equal[x] > x.prompt_len for x in equal):
                assert read.valid.all()
                np.testing.assert_array_equal(read.topk_ids, rows[:stop])
            for p in np.flatnonzero(read.valid.all(axis=1)[:prompt]):
                owners = [one, *(x for x in equal if equal[x] > p and len(self.rows[x]) > p)]
                assert any((read.topk_ids[p] == self.rows[x][p]).all() for x in owners)


class Drawn:
    """Two runs whose requests are drawn, with many equal tokens, and what is asked of them."""

    def __init__(self, target: str | None, stack: ExitStack, seed: int) -> None:
        self.rng = random.Random(seed)
        self.places = Place(target, stack, [*SHARDS], seed), Place(target, stack, ["e0"], seed)
        rng = self.rng
        base = tuple(rng.randrange(2) for _ in range(150))
        lengths = rng.randint(1, 10), rng.randint(30, 63), 64, rng.randint(65, 150)
        self.prompts = [base[:n] for n in rng.sample(lengths, 2)] + [self._sampled(20)]
        running: list[tuple[Place, Request, bool]] = []
        for _ in range(30):
            place = self.places[rng.random() < 0.2]
            running.append(self._begin(place))
            while running and rng.random() < 0.6:
                place, one, tells = running.pop(rng.randrange(len(running)))
                reason = rng.choice(("stop", "stop", "length", "abort", "abort", "handoff"))
                place.end(one, reason, tells=tells)
            if rng.random() < 0.02 and place.model.traces:
                place.delete(rng.choice([*place.model.traces]))
            place.version = rng.choice((place.version, rng.randrange(3)))
        self.asked = [(place, self._asked(place)) for place in self.places * 8]

    def _sampled(self, most: int) -> Tokens:
        """An answer of up to so many tokens."""
        rng = self.rng
        length = rng.choice((1, 2, 3, *[rng.randint(1, n) for n in (20, most, most)]))
        return tuple(rng.randrange(2) for _ in range(min(length, most)))

    def _begin(self, place: Place) -> tuple[Place, Request, bool]:
        rng, former = self.rng, [one for p in self.places for one in p.requests]
        prompt: Tokens = rng.choice(self.prompts)
        tokens, trace = prompt + self._sampled(200), f"t{rng.randrange(7)}"
        if former and rng.random() < 0.8:
            one = rng.choice(former)
            first = max(1, one.prompt_len)
            cut = one.tokens[: rng.randint(first, len(one.tokens))]
            ways = [
                (one.tokens[:first], one.tokens),  # equal
                (one.tokens[:first], cut + self._sampled(200)),  # a sibling
                (one.tokens[:first], one.tokens + self._sampled(9)),
                (p := one.tokens + self._sampled(80)[1:], p + self._sampled(200)),  # a next turn
                (p := cut + self._sampled(9), p + self._sampled(200)),
            ]
            if len((way := rng.choice(ways))[1]) < 400:
                prompt, tokens = way
                trace = one.trace_id if rng.random() < 0.6 else trace
        labels = {
            name: value
            for name, value, share in (
                ("group", f"g{rng.randrange(2)}", 0.5), ("adapter", "a", 0.15),
                ("kv_cache_dtype", "fp8", 0.1),
            )
            if rng.random() < share
        }  # fmt: skip
        begun = place.begin(
            tokens, len(prompt), trace, engine=rng.choice([*place.agents]), labels=labels,
            named=rng.random() < 0.95, tells=rng.random() < 0.95,
        )  # fmt: skip
        return place, begun, rng.random() < 0.95

    def _asked(self, place: Place) -> dict[str, Any]:
        """Arguments of a call, mostly about requests of a run."""
        rng, former = self.rng, [one for p in self.places for one in p.requests]
        there = [one for trace in place.model.traces.values() for one in trace]
        sampled = [one for one in there if one.reason not in ("", "handoff")]
        sequences: list[Tokens] = []
        labels: list[dict[str, str] | None] = []
        for _ in range(25):
            one = rng.choice(sampled if sampled and rng.random() < 0.8 else former)
            t, n = one.tokens, len(one.tokens)
            at = rng.randrange(n)
            ways = [t, t, t[: at + 1], t[: 64 * rng.randint(1, max(1, n // 64))]]
            ways += [t[: max(1, n - rng.randint(1, 9))], t[: max(1, n - rng.randint(1, 64))]]
            ways += [t + self._sampled(100), (*t[:at], 1 - t[at], *t[at + 1 :]), self._sampled(100)]
            sequences.append(rng.choice([*ways, *sequences[-1:]]))
            some = rng.sample([*one.labels.items()], rng.randint(0, len(one.labels)))
            mine = dict(some) or None
            labels.append(rng.choice((None, mine, mine, {"group": "g0"}, {"adapter": "a"})))
        asked: dict[str, Any] = {"sequences": sequences, "equal": rng.choice(("refuse", "any"))}
        if rng.random() < 0.4:
            asked["labels"] = rng.choice((labels, {"group": "g1"}))
        if asked["equal"] == "refuse" and rng.random() < 0.6:
            asked["indexes"] = [rng.choice((None, None, 0, 1, 2)) for _ in sequences]
        if rng.random() < 0.3:
            asked["weight_versions"] = rng.sample(range(3), rng.randint(1, 2))
        return asked

    def locate(self) -> list[list[Answer]]:
        """Ask both runs, and compare the answers."""
        return [place.locate(**how) for place, how in self.asked]
