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
    lifted: torch.Tensor
    private: torch.Tensor
    host: torch.Tensor


class Slot:
    """Tensors for the rows of one pass, and the stream that copies them."""

    def __init__(self, layout: ModelLayout, max_num_tokens: int, device: torch.device) -> None:
        num_layers, top_k = len(layout.layer_ids), layout.top_k
        # Torch has few operators for uint16: int16 with the same bits replaces it.
        dtype = torch.uint8 if layout.dtype.itemsize == 1 else torch.int16
        shape = (max_num_tokens, num_layers, top_k)
        self._layout = layout
        marker = np.array(0 if top_k > 1 else layout.num_experts, layout.dtype)
        self._marker = torch.tensor(marker.view(f"i{marker.itemsize}")).to(dtype).to(device)
        self._lifted = torch.empty(
            (num_layers, max_num_tokens, top_k), dtype=torch.int32, device=device
        )
        self.private = torch.empty(shape, dtype=dtype, device=device)
        self.host = self.private
        self._views: _Views | None = None
        self._rows: npt.NDArray[Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.host = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif device.type != "cpu":
            self.host = torch.empty(shape, dtype=dtype)

    def send(self, buffer: torch.Tensor, num_rows: int) -> None:
        """Start the copy of the first rows of a pass.

        Enqueues one kernel on the current stream, and the rest on the slot's stream.
        """
        views = self._first(num_rows)
        capture_cells.lift(buffer[:, :num_rows], views.lifted)
        if self._stream is None:
            self._narrow(views)
            if views.host is not views.private:
                views.host.copy_(views.private)
            return
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            self._narrow(views)
            views.host.copy_(views.private, non_blocking=True)
            self._arrived.record(self._stream)

    def receive(self, num_rows: int) -> npt.NDArray[Any]:
        """Wait for the first rows, and return a view of them."""
        if self._stream is not None:
            self._arrived.synchronize()
        if self._rows is None:  # once: it costs as much as a small step
            self._rows = self.host.numpy()
        return self._rows[:num_rows]

    def _narrow(self, views: _Views) -> None:
        capture_cells.narrow(views.lifted, self._layout, self._marker, views.private)

    def _first(self, num_rows: int) -> _Views:
        """Return the views of so many rows, mostly those of the step before."""
        if self._views is None or self._views.num_rows != num_rows:
            private = self.private[:num_rows]
            host = private if self.host is self.private else self.host[:num_rows]
            self._views = _Views(num_rows, self._lifted[:, :num_rows], private, host)
        return self._views
