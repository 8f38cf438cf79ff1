"""Checks of the ids that are given to `replay`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.client.rows import Rows
from routetrace.codec.frame import invalid_rows
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers._force import Given

Ids = torch.Tensor | npt.NDArray[Any]


def of_rows(layout: ModelLayout, rows: Rows) -> Given:
    """Check the rows; the result shares their memory."""
    planned = rows.plan.layout
    if (planned.num_experts, planned.top_k) != (layout.num_experts, layout.top_k):
        raise InvalidArgument(
            field="plan.layout",
            value=f"top-{planned.top_k} of {planned.num_experts} experts",
            expected=f"top-{layout.top_k} of {layout.num_experts}, as the model's routers choose",
        )
    if any(span.stride != 1 for span in rows.plan.spans):
        raise InvalidArgument(
            field="plan",
            value="tokens flattened by sequence",
            expected='Rank(flatten="batch"), as the model\'s routers see tokens',
        )
    for column, layer in enumerate(rows.layer_ids):
        ids, valid = rows.topk_ids[column], rows.valid[column]
        bad = invalid_rows(ids[:, None], layout.num_experts) & valid
        if bad.any():
            token = int(bad.argmax())
            raise _bad_ids(ids[token].tolist(), token, layer, layout)
    # torch supports few operations on uint16: carry its bits as int16.
    narrow = rows.topk_ids if rows.topk_ids.itemsize == 1 else rows.topk_ids.view(np.int16)
    return Given(_shared(narrow), _shared(rows.valid))


def _shared(array: npt.NDArray[Any]) -> torch.Tensor:
    # torch warns of read-only memory.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _bad_ids(ids: list[int], token: int, layer: int, layout: ModelLayout) -> InvalidArgument:
    return InvalidArgument(
        field="topk_ids",
        value=f"{ids} for token {token} at layer {layer}",
        expected=f"distinct ids in [0, {layout.num_experts}) in every valid cell",
    )


def of_arrays(layout: ModelLayout, topk_ids: Ids, layer_ids: list[int], valid: Ids | None) -> Given:
    """Check ids; the result is a narrow copy in layer-major order."""
    if isinstance(topk_ids, np.ndarray) and topk_ids.dtype.kind == "u" and topk_ids.itemsize > 1:
        topk_ids = topk_ids.astype(np.int64)  # torch supports few operations on wide unsigned types
    ids = torch.as_tensor(topk_ids)
    shape = (len(layer_ids), layout.top_k)
    if ids.dim() not in (3, 4) or ids.shape[-2:] != shape or not _is_integer(ids):
        raise InvalidArgument(
            field="topk_ids",
            value=f"{ids.dtype} {tuple(ids.shape)}",
            expected=f"integers [batch, seq, {shape[0]}, {shape[1]}] or the same without batch",
        )
    if valid is None:
        mask = torch.ones(ids.shape[:-1], dtype=torch.bool, device=ids.device)
    else:
        mask = torch.as_tensor(valid, device=ids.device)
        if mask.shape == ids.shape[:-2]:
            mask = mask[..., None].expand(ids.shape[:-1])
        if mask.shape != ids.shape[:-1] or mask.dtype != torch.bool:
            raise InvalidArgument(
                field="valid",
                value=f"{mask.dtype} {tuple(mask.shape)}",
                expected=f"bool {tuple(ids.shape[:-1])} or {tuple(ids.shape[:-2])}",
            )
    ids, mask = ids.reshape(-1, *shape), mask.reshape(-1, shape[0])
    ordered = ids.sort(dim=-1).values
    bad = (ordered[..., 0] < 0) | (ordered[..., -1] >= layout.num_experts)
    bad |= (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    bad &= mask
    if bool(bad.any()):
        token, column = bad.nonzero()[0].tolist()
        raise _bad_ids(ids[token, column].tolist(), token, layer_ids[column], layout)
    narrow = torch.uint8 if layout.num_experts <= 256 else torch.int16
    ids, mask = ids.to(narrow).transpose(0, 1), mask.transpose(0, 1)
    return Given(ids.contiguous(), mask.contiguous())


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
