"""What the routers of one forward pass chose, taken off the device without stalling it.

The routers write into one device buffer whose address never changes. They do so through an operator
that torch knows, `routetrace::capture`, so that eager mode, compiled graphs and CUDA graphs (whose
replay runs no Python) do the same. After the pass its rows are narrowed into a private device
buffer, on the stream of the forward pass; only then may the next pass write. From there they travel
to pinned host memory on a stream of their own. Two such pairs take turns, so that the next step
never meets a copy in flight.

Nothing of an earlier pass is taken for this one's: before each pass the whole buffer is poisoned,
and a layer that writes twice in a pass is not believed (see `_write`).

Knows torch and layouts; knows no engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

Rows = npt.NDArray[np.unsignedinteger]

# What a cell of the buffer holds before its pass, and what is added to the id that is written there
# first: _SHIFT * _POISON modulo 2**32.
_POISON = (1 << 16) - 2
_SHIFT = 1 << 16
_ONCE = -2 * _SHIFT
_NUM_SLOTS = 2


def _write(buffer: torch.Tensor, column: int, topk_ids: torch.Tensor) -> None:
    """Puts ids [n, K or more] into the first n rows of a column of int32 [L, N, K].

    A cell becomes _SHIFT * (what it held) + id, modulo 2**32. That takes one kernel, as a copy
    would, and shows how often a cell was written, also where a graph is replayed. Written once, it
    is id + _ONCE, for any id of 32 bits. Written again, its upper half is the lower half of what
    was written before, and _POISON is no id (unless there are 65535 experts) nor -1.
    """
    n, (_, most, top_k) = topk_ids.shape[0], buffer.shape
    if n > most:
        raise InvalidArgument(
            field="topk_ids", value=f"{n} rows", expected=f"at most {most}, as max_num_tokens says"
        )
    ids = topk_ids[:, :top_k].to(buffer.device)
    if ids.dtype in _NOT_ADDED:
        ids = ids.to(torch.int32)
    cells = buffer[column, :n]
    torch.add(ids, cells, alpha=_SHIFT, out=cells)


# Dtypes that torch can hold and convert, but not compute with.
_NOT_ADDED = (torch.uint16, torch.uint32, torch.uint64)

# Not torch.library.custom_op, whose wrappers would more than double what a call costs.
_LIBRARY = torch.library.Library("routetrace", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("capture(Tensor(a!) buffer, int column, Tensor topk_ids) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("capture", _write, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("routetrace::capture", lambda *_: None, lib=_LIBRARY)


class PendingRows:
    """Rows of one forward pass, on their way to the host."""

    def __init__(self, capturer: RoutingCapturer, slot: _Slot, num_tokens: int) -> None:
        self._capturer = capturer
        self._slot: _Slot | None = slot  # None: it is free again
        self._num_tokens = num_tokens
        self._lock = threading.Lock()
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        """The rows, once their copy has arrived (it is waited for). From any thread.

        Returns:
            Array [num_tokens, layers, top_k] of `layout.dtype`, the caller's own. Cells that no
            router wrote, or that hold an id out of range, are invalid: all ids 0 (a valid top-k
            never repeats one), or `num_experts` where top_k is 1. So is all of a layer whose first
            row is, since that is how a layer shows that it was called twice.

        Raises:
            InvalidArgument: if they were handed over.
        """
        with self._lock:
            self._fetch()
            return self._kept()

    def hand_to(self, take: Callable[[Rows], object]) -> None:
        """Calls `take` with what `rows()` gives, but where it arrived: there is no copy of it.

        `take` copies what it keeps: after it, the memory is another pass's. Nobody can ask for the
        rows again.
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
        """Has the slot back, at the price of a copy."""
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        if self._slot is not None:
            self._rows = self._arrived(self._slot).copy()
            self._release(self._slot)

    def _kept(self) -> Rows:
        if self._rows is None:
            raise InvalidArgument(field="rows", value="handed over", expected="asked for once")
        return self._rows

    def _arrived(self, slot: _Slot) -> Rows:
        rows: Rows = slot.receive(self._num_tokens).view(self._capturer.layout.dtype)
        return rows

    def _release(self, slot: _Slot) -> None:
        self._slot = None
        self._capturer._take_back(self, slot)


class RoutingCapturer:
    """Collects the expert ids of every layer of a forward pass.

    Per pass: `begin` before it; `capture` once per layer, inside the forward; `snapshot` once,
    after it. They belong to one thread, and to the stream that the pass runs on. Any thread may ask
    for the rows (`PendingRows.rows`), at any time.

    The forward may be compiled, and recorded into CUDA graphs; those must not outlive the capturer.

    Args:
        layout: columns of the rows.
        max_num_tokens: most tokens of one pass, padding included.
        device: where the model runs.

    Raises:
        InvalidArgument: if top_k is 1 and every value of the id type is an expert, so that an
            invalid cell cannot be told from a valid one; or if max_num_tokens is not positive.
    """

    def __init__(
        self, layout: RoutingLayout, max_num_tokens: int, device: torch.device | str
    ) -> None:
        if layout.top_k == 1 and layout.num_experts > np.iinfo(layout.dtype).max:
            raise InvalidArgument(
                field="num_experts",
                value=layout.num_experts,
                expected=f"at most {np.iinfo(layout.dtype).max} with top_k = 1: "
                "an id has to be left to mark cells that were not captured",
            )
        if max_num_tokens < 1:
            raise InvalidArgument(
                field="max_num_tokens", value=max_num_tokens, expected="a positive number"
            )
        self.layout = layout
        self.max_num_tokens = max_num_tokens
        self.device = torch.device(device)
        num_layers, top_k = len(layout.layer_ids), layout.top_k
        shape = (max_num_tokens, num_layers, top_k)
        # Torch computes little with uint16: int16 of the same bits stands in for it.
        dtype = torch.uint8 if layout.dtype.itemsize == 1 else torch.int16
        # Tensors that are made in inference mode could not be written outside it.
        with torch.inference_mode(mode=False):
            # Layer-major, so that what a layer writes is contiguous.
            self._buffer = torch.full(
                (num_layers, max_num_tokens, top_k), _POISON, dtype=torch.int32, device=self.device
            )
            slots = [_Slot(shape, dtype, self.device) for _ in range(_NUM_SLOTS)]
        if self.device.type == "cuda":
            # Or torch.compile's own CUDA graphs would write to a copy of theirs.
            torch._dynamo.mark_static_address(self._buffer)
        self._begun = False
        # Of the two queues, which `snapshot` and `rows` share.
        self._lock = threading.Lock()
        self._free = deque(slots)
        self._in_flight: deque[PendingRows] = deque()

    def begin(self) -> None:
        """A pass begins: forgets what the buffer holds. Enqueues one fill of all of it.

        All of it, since nobody knows how many rows a replayed graph writes.
        """
        self._buffer.fill_(_POISON)
        self._begun = True

    def capture(self, column: int, topk_ids: torch.Tensor) -> None:
        """Takes what one layer chose. Enqueues one kernel and never waits.

        Args:
            column: the layer's column in the layout.
            topk_ids: integer ids [n, top_k or more], of 64 bits the lower 32; columns after the
                first top_k (fused shared experts) are cut off. The n rows are the first n tokens of
                the pass.

        Raises:
            InvalidArgument: if the column or the shape, rank or type of the ids is another.
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
        torch.ops.routetrace.capture(self._buffer, column, topk_ids)

    def fired(self, num_tokens: int) -> list[int]:
        """Columns that the pass which has just ended wrote completely, and once.

        Waits for the device: for a check at start, with a pass of the model over some tokens
        between `begin` and this.

        Args:
            num_tokens: tokens of the pass, without padding.

        Returns:
            The columns, ascending, whose first `num_tokens` rows all hold ids of experts.

        Raises:
            InvalidArgument: if no such pass can have been, or `begin` was not called.
        """
        self._check_pass(num_tokens, 1)
        _, bad = self._ids(num_tokens)
        whole: list[int] = (~bad.flatten(1).any(dim=1)).nonzero().flatten().tolist()
        return whole

    def snapshot(self, num_tokens: int) -> PendingRows:
        """Sends the rows of the pass that has just ended on their way.

        Never waits for the device, unless the rows of `_NUM_SLOTS` earlier passes have not been
        asked for: then it first fetches the oldest.

        Args:
            num_tokens: tokens of the pass; rows after them (graph padding) are dropped.

        Raises:
            InvalidArgument: if the buffer does not hold so many, or `begin` was not called.
        """
        self._check_pass(num_tokens, 0)
        slot = self._take_slot()
        self._begun = False
        try:
            self._narrow(num_tokens, slot.private[:num_tokens])
            slot.send(num_tokens)
        except BaseException:  # the device's memory is full, say
            with self._lock:
                self._free.append(slot)
            raise
        pending = PendingRows(self, slot, num_tokens)
        with self._lock:
            self._in_flight.append(pending)
        return pending

    def _check_pass(self, num_tokens: int, least: int) -> None:
        if not least <= num_tokens <= self.max_num_tokens:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected=f"[{least}, {self.max_num_tokens}]"
            )
        if not self._begun:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected="rows of a pass, begun by begin()"
            )

    def _take_slot(self) -> _Slot:
        while True:
            with self._lock:
                if self._free:
                    return self._free.popleft()
                oldest = self._in_flight[0]
            oldest._spare()  # not under the lock: it may wait for another thread that asked first

    def _ids(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 [L, n, K] as they were written, and which cells are invalid, bool [L, n, 1]."""
        ids = self._buffer[:, :num_tokens] - _ONCE
        bad = ((ids < 0) | (ids >= self.layout.num_experts)).any(dim=-1, keepdim=True)
        # Every write of a layer has the first row; later ones need not be as long as earlier ones.
        return ids, bad | bad[:, :1]

    def _narrow(self, num_tokens: int, out: torch.Tensor) -> None:
        """Buffer -> out [n, L, K] of the id type, invalid cells marked."""
        ids, bad = self._ids(num_tokens)
        ids = ids.masked_fill(bad, 0 if self.layout.top_k > 1 else self.layout.num_experts)
        if out.dtype == torch.int16:
            # The low halves, as they are: a cast to int16 may saturate above 32767.
            ids = ids.view(torch.int16)[..., ::2]
        out.copy_(ids.transpose(0, 1))

    def _take_back(self, pending: PendingRows, slot: _Slot) -> None:
        with self._lock:
            self._in_flight.remove(pending)
            self._free.append(slot)


class _Slot:
    """A private device buffer, and the host memory that it is copied to on a stream of its own."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.private = torch.empty(shape, dtype=dtype, device=device)
        self.host = self.private
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.host = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif device.type != "cpu":
            self.host = torch.empty(shape, dtype=dtype)

    def send(self, num_rows: int) -> None:
        """Copies the first rows, once what the current stream does with them is done."""
        if self.host is self.private:
            return
        host, private = self.host[:num_rows], self.private[:num_rows]
        if self._stream is None:
            host.copy_(private)
            return
        self._stream.wait_stream(torch.cuda.current_stream(private.device))
        with torch.cuda.stream(self._stream):
            host.copy_(private, non_blocking=True)
            self._arrived.record(self._stream)

    def receive(self, num_rows: int) -> npt.NDArray[Any]:
        """The first rows, once they have arrived; a view."""
        if self._stream is not None:
            self._arrived.synchronize()
        return self._rows[:num_rows]

    @cached_property
    def _rows(self) -> npt.NDArray[Any]:
        # Once: what torch takes for a slice as an array is as much as a small step.
        return self.host.numpy()
