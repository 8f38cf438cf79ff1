"""Rows of one sample, from a trace or from a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.plan import FetchPlan
from routetrace.client.rows import Rows
from routetrace.client.trace import Trace, incomplete
from routetrace.common.errors import Incomplete, InvalidArgument, kind_of
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange

LayerAxis = Literal["hidden", "moe"]


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
            return trace
        if not isinstance(trace, Trace):
            raise InvalidArgument(
                field="rows",
                value=kind_of(trace),
                expected="Trace or SampleRows",
                remedy="use SampleRows.split(rows) for Rows",
            )
        _all_layers(trace.layer_ids, trace.layout)
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
        return cls(repr(trace.trace_id), trace.layout, ids, valid, trace.missing)

    @classmethod
    def split(cls, rows: Rows) -> list[SampleRows]:
        """Return the rows of each sample of a plan that splits neither layers nor tokens.

        Args:
            rows: rows of all MoE layers, without context or sequence parallelism; packed or padded.

        Raises:
            InvalidArgument: if the rank has only part of the layers or tokens.
        """
        plan = rows.plan
        _all_layers(rows.layer_ids, plan.layout)
        there = sum(span.stop - span.start for span in plan.spans)
        if there != (whole := sum(sample.num_tokens for sample in plan.samples)):
            raise InvalidArgument(
                field="rows",
                value=f"{there} of the {whole} tokens of the samples",
                expected="a plan that is not split: cp_size = sp_size = 1",
            )
        found = []
        for number, sample in enumerate(plan.samples):
            if not sample.num_tokens:
                continue  # padding
            tokens = np.flatnonzero(plan.sample_of == number)[:-1]  # ascending without a split
            found.append(
                cls(
                    f"sample {number}",
                    plan.layout,
                    rows.topk_ids[:, tokens],
                    rows.valid[:, tokens],
                    tuple(missing for owner, missing in rows.missing if owner == number),
                )
            )
        return found

    def require_valid(self, framework: str) -> None:
        """Require every cell.

        Raises:
            Incomplete: if a cell is missing, with the consequence in `framework`.
        """
        if self.valid.all():
            return
        layer, position = (int(i) for i in np.argwhere(~self.valid)[0])
        raise Incomplete(
            f"{self.name} lacks {int((~self.valid).sum())} of {self.valid.size} cells, the first "
            f"at position {position} of layer {self.layout.moe_layer_ids[layer]}"
            f"{''.join(f'; {m}' for m in self.missing[:4])}; {framework} cannot mark missing rows, "
            "and would train on a filler",
            missing=self.missing,
        )

    def array(
        self,
        dtype: npt.DTypeLike,
        axis: LayerAxis,
        *,
        num_rows: int | None = None,
        missing: int | None = None,
        after: npt.ArrayLike = 0,
    ) -> npt.NDArray[Any]:
        """Return a new C-contiguous array [num_rows, layers, top_k].

        Args:
            dtype: a dtype that holds the ids.
            axis: "hidden": every decoder layer, zeros in dense ones; "moe": MoE layers only.
            num_rows: number of rows, at least N - 1; None for N - 1.
            missing: filler of missing cells; None if `require_valid` has passed.
            after: filler in MoE layers of rows from N - 1 on: one id, or top_k ids.

        Raises:
            InvalidArgument: if `num_rows` is less than N - 1.
        """
        count = self.num_tokens - 1
        num_rows = count if num_rows is None else check.whole("num_rows", num_rows, count)
        moe = self.layout.moe_layer_ids
        columns = range(len(moe)) if axis == "moe" else moe
        layers = len(moe) if axis == "moe" else self.layout.num_hidden_layers
        out = np.zeros((num_rows, layers, self.layout.top_k), dtype)
        for column, ids, valid in zip(columns, self.topk_ids, self.valid, strict=True):
            out[:count, column] = ids
            if missing is not None:
                out[:count, column][~valid] = missing
            out[count:, column] = after
        return out


def required(plan: FetchPlan) -> npt.NDArray[np.bool_]:
    """Return a mask of local tokens that must have a row: no padding, no last token."""
    last = np.array([s.num_tokens - 1 for s in plan.samples] or [0])
    needed: npt.NDArray[np.bool_] = plan.position_of != last[plan.sample_of]
    return needed & (plan.position_of >= 0)


def as_array(
    data: npt.NDArray[Any], layout: ModelLayout, num_rows: int | None
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Convert the answer of an engine to [rows, MoE layers, top_k].

    Raises:
        InvalidArgument: if the shape does not fit the layout or `num_rows`, or an id is not an
            expert of the model.
    """
    moe = list(layout.moe_layer_ids)
    shapes = [(n, layout.top_k) for n in dict.fromkeys((layout.num_hidden_layers, len(moe)))]
    rows = "rows" if num_rows is None else num_rows
    if data.ndim != 3 or data.shape[1:] not in shapes or num_rows not in (None, len(data)):
        raise InvalidArgument(
            field="shape",
            value=data.shape,
            expected=" or ".join(f"({rows}, {n}, {k})" for n, k in shapes),
        )
    if data.dtype.kind not in "iu":
        raise InvalidArgument(field="dtype", value=str(data.dtype), expected="integers")
    if data.shape[1] == layout.num_hidden_layers:
        data = data[:, moe]
    if data.size and not 0 <= int(data.min()) <= int(data.max()) < layout.num_experts:
        raise InvalidArgument(
            field="ids",
            value=f"between {data.min()} and {data.max()}",
            expected=f"ids in [0, {layout.num_experts})",
        )
    return data.astype(layout.dtype)


def _all_layers(layer_ids: tuple[int, ...], layout: ModelLayout) -> None:
    if layer_ids != layout.moe_layer_ids:
        raise InvalidArgument(
            field="layer_ids", value=layer_ids, expected=f"all MoE layers {layout.moe_layer_ids}"
        )
