"""Index of traces by the tokens of their requests (docs/rows.md, section 9).

It is derived from the traces and not part of snapshots. Of each request it holds the digests of its
prompt, of the first multiple of `DIGEST_EVERY` behind that, of its end, and of its tail if it was
aborted. Results are hints: the caller compares the digests of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST_EVERY, digest_key
from routetrace.server.index.traces.sharded import Sharded
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.tiers import Column, Columns, DigestIndex, Indexed
from routetrace.server.index.traces.trace import Trace

#: Entries of a source that was not aborted.
_USUAL_ENTRIES = 3

#: Maximum keys of digests that are known of a run, the newest ones.
_MAX_KEYS = 64


class TokenIndex(DigestIndex):
    """Traces by (run, position, digest): 48 bytes for each request that was not aborted."""

    def __init__(self, traces: Sharded[int, Trace]) -> None:
        super().__init__(traces)
        self._keys: dict[str, dict[str, None]] = {}

    # ------------------------------------------------------------------ keeping up

    def add(self, trace: Trace) -> None:
        """Add a new or loaded trace."""
        for source in trace.sources:
            self.learn(trace, source)

    def learn(self, trace: Trace, source: Source) -> None:
        """Index the digests of a source."""
        if not source.num_digests:
            return
        keys = self._keys.setdefault(trace.key[0], {})
        key = digest_key(source.labels)
        keys.pop(key, None)
        keys[key] = None
        if len(keys) > _MAX_KEYS:
            del keys[next(iter(keys))]
        self._queue(trace, source)

    def forget(self, run: str) -> None:
        """Forget the keys of a run that has no traces any more."""
        self._keys.pop(run, None)

    def _count(self, indexed: Indexed) -> int:
        return min(_USUAL_ENTRIES, len(indexed.digests))

    def _facts(self, indexed: Indexed) -> Iterable[tuple[int, ...]]:
        yield indexed.prompt_len, int(indexed.digests["position"][-1])

    def _entries(self, digests: Column, facts: Column) -> Columns:
        salt, serials, prompt_len, last = facts
        position = digests["position"].astype(np.int64)
        first = (prompt_len // DIGEST_EVERY + 1) * DIGEST_EVERY
        # Behind the prompt, positions that are no multiples are those of the end and of the tail.
        chosen = (position % DIGEST_EVERY != 0) | (position == first) | (position == last)
        chosen = (position == prompt_len) | ((position > prompt_len) & chosen)
        return (digests["value"].view(np.int64) ^ salt)[chosen], serials[chosen]

    # ------------------------------------------------------------------ looking up

    def holders(self, run: str, digests: npt.NDArray[np.uint64]) -> tuple[Column, Column]:
        """Return the traces that may have requests with some digests.

        Args:
            run: run of the traces.
            digests: [n].

        Returns:
            Indexes of `digests`, ascending, and serial numbers of traces, some of which may be
            removed, ascending for each.
        """
        parts = [np.empty((2, 0), np.int64)]
        for which, (_, serials) in self._find(run, digests):
            parts.append(np.stack([which, serials]))
        which, serials = np.concatenate(parts, axis=1)
        order = np.lexsort((serials, which))
        return which[order], serials[order]

    def keys(self, run: str, most: int) -> list[str]:
        """Return the keys of the digests of a run (`digest_key`), the newest first."""
        return [*reversed(self._keys.get(run, {}))][:most]
