"""One fetch of a plan: what is read, where it goes, and what is made of it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client._assemble import Want
from routetrace.client._cells import PlacedCells
from routetrace.client._core import Plan as Steps
from routetrace.client.alignment import check_tokens, comparable
from routetrace.client.plan import Plan
from routetrace.client.rows import FetchStats, RankRows
from routetrace.client.stat import ReadFacts
from routetrace.v1.errors import InvalidArgument

Read = Callable[[Want], Steps[ReadFacts]]


class Fetch:
    """What a plan needs.

    Args:
        plan: the plan.
        read: makes the steps that read a `Want`.
        mask: whether cells may be missing.
        weight_version: that must have computed all rows; None: any.
        out: [layers, tokens, top_k] to decode into; an array or a CPU tensor; None: a new one.
        pin_memory: whether a new one is page-locked.

    Raises:
        InvalidArgument: if `out` does not fit the plan.
    """

    def __init__(
        self,
        plan: Plan,
        read: Read,
        mask: bool,
        weight_version: int | None,
        out: Any = None,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self._read = read
        self._mask = mask
        self._weight_version = weight_version
        self._out = None if out is None else _checked(out, plan)
        self._pin = pin_memory
        self._cells: list[PlacedCells] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it will hold."""
        return self.plan.nbytes

    def reads(self) -> Iterator[Steps[ReadFacts]]:
        """The reads, in the order of `plan.reads`; the memory for them is taken now."""
        plan = self.plan
        ids = self._out
        if ids is None:
            ids = _empty(plan.shape, plan.layout.dtype, self._pin)
        self._ids = ids
        self._valid = _empty(plan.shape[:2], np.dtype(np.bool_), self._pin)
        self._valid.fill(False)
        for number in range(len(plan.reads)):
            yield self._steps(number)

    def _steps(self, number: int) -> Steps[ReadFacts]:
        planned = self.plan.reads[number]
        segment = planned.segment
        cells = PlacedCells(self._ids, self._valid, self.plan.layout, planned.pieces)
        self._cells.append(cells)
        want = Want(
            segment.request_id,
            self.plan.layer_ids,
            planned.pieces[0].start,
            planned.pieces[-1].stop,
            mask=self._mask,
            weight_version=self._weight_version,
            incarnation=segment.incarnation or 0,
            token_digests=comparable(self.plan.samples[planned.sample], segment),
            into=cells,
        )
        return _blame(planned.sample, segment.request_id, self._read(want))

    def rows(self, reads: list[ReadFacts], wait_seconds: float) -> RankRows:
        """What came.

        Args:
            reads: what each of the reads gave.
            wait_seconds: how long the caller waited for them.

        Raises:
            InvalidArgument: if the tokens of a request are not those of its sample.
        """
        plan = self.plan
        verified = tuple(
            check_tokens(planned.sample, plan.samples[planned.sample], planned.segment, facts)
            for planned, facts in zip(plan.reads, reads, strict=True)
        )
        valid_cells = int(np.count_nonzero(self._valid))
        stats = FetchStats(
            bytes_fetched=sum(cells.bytes_fetched for cells in self._cells),
            bytes_avoided=sum(
                max(0, facts.stored_bytes - cells.bytes_fetched)
                for cells, facts in zip(self._cells, reads, strict=True)
            ),
            rows=plan.num_rows,
            cells=plan.num_rows * len(plan.layer_ids),
            valid_cells=valid_cells,
            wait_seconds=wait_seconds,
        )
        return RankRows(
            plan=plan,
            topk_ids=self._ids,
            valid=self._valid,
            layer_ids=plan.layer_ids,
            reads=tuple(reads),
            verified=verified,
            stats=stats,
        )


class Budget:
    """Which fetches may be under way: as many as fit into so many bytes, and one at least."""

    def __init__(self, fetches: Iterable[Fetch], max_bytes: int) -> None:
        self._fetches = iter(fetches)
        self._left = max_bytes
        self._under_way = 0
        self._next: Fetch | None = None

    def admit(self) -> Iterator[tuple[Fetch, list[Steps[ReadFacts]]]]:
        """Those that may begin now, and their reads; one that cannot be made is passed over."""
        while True:
            fetch = self._next or next(self._fetches, None)
            self._next = fetch
            if fetch is None or (self._under_way and fetch.nbytes > self._left):
                return
            self._next = None
            reads = list(fetch.reads())  # takes the memory, or fails
            self._left -= fetch.nbytes
            self._under_way += 1
            yield fetch, reads

    def release(self, fetch: Fetch) -> None:
        """The memory of one is the caller's now."""
        self._left += fetch.nbytes
        self._under_way -= 1


def _blame(sample: int, request_id: str, steps: Steps[ReadFacts]) -> Steps[ReadFacts]:
    """Names the sample in what is wrong with its read."""
    try:
        yield from steps
    except InvalidArgument as error:
        raise InvalidArgument(
            field=f"samples[{sample}]: {error.field} of trace {request_id!r}",
            value=error.value,
            expected=error.expected,
        ) from error


def _checked(out: Any, plan: Plan) -> npt.NDArray[Any]:
    """The caller's buffer as an array of the plan's shape and dtype."""
    dtype = plan.layout.dtype
    try:
        array = out.numpy() if hasattr(out, "numpy") else out
    except (TypeError, RuntimeError):  # a tensor on a device, or one that requires gradients
        array = None
    if isinstance(array, np.ndarray) and array.dtype == np.int16 and dtype == np.uint16:
        array = array.view(np.uint16)  # torch before 2.3 has no uint16
    fits = isinstance(array, np.ndarray) and array.shape == plan.shape and array.dtype == dtype
    if array is None or not fits or not array.flags.writeable:
        raise InvalidArgument(
            field="out",
            value=f"{type(out).__name__} of {getattr(out, 'dtype', None)} "
            f"{tuple(getattr(out, 'shape', ()))}",
            expected=f"a writeable array or CPU tensor of {dtype} {plan.shape}",
        )
    return array  # type: ignore[no-any-return]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], pin: bool) -> npt.NDArray[Any]:
    if not pin:
        return np.empty(shape, dtype)
    import torch

    if not torch.cuda.is_available():
        raise InvalidArgument(
            field="pin_memory", value=True, expected="False without a CUDA device"
        )
    # torch before 2.3 has no uint16, and numpy no pinned memory.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)
