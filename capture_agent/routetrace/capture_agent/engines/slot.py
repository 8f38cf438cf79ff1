"""Memory for the rows of one pass on their way from the capture buffer to the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.engines import cells as capture_cells
from routetrace.common.layout import ModelLayout


class _Views(NamedTuple):
    """First rows of the tensors of a slot."""

    num_rows: int
    private: torch.Tensor
    host: torch.Tensor


class Slot:
    """Tensors for the rows of one pass, and the stream that copies them."""

    def __init__(self, layout: ModelLayout, max_num_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self._gather = capture_cells.Gather(layout.num_experts, device)
        shape, dtype = (max_num_tokens, len(layout.layer_ids), layout.top_k), self._gather.dtype
        self.private = torch.empty(shape, dtype=dtype, device=device)
        self.host = self.private
        self._views: _Views | None = None
        self._rows: npt.NDArray[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.host = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif device.type != "cpu":
            self.host = torch.empty(shape, dtype=dtype)

    def send(self, buffer: torch.Tensor, num_rows: int) -> None:
        """Start the copy of the first rows of a pass.

        Enqueues one kernel on the current stream, and one copy on the slot's stream. No kernel
        there: on CUDA, work of another stream makes each kernel of a graph begin later.
        """
        views = self._first(num_rows)
        self._gather(buffer[:, :num_rows], views.private)
        if self._stream is None:
            if views.host is not views.private:
                views.host.copy_(views.private)
            return
        self._gathered.record(torch.cuda.current_stream(buffer.device))
        self._stream.wait_event(self._gathered)
        with torch.cuda.stream(self._stream):
            views.host.copy_(views.private, non_blocking=True)
            self._arrived.record(self._stream)

    def receive(self, num_rows: int) -> npt.NDArray[np.unsignedinteger]:
        """Wait for the first rows, and return them: valid until the slot is used again."""
        if self._stream is not None:
            self._arrived.synchronize()
        if self._rows is None:  # once: it costs as much as a small step
            rows = self.host.numpy()
            self._rows = rows.view(f"u{rows.itemsize}")
        return capture_cells.mark_invalid(self._rows[:num_rows], self._layout)

    def _first(self, num_rows: int) -> _Views:
        """Return the views of so many rows, mostly those of the step before."""
        if self._views is None or self._views.num_rows != num_rows:
            private = self.private[:num_rows]
            host = private if self.host is self.private else self.host[:num_rows]
            self._views = _Views(num_rows, private, host)
        return self._views
