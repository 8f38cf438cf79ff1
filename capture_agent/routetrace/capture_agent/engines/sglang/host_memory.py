"""KV in host memory (HiCache): what SGLang copies there, loads again, and fills from elsewhere.

SGLang's scheduler orders copies between passes. They are noted in that order, and reported with the
next pass, before its rows. Slots of the device come to the host with those rows. A host slot that
SGLang allocates, other than for a copy, is filled from elsewhere: from storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.agent import CaptureAgent

Ints = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Move:
    """KV that comes into slots, in their order."""

    kind: Literal["load", "write", "fill"]
    """Of the device, of host memory by a copy, or of host memory from elsewhere."""
    device: torch.Tensor | None = None
    """[n] slots of the device; none for "fill"."""
    host: Any = None
    """[n] slots of host memory, int64; None: KV from elsewhere."""


class HostMemory:
    """Notes moves of KV, and reports them to an agent.

    Args:
        block_size: SGLang's page size.
        num_blocks: pages of the device, behind which those of host memory are numbered.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.num_host_blocks = 0
        """Pages of host memory that are followed."""
        self._size = block_size
        self._first = num_blocks
        self._controller: Any = None
        self._moves: list[Move] = []

    def follow(self, controller: Any, note: Callable[[Callable[[], None]], None]) -> None:
        """Follow the pages of SGLang's `HiCacheController`, which `num_pages` has.

        Args:
            controller: the controller.
            note: makes a call, unless capture has ended.
        """
        self.num_host_blocks = self.num_pages(controller)
        self._controller = controller
        pool = _pool(controller)
        alloc = pool.alloc

        def noted(*args: Any, **named: Any) -> Any:
            slots = alloc(*args, **named)
            if slots is not None and len(slots):
                note(lambda: self._moves.append(Move("fill", host=_private(slots))))
            return slots

        pool.alloc = noted

    def num_pages(self, controller: Any) -> int:
        """Return the number of its pages; 0 if they cannot be followed.

        Pages of another size cannot, nor can those of pools that share their memory with others:
        they allocate in another way.
        """
        pool = _pool(controller)
        # SGLang 0.5.16 and older have no such domains.
        shares = getattr(pool, "shared_allocation_domain", None) is not None
        if self._controller is not None or shares or controller.page_size != self._size:
            return 0
        return -(-int(pool.size) // self._size)

    def loaded(self, device: torch.Tensor, host: Any = None, controller: Any = None) -> None:
        """Note that KV comes into slots of the device: from host slots, or from elsewhere."""
        followed = controller is not None and controller is self._controller
        slots = device.reshape(-1).to(torch.int64)
        known = _private(host) if followed and host is not None else None
        self._moves.append(Move("load", slots, known))

    def written(self, device: torch.Tensor, host: Any, controller: Any) -> None:
        """Note that KV is copied to host slots, which were allocated for it just now."""
        if controller is not self._controller:
            return
        slots = _private(host)
        last = self._moves[-1] if self._moves else None
        if last and last.kind == "fill" and np.array_equal(last.host, slots):
            self._moves.pop()
        self._moves.append(Move("write", device.reshape(-1).to(torch.int64), slots))

    def take(self) -> list[Move]:
        """Take the moves since the last pass."""
        moves, self._moves = self._moves, []
        return moves

    def report(self, moves: list[Move], indexes: list[Ints], agent: CaptureAgent) -> None:
        """Report moves in their order.

        Args:
            moves: of one `take`.
            indexes: arrays of their pass; that of `device_slots`, the last one, is taken from it.
            agent: to report to.
        """
        slots = indexes.pop() if any(move.device is not None for move in moves) else _NONE
        at = 0
        for move in moves:
            device: list[int] = []
            host: list[int] = []
            whole = move.host is not None
            if move.device is not None:
                part = slots[at : at + len(move.device)]
                at += len(part)
                device, fits = _pages(part, self._size)
                whole &= fits
            if move.host is not None:
                pages, fits = _pages(move.host, self._size)
                known = [page for page in pages if page < self.num_host_blocks]
                host = [self._first + page for page in known]
                whole &= fits and len(known) == len(pages)
            whole &= len(device) == len(host)
            sources, targets = (host, device) if move.kind == "load" else (device, host)
            if whole:
                agent.copy_blocks(sources, targets)
            elif targets:
                agent.mark_external(targets)


def device_slots(moves: list[Move]) -> list[torch.Tensor]:
    """Return the slots of the device of moves, as one tensor; none without any."""
    slots = [move.device for move in moves if move.device is not None]
    return [torch.cat(slots)] if slots else []


def _pool(controller: Any) -> Any:
    """Return the pool of the slots that a controller copies to: of several, that of KV."""
    anchor = getattr(controller.mem_pool_host, "anchor_entry", None)  # of several pools alone
    return controller.mem_pool_host if anchor is None else anchor.host_pool


def _pages(slots: Ints, size: int) -> tuple[list[int], bool]:
    """Return the pages of slots, and whether these are whole pages in their order."""
    if len(slots) % size == 0:
        firsts = slots[::size]
        every = (firsts[:, None] + np.arange(size)).ravel()
        if not (firsts % size).any() and np.array_equal(every, slots):
            return (firsts // size).tolist(), True
    return np.unique(slots // size).tolist(), False


def _private(slots: torch.Tensor) -> Ints:
    return slots.reshape(-1).cpu().numpy().astype(np.int64)
