"""Indexes of traces by token digests: sorted columns, which are joined step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST
from routetrace.server.index.traces.sharded import Sharded
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.trace import Trace

#: Sources, or about their digests, that are indexed at a time.
_BATCH = 128
_BATCH_DIGESTS = 1 << 12

#: Maximum entries of a tier, and of one that is joined while a record is applied: they bound the
#: time to sort them.
_MAX_TIER = 1 << 15
_MAX_FRESH = 1 << 12

#: Entries that are looked at in a step.
_LOOKED_AT = 1 << 11

#: Maximum share of entries of removed traces.
_DEAD_SHARE = 0.25

Column = npt.NDArray[Any]
Columns = Sequence[Column]
"""Columns of equal length: keys first, serial numbers of traces next, further ones behind."""

_KEYS, _SERIALS = 0, 1


class Tiers:
    """Entries in tiers of ascending keys, the larger tiers first.

    Args:
        traces: the traces that are there, by serial number; entries of others are dropped in time.
    """

    def __init__(self, traces: Sharded[int, Trace]) -> None:
        self._traces = traces
        self._tiers: list[Columns] = []
        self._dead = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(column.nbytes for tier in self._tiers for column in tier)

    def __len__(self) -> int:
        return sum(map(_size, self._tiers))

    def add(self, entries: Columns) -> None:
        """Add entries in any order."""
        if _size(entries):
            self._tiers.append(_merged([entries]))
        # Join small neighbours of similar size, so that tiers stay few until the next `clean`.
        last = len(self._tiers) - 1
        while (
            last > 0
            and self._fit(last, _MAX_FRESH)
            and _size(self._tiers[last - 1]) < 2 * _size(self._tiers[last])
        ):
            self._join(last)
            last -= 1

    def bury(self, count: int) -> None:
        """Note entries of a trace that is removed; they stay until `clean`."""
        self._dead += count

    def clean(self) -> Iterator[None]:
        """Join tiers, and drop entries of removed traces if they are many, step by step."""
        drop = self._dead > _DEAD_SHARE * len(self)
        if drop:
            self._dead = 0
        at = 0
        while at < len(self._tiers):  # other tasks may add tiers, and join the last ones
            tier = self._tiers[at]
            if drop:
                there = np.empty(_size(tier), np.bool_)
                for first in range(0, len(there), _LOOKED_AT):
                    serials = tier[_SERIALS][first : first + _LOOKED_AT].tolist()
                    there[first : first + len(serials)] = [n in self._traces for n in serials]
                    yield
                if at >= len(self._tiers) or self._tiers[at] is not tier:
                    continue
                self._tiers[at] = tier if there.all() else _part(tier, there)
            if at and self._fit(at, _MAX_TIER):
                self._join(at)
                yield
            else:
                at += 1

    def find(self, keys: Column) -> Iterator[tuple[Column, Columns]]:
        """Yield, for each tier, the entries with some keys, and the index of the key of each."""
        order = np.argsort(keys, kind="stable")  # neighbours are looked up in a third of the time
        ascending = keys[order]
        for tier in self._tiers:
            start = np.searchsorted(tier[_KEYS], ascending)
            there = tier[_KEYS][np.minimum(start, _size(tier) - 1)] == ascending
            start, which = start[there], order[there]
            count = np.searchsorted(tier[_KEYS], ascending[there], "right") - start
            skipped = (start - (np.cumsum(count) - count)).repeat(count)
            yield which.repeat(count), _part(tier, np.arange(len(skipped)) + skipped)

    def _fit(self, at: int, most: int) -> bool:
        """Whether a tier and its predecessor have at most so many entries."""
        return _size(self._tiers[at - 1]) + _size(self._tiers[at]) <= most

    def _join(self, at: int) -> None:
        """Join a tier with its predecessor."""
        self._tiers[at - 1 : at + 1] = [_merged(self._tiers[at - 1 : at + 1])]


class Indexed(NamedTuple):
    """A source, as an index sees it."""

    trace: Trace
    prompt_len: int
    digests: Column
    """[n] of DIGEST, ascending."""


class DigestIndex(ABC):
    """Index of traces by the digests of their requests: hints that are derived from the traces.

    Digests of sources wait until there are many, or until they are looked for.

    Args:
        traces: all traces, by serial number.
    """

    def __init__(self, traces: Sharded[int, Trace]) -> None:
        self._traces = traces
        self._fresh: dict[Source, Trace] = {}
        self._waiting = 0  # at least the digests of the fresh ones
        self._tiers = Tiers(traces)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._tiers.nbytes

    def __len__(self) -> int:
        return len(self._tiers)

    def remove(self, trace: Trace) -> None:
        """Remove a trace; its entries stay until `clean`."""
        for source in trace.sources:
            self._fresh.pop(source, None)
            self._tiers.bury(self._count(Indexed(trace, source.prompt_len, source.digests)))

    def clean(self) -> Iterator[None]:
        """Join tiers, and drop entries of removed traces if they are many, step by step."""
        return self._tiers.clean()

    def _queue(self, trace: Trace, source: Source) -> None:
        """Queue the digests of a source."""
        self._fresh[source] = trace
        self._waiting += source.num_digests
        if len(self._fresh) >= _BATCH or self._waiting >= _BATCH_DIGESTS:
            self._take_in()

    def _take_in(self) -> None:
        held: list[bytes] = []
        counts: list[int] = []
        facts: list[tuple[int, ...]] = []
        for source, trace in self._fresh.items():
            salt = _salt_of(trace.key[0])
            indexed = Indexed(trace, source.prompt_len, source.digests)
            for fact in self._facts(indexed):
                held.append(indexed.digests.tobytes())
                counts.append(len(indexed.digests))
                facts.append((salt, trace.serial, *fact))
        self._fresh.clear()
        self._waiting = 0
        if held:
            columns = np.array(facts, np.int64).repeat(counts, axis=0).T
            self._tiers.add(self._entries(np.frombuffer(b"".join(held), DIGEST), columns))

    def _find(self, run: str, digests: Column) -> Iterator[tuple[Column, Columns]]:
        """Yield entries with some digests, and the index of the digest of each."""
        if self._fresh:
            self._take_in()
        return self._tiers.find(digests.view(np.int64) ^ _salt_of(run))

    @abstractmethod
    def _count(self, indexed: Indexed) -> int:
        """Return about how many entries a source has."""

    @abstractmethod
    def _facts(self, indexed: Indexed) -> Iterable[tuple[int, ...]]:
        """Yield facts about all digests of a source; for each, its digests are indexed once."""

    @abstractmethod
    def _entries(self, digests: Column, facts: Column) -> Columns:
        """Return the entries of digests.

        Args:
            digests: [n] of DIGEST.
            facts: [2 + facts, n] of int64: salt of the run, serial number, and the facts.
        """


def differ(column: Column) -> npt.NDArray[np.bool_]:
    """Mark values that differ from the one before; the first one does."""
    new = np.ones(column.size, np.bool_)
    new[1:] = column[1:] != column[:-1]
    return new


@lru_cache(maxsize=1024)
def _salt_of(run: str) -> int:
    """Return the salt of a run's keys."""
    return int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "little", signed=True)


def _size(tier: Columns) -> int:
    return int(tier[_KEYS].size)


def _part(tier: Columns, chosen: Column) -> Columns:
    return tuple(column[chosen] for column in tier)


def _merged(tiers: Iterable[Columns]) -> Columns:
    """Merge tiers, without repeated entries."""
    whole: Columns = tuple(map(np.concatenate, zip(*tiers, strict=True)))
    # The keys of a tier ascend, and a stable sort goes through such parts once.
    whole = _part(whole, np.argsort(whole[_KEYS], kind="stable"))
    keys = whole[_KEYS]
    equal = keys[1:] == keys[:-1]
    if not equal.any():
        return whole
    several = np.zeros(len(keys), np.bool_)
    several[1:] |= equal
    several[:-1] |= equal
    tied = _part(whole, several)
    for column, ordered in zip(whole, _part(tied, np.lexsort(tuple(tied[::-1]))), strict=True):
        column[several] = ordered
    new = np.logical_or.reduce([differ(column) for column in whole])
    return whole if new.all() else _part(whole, new)
