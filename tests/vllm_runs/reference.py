"""Choices of Transformers for the same tokens, in float32: the independent truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache

#: Scores that differ by less are a tie: two kernels may choose either.
TIE = 1e-4


@dataclass(frozen=True)
class Choice:
    """Choices of the routers, and their candidates."""

    ids: npt.NDArray[np.int64]
    """[tokens, MoE layers, top_k], ascending."""
    scores: npt.NDArray[np.float32]
    """[tokens, MoE layers, experts]: what the top-k was taken of."""

    def agrees(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], int]:
        """Which cells hold the experts that were chosen here, in any order.

        Args:
            rows: [tokens, MoE layers, top_k] expert ids.

        Returns:
            Bool [tokens, MoE layers], and how many of the agreeing cells are ties.
        """
        rows = np.sort(rows.astype(np.int64), axis=2)
        same = (rows == self.ids).all(axis=2)
        ties = 0
        for token, layer in np.argwhere(~same).tolist():
            if self._tied(token, layer, rows[token, layer]):
                same[token, layer] = True
                ties += 1
        return same, ties

    def _tied(self, token: int, layer: int, ids: npt.NDArray[np.int64]) -> bool:
        scores = self.scores[token, layer]
        if len(set(ids.tolist())) < ids.size or ids[0] < 0 or ids[-1] >= scores.size:
            return False
        best = scores[self.ids[token, layer]].min()
        return bool(scores[ids].min() > best - TIE)


class Reference:
    """A model of Transformers whose routers are listened to.

    Args:
        checkpoint: directory of the model.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.eval()
        for module in self._model.modules():
            # vLLM's Transformers backend decorates classes of Transformers in place.
            module.do_not_compile = True
        routers = [m for m in self._model.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]
        self._seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in routers]
        for router, seen in zip(routers, self._seen, strict=True):
            router.register_forward_hook(_listen(seen))

    @torch.no_grad()
    def choose(
        self,
        tokens: Sequence[int],
        phases: Sequence[tuple[int, int, bool]] = (),
        recomputed: bool = False,
    ) -> Choice:
        """The choices for all of the tokens.

        Args:
            tokens: token ids from position 0 on.
            phases: (start, stop, whether `change_weights` held then), where the weights changed
                while they were computed.
            recomputed: whether earlier positions were computed again then; else they keep the KV
                entries that they had.
        """
        cache = DynamicCache()
        chosen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._seen]
        for start, stop, changed in phases or [(0, len(tokens), False)]:
            if changed:
                change_weights(self._model)
            if recomputed:
                cache = DynamicCache()
            first = 0 if recomputed else start
            part = torch.tensor([tokens[first:stop]])
            self._model(input_ids=part, past_key_values=cache, use_cache=True)
            if changed:
                change_weights(self._model)
            for seen, kept in zip(self._seen, chosen, strict=True):
                ((scores, ids),) = seen
                seen.clear()
                kept.append((scores[start - first :], ids[start - first :]))
        ids = [torch.cat([i for _, i in kept]) for kept in chosen]
        scores = [torch.cat([s for s, _ in kept]) for kept in chosen]
        return Choice(
            torch.stack(ids, 1).sort(2).values.numpy(), torch.stack(scores, 1).float().numpy()
        )

    def choose_handed(self, tokens: Sequence[int], loaded: int, handed: int) -> Choice:
        """The choices where one engine goes on from another's KV, with `change_weights`.

        Args:
            tokens: token ids from position 0 on.
            loaded: tokens whose KV came from the other engine.
            handed: tokens whose choices are the other engine's; some of them may have been computed
                by both.
        """
        first = self.choose(tokens[:handed])
        second = self.choose(tokens, [(0, loaded, False), (loaded, len(tokens), True)])
        return Choice(
            np.concatenate([first.ids, second.ids[handed:]]),
            np.concatenate([first.scores, second.scores[handed:]]),
        )


def change_weights(model: Any) -> None:
    """Make every MLP see half of its inputs with the other sign; twice is as before.

    By the norms before them: vLLM's linear layers on CPU keep packed copies of their weights.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("post_attention_layernorm.weight"):
            parameter.data[::2].neg_()


def _listen(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    def hook(router: Any, _args: Any, output: Any) -> None:
        # Logits of all experts, weights and ids of the chosen ones; their order differs.
        (ids,) = (part for part in output if not part.is_floating_point())
        scores = max((part for part in output if part is not ids), key=lambda part: part.shape[-1])
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            scores = scores.sigmoid() + bias
        seen.append((scores.reshape(-1, scores.shape[-1]), ids.reshape(-1, ids.shape[-1])))

    return hook
