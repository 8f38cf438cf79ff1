"""The emitter: lingering rows out as frames, and rows that are lost as ops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import ChunkBuilder, Ids
from routetrace.capture_agent.pipeline.linger import Bytes, Ints, Linger
from routetrace.capture_agent.pipeline.request import Request
from routetrace.capture_agent.pipeline.window import as_ids
from routetrace.codec.frame import invalid_rows
from routetrace.codec.records import OpKind
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

#: Rows that are checked at a time, so that temporary arrays stay in the CPU's cache.
_CHECKED_ROWS = 512


class Emitter:
    """Takes rows out of `linger` and hands them to the chunk builder.

    Args:
        layout: columns of the rows.
        linger: lingering rows.
        requests: live requests by lane.
        out: ops and frames go here.
        drop: drop callback.
    """

    def __init__(
        self,
        layout: ModelLayout,
        linger: Linger,
        requests: dict[int, Request],
        out: ChunkBuilder,
        drop: Callable[[Word, int], None],
    ) -> None:
        self._layout = layout
        self._linger = linger
        self._requests = requests
        self._out = out
        self._drop = drop

    def flush_all(self) -> None:
        """Emit all lingering rows."""
        self.flush(self._linger.lingering())

    def flush_request(self, request: Request) -> None:
        """Emit the lingering rows of one request."""
        if self._linger.fill[request.lane]:
            self.flush(np.array([request.lane]))

    def flush(self, lanes: Ints) -> None:
        """Emit the rows of some lanes, in parts so that memory stays bounded."""
        if not len(lanes):
            return
        linger, at = self._linger, 0
        fill = linger.fill[lanes]
        stops = np.cumsum(fill)
        while at < len(lanes):
            most = (int(stops[at - 1]) if at else 0) + self._out.max_rows
            stop = max(at + 1, int(np.searchsorted(stops, most, "right")))
            some = lanes[at:stop]
            columns = (
                some,
                linger.end[some] - fill[at:stop],
                fill[at:stop],
                linger.step[some],
                linger.version[some],
                linger.tentative[some],
            )
            rows, row = linger.take(some), 0
            ids, bad = as_ids(rows, self._layout), self._invalid(rows)
            good = not bad.any()
            for lane, position, n, *facts in zip(*(c.tolist() for c in columns), strict=True):
                request, part = self._requests[lane], slice(row, row + n)
                if good and 0 < n <= self._out.max_rows:
                    self._out.rows(request.request_id, position, ids[part], *facts)
                    request.emitted = max(request.emitted, position + n)
                elif n:
                    self._emit(request, position, ids[part], bad[part], *facts)
                row += n
            linger.sure[some] = linger.end[some] - linger.tentative[some]
            at = stop

    def emit(
        self, request: Request, position: int, rows: Bytes, step: int, version: int, tentative: int
    ) -> None:
        """Emit rows [n, row_bytes] that did not linger, from `position` to the request's end."""
        ids, bad = as_ids(rows, self._layout), self._invalid(rows)
        self._emit(request, position, ids, bad, step, version, tentative)

    def lose(
        self, request: Request, position: int, count: int, reason: int, drafts: int = 0
    ) -> None:
        """Emit a LOST op; with `count` 0 it covers everything from `position` on."""
        self._out.op(
            OpKind.LOST,
            request.request_id,
            arg=reason,
            position=position,
            count=count,
            value=drafts,
        )

    def _emit(
        self,
        request: Request,
        position: int,
        ids: Ids,
        bad: npt.NDArray[np.bool_],
        step: int,
        version: int,
        tentative: int,
    ) -> None:
        """Emit the last rows [n, L, K] of a request; those that are `bad` become LOST."""
        edges = {0, len(ids), *range(0, len(ids), self._out.max_rows)}
        if bad.any():
            edges.update((np.flatnonzero(bad[1:] != bad[:-1]) + 1).tolist())
        for start, stop in pairwise(sorted(edges)):
            at, n = position + start, stop - start
            drafts = max(0, tentative - (len(ids) - stop))
            if bad[start]:
                self._drop(Word.INVALID_IDS, n)
                self.lose(request, at, n, pb.MISSING_REASON_INVALID_IDS, drafts)
            else:
                self._out.rows(request.request_id, at, ids[start:stop], step, version, drafts)
        request.emitted = max(request.emitted, position + len(ids))
        self._linger.sure[request.lane] = position + len(ids) - tentative

    def _invalid(self, rows: Bytes) -> npt.NDArray[np.bool_]:
        """Rows that no router chose, bool [n]; a row costs less the more there are."""
        ids = as_ids(rows, self._layout)
        parts = [
            invalid_rows(ids[at : at + _CHECKED_ROWS], self._layout.num_experts)
            for at in range(0, max(1, len(ids)), _CHECKED_ROWS)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
