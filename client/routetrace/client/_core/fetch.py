"""One fetch of a plan: its reads, their destination and result. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _memory
from routetrace.client._core.assemble import Want
from routetrace.client._core.batch import MAX_READS, together
from routetrace.client._core.cells import PlacedCells
from routetrace.client._core.config import Config
from routetrace.client._core.locating import locate, until_settled
from routetrace.client._core.proof import Search
from routetrace.client._core.reads import value_of
from routetrace.client._core.steps import Emit, Part
from routetrace.client._core.steps import Plan as Steps
from routetrace.client.alignment import Proof, check_layout, check_tokens, tokens_of
from routetrace.client.located import Locations
from routetrace.client.options import ReadOptions
from routetrace.client.plan import FetchPlan, PlannedRead
from routetrace.client.rows import FetchStats, Rows
from routetrace.client.stat import ReadFacts
from routetrace.common.errors import (
    DeadlineExceeded,
    Incomplete,
    InvalidArgument,
    RouteTraceError,
    counted,
)
from routetrace.common.missing import MissingReason

Read = Callable[[Want], Steps[ReadFacts]]

#: Fields of a read that a trace of other tokens, or of another model, does not have.
_OF_THE_TRACE = ("layer_ids", "token_start", "token_stop")
#: Changes to a read so that it has the facts of the trace, and little else.
_FIRST_ROW: dict[str, Any] = {
    "layer_ids": None,
    "token_start": 0,
    "token_stop": 1,
    "mask": True,
    "token_digests": True,
    "into": None,
}

#: Maximum ranges of positions in one batch: a server takes requests of 64 KiB.
_MAX_RANGES = 4096


class Fetch:
    """Reads of one plan, and their result.

    Args:
        config: configuration of the client.
        plan: rank plan.
        read: returns the read plan of a `Want`.
        options: options of its reads.
        out: [layers, tokens, top_k] to decode into: an array or a CPU tensor; None: a new array.
        pin_memory: whether a new one is page-locked.

    Raises:
        InvalidArgument: if `out` does not fit the plan.
    """

    def __init__(
        self,
        config: Config,
        plan: FetchPlan,
        read: Read,
        options: ReadOptions,
        out: Any = None,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self._config = config
        self._read = read
        self._options = options
        self._out = None if out is None else _checked(out, plan)
        self._pin = pin_memory
        self._cells: list[PlacedCells] = []
        self._verified: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of its result."""
        return self.plan.nbytes

    def reads(self, concurrency: int) -> Iterator[Steps[ReadFacts | RouteTraceError]]:
        """Allocate the result; yield plans for batches of `plan.reads`, in their order.

        Args:
            concurrency: number of batches under way at a time.
        """
        plan = self.plan
        ids = self._out
        if ids is None:
            ids = _memory.empty(plan.shape, plan.layout.dtype, self._pin)
        self._ids = ids
        self._valid = _memory.zeros(plan.shape[:2], np.bool_, self._pin)
        if plan.unproven and plan.locations is None:
            yield self._located()
        else:
            yield from self._batches(concurrency)

    def _located(self) -> Steps[ReadFacts | RouteTraceError]:
        """Find the requests of samples by their tokens; then read the rows."""
        waits = self._options.wait_for is not None
        limit = self._config.limit(self._options.timeout)
        locations = yield from until_settled(self._look, limit, waits=waits)
        self.plan = self.plan.with_locations(locations)
        left = self.plan.unproven
        if waits and locations.unsettled and left and self._options.missing == "raise":
            raise DeadlineExceeded(f"{_unproven(self.plan)} after {limit:.3g} s")
        for steps in self._batches(1):
            yield from steps

    def _look(self, seconds: float) -> Steps[Locations]:
        equal = self._options.equal
        return locate(self._config, self.plan.sequences, equal=equal, timeout=seconds)

    def _batches(self, concurrency: int) -> Iterator[Steps[ReadFacts | RouteTraceError]]:
        plan = self.plan
        if plan.unproven and self._options.missing == "raise":
            raise Incomplete(
                _unproven(plan),
                missing=(plan.unproven[0][1],),
                remedy='use wait_for="end" or missing="mask"',
            )
        self._verified = [0] * len(plan.reads)
        most = min(MAX_READS, -(-len(plan.reads) // concurrency))
        batch: list[Steps[ReadFacts]] = []
        ranges = 0
        for number, planned in enumerate(plan.reads):
            ranges += len(planned.pieces)
            if len(batch) == most or (batch and ranges > _MAX_RANGES):
                yield together(self._config, batch)
                batch, ranges = [], len(planned.pieces)
            batch.append(self._steps(number))
        if batch:
            yield together(self._config, batch)

    def _steps(self, number: int) -> Steps[ReadFacts]:
        planned = self.plan.reads[number]
        segment = planned.segment
        cells = PlacedCells(self._ids, self._valid, self.plan.layout, planned.pieces)
        self._cells.append(cells)
        want = Want(
            segment.trace_id,
            self.plan.layer_ids,
            planned.pieces[0].start,
            planned.pieces[-1].stop,
            mask=self._options.missing == "mask",
            weight_version=self._options.weight_version,
            incarnation=segment.incarnation or 0,
            nonce=segment.nonce or 0,
            token_digests=tokens_of(self.plan.samples[planned.sample], segment) is not None,
            into=cells,
        )
        return self._checked(number, want)

    def _checked(self, number: int, want: Want) -> Steps[ReadFacts]:
        """Run a read plan, of the incarnation that the sample's tokens prove; check its tokens."""
        planned = self.plan.reads[number]
        sample, segment = self.plan.samples[planned.sample], planned.segment
        facts = yield from self._facts_of(planned, want)
        self._verified[number] = check_tokens(planned.sample, sample, segment, facts)
        yield Emit(facts)

    def _facts_of(self, planned: PlannedRead, want: Want) -> Part[ReadFacts]:
        sample, segment = self.plan.samples[planned.sample], planned.segment
        token_ids = tokens_of(sample, segment)
        if token_ids is None or want.incarnation or want.nonce:
            return (yield from self._explained(planned, want))
        search = Search(self._config, want.trace_id, token_ids)
        try:
            facts = yield from self._explained(planned, want)
        except (DeadlineExceeded, Incomplete, InvalidArgument):
            other = yield from search.look(least=2)
            if other is None:
                raise
        else:
            if facts.num_incarnations == 1 or search.see(facts) is Proof.WHOLE:
                return facts
            other = yield from search.look()
            if other is None and search.see(facts) in (Proof.PROMPT, Proof.BEGINS, Proof.NONE):
                raise search.refusal(f"samples[{planned.sample}].token_ids")
            if other in (None, facts.incarnation):
                return facts
        return (yield from self._explained(planned, replace(want, incarnation=other)))

    def _explained(self, planned: PlannedRead, want: Want) -> Part[ReadFacts]:
        """Run a read plan; explain its InvalidArgument by the tokens and layers of the trace."""
        number, segment = planned.sample, planned.segment
        try:
            return (yield from value_of(self._read(want)))
        except InvalidArgument as error:
            if error.field in _OF_THE_TRACE:
                try:
                    facts = yield from value_of(self._read(replace(want, **_FIRST_ROW)))
                except RouteTraceError:
                    pass
                else:
                    check_layout(want.name, facts.layout, self.plan.layout)
                    check_tokens(number, self.plan.samples[number], segment, facts)
            if error.field.startswith("layout."):  # it names plan and trace
                raise
            raise InvalidArgument(
                field=f"samples[{number}]: {error.field} of {want.name}",
                value=error.value,
                expected=error.expected,
                remedy=error.remedy,
            ) from error

    def rows(self, reads: list[ReadFacts], wait_seconds: float) -> Rows:
        """Return the result.

        Args:
            reads: result of each read.
            wait_seconds: seconds that the caller waited for them.
        """
        plan = self.plan
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
            **_counts(plan.locations),
        )
        return Rows(
            plan=plan,
            topk_ids=self._ids,
            valid=self._valid,
            layer_ids=plan.layer_ids,
            reads=tuple(reads),
            verified=tuple(self._verified),
            stats=stats,
        )


class Admitted(NamedTuple):
    """A fetch that may begin, or the error in its place."""

    fetch: Fetch | None
    reads: list[Steps[ReadFacts | RouteTraceError]]
    error: Exception | None = None


class Budget:
    """Admission of fetches: as many as fit into a number of bytes, at least one.

    Args:
        plans: their plans; consumed as the budget allows.
        make: returns the fetch of a plan.
        max_bytes: the budget.
        concurrency: number of calls under way at a time.
    """

    def __init__(
        self,
        plans: Iterable[FetchPlan],
        make: Callable[[FetchPlan], Fetch],
        max_bytes: int,
        concurrency: int,
    ) -> None:
        self._fetches = self._made(plans, make)
        self._concurrency = concurrency
        self._left = max_bytes
        self._under_way = 0
        self._next: Fetch | Exception | None = None

    @staticmethod
    def _made(
        plans: Iterable[FetchPlan], make: Callable[[FetchPlan], Fetch]
    ) -> Iterator[Fetch | Exception]:
        for plan in plans:
            try:
                fetch: Fetch | Exception = make(plan)
            except Exception as error:
                fetch = error
            yield fetch

    def admit(self) -> Iterator[Admitted]:
        """Yield the fetches that may begin now; end at an error, so that it keeps its turn.

        Raises:
            Exception: of the iterator of plans.
        """
        while True:
            fetch = self._next or next(self._fetches, None)
            self._next = fetch
            if fetch is None:
                return
            if isinstance(fetch, Exception):
                self._next = None
                yield Admitted(None, [], fetch)
                return
            if self._under_way and fetch.nbytes > self._left:
                return
            self._next = None
            try:
                reads = list(fetch.reads(self._concurrency))  # allocates
            except Exception as error:
                yield Admitted(None, [], error)
                return
            self._left -= fetch.nbytes
            self._under_way += 1
            yield Admitted(fetch, reads)

    def release(self, fetch: Fetch) -> None:
        """Return the bytes of a fetch to the budget."""
        self._left += fetch.nbytes
        self._under_way -= 1


def _counts(locations: Locations | None) -> dict[str, int]:
    if locations is None:
        return {}
    return {
        "samples_found": sum(each is not None for each in locations),
        "samples_not_found": len(locations.not_found),
        "samples_ambiguous": len(locations.ambiguous),
        "samples_of_several": len(locations.any_of_several),
    }


def _unproven(plan: FetchPlan) -> str:
    """Say which rows no request is proven to have."""
    number, missing = plan.unproven[0]
    tokens = counted(plan.samples[number].num_tokens, "token")
    why = "no request that has ended is proven to have its tokens"
    if missing.reason is MissingReason.AMBIGUOUS:
        why = "several requests have its tokens, or may have them"
    more = len(plan.unproven) - 1
    others = f", and {counted(more, 'other sample')}" if more else ""
    return f"samples[{number}] of {tokens}{others}: {missing}: {why}"


def _checked(out: Any, plan: FetchPlan) -> npt.NDArray[Any]:
    """Return the caller's buffer as an array of the plan's shape and dtype."""
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
