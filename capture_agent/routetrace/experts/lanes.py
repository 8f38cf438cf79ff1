"""Order of copies and kernels on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lanes:
    """Order of copies and kernels on a device that runs all calls in order."""

    def copying(self, after: Iterable[Any]) -> AbstractContextManager[Any]:
        """Return a context whose copies run after these marks."""
        del after
        return nullcontext()

    def copied(self) -> Any:
        """Return a mark after the copies so far."""

    def kernels(self, after: Any) -> Any:
        """Return the lane of the next kernels, which wait for this mark; None has passed."""

    def used(self, lane: Any) -> Any:
        """Return a mark after the kernels that were enqueued on the lane so far."""


class CudaLanes(Lanes):
    """Order on CUDA: a stream for copies, streams as lanes, events as marks."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._device = buffers[0].device
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Earlier users of the buffers' memory may still run on the stream that allocated them.
        made = torch.cuda.current_stream(self._device)
        self._copies.wait_stream(made)
        # The allocator reuses the memory only after the work of these streams.
        self._known = {made}
        self._keep_for(self._copies)

    def copying(self, after: Iterable[Any]) -> AbstractContextManager[Any]:
        """See `Lanes.copying`."""
        for mark in after:
            self._copies.wait_event(mark)
        return torch.cuda.stream(self._copies)

    def copied(self) -> Any:
        """See `Lanes.copied`."""
        return self._copies.record_event()

    def kernels(self, after: Any) -> Any:
        """See `Lanes.kernels`."""
        lane = torch.cuda.current_stream(self._device)
        self._keep_for(lane)
        if after is not None:
            lane.wait_event(after)
        return lane

    def used(self, lane: Any) -> Any:
        """See `Lanes.used`."""
        return lane.record_event()

    def _keep_for(self, stream: Any) -> None:
        if stream not in self._known:
            self._known.add(stream)
            for buffer in self._buffers:
                buffer.record_stream(stream)
