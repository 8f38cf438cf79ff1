"""ExpertLoad: how often each expert was chosen in rows of traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.trace import Trace
from routetrace.common import balance
from routetrace.common.errors import InvalidArgument
from routetrace.common.values import Values


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ExpertLoad(Values):
    """Counts of the experts that valid cells chose, by layer: L layers, E experts.

    Adds up: `a + b`, and `sum(loads)`. For the load of ranks, sum columns: with `rank` int [E] as a
    placement, `load.load @ np.eye(num_ranks, dtype=int)[rank]` is [L, num_ranks].
    """

    layer_ids: tuple[int, ...]
    """Absolute decoder layer ids of the counts, ascending."""
    num_experts: int
    """E."""
    top_k: int
    """Experts per cell."""
    traces: int
    """Traces, or ranges of them, that were counted."""
    tokens: int
    """Their rows, those with missing cells included."""
    cells: npt.NDArray[np.int64]
    """Valid cells [L]."""
    load: npt.NDArray[np.int64]
    """Choices of each expert [L, E]; `top_k` for each valid cell."""

    @classmethod
    def of(cls, trace: Trace) -> ExpertLoad:
        """Count the valid cells of a trace.

        Raises:
            InvalidArgument: if it is no trace.
            Corrupt: if an id is not below num_experts.
        """
        check.instance("trace", trace, Trace)
        experts = trace.layout.num_experts
        ids, valid = trace.topk_ids, trace.valid
        load = np.zeros((len(trace.layer_ids), experts), np.int64)
        for column in range(len(load)):  # one layer at a time, as counting widens the ids
            chosen = ids[:, column]
            there = valid[:, column]
            if not there.all():
                chosen = chosen[there]
            counts = np.bincount(chosen.ravel(), minlength=experts)
            if len(counts) > experts:
                trace.validate()
            load[column] = counts
        return cls(
            layer_ids=trace.layer_ids,
            num_experts=experts,
            top_k=trace.top_k,
            traces=1,
            tokens=len(trace),
            cells=valid.sum(0, dtype=np.int64),
            load=load,
        )

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        if not isinstance(other, ExpertLoad):
            return NotImplemented
        if self.model != other.model:
            raise InvalidArgument(
                field="other",
                value=f"counts of {other.words}",
                expected=f"counts of one model: {self.words}",
            )
        return ExpertLoad(
            layer_ids=self.layer_ids,
            num_experts=self.num_experts,
            top_k=self.top_k,
            traces=self.traces + other.traces,
            tokens=self.tokens + other.tokens,
            cells=self.cells + other.cells,
            load=self.load + other.load,
        )

    def __radd__(self, other: int) -> ExpertLoad:
        """Support `sum(loads)`."""
        return self if other == 0 else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertLoad):
            return NotImplemented
        return bool(
            (self.model, self.traces, self.tokens) == (other.model, other.traces, other.tokens)
            and np.array_equal(self.cells, other.cells)
            and np.array_equal(self.load, other.load)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ExpertLoad {self.tokens} tokens of {self.traces} traces: {self.words}>"

    @property
    def model(self) -> tuple[Any, ...]:
        """Layers, experts and top-k: counts of the same ones add up."""
        return self.layer_ids, self.num_experts, self.top_k

    @property
    def words(self) -> str:
        """Layers, experts and top-k as text."""
        layers = self.layer_ids
        which = f"{len(layers)} layers {layers[0]} to {layers[-1]}" if layers else "no layers"
        return f"{which}, top-{self.top_k} of {self.num_experts}"

    @property
    def relative(self) -> npt.NDArray[np.float64]:
        """Load / even share of the layer [L, E]: 1 is even, E all choices; 0 without counts."""
        return balance.shares(self.load) * self.num_experts

    @property
    def balancedness(self) -> npt.NDArray[np.float64]:
        """Mean load / largest load [L]: 1 is even, 1 / E all on one expert; 1 without counts."""
        return balance.balancedness(self.load)

    @property
    def entropy(self) -> npt.NDArray[np.float64]:
        """Entropy of the load / log2 E [L]: 1 is even, 0 all on one expert or without counts."""
        return balance.entropy(self.load)
