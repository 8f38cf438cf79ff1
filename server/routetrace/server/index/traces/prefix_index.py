"""Index of the traces that computed rows of a token prefix, by sorted token digests.

It is derived from the traces and not part of snapshots. It holds only digests after rows that a
forward pass of the trace computed, once per known weight version, with the first position of such a
row: of thousands of requests that hit one cached prompt, it names those that computed a part of it.
Results are hints: the caller compares the digests of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import UNKNOWN_VERSION, Provenance
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.tiers import Column, Columns, DigestIndex, Indexed, differ
from routetrace.server.index.traces.trace import Trace

#: Maximum indexed weight versions of one trace.
_MAX_VERSIONS = 64

#: A trace that may hold rows of a prefix: index of the prefix, serial number of the trace, and
#: the first position with a row.
HOLDER = np.dtype([("prefix", "i8"), ("serial", "i8"), ("first", "i8")])


class PrefixIndex(DigestIndex):
    """Traces by (run, position, digest, weight version): 28 bytes for each digest of a trace."""

    def add(self, trace: Trace) -> None:
        """Add a new or loaded trace."""
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
        """Index the digests of a source, if its trace has computed rows so far."""
        if trace.computed:
            self._queue(trace, source)

    def _count(self, indexed: Indexed) -> int:
        return len(indexed.trace.computed) * len(indexed.digests)

    def _facts(self, indexed: Indexed) -> Iterable[tuple[int, ...]]:
        return indexed.trace.computed.items()

    def _entries(self, digests: Column, facts: Column) -> Columns:
        there = digests["position"] > facts[3]
        salt, serials, versions, firsts = facts[:, there]
        keys = digests["value"][there].view(np.int64) ^ salt
        return keys, serials, versions, firsts.astype(np.int32)

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
        parts = [np.empty(0, HOLDER)]
        found = self._find(run, np.array(digests, np.uint64))
        for prefix, (_, serials, versions, firsts) in found:
            wanted = (versions == weight_version) & (firsts <= last[prefix])
            part = np.empty(np.count_nonzero(wanted), HOLDER)
            part["prefix"] = prefix[wanted]
            part["serial"], part["first"] = serials[wanted], firsts[wanted]
            parts.append(part)
        whole = np.concatenate(parts)
        there = [n for n in np.unique(whole["serial"]).tolist() if n in self._traces]
        whole = whole[np.isin(whole["serial"], there)]
        whole = whole[np.lexsort((whole["first"], whole["serial"], whole["prefix"]))]
        return whole[differ(whole["prefix"]) | differ(whole["serial"])]

    def trace(self, serial: int) -> Trace | None:
        """Return a trace unless it was removed."""
        return self._traces.get(serial)
