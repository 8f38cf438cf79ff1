"""SampleRows: the rows of one sample, from a trace or from a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.trace import Trace, incomplete
from routetrace.common.errors import InvalidArgument, kind_of
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange


@dataclass(frozen=True, eq=False)
class SampleRows:
    """Rows of one sample: N tokens, N - 1 rows, every MoE layer of the model."""

    name: str
    """Name in error messages."""
    layout: ModelLayout
    """Layout of the model."""
    topk_ids: npt.NDArray[np.unsignedinteger[Any]]
    """[MoE layers, N - 1, top_k], uint8 up to 256 experts, uint16 above; meaningless where not
    `valid`."""
    valid: npt.NDArray[np.bool_]
    """[MoE layers, N - 1]."""
    missing: tuple[MissingRange, ...] = ()
    """Known missing ranges with reasons, in positions of the requests."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample, N."""
        return int(self.valid.shape[1]) + 1

    @classmethod
    def of(cls, trace: Trace | SampleRows, num_tokens: int | None = None) -> SampleRows:
        """Return the rows of a sample that is one request, or its first tokens.

        Args:
            trace: a trace from position 0 on with all MoE layers; cells may be masked.
            num_tokens: tokens of the sample; None for those of the request.

        Raises:
            InvalidArgument: if the trace does not start at 0 or lacks MoE layers, or is none.
            Incomplete: if the number of tokens is unknown.
        """
        if isinstance(trace, SampleRows):
            return trace._first(num_tokens)
        if not isinstance(trace, Trace):
            raise InvalidArgument(
                field="rows",
                value=kind_of(trace),
                expected="Trace or SampleRows",
                remedy="use rows.per_sample() for Rows",
            )
        all_layers(trace.layer_ids, trace.layout)
        if trace.token_start:
            raise InvalidArgument(
                field="token_start", value=trace.token_start, expected="0: a trace from its start"
            )
        if num_tokens is None:
            if not trace.num_tokens:
                raise incomplete(trace, unknown_from=trace.token_stop)
            num_tokens = trace.num_tokens
        count = check.whole("num_tokens", num_tokens, 1) - 1
        ids = np.zeros((len(trace.layer_ids), count, trace.top_k), trace.layout.dtype)
        valid = np.zeros(ids.shape[:2], np.bool_)
        there = min(count, len(trace))
        ids[:, :there] = trace.topk_ids[:there].transpose(1, 0, 2)
        valid[:, :there] = trace.valid[:there].T
        missing = _before(count, trace.missing)
        return cls(repr(trace.trace_id), trace.layout, ids, valid, missing)

    def _first(self, num_tokens: int | None) -> SampleRows:
        """Return its first tokens."""
        if num_tokens is None:
            return self
        count = check.whole("num_tokens", num_tokens, 1, self.num_tokens) - 1
        return replace(
            self,
            topk_ids=self.topk_ids[:, :count],
            valid=self.valid[:, :count],
            missing=_before(count, self.missing),
        )


def _before(stop: int, missing: Iterable[MissingRange]) -> tuple[MissingRange, ...]:
    """Return missing cells of the positions below `stop`."""
    return tuple(replace(m, stop=min(m.stop, stop)) for m in missing if m.start < stop)


def all_layers(layer_ids: tuple[int, ...], layout: ModelLayout) -> None:
    """Require every MoE layer.

    Raises:
        InvalidArgument: if one is missing.
    """
    if layer_ids != layout.moe_layer_ids:
        raise InvalidArgument(
            field="layer_ids", value=layer_ids, expected=f"all MoE layers {layout.moe_layer_ids}"
        )
