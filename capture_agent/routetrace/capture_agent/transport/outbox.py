"""Chunks that are not acknowledged yet, in order, with their sequence numbers.

No thread, no clock and no network: the caller holds a lock, and the disk is behind `Spill`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import Chunk, ChunkBuilder
from routetrace.capture_agent.transport.ledger import Ledger
from routetrace.capture_agent.transport.spill import Record, Spill
from routetrace.common.layout import ModelLayout

#: Bytes that an entry takes in memory, beside its chunk.
_ENTRY_BYTES = 512


@dataclass(eq=False)
class Entry:
    """One chunk on its way."""

    sequence: int
    chunk: Chunk
    ticket: int
    """Number of the put() call; it survives a renumbering."""
    made: float
    """Time of the put() call, by the caller's clock."""
    record: Record | None = None
    """The payload, where it is on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return _ENTRY_BYTES + self.chunk.nbytes


class Outbox:
    """Queue of chunks from put() to their acknowledgement.

    Args:
        layout: columns of the rows.
        words: counters of the agent.
        builder: makes the replacement of a refused chunk.
        spill: disk for payloads, if any.
        memory_share: bytes in memory above which payloads go to disk.
    """

    def __init__(
        self,
        layout: ModelLayout,
        words: memoryview,
        builder: ChunkBuilder,
        spill: Spill | None,
        memory_share: int,
    ) -> None:
        self._layout = layout
        self._words = words
        self._builder = builder
        self._spill = spill
        self._memory_share = memory_share
        self._entries: deque[Entry] = deque()
        self._ledger = Ledger()
        self._ticket = 0
        self._flushes: deque[tuple[int, int]] = deque()  # (ticket, token)
        self.next_sequence = 1
        """Number of the next chunk put."""
        self.nbytes = 0
        """Bytes in memory."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_rows(self) -> int:
        """Rows in the chunks."""
        return sum(entry.chunk.rows for entry in self._entries)

    @property
    def oldest(self) -> float | None:
        """Time of the oldest put() call of a chunk that is not acknowledged; None if all are."""
        return min((entry.made for entry in self._entries), default=None)

    @property
    def first_sequence(self) -> int:
        """Number of the oldest chunk that is not acknowledged, or else of the next one put."""
        return self._entries[0].sequence if self._entries else self.next_sequence

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of chunks and of the state of live requests."""
        return self.nbytes + self._ledger.nbytes

    # ------------------------------------------------------------------ in

    def prepare(self, chunk: Chunk) -> tuple[Chunk, Record | None]:
        """Write the payload to disk if memory is short; call it without the lock, before put()."""
        if self._spill and chunk.payload and self.nbytes + chunk.nbytes > self._memory_share:
            record = self._spill.write(chunk.payload)
            if record:
                return replace(chunk, payload=b""), record
        return chunk, None

    def put(self, chunk: Chunk, record: Record | None, now: float) -> None:
        """Append a chunk that `prepare` returned, at a time."""
        self._ticket += 1
        entry = Entry(self.next_sequence, chunk, self._ticket, now, record)
        self._entries.append(entry)
        self.next_sequence += 1
        self._hold(entry.nbytes)

    def flush(self, token: int) -> bool:
        """Set `Word.FLUSHED` to `token` once all chunks put so far are acknowledged.

        Returns:
            Whether the word changed at once.
        """
        if self._flushes and self._flushes[-1][0] == self._ticket:
            self._flushes.pop()
        self._flushes.append((self._ticket, token))
        return self._flushed()

    # ------------------------------------------------------------------ out

    def entry(self, sequence: int) -> Entry | None:
        """Return the entry with this number, if it is not acknowledged."""
        index = sequence - self._entries[0].sequence if self._entries else -1
        return self._entries[index] if 0 <= index < len(self._entries) else None

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is not acknowledged."""
        return self.entry(entry.sequence) is entry

    def read(self, record: Record) -> bytes | None:
        """Read a payload from disk; None if it is damaged. Call it without the lock."""
        assert self._spill is not None
        return self._spill.read(record)

    def acknowledge(self, sequence: int) -> bool:
        """Drop the chunks up to and including `sequence`.

        Returns:
            Whether `Word.FLUSHED` changed.
        """
        words = self._words
        while self._entries and self._entries[0].sequence <= sequence:
            entry = self._entries.popleft()
            self._release(entry)
            self._ledger.apply(entry.chunk)
            words[Word.ACKNOWLEDGED] += entry.chunk.rows
            words[Word.SENT_BYTES] += entry.chunk.nbytes
            words[Word.SENT_BYTES] += entry.record.size if entry.record else 0
            words[Word.CHUNKS] += 1
        return self._flushed()

    def replace(self, entry: Entry, reason: int) -> None:
        """Replace a chunk by one that reports its rows as missing, with a MissingReason."""
        self._release(entry)
        entry.chunk, entry.record = self._builder.degrade(entry.chunk, reason), None
        self._hold(entry.nbytes)

    def forget_requests(self, entry: Entry) -> None:
        """Report the requests that a chunk names to no server any more: their state is unknown."""
        self._ledger.forget(entry.chunk)

    def renumber(self, next_sequence: int, now: float) -> None:
        """Number all chunks from `next_sequence` on, for a server without memory of the epoch.

        Chunks that report the running requests come first.
        """
        chunks = self._ledger.begin_anew(self._layout)
        self._ledger = Ledger()
        ticket = self._entries[0].ticket if self._entries else self._ticket
        anew = [Entry(0, chunk, ticket, now) for chunk in chunks]
        self._entries.extendleft(reversed(anew))
        self._hold(sum(entry.nbytes for entry in anew))
        self.next_sequence = next_sequence
        for entry in self._entries:
            entry.sequence = self.next_sequence
            self.next_sequence += 1

    def forget_in_child(self) -> None:
        """After a fork, in the child: close the spill file."""
        if self._spill:
            self._spill.close()

    # ------------------------------------------------------------------ private

    def _hold(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._words[Word.QUEUED_BYTES] = self.nbytes
        self._words[Word.SPILLED_BYTES] = self._spill.nbytes if self._spill else 0

    def _release(self, entry: Entry) -> None:
        if entry.record and self._spill:
            self._spill.release(entry.record)
        self._hold(-entry.nbytes)

    def _flushed(self) -> bool:
        before = self._entries[0].ticket if self._entries else self._ticket + 1
        done = 0
        while self._flushes and self._flushes[0][0] < before:
            done = self._flushes.popleft()[1]
        if done:
            self._words[Word.FLUSHED] = done
        return bool(done)
