"""Arrays, masks and checks that several frameworks share."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.plan import FetchPlan
from routetrace.client.samples import SampleRows
from routetrace.common.errors import Incomplete, InvalidArgument
from routetrace.common.layout import ModelLayout

LayerAxis = Literal["hidden", "moe"]


def require_valid(sample: SampleRows, framework: str) -> None:
    """Require every cell of a sample.

    Raises:
        Incomplete: if a cell is missing, with the consequence in `framework`.
    """
    if sample.valid.all():
        return
    layer, position = (int(i) for i in np.argwhere(~sample.valid)[0])
    raise Incomplete(
        f"{sample.name} lacks {int((~sample.valid).sum())} of {sample.valid.size} cells, the first "
        f"at position {position} of layer {sample.layout.moe_layer_ids[layer]}"
        f"{''.join(f'; {m}' for m in sample.missing[:4])}; {framework} cannot mark missing rows, "
        "and would train on a filler",
        missing=sample.missing,
    )


def array_of(
    sample: SampleRows,
    dtype: npt.DTypeLike,
    axis: LayerAxis,
    *,
    num_rows: int | None = None,
    missing: int | None = None,
    after: npt.ArrayLike = 0,
) -> npt.NDArray[Any]:
    """Return a new C-contiguous array [num_rows, layers, top_k].

    Args:
        sample: rows of the sample.
        dtype: a dtype that holds the ids.
        axis: "hidden": every decoder layer, zeros in dense ones; "moe": MoE layers only.
        num_rows: number of rows, at least N - 1; None for N - 1.
        missing: filler of missing cells; None if `require_valid` has passed.
        after: filler in MoE layers of rows from N - 1 on: one id, or top_k ids.

    Raises:
        InvalidArgument: if `num_rows` is less than N - 1.
    """
    count = sample.num_tokens - 1
    num_rows = count if num_rows is None else check.whole("num_rows", num_rows, count)
    moe = sample.layout.moe_layer_ids
    columns = range(len(moe)) if axis == "moe" else moe
    layers = len(moe) if axis == "moe" else sample.layout.num_hidden_layers
    out = np.zeros((num_rows, layers, sample.layout.top_k), dtype)
    for column, ids, valid in zip(columns, sample.topk_ids, sample.valid, strict=True):
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
