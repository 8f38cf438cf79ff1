"""Stand-ins for an experts module and its weights, under the library's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from routetrace.experts.weights import ExpertWave


class Stand:
    """Stand-in for `self` in the library's code: the module with other weights."""

    def __init__(self, module: nn.Module, others: Mapping[str, Any]) -> None:
        vars(self).update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


class WeightRows:
    """Stand-in for a weight [E, ...] that the library only indexes by one expert."""

    def __init__(self, row: Callable[[int], torch.Tensor]) -> None:
        self._row = row

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self._row(int(expert))


class _Gathered:
    """Stand-in for a weight [E, ...] that is indexed by the ids of all pairs, in their order."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __getitem__(self, _ids: torch.Tensor) -> torch.Tensor:
        return self._rows


def gathered_rows(waves: Iterable[ExpertWave], num_pairs: int) -> dict[str, _Gathered]:
    """Return the weights indexed as by the batched kernel: a row for each pair.

    The kernel multiplies all rows in one product. Products of parts, wave by wave, may differ from
    parts of it: libraries choose an algorithm by the number of matrices.
    """
    rows: dict[str, torch.Tensor] = {}
    for wave in waves:
        pairs, places = pairs_of(wave)
        for name, slots in wave.weights.items():
            if name not in rows:
                rows[name] = slots.new_zeros(num_pairs, *slots.shape[1:])
            rows[name][pairs] = slots[places]
    return {name: _Gathered(tensor) for name, tensor in rows.items()}


def pairs_of(wave: ExpertWave) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of a wave's pairs of token and expert, and their slots."""
    places = wave.topk_ids.flatten()
    pairs = (places >= 0).nonzero()[:, 0]
    return pairs, places[pairs]
