"""Requests of a rollout engine that is a stand-in: random tokens, and rows that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout


class Rollouts:
    """Requests of one run, by their tokens.

    Args:
        target: the server.
        run: the run.
        layout: of the model.
        vocabulary: token ids are below it.
    """

    def __init__(self, target: str, run: str, layout: ModelLayout, vocabulary: int) -> None:
        self.target, self.run = target, run
        self.layout, self.vocabulary = layout, vocabulary
        self.rows: dict[tuple[int, ...], list[np.ndarray]] = {}
        """Rows [N - 1, layers, top_k] of the requests with some tokens, in order of arrival."""
        config = AgentConfig(
            target=target, run=run, engine_id="engine", layout=layout, background="thread"
        )
        self.agent = CaptureAgent(config)
        self._rng = np.random.default_rng(len(run))
        self._count = 0

    def close(self) -> None:
        self.agent.close()

    def tokens(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self._rng.integers(3, self.vocabulary, count))

    def add(self, tokens: torch.Tensor, missing: Sequence[int] = ()) -> None:
        """Report a request with these tokens, and random rows but at some positions."""
        count, layers = len(tokens) - 1, len(self.layout.layer_ids)
        order = self._rng.random((count, layers, self.layout.num_experts)).argsort(axis=2)
        rows = order[..., : self.layout.top_k].astype(np.uint8)
        self._count += 1
        ids = tokens.numpy()
        handle = self.agent.begin(f"r{self._count}", prompt_token_ids=ids[:2])
        for position in range(count):
            span = [(handle, position, 1)]
            if position in missing:
                self.agent.skip(span)
            else:
                self.agent.step(rows[position : position + 1], span)
        self.agent.finish(handle, len(ids), token_ids=ids)
        assert self.agent.flush(30)
        self.rows.setdefault(tuple(ids.tolist()), []).append(rows)

    def answers(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Report requests of these lengths; return their tokens."""
        found = [self.tokens(count) for count in lengths]
        for tokens in found:
            self.add(tokens)
        return found

    def truth(
        self, places: Sequence[tuple[int, torch.Tensor]], total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of sequences in a flat batch; equal sequences have those of one request each.

        Args:
            places: first token, and tokens, of each sequence; unknown ones have no rows.
            total: tokens of the batch.

        Returns:
            Ids [layers, total, top_k] of int64, and their validity [layers, total].
        """
        layers = len(self.layout.layer_ids)
        ids = torch.zeros((layers, total, self.layout.top_k), dtype=torch.int64)
        valid = torch.zeros((layers, total), dtype=torch.bool)
        used: dict[tuple[int, ...], int] = {}
        for at, tokens in places:
            name = tuple(tokens.tolist())
            known = self.rows.get(name, [])
            if not known:
                continue
            rows = known[-1 - used.get(name, 0)]  # from the newest back
            used[name] = used.get(name, 0) + 1
            there = torch.from_numpy(rows.astype(np.int64)).transpose(0, 1)
            ids[:, at : at + len(rows)] = there
            valid[:, at : at + len(rows)] = True
        return ids, valid
