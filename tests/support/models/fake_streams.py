"""A CUDA device on the CPU: streams, events and copies as late as their order allows.

Time is a vector clock: per stream, and for the host, how much of each stream's work is certainly
over. Nothing is over before an event or a wait says so:

* kernels run at once, but using memory that unordered work still writes or reads is an error;
* a copy to pinned memory arrives when the host has waited for it; until then garbage is there;
* a copy from pinned memory must find its source unchanged when the host has waited for it;
* freed pinned memory is given out again as torch's host allocator does: at once, unless a copy
  from or to it was recorded, which takes the very storage or the block's first byte.

Tensors of the device are CPU tensors; code under test runs inside `FakeCuda.running()`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = 0x55


class FakeStream:
    """A stream; the host is one, too, on which nothing is enqueued."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.device = torch.device("cpu")
        self.clock: dict[FakeStream, int] = defaultdict(int)

    def work(self) -> Work:
        """Enqueue something; all that the host waited for is over by then."""
        self._after(self.cuda.host.clock)
        self.clock[self] += 1
        return Work(self, self.clock[self])

    def over(self, work: Work) -> bool:
        """Whether that work is over for certain when what is enqueued here next begins."""
        return self.clock[work.stream] >= work.time

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._after(event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def _after(self, clock: dict[FakeStream, int]) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock[stream], time)


@dataclass(frozen=True)
class Work:
    """A place in a stream."""

    stream: FakeStream
    time: int


class FakeEvent:
    """Work complete at one moment of a stream; none before the event is recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.clock: dict[FakeStream, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.cuda.current
        stream.work()
        self.clock = dict(stream.clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.cuda.current).wait_event(self)

    def query(self) -> bool:
        return all(self.cuda.host.over(Work(*at)) for at in self.clock.items())

    def synchronize(self) -> None:
        self.cuda.wait(self)


@dataclass
class _Use:
    """A use of bytes [start, stop) of a storage."""

    work: Work
    start: int
    stop: int
    writes: bool


@dataclass
class _Block:
    """Pinned memory; it is never given back."""

    memory: np.ndarray
    storage: int = 0
    copies: list[Work] = field(default_factory=list)


@dataclass
class _Copy:
    """A copy between the device and pinned memory, and what has to be done when it is over."""

    work: Work
    to_host: bool
    arrive: Callable[[], None]


class FakeCuda:
    """The device, with the stream that is current at first as `main`."""

    def __init__(self) -> None:
        self.host = FakeStream(self)
        self.main = self.current = FakeStream(self)
        self.waits = 0
        """How often the host waited for work that was not over."""
        self.kernel_streams: set[FakeStream] = set()
        """Streams that kernels ran on."""
        self._copies: list[_Copy] = []
        self._uses: dict[int, list[_Use]] = {}  # by storage, of the device's memory
        self._alive: list[StorageWeakRef] = []  # so that no storage takes another's name
        self._blocks: list[_Block] = []
        self._freed: list[_Block] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put its streams and events in the place of torch's."""
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream(self))
        patch.setattr(torch.cuda, "Event", lambda *_, **__: FakeEvent(self))
        patch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)
        patch.setattr(torch.cuda, "default_stream", lambda _device=None: self.main)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "synchronize", lambda _device=None: self.synchronize())
        patch.setattr(torch.cuda, "is_available", lambda: True)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Calls of torch work on the device, in this thread."""
        with pytest.MonkeyPatch.context() as patch, _Calls(self), _Kernels(self):
            self.install(patch)
            yield

    def wait(self, event: FakeEvent) -> None:
        """The host waits for an event."""
        self.waits += not event.query()
        self.host.wait_event(event)
        over = [copy for copy in self._copies if self.host.over(copy.work)]
        self._copies = [copy for copy in self._copies if copy not in over]
        for copy in over:
            copy.arrive()

    def synchronize(self) -> None:
        """The host waits for everything."""
        everything = FakeEvent(self)
        everything.clock = {copy.work.stream: copy.work.time for copy in self._copies}
        for stream in [self.main, *list(everything.clock)]:
            everything.clock[stream] = stream.clock[stream]
        self.wait(everything)

    def on_their_way(self) -> list[Work]:
        """Copies to the host that it has not waited for."""
        return [copy.work for copy in self._copies if copy.to_host]

    # Memory.

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make its memory the device's."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._uses:
            self._uses[storage._cdata] = []
            self._alive.append(StorageWeakRef(storage))
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._uses

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory with the shape and dtype of a tensor."""
        size = like.numel() * like.element_size()
        for block in self._freed:
            if block.memory.size == size and all(map(self.host.over, block.copies)):
                self._freed.remove(block)
                break
        else:
            block = _Block(np.empty(size, np.uint8))
            self._blocks.append(block)
        lease = block.memory.view(_Lease)
        lease[:] = GARBAGE
        weakref.finalize(lease, self._freed.append, block).atexit = False
        tensor = torch.from_numpy(lease)
        block.storage, block.copies = tensor.untyped_storage()._cdata, []
        return tensor.view(like.dtype).view(like.shape)

    def block_of(self, tensor: torch.Tensor) -> _Block | None:
        """The pinned block that it lies in, if any."""
        for block in self._blocks:
            first = block.memory.ctypes.data
            if first <= tensor.data_ptr() < first + max(1, block.memory.size):
                return block
        return None

    def use(self, tensor: torch.Tensor, writes: bool, work: Work) -> None:
        """The current stream works on the device's memory."""
        if not tensor.numel():
            return
        uses = self._uses[tensor.untyped_storage()._cdata]
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.element_size()
        use = _Use(work, start, start + span * tensor.element_size(), writes)
        for earlier in uses:
            both = earlier.start < use.stop and use.start < earlier.stop
            if both and (earlier.writes or writes):
                assert work.stream.over(earlier.work), "works on memory that is still in use"
        uses.append(use)

    # Copies.

    def copy(self, to: torch.Tensor, of: torch.Tensor, non_blocking: bool) -> None:
        """`to.copy_(of, non_blocking)` between the device and the host."""
        to_host = not self.holds(to)
        there, here = (of, to) if to_host else (to, of)
        block = self.block_of(here)
        work = self.current.work()
        self.use(there, not to_host, work)
        value = of.clone()
        if block is None or not non_blocking or not here.is_contiguous():
            to.copy_(value)
            self.current.synchronize()
            return
        if block.storage == here.untyped_storage()._cdata or (
            here.data_ptr() == block.memory.ctypes.data
        ):
            block.copies.append(work)
        # Not the tensor: it would keep the memory from being freed.
        first = here.data_ptr() - block.memory.ctypes.data
        raw = block.memory[first : first + here.numel() * here.element_size()]
        image = value.contiguous().flatten().view(torch.uint8).numpy()
        if to_host:
            raw[:] = GARBAGE

            def arrive() -> None:
                raw[:] = image
        else:
            to.copy_(value)

            def arrive() -> None:
                assert (raw == image).all(), "the source changed before its copy was over"

        self._copies.append(_Copy(work, to_host, arrive))


class _Lease(np.ndarray):
    """Pinned memory that somebody has; it is free again when this goes."""


class _Calls(TorchFunctionMode):
    """Makes tensors of the device and pinned ones where calls ask for them."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, cuda = dict(kwargs or {}), self._cuda
        if func is torch.Tensor.to:
            return self._to(args, kwargs)
        if func is torch.Tensor.is_pinned:
            return cuda.block_of(args[0]) is not None
        if func is torch.Tensor.pin_memory:
            return cuda.pinned(args[0]).copy_(args[0])
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            return cuda.pinned(made) if func is torch.empty else cuda.pinned(made).copy_(made)
        if _is_cuda(kwargs.get("device")):
            return cuda.adopt(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        tensor, *more = args
        device = kwargs.pop("device", None)
        if more and isinstance(more[0], (str, torch.device)):
            device = more.pop(0)
        non_blocking = kwargs.pop("non_blocking", False)
        if _is_cuda(device) and not self._cuda.holds(tensor):
            moved = self._cuda.adopt(torch.empty_like(tensor, memory_format=torch.preserve_format))
            tensor = moved.copy_(tensor, non_blocking=non_blocking)
        return tensor.to(*more, **kwargs) if more or kwargs else tensor


class _Kernels(TorchDispatchMode):
    """Sees which memory of the device each operator reads and writes."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, cuda = kwargs or {}, self._cuda
        if func is torch.ops.aten.copy_.default and cuda.holds(args[0]) != cuda.holds(args[1]):
            cuda.copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
            return args[0]
        if func.is_view:
            return func(*args, **kwargs)
        parameters = func._schema.arguments
        given = [*zip(parameters, args, strict=False)]
        given += [(p, kwargs[p.name]) for p in parameters if p.name in kwargs]
        uses = [
            (leaf, bool(p.alias_info and p.alias_info.is_write))
            for p, value in given
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor) and cuda.holds(leaf)
        ]
        if not uses:
            return func(*args, **kwargs)
        work = cuda.current.work()
        cuda.kernel_streams.add(cuda.current)
        for tensor, writes in uses:
            cuda.use(tensor, writes, work)
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and not cuda.holds(leaf):
                cuda.use(cuda.adopt(leaf), True, work)
        return made


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
