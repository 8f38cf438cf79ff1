"""Conversations whose turns run on any engine, told to one process and to several workers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np

from faults.script import RUN
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((0, 1, 2), 3, 16, 2)


class Rollouts:
    """Engines that share conversations and report to one process and to several workers."""

    def __init__(
        self, alone: str, together: str, seed: int, run: str = RUN, **settings: Any
    ) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.tokens: dict[str, int] = {}
        self._stack = ExitStack()
        self.agents = [
            [
                self._stack.enter_context(
                    CaptureAgent(AgentConfig(target, f"e{i}", LAYOUT, run=run, **settings))
                )
                for target in (alone, together)
            ]
            for i in range(6)
        ]

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def turns(self, count: int, conversations: int) -> None:
        """Let conversations go on, on any engine, which computes all rows of a turn anew."""
        for _ in range(count):
            number = self.rng.randrange(conversations)
            known = self.tokens.get(f"t{number}", 0)
            prompt = known + self.rng.randint(1, 90)
            tokens = self.tokens[f"t{number}"] = prompt + self.rng.randint(2, 90)
            ids = np.arange(tokens) + 10_000 * number
            every = np.broadcast_to(np.arange(16, dtype=np.uint8), (tokens - 1, 3, 16))
            rows = np.ascontiguousarray(self.numbers.permuted(every, axis=2)[:, :, :2])
            for agent in self.rng.choice(self.agents):
                handle = agent.begin(
                    f"r{number}-{known}",
                    trace_id=f"t{number}",
                    prompt_len=prompt,
                    prompt_token_ids=ids[:prompt],
                )
                agent.step(rows, [(handle, 0, tokens - 1)])
                agent.finish(handle, tokens, token_ids=ids)
                assert agent.flush(60)  # turns arrive in their order

    def compare(self, one: RouteClient, several: RouteClient) -> None:
        """Compare every trace, read alone and together."""
        names = [*self.tokens]
        read = []
        for client in (one, several):
            alone = [
                client.get(name, wait_for="end", num_tokens=self.tokens[name]) for name in names
            ]
            batch = client.get_many(names, timeout=60)
            stats = [client.stat(name) for name in names]
            read.append(
                [
                    [(t.num_tokens, t.topk_ids.tolist(), t.incarnation) for t in alone],
                    [(t.num_tokens, t.topk_ids.tolist(), t.incarnation) for t in batch],
                    [(s.num_incarnations, s.engine_ids, str(s.state)) for s in stats],
                    sorted(stat.trace_id for stat in client.find()),
                ]
            )
        assert read[0] == read[1]
        assert read[0][-1] == sorted(names)
