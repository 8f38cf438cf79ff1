"""Index of the traces that computed rows of a token prefix, by sorted token digests.

It is derived from the traces and not part of snapshots. It holds only digests after rows that a
forward pass of the trace computed, once per known weight version, with the first position of such a
row: of thousands of requests that hit one cached prompt, it names those that computed a part of it.
Results are hints: the caller compares the digests of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST, UNKNOWN_VERSION, Provenance
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

#: Maximum indexed weight versions of one trace.
_MAX_VERSIONS = 64

#: Maximum share of entries of removed traces.
_DEAD_SHARE = 0.25

_Column = npt.NDArray[Any]


#: Of a source and a weight version: facts about all its digests.
_FACT = np.dtype([("salt", "u8"), ("version", "i8"), ("serial", "i8"), ("first", "i8")])


#: A trace that may hold rows of a prefix: index of the prefix, serial number of the trace, and
#: the first position with a row.
HOLDER = np.dtype([("prefix", "i8"), ("serial", "i8"), ("first", "i8")])


class _Tier(NamedTuple):
    """Ascending entries."""

    keys: _Column
    versions: _Column
    serials: _Column
    firsts: _Column

    def part(self, chosen: slice | _Column) -> _Tier:
        return _Tier(*(column[chosen] for column in self))

    def __len__(self) -> int:
        return self.keys.size


class PrefixIndex:
    """Traces by (run, position, digest, weight version): 28 bytes for each digest of a trace."""

    def __init__(self) -> None:
        self._traces: Sharded[int, Trace] = Sharded()
        self._fresh: dict[Source, Trace] = {}
        self._waiting = 0  # at least the digests of the fresh ones
        self._tiers: list[_Tier] = []  # the larger ones first
        self._dead = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(column.nbytes for tier in self._tiers for column in tier)

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    # ------------------------------------------------------------------ keeping up

    def add(self, trace: Trace) -> None:
        """Add a new or loaded trace."""
        self._traces[trace.serial] = trace
        for source in trace.sources:
            for spans in source.attempts:
                for span in spans:
                    if span.provenance == Provenance.FORWARD:
                        self.computed(trace, span.weight_version, span.position)

    def computed(self, trace: Trace, weight_version: int, position: int) -> None:
        """Note rows that a forward pass computed from a position on."""
        if weight_version == UNKNOWN_VERSION:  # its rows stand in for none
            return
        first = trace.computed.get(weight_version)
        known = first is not None or len(trace.computed) < _MAX_VERSIONS
        if known and (first is None or position < first):
            trace.computed[weight_version] = position
            for source in trace.sources:
                self.learn(trace, source)

    def learn(self, trace: Trace, source: Source) -> None:
        """Queue the digests of a source for the index, if its trace has computed rows so far."""
        if not trace.computed:
            return
        self._fresh[source] = trace
        self._waiting += source.num_digests
        if len(self._fresh) >= _BATCH or self._waiting >= _BATCH_DIGESTS:
            self._take_in()

    def remove(self, trace: Trace) -> None:
        """Remove a trace; its entries stay until `clean`."""
        if self._traces.pop(trace.serial):
            for source in trace.sources:
                self._fresh.pop(source, None)
                self._dead += len(trace.computed) * len(source.digests)

    def clean(self) -> Iterator[None]:
        """Join tiers, and drop entries of removed traces if they are many, step by step."""
        drop = self._dead > _DEAD_SHARE * len(self)
        if drop:
            self._dead = 0
        at = 0
        while at < len(self._tiers):  # other tasks may add tiers, and join the last ones
            tier = self._tiers[at]
            if drop:
                there = np.empty(len(tier), np.bool_)
                for first in range(0, len(tier), _LOOKED_AT):
                    serials = tier.serials[first : first + _LOOKED_AT].tolist()
                    there[first : first + len(serials)] = [n in self._traces for n in serials]
                    yield
                if at >= len(self._tiers) or self._tiers[at] is not tier:
                    continue
                self._tiers[at] = tier if there.all() else tier.part(there)
            if at and self._fit(at, _MAX_TIER):
                self._join(at)
                yield
            else:
                at += 1

    def _take_in(self) -> None:
        held: list[bytes] = []
        counts: list[int] = []
        facts: list[tuple[int, int, int, int]] = []
        for source, trace in self._fresh.items():
            salt = _salt(trace.key[0])
            for version, first in trace.computed.items():
                held.append(source.digests.tobytes())
                counts.append(len(source.digests))
                facts.append((salt, version, trace.serial, first))
        self._fresh.clear()
        self._waiting = 0
        if held:
            digests = np.frombuffer(b"".join(held), DIGEST)
            fact = np.array(facts, _FACT).repeat(counts)
            keys, firsts = digests["value"] ^ fact["salt"], fact["first"].astype(np.int32)
            tier = _Tier(keys, fact["version"], fact["serial"], firsts)
            tier = tier.part(digests["position"] > fact["first"])
            if len(tier):
                self._tiers.append(_merged([tier]))
        # Join small neighbours of similar size, so that tiers stay few until the next `clean`.
        last = len(self._tiers) - 1
        while (
            last > 0
            and self._fit(last, _MAX_FRESH)
            and (len(self._tiers[last - 1]) < 2 * len(self._tiers[last]))
        ):
            self._join(last)
            last -= 1

    def _fit(self, at: int, most: int) -> bool:
        """Whether a tier and its predecessor have at most so many entries."""
        return len(self._tiers[at - 1]) + len(self._tiers[at]) <= most

    def _join(self, at: int) -> None:
        """Join a tier with its predecessor."""
        self._tiers[at - 1 : at + 1] = [_merged(self._tiers[at - 1 : at + 1])]

    # ------------------------------------------------------------------ looking up

    def holders(
        self, run: str, digests: Sequence[int], last: npt.NDArray[Any], weight_version: int
    ) -> npt.NDArray[Any]:
        """Return the traces that may hold rows of prefixes.

        Args:
            run: run of the traces.
            digests: digests of the prefixes.
            last: last position of interest of each.
            weight_version: weight version of the rows.

        Returns:
            [n] of HOLDER, by prefix and serial number, each pair once.
        """
        if self._fresh:
            self._take_in()
        keys = np.array(digests, np.uint64) ^ np.uint64(_salt(run))
        parts = [np.empty(0, HOLDER)]
        for tier in self._tiers:
            start = np.searchsorted(tier.keys, keys, "left")
            count = np.searchsorted(tier.keys, keys, "right") - start
            prefix = np.arange(len(keys)).repeat(count)
            skipped = start - (np.cumsum(count) - count)
            held = tier.part(np.arange(len(prefix)) + skipped[prefix])
            wanted = (held.versions == weight_version) & (held.firsts <= last[prefix])
            held, part = held.part(wanted), np.empty(np.count_nonzero(wanted), HOLDER)
            part["prefix"] = prefix[wanted]
            part["serial"], part["first"] = held.serials, held.firsts
            parts.append(part)
        found = np.concatenate(parts)
        there = [n for n in np.unique(found["serial"]).tolist() if n in self._traces]
        found = found[np.isin(found["serial"], there)]
        found = found[np.lexsort((found["first"], found["serial"], found["prefix"]))]
        return found[_differ(found["prefix"]) | _differ(found["serial"])]

    def trace(self, serial: int) -> Trace | None:
        """Return a trace unless it was removed."""
        return self._traces.get(serial)


def _merged(tiers: Iterable[_Tier]) -> _Tier:
    """Merge tiers, without repeated entries."""
    whole = _Tier(*map(np.concatenate, zip(*tiers, strict=True)))
    # The keys of a tier ascend, and a stable sort goes through such parts once.
    whole = whole.part(np.argsort(whole.keys, kind="stable"))
    equal = whole.keys[1:] == whole.keys[:-1]
    if not equal.any():
        return whole
    several = np.zeros(len(whole), np.bool_)
    several[1:] |= equal
    several[:-1] |= equal
    tied = whole.part(several)
    for column, ordered in zip(whole, tied.part(np.lexsort(tied[::-1])), strict=True):
        column[several] = ordered
    new = np.logical_or.reduce([_differ(column) for column in whole])
    return whole if new.all() else whole.part(new)


def _differ(column: _Column) -> npt.NDArray[np.bool_]:
    """Mark values that differ from the one before; the first one does."""
    new = np.ones(column.size, np.bool_)
    new[1:] = column[1:] != column[:-1]
    return new


@lru_cache(maxsize=1024)
def _salt(run: str) -> int:
    """Return the salt of a run's digests."""
    return int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "little")
