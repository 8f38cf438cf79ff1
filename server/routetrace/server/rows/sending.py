"""Rows of one read, in the pieces that its messages carry."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from routetrace.server.index.traces.sources import Source
from routetrace.server.rows.frames import Batch, Fetched
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.served import Known, Row
from routetrace.server.rows.view import Selection
from routetrace.v1 import routetrace_pb2 as pb


class Piece(NamedTuple):
    """Content of one message of a read."""

    info: pb.TraceInfo | None = None
    """Info of the trace."""
    rows: Fetched | None = None
    """Rows of the message."""
    first_frame: int = 0
    """Number of frames sent before."""
    end: pb.ReadEnd | None = None
    """End of the read."""


class Sending:
    """Rows sent by one read so far."""

    def __init__(self, reader: Reader, sources: Sequence[Source]) -> None:
        self._reader = reader
        self.sources = sources
        """Sources that the next rows index."""
        self._num_spans = 0
        self._num_frames = 0
        self._unread: list[tuple[Row, Source]] = []

    async def fetch(self, batch: Batch, selection: Selection) -> tuple[Fetched, int]:
        """Return the rows of one message, and the number of frames sent before them."""
        fetched = await self._reader.frames.fetch(batch, selection.layers)
        first_frame = self._num_frames
        self._num_spans += len(fetched.rows)
        self._num_frames += len(fetched.frame_lengths)
        self._unread += [(row, self.sources[row[4]]) for row in fetched.unread]
        return fetched, first_frame

    def end(
        self, info: pb.TraceInfo, missing: list[pb.MissingRange], selection: Selection
    ) -> pb.ReadEnd:
        """Return the end of the stream: the number of spans sent and the missing cells.

        Args:
            info: info of the trace.
            missing: cells without rows; cells that could not be read are added.
            selection: selected cells.
        """
        for (position, stop, *_, layers), source in self._unread:
            held = layers or source.layout.column
            missing.append(
                pb.MissingRange(
                    start=position,
                    stop=stop,
                    layer_ids=[i for i in selection.layers if i in held],
                    reason=pb.MISSING_REASON_CORRUPT,
                )
            )
        end = pb.ReadEnd(
            info=info,
            token_start=selection.start,
            token_stop=selection.stop,
            missing=missing,
            num_spans=self._num_spans,
        )
        end.info.ClearField("token_digests")  # sent before
        return end


class Answer:
    """Answer to one read, as of one moment: the first piece has the info, the last one the end.

    Args:
        reader: source of the rows.
        info: info of the trace.
        known: view of the incarnation that is read.
        selection: selected cells.
    """

    def __init__(
        self, reader: Reader, info: pb.TraceInfo, known: Known, selection: Selection
    ) -> None:
        self._sending = Sending(reader, known.sources)
        self._info, self._selection = info, selection
        self.rows = reader.rows(known, selection)
        """Rows to send. Pin them until the last piece is sent: the info counts them as present."""
        # Computed with the rows: the trace may change while they are sent.
        self._missing = reader.missing(info.state, known, selection, self.rows)
        self._left = deque(reader.frames.batches(self.rows, selection.layers))
        self._first: pb.TraceInfo | None = info
        self.done = False
        """Whether the last piece was returned."""

    async def next(self) -> Piece:
        """Fetch the next piece."""
        rows, number = None, 0
        if self._left:
            rows, number = await self._sending.fetch(self._left.popleft(), self._selection)
        end = None
        if not self._left:
            self.done = True
            end = self._sending.end(self._info, self._missing, self._selection)
        piece = Piece(self._first, rows, number, end)
        self._first = None
        return piece
