"""What the routers of one forward pass chose, taken off the device without stalling it.

The routers write into one device buffer whose address never changes, so that the writes may be
part of a CUDA graph. After the pass its rows are narrowed into a private device buffer, on the
stream of the forward pass; only then may the next pass write. From there they travel to pinned host
memory on a stream of their own. Two such pairs take turns, so that the next step never meets a copy
in flight.

Knows torch and layouts; knows no engine.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

Rows = npt.NDArray[np.unsignedinteger]

# Marks a cell that no router wrote.
_POISON = -1
_NUM_SLOTS = 2


class PendingRows:
    """Rows of one forward pass, on their way to the host."""

    def __init__(self, capturer: RoutingCapturer, slot: _Slot, num_tokens: int) -> None:
        self._capturer = capturer
        self._slot = slot
        self._num_tokens = num_tokens
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        """The rows, once their copy has arrived (it is waited for).

        Returns:
            Array [num_tokens, layers, top_k] of `layout.dtype`, the caller's own. Cells that no
            router wrote, or that hold an id out of range, are invalid: all ids 0 (a valid top-k
            never repeats one), or `num_experts` where top_k is 1.
        """
        if self._rows is None:
            self._rows = self._capturer._collect(self, self._slot, self._num_tokens)
        return self._rows


class RoutingCapturer:
    """Collects the expert ids of every layer of a forward pass.

    Per pass: `capture` once per layer, inside the forward; `snapshot` once, after it. Not safe to
    use from several threads at once.

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
        # Layer-major, so that what a layer writes is contiguous.
        self._buffer = torch.full(
            (num_layers, max_num_tokens, top_k), _POISON, dtype=torch.int32, device=self.device
        )
        # Rows at this index and after have never been written. Not reset with the buffer: the
        # writes of a replayed CUDA graph do not pass through `capture` again.
        self._high_water = 0
        shape = (max_num_tokens, num_layers, top_k)
        # Torch computes little with uint16: int16 of the same bits stands in for it.
        dtype = torch.uint8 if layout.dtype.itemsize == 1 else torch.int16
        slots = [_Slot(shape, dtype, self.device) for _ in range(_NUM_SLOTS)]
        self._free = deque(slots)
        self._in_flight: deque[PendingRows] = deque()
        self._copy_stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def capture(self, column: int, topk_ids: torch.Tensor) -> None:
        """Takes what one layer chose. Enqueues one copy and never waits.

        Args:
            column: the layer's column in the layout.
            topk_ids: integer ids [n, top_k or more]; columns after the first top_k (fused shared
                experts) are cut off. The n rows are the first n tokens of the pass.

        Raises:
            InvalidArgument: if the column or the shape, rank or type of the ids is another.
        """
        top_k = self.layout.top_k
        if not 0 <= column < len(self.layout.layer_ids):
            raise InvalidArgument(
                field="column", value=column, expected=f"[0, {len(self.layout.layer_ids)})"
            )
        n = topk_ids.shape[0] if topk_ids.dim() == 2 else -1
        if not 0 <= n <= self.max_num_tokens or topk_ids.shape[1] < top_k:
            raise InvalidArgument(
                field="topk_ids",
                value=f"shape {tuple(topk_ids.shape)}",
                expected=f"[at most {self.max_num_tokens}, {top_k} or more]",
            )
        if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
            raise InvalidArgument(
                field="topk_ids", value=str(topk_ids.dtype), expected="an integer dtype"
            )
        self._high_water = max(self._high_water, n)
        self._buffer[column, :n].copy_(topk_ids[:, :top_k], non_blocking=True)

    def clear(self) -> None:
        """Forgets what was captured since the last snapshot: for a pass that was given up."""
        self._buffer[:, : self._high_water].fill_(_POISON)

    def snapshot(self, num_tokens: int) -> PendingRows:
        """Sends the rows of the pass that has just ended on their way, and clears the buffer.

        Never waits for the device, unless the rows of `_NUM_SLOTS` earlier passes have not been
        asked for: then it first fetches the oldest.

        Args:
            num_tokens: tokens of the pass; rows after them (graph padding) are dropped.

        Raises:
            InvalidArgument: if the buffer does not hold so many.
        """
        if not 0 <= num_tokens <= self.max_num_tokens:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected=f"[0, {self.max_num_tokens}]"
            )
        if not self._free:
            self._in_flight[0].rows()
        slot = self._free.popleft()
        self._narrow(num_tokens, slot.private[:num_tokens])
        self.clear()
        host, private = slot.host[:num_tokens], slot.private[:num_tokens]
        if self._copy_stream is not None and slot.event is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copy_stream):
                host.copy_(private, non_blocking=True)
                slot.event.record(self._copy_stream)
        elif slot.host is not slot.private:
            host.copy_(private)
        pending = PendingRows(self, slot, num_tokens)
        self._in_flight.append(pending)
        return pending

    def _narrow(self, num_tokens: int, out: torch.Tensor) -> None:
        """Buffer int32 [L, n, K] -> out [n, L, K] of the id type, invalid cells marked."""
        ids = self._buffer[:, :num_tokens]
        mark = 0 if self.layout.top_k > 1 else self.layout.num_experts
        bad = ((ids < 0) | (ids >= self.layout.num_experts)).any(dim=-1, keepdim=True)
        ids = ids.masked_fill(bad, mark)
        if out.dtype == torch.int16:
            # The low halves, as they are: a cast to int16 may saturate above 32767.
            ids = ids.view(torch.int16)[..., ::2]
        out.copy_(ids.transpose(0, 1))

    def _collect(self, pending: PendingRows, slot: _Slot, num_tokens: int) -> Rows:
        if slot.event is not None:
            slot.event.synchronize()
        rows = slot.host[:num_tokens].numpy().view(self.layout.dtype).copy()
        self._in_flight.remove(pending)
        self._free.append(slot)
        return rows


class _Slot:
    """A private device buffer and the host memory that it is copied to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.private = torch.empty(shape, dtype=dtype, device=device)
        self.event: torch.cuda.Event | None = None
        if device.type == "cpu":
            self.host = self.private
        else:
            self.host = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        if device.type == "cuda":
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
