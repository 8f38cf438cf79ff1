"""What became of the rows: counters in memory that the engine and the background both see.

Each word has one writer. Rows in flight are not counted but left over, so that

    offered = acknowledged + dropped + in flight

holds at any time, whichever side was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

#: Bytes of the words, in front of the ring.
COUNTER_BYTES = 4096


class Word(IntEnum):
    """Where a counter is."""

    # Written by the engine.
    OFFERED = 0
    REFUSED = 1  # rows that did not fit into the ring
    UNMARKABLE = 2  # rows with ids out of range, of a layout that has no mark for them
    DEADLINE = 3  # when close() ends: time.monotonic_ns(); 0 while it was not called
    TOO_LATE = 4  # rows of requests that had ended
    # Written by the background's framing.
    QUEUE_FULL = 8
    INVALID_IDS = 9
    REWOUND = 10
    LATE = 11  # rows of requests that were preempted
    UNTOLD = 12  # requests that the server will never hear of
    # Written by the background's sender.
    ACKNOWLEDGED = 16
    REJECTED = 17
    SENT_BYTES = 18
    CHUNKS = 19
    RECONNECTS = 20
    FLUSHED = 21  # token of the last flush that is done
    ENDED = 22  # an Ended
    CORRUPT = 23  # rows that came back damaged from the disk
    QUEUED_BYTES = 24  # in the outbox, in memory
    SPILLED_BYTES = 25  # in the outbox, on disk


class Ended(IntEnum):
    """Why the background gave up; 0 while it has not."""

    FENCED = 1  # a newer epoch of the engine has taken over
    REJECTED = 2  # the server refuses even what stands for refused chunks


_REASONS = {
    "queue_full": (Word.REFUSED, Word.QUEUE_FULL),
    "invalid_ids": (Word.UNMARKABLE, Word.INVALID_IDS),
    "rewound": (Word.REWOUND,),
    "late": (Word.TOO_LATE, Word.LATE),
    "rejected": (Word.REJECTED,),
    "corrupt": (Word.CORRUPT,),
}


@dataclass(frozen=True)
class AgentStats:
    """What became of the rows so far: offered = acknowledged + dropped + in flight."""

    offered_rows: int = 0
    """Rows handed to step() and step_slots()."""
    acknowledged_rows: int = 0
    """Rows that the server has stored."""
    dropped_rows: dict[str, int] = field(default_factory=dict)
    """Rows that it will not get, by reason: queue_full (no room in the ring or the queue),
    invalid_ids (an id out of range or twice in one top-k), rewound (taken back by the engine before
    they were sent), late (of a request that had ended or was preempted by then), rejected (refused
    by the server), corrupt (damaged on the disk they were spilled to), fenced (a newer epoch of the
    engine has taken over), agent_lost (the background died), unsent (close() ran out of time)."""
    in_flight_rows: int = 0
    """Rows on their way."""
    sent_bytes: int = 0
    """Bytes of the chunks that were acknowledged."""
    chunks: int = 0
    """Chunks that were acknowledged."""
    reconnects: int = 0
    """Times that the stream was opened again."""
    queued_bytes: int = 0
    """Bytes of chunks that wait for their acknowledgement, in memory."""
    spilled_bytes: int = 0
    """The same on disk."""
    untold_requests: int = 0
    """Requests, all their rows dropped, of which the server will never hear: there was no memory
    for their names."""


@dataclass(frozen=True)
class CloseReport:
    """What became of the rows in the end."""

    acknowledged_rows: int = 0
    """Rows that the server has stored."""
    dropped_rows: dict[str, int] = field(default_factory=dict)
    """Rows that it has not, by reason; as in AgentStats, without those unsent."""
    unsent_rows: int = 0
    """Rows that were still on their way when the time was up."""


def read(words: memoryview, leftover: str | None) -> AgentStats:
    """Reads the counters.

    Args:
        words: the counters, as "Q".
        leftover: what became of the rows that are nowhere else; None while they are in flight.
    """
    # Before OFFERED, so that rows that move in between do not make the rest negative.
    acknowledged = words[Word.ACKNOWLEDGED]
    dropped = {reason: sum(words[w] for w in where) for reason, where in _REASONS.items()}
    offered = words[Word.OFFERED]
    rest = offered - acknowledged - sum(dropped.values())
    if leftover:
        dropped[leftover] = dropped.get(leftover, 0) + rest
    return AgentStats(
        offered_rows=offered,
        acknowledged_rows=acknowledged,
        dropped_rows={reason: rows for reason, rows in dropped.items() if rows},
        in_flight_rows=0 if leftover else rest,
        sent_bytes=words[Word.SENT_BYTES],
        chunks=words[Word.CHUNKS],
        reconnects=words[Word.RECONNECTS],
        queued_bytes=words[Word.QUEUED_BYTES],
        spilled_bytes=words[Word.SPILLED_BYTES],
        untold_requests=words[Word.UNTOLD],
    )
