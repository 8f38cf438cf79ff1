"""Cells of the capture buffer: writes of a pass, and their evaluation.

The buffer is int32 [L, N, K]: layer-major, so that the rows of a layer are contiguous. A cell
starts a pass as POISON. A write makes it _SHIFT * (its content) + id, modulo 2**32. That takes one
kernel, as a copy would, and counts the writes, also where a graph is replayed:

    never written   POISON
    written once    _ONCE + id, for any id of 32 bits
    written twice   the lower half of the first content is the upper half of the second one, and
                    POISON is neither -1 nor an id (unless there are more than 65520 experts)

An id of -1 is the skip sentinel of routers for rows of padding: such a cell was written, but names
no expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

_SHIFT = 1 << 16
POISON = _SHIFT - 16
_ONCE = -16 * _SHIFT
_LOWEST = -(1 << 31)
# Two writes never leave an id closer to zero than this.
_FAR = 1 << 19

# Dtypes that torch can hold and convert, but not compute with.
_NOT_ADDED = (torch.uint16, torch.uint32, torch.uint64)


def write(buffer: torch.Tensor, columns: Sequence[int], topk_ids: Sequence[torch.Tensor]) -> None:
    """Write ids [n, K or more] of several layers into the first n rows of their columns.

    Takes two kernels where the columns are consecutive and their ids have one shape and dtype, as
    in a pass that no layer skips.

    Raises:
        InvalidArgument: if there are more rows than the buffer has.
    """
    for first, layers in _stretches(buffer, columns, topk_ids):
        n = layers[0].shape[0]
        cells = buffer[first : first + len(layers), :n]
        ids = torch.stack(layers) if len(layers) > 1 else layers[0][None]
        torch.add(ids, cells, alpha=_SHIFT, out=cells)


def _stretches(
    buffer: torch.Tensor, columns: Sequence[int], topk_ids: Sequence[torch.Tensor]
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield consecutive columns whose ids can be stacked: the first column, and the ids."""
    _, most, top_k = buffer.shape
    first, layers = 0, list[torch.Tensor]()
    for column, given in zip(columns, topk_ids, strict=True):
        ids = given[:, :top_k].to(buffer.device)
        if ids.shape[0] > most:
            raise too_many_rows(ids.shape[0], most)
        if ids.dtype in _NOT_ADDED:
            ids = ids.to(torch.int32)
        if layers and (
            column != first + len(layers)
            or (ids.shape, ids.dtype) != (layers[0].shape, layers[0].dtype)
        ):
            yield first, layers
            layers = []
        if not layers:
            first = column
        layers.append(ids)
    if layers:
        yield first, layers


def too_many_rows(n: int, most: int) -> InvalidArgument:
    """Return the error for more rows than the buffer has."""
    return InvalidArgument(
        field="topk_ids", value=f"{n} rows", expected=f"at most {most}, the max_num_tokens"
    )


#: Schema of the operator. Code compiled with another schema must not be reused.
OPERATOR = "capture(Tensor(a!) buffer, int[] columns, Tensor[] topk_ids) -> ()"

# Not torch.library.custom_op, whose wrappers more than double the cost of a call.
_LIBRARY = torch.library.Library("routetrace", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(OPERATOR)  # type: ignore[no-untyped-call]
_LIBRARY.impl("capture", write, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("routetrace::capture", lambda *_: None, lib=_LIBRARY)


def lift(cells: torch.Tensor, out: torch.Tensor) -> None:
    """Copy cells so that those written once hold _LOWEST + id. One kernel.

    All others are then greater than any of these, so that `narrow` needs one comparison.
    """
    torch.add(cells, _LOWEST - _ONCE, out=out)


def narrow(
    lifted: torch.Tensor, layout: ModelLayout, marker: torch.Tensor, out: torch.Tensor
) -> None:
    """Turn lifted cells [L, n, K] into rows [n, L, K] of the id type, invalid cells marked.

    Args:
        lifted: output of `lift`, contiguous along K.
        layout: number of experts.
        marker: value of invalid cells, a scalar of the dtype of `out`.
        out: uint8, or int16 for the bits of uint16.
    """
    bad = lifted.amax(dim=-1, keepdim=True) >= _LOWEST + layout.num_experts
    # Every write of a layer covers the first row; a later one may be shorter than an earlier one.
    bad = bad | bad[:, :1]
    # The low bits unchanged: a cast to int16 may saturate above 32767.
    low = lifted.view(out.dtype)[..., :: 4 // out.element_size()]
    torch.where(bad, marker, low, out=out.transpose(0, 1))


def faults(cells: torch.Tensor, num_experts: int) -> dict[int, str]:
    """Return the faults of the cells [L, n, K] of a pass, by column. Waits for the device.

    A cell that a router wrote once with -1 has no fault.
    """
    held = cells.cpu().flatten(1).to(torch.int64)
    ids = (held - _ONCE + (1 << 31)) % (1 << 32) - (1 << 31)
    never, far = held == POISON, ids.abs() >= _FAR
    outside = (ids < -1) | (ids >= num_experts)
    found = {}
    for column in range(len(held)):
        if (far & ~never)[column].any():
            found[column] = "written twice"
        elif never[column].any():
            found[column] = "never written"
        elif outside[column].any():
            one = ids[column][outside[column]][0].item()
            found[column] = f"out of range: id {one} of {num_experts} experts"
    return found
