"""Masks and checks that several frameworks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client.plan import FetchPlan
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout


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
