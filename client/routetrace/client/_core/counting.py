"""Rows that are counted and dropped, as the calls of `calls.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from routetrace.client import _arguments as check
from routetrace.client._core import calls
from routetrace.client._core.config import Config
from routetrace.client._core.steps import Plan
from routetrace.client.expert_load import ExpertLoad
from routetrace.client.options import ReadOptions
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument, typed


class Part(NamedTuple):
    """Rows of one trace; to its end if `stop` is None."""

    trace_id: str
    start: int
    stop: int | None


class LoadCount:
    """Counts of the parts of a call, each of which is read by a plan of its own.

    Args:
        config: configuration of the client.
        trace_ids: ids of the traces.
        ranges: positions of each, or None for all of it; None: all rows of each trace.
        options: options of the reads.
        layer_ids: layers; None: all.

    Raises:
        InvalidArgument: if an argument is wrong.
    """

    def __init__(
        self,
        config: Config,
        trace_ids: Iterable[str],
        ranges: Iterable[tuple[int, int | None] | None] | None,
        options: ReadOptions,
        *,
        layer_ids: Sequence[int] | None,
    ) -> None:
        check.layers(layer_ids)
        self.parts = _parts(trace_ids, ranges)
        self._total: ExpertLoad | None = None
        self.plan: Callable[[Part], Plan[Trace]] = lambda part: calls.get(
            config,
            part.trace_id,
            options,
            layer_ids=layer_ids,
            token_start=part.start,
            token_stop=part.stop,
            incarnation=None,
            pin_memory=False,
        )

    def add(self, trace: Trace) -> None:
        """Count the rows of a part."""
        load = ExpertLoad.of(trace)
        if self._total is None:
            self._total = load
            return
        if load.model != self._total.model:
            raise InvalidArgument(
                field="trace_ids",
                value=f"{trace.trace_id!r} among them, which is {load.words}",
                expected=f"traces of one model: {self._total.words}, as those before",
            )
        self._total += load

    @property
    def result(self) -> ExpertLoad:
        """Counts of all parts."""
        assert self._total is not None, "a call has at least one part"
        return self._total


def _parts(
    trace_ids: Iterable[str], ranges: Iterable[tuple[int, int | None] | None] | None
) -> list[Part]:
    ids = check.identifiers("trace_ids", trace_ids)
    if not ids:
        raise InvalidArgument(field="trace_ids", value="[]", expected="at least one id")
    if ranges is None:
        return [Part(trace_id, 0, None) for trace_id in ids]
    limits = [*check.several("ranges", ranges, "(start, stop)")]
    if len(limits) != len(ids):
        raise InvalidArgument(
            field="ranges",
            value=f"{len(limits)} of them",
            expected=f"one for each of {len(ids)} ids",
        )
    return [Part(one, *_limits(i, limits[i])) for i, one in enumerate(ids)]


def _limits(index: int, given: Any) -> tuple[int, int | None]:
    if given is None:
        return 0, None
    name = f"ranges[{index}]"
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidArgument(
            field=name, value=typed(given), expected="(start, stop), or None for all rows"
        )
    start = check.whole(f"{name}[0]", given[0])
    return start, None if given[1] is None else check.whole(f"{name}[1]", given[1], start + 1)
