"""Cells of the capture buffer: writes of a pass, and their evaluation.

The buffer is int32 [L, N, K]: layer-major, so that the rows of a layer are contiguous. A cell
starts a pass as POISON. A write makes it _SHIFT * (its content) + id, modulo 2**32. That takes one
kernel, as a copy would, and counts the writes, also where a graph is replayed:

    never written   POISON
    written once    _ONCE + id, for any id of 32 bits
    written twice   the lower half of the first content is the upper half of the second one, and
                    POISON is neither -1, nor an id, nor the number of experts, which some
                    routers choose for padding

An id of -1 is the skip sentinel of routers for rows of padding: such a cell was written, but names
no expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

_SHIFT = 1 << 16
POISON = _SHIFT - 16
#: Most experts that a layout may have.
MOST_EXPERTS = POISON - 1
_ONCE = -16 * _SHIFT
# Two writes never leave an id closer to zero than this.
_FAR = 1 << 19

# Most experts whose ids leave a value of uint8 to mark cells.
_UINT8 = 255

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


class Gather:
    """Copy of the cells of a pass, as ids in few bytes. One kernel."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        #: Of ids, and of `num_experts`, which marks cells without one; int16 has the bits of
        #: uint16, for which torch has few operators.
        self.dtype = torch.uint8 if num_experts <= _UINT8 else torch.int16
        bounds = (_ONCE - 1, _ONCE + num_experts)
        self._least, self._most = (
            torch.tensor(bound, dtype=torch.int32, device=device) for bound in bounds
        )

    def __call__(self, cells: torch.Tensor, out: torch.Tensor) -> None:
        """Copy cells [L, n, K] to `out` [n, L, K].

        A cell that was not written once with the id of an expert becomes `num_experts`, or the
        largest value of the type.
        """
        # The cells are cut to the bounds, and then to their lower bits.
        torch.clamp(cells, self._least, self._most, out=out.transpose(0, 1))


def mark_invalid(rows: npt.NDArray[Any], layout: ModelLayout) -> npt.NDArray[np.unsignedinteger]:
    """Return gathered rows [n, L, K] in the id type, with invalid cells marked, maybe in place.

    All K ids of a token and layer are invalid if one is; a layer is invalid as a whole if its first
    row is, since any second write covers that row, and may be shorter than the first.
    """
    if rows.size and rows.max() >= layout.num_experts:
        bad = np.asarray((rows >= layout.num_experts).any(axis=2))
        bad |= bad[:1]
        rows[bad] = 0 if layout.top_k > 1 else layout.num_experts
    return rows.astype(layout.dtype, copy=False)


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
