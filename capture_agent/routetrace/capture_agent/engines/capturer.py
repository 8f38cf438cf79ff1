"""Copy the expert ids of a forward pass off the device without stalling it.

The routers write into one device buffer with a constant address, through the torch operator
`routetrace::capture`, so that eager mode, compiled graphs and CUDA graphs (whose replay runs no
Python) work alike. Layers do not write one by one: the ids of each are kept by reference, and the
last layer writes all of them at once.

After the pass one kernel copies its rows to a slot, as narrow as they travel, on the stream of the
forward pass; the next pass writes after it. A second stream copies them to pinned host memory. Two
slots alternate, so that the next step never meets a copy in flight.

No row of an earlier pass is taken for one of this pass: before each pass its rows are poisoned, and
a layer that writes twice in a pass is invalid (see `cells`).

Depends on torch and layouts, on no engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.engines import cells as capture_cells
from routetrace.capture_agent.engines.slot import Slot
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

Rows = npt.NDArray[np.unsignedinteger]

_NUM_SLOTS = 2


class PendingRows:
    """Rows of one forward pass that are being copied to the host."""

    def __init__(self, capturer: RoutingCapturer, slot: Slot, num_tokens: int) -> None:
        self._capturer = capturer
        self._slot: Slot | None = slot  # None: released
        self._num_tokens = num_tokens
        self._lock = threading.Lock()
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        """Wait for the copy, and return the rows. Safe from any thread.

        Returns:
            Array [num_tokens, layers, top_k] of `layout.dtype`, owned by the caller. Cells that no
            router wrote, or that hold an id out of range, are invalid: all ids 0 (a valid top-k
            never repeats one), or `num_experts` where top_k is 1. A layer whose first row is
            invalid is invalid as a whole, since any second write of a layer covers that row.

        Raises:
            InvalidArgument: after `hand_to`.
        """
        with self._lock:
            self._fetch()
            return self._kept()

    def hand_to(self, take: Callable[[Rows], object]) -> None:
        """Call `take` with the rows in place, without the copy that `rows` makes.

        The memory is reused after `take` returns. The rows cannot be requested again.
        """
        with self._lock:
            slot = self._slot
            rows = self._kept() if slot is None else self._arrived(slot)
            try:
                take(rows)
            finally:
                self._rows = None
                if slot is not None:
                    self._release(slot)

    def _spare(self) -> None:
        """Release the slot, at the cost of a copy."""
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        if self._slot is not None:
            self._rows = self._arrived(self._slot).copy()
            self._release(self._slot)

    def _kept(self) -> Rows:
        if self._rows is None:
            raise InvalidArgument(field="rows", value="handed over", expected="requested once")
        return self._rows

    def _arrived(self, slot: Slot) -> Rows:
        return slot.receive(self._num_tokens)

    def _release(self, slot: Slot) -> None:
        self._slot = None
        self._capturer._take_back(self, slot)


class RoutingCapturer:
    """Collector of the expert ids of every layer of a forward pass.

    Per pass: `begin` before it; `capture` once per layer, inside the forward, in the order of the
    columns; `snapshot` once, after it. All three run on one thread, and on the stream of the pass.
    `PendingRows.rows` may be called from any thread, at any time.

    The forward may be compiled, and recorded into CUDA graphs, whole or in pieces; those must not
    outlive the capturer. Before a pass is recorded, `forget` drops the ids of one that ended early.

    Args:
        layout: columns of the rows.
        max_num_tokens: maximum tokens of one pass, padding included.
        device: of the model.

    Raises:
        InvalidArgument: if there are more than 65,519 experts; if top_k is 1 and every value of the
            id type is an expert, so that no value is left for invalid cells; or if max_num_tokens
            is not positive.
    """

    def __init__(
        self, layout: ModelLayout, max_num_tokens: int, device: torch.device | str
    ) -> None:
        if layout.top_k == 1 and layout.num_experts > np.iinfo(layout.dtype).max:
            raise InvalidArgument(
                field="num_experts",
                value=layout.num_experts,
                expected=f"at most {np.iinfo(layout.dtype).max} with top_k = 1: "
                "one id must be left to mark cells that were not captured",
            )
        if layout.num_experts > capture_cells.MOST_EXPERTS:
            raise InvalidArgument(
                field="num_experts",
                value=layout.num_experts,
                expected=f"at most {capture_cells.MOST_EXPERTS}",
            )
        if max_num_tokens < 1:
            raise InvalidArgument(
                field="max_num_tokens", value=max_num_tokens, expected="a positive number"
            )
        self.layout = layout
        self.max_num_tokens = max_num_tokens
        self.device = torch.device(device)
        num_layers, top_k = len(layout.layer_ids), layout.top_k
        # Tensors made in inference mode cannot be written outside it.
        with torch.inference_mode(mode=False):
            self._buffer = torch.full(
                (num_layers, max_num_tokens, top_k),
                capture_cells.POISON,
                dtype=torch.int32,
                device=self.device,
            )
            slots = [Slot(layout, max_num_tokens, self.device) for _ in range(_NUM_SLOTS)]
        if self.device.type == "cuda":
            # Otherwise CUDA graphs of torch.compile write to a copy.
            torch._dynamo.mark_static_address(self._buffer)
        self._first: torch.Tensor | None = None  # rows of the last pass
        self._begun: int | None = None  # maximum rows of the pass
        # Layers that are not written yet: columns, ids, torch's version counters of the ids, and
        # the index of the ids by address.
        self._columns: list[int] = []
        self._ids: list[torch.Tensor] = []
        self._versions: list[int | None] = []
        self._places: dict[int, int] = {}
        self._keeps = True
        # Guards the two queues, which `snapshot` and `rows` share.
        self._lock = threading.Lock()
        self._free = deque(slots)
        self._in_flight: deque[PendingRows] = deque()

    def begin(self, num_tokens: int | None = None) -> None:
        """Begin a pass: poison the rows that `snapshot` may read. One fill.

        Args:
            num_tokens: rows of the pass, padding not included; None: not known yet.

        Raises:
            InvalidArgument: if they exceed the buffer.
        """
        most = self.max_num_tokens if num_tokens is None else num_tokens
        self._check_rows(most, 0, self.max_num_tokens)
        self.forget()
        if self._first is None or self._first.shape[1] != most:
            with torch.inference_mode(mode=False):  # a view made there could only be filled there
                self._first = self._buffer[:, :most]  # once: it costs as much as the fill
        self._first.fill_(capture_cells.POISON)
        self._begun = most

    def forget(self) -> None:
        """Drop the ids of layers that are not written yet, after a pass that ended early."""
        if self._ids:
            self._columns, self._ids, self._versions, self._places = [], [], [], {}

    def capture(self, column: int, topk_ids: torch.Tensor) -> None:
        """Take the ids of one layer. The last layer enqueues two kernels for all layers.

        The ids are kept by reference until then. Where they change before (routers that share an
        output, code that changes ids in place) those layers are missing in that pass, and each
        layer is written at once from the next pass on.

        Args:
            column: the layer's column in the layout.
            topk_ids: integer ids [n, top_k or more], of 64 bits the lower 32; columns after the
                first top_k (fused shared experts) are cut off. The n rows are the first n tokens of
                the pass.

        Raises:
            InvalidArgument: if the column is out of range, or the ids have another shape or type.
        """
        top_k = self.layout.top_k
        if not 0 <= column < len(self.layout.layer_ids):
            raise InvalidArgument(
                field="column", value=column, expected=f"[0, {len(self.layout.layer_ids)})"
            )
        if topk_ids.dim() != 2 or topk_ids.shape[1] < top_k:
            raise InvalidArgument(
                field="topk_ids",
                value=f"shape {tuple(topk_ids.shape)}",
                expected=f"[at most {self.max_num_tokens}, {top_k} or more]",
            )
        if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
            raise InvalidArgument(
                field="topk_ids", value=str(topk_ids.dtype), expected="an integer dtype"
            )
        if self._columns and column <= self._columns[-1]:
            self._write()  # a layer that is written twice, which its cells will show
        if torch.compiler.is_compiling():
            # The compiler removes this copy where the ids do not change.
            self._ids.append(topk_ids.clone())
            self._versions.append(None)
        else:
            self._keep(topk_ids)
        self._columns.append(column)
        if column == len(self.layout.layer_ids) - 1 or not self._keeps:
            self._write()

    def _keep(self, topk_ids: torch.Tensor) -> None:
        n = topk_ids.shape[0]
        if n > self.max_num_tokens:
            raise capture_cells.too_many_rows(n, self.max_num_tokens)
        if n:
            place = topk_ids.data_ptr()
            if (other := self._places.setdefault(place, len(self._ids))) < len(self._ids):
                self._spoil(other)
        self._ids.append(topk_ids)
        # Tensors of inference mode have no version counter.
        self._versions.append(None if topk_ids.is_inference() else topk_ids._version)

    def _spoil(self, index: int) -> None:
        """Invalidate a layer that is kept: its ids have been overwritten."""
        self._ids[index] = torch.full_like(self._ids[index], -1)
        self._versions[index] = None
        self._keeps = False

    def _write(self) -> None:
        """Write the layers that are kept."""
        if not self._columns:
            return
        if not torch.compiler.is_compiling():
            for index, version in enumerate(self._versions):
                if version is not None and self._ids[index]._version != version:
                    self._spoil(index)
        columns, ids = self._columns, self._ids
        self.forget()
        torch.ops.routetrace.capture(self._buffer, columns, ids)

    def faults(self, num_tokens: int) -> dict[int, str]:
        """Return the columns that the latest pass did not write correctly, with the fault.

        Waits for the device: for a check at start, with a pass of the model over some tokens
        between `begin` and this. An id of -1, the skip sentinel of routers for padding, is valid.

        Args:
            num_tokens: routed tokens of the pass, padding of dummy batches included.

        Returns:
            By column: "never written", "written twice", or "out of range" with an id.

        Raises:
            InvalidArgument: if num_tokens exceeds the pass, or `begin` was not called.
        """
        self._check_pass(num_tokens, 1)
        self._write()
        return capture_cells.faults(self._buffer[:, :num_tokens], self.layout.num_experts)

    def fired(self, num_tokens: int) -> list[int]:
        """Return the columns that are not in `faults`, ascending."""
        faults = self.faults(num_tokens)
        return [column for column in range(len(self.layout.layer_ids)) if column not in faults]

    def snapshot(self, num_tokens: int) -> PendingRows:
        """Start the copy of the rows of the latest pass.

        Never waits for the device, unless `_NUM_SLOTS` earlier passes have not been read: then it
        first fetches the oldest.

        Args:
            num_tokens: tokens of the pass; rows after them (graph padding) are dropped.

        Raises:
            InvalidArgument: if num_tokens exceeds the pass, or `begin` was not called.
        """
        self._check_pass(num_tokens, 0)
        self._write()  # the pass may have skipped its last layer
        slot = self._take_slot()
        self._begun = None
        try:
            slot.send(self._buffer, num_tokens)
        except BaseException:  # such as device memory exhausted
            with self._lock:
                self._free.append(slot)
            raise
        pending = PendingRows(self, slot, num_tokens)
        with self._lock:
            self._in_flight.append(pending)
        return pending

    def _check_pass(self, num_tokens: int, least: int) -> None:
        if self._begun is None:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected="rows of a pass, begun by begin()"
            )
        self._check_rows(num_tokens, least, self._begun)

    def _check_rows(self, num_tokens: int, least: int, most: int) -> None:
        if not least <= num_tokens <= most:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected=f"[{least}, {most}]"
            )

    def _take_slot(self) -> Slot:
        while True:
            with self._lock:
                if self._free:
                    return self._free.popleft()
                oldest = self._in_flight[0]
            oldest._spare()  # not under the lock: another thread may be reading it

    def _take_back(self, pending: PendingRows, slot: Slot) -> None:
        with self._lock:
            self._in_flight.remove(pending)
            self._free.append(slot)
