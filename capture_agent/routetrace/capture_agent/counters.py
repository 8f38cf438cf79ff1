"""Counters of rows, in memory that the engine and the background share.

Each word has one writer; between two backgrounds, the engine may set those of a background. Rows in
flight are not counted but derived, so that

    offered = acknowledged + dropped + in flight

holds at any time, whichever side was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from routetrace.common.values import Values

#: Bytes of the words, in front of the ring.
COUNTER_BYTES = 4096


class Word(IntEnum):
    """Index of a counter."""

    # Written by the engine.
    OFFERED = 0
    REFUSED = 1  # rows that found no room in the ring
    UNMARKABLE = (
        2  # rows with slots alone and ids out of range, of a layout without a mark for them
    )
    DEADLINE = 3  # end of close(), as time.monotonic_ns(); 0 before the call
    TOO_LATE = 4  # rows of requests that had ended
    HELD = 5  # 1 while the agent before this one may still send
    DEATHS = 6  # backgrounds that died
    AGENT_LOST = 7  # rows that they held
    CLOSED = 14  # 1 if close() was called, all before it is in the ring, and no agent follows
    # Written by the background's framing.
    QUEUE_FULL = 8
    INVALID_IDS = 9
    REWOUND = 10
    LATE = 11  # rows of requests that were preempted
    UNREPORTED = 12  # requests dropped without a name
    UNSEEN = 13  # rows of requests that a background before it saw begin
    # Written by the background's sender.
    ACKNOWLEDGED = 16
    REJECTED = 17
    SENT_BYTES = 18
    CHUNKS = 19
    RECONNECTS = 20
    FLUSHED = 21  # token of the last completed flush
    ENDED = 22  # an Ended
    CORRUPT = 23  # rows that were damaged on disk
    QUEUED_BYTES = 24  # in the outbox, in memory
    SPILLED_BYTES = 25  # in the outbox, on disk
    CONNECTED = 26  # 1 while a stream is open
    UP = 27  # 1 once the background works
    EPOCH = 28  # of the last stream


class Ended(IntEnum):
    """Reason why the background stopped sending; 0 while it sends."""

    FENCED = 1  # a newer epoch of the engine took over
    REJECTED = 2  # the server refuses even the replacements of refused chunks


_REASONS = {
    "queue_full": (Word.REFUSED, Word.QUEUE_FULL),
    "invalid_ids": (Word.UNMARKABLE, Word.INVALID_IDS),
    "rewound": (Word.REWOUND,),
    "late": (Word.TOO_LATE, Word.LATE),
    "rejected": (Word.REJECTED,),
    "corrupt": (Word.CORRUPT,),
    "agent_lost": (Word.AGENT_LOST, Word.UNSEEN),
}

#: Words of rows that came out of the ring, and that the background no longer holds.
_SETTLED = (
    Word.QUEUE_FULL,
    Word.INVALID_IDS,
    Word.REWOUND,
    Word.LATE,
    Word.UNSEEN,
    Word.ACKNOWLEDGED,
    Word.REJECTED,
    Word.CORRUPT,
    Word.AGENT_LOST,
)


@dataclass(frozen=True)
class AgentStats(Values):
    """Counters of rows so far: offered = acknowledged + dropped + in flight."""

    offered_rows: int = 0
    """Rows passed to step() and step_slots()."""
    acknowledged_rows: int = 0
    """Rows that the server has stored."""
    dropped_rows: dict[str, int] = field(default_factory=dict)
    """Rows that the server will not get, by reason: queue_full (no room in the ring or the queue),
    invalid_ids (an id out of range or twice in one top-k), rewound (rejected by the engine before
    they were sent), late (of a request that had ended or was preempted), rejected (refused by the
    server), corrupt (damaged on the disk they were spilled to), fenced (a newer epoch of the engine
    took over), agent_lost (the background died with them, or with the begin of their request),
    unsent (close() ran out of time)."""
    in_flight_rows: int = 0
    """Rows neither acknowledged nor dropped."""
    sent_bytes: int = 0
    """Bytes of acknowledged chunks."""
    chunks: int = 0
    """Acknowledged chunks."""
    reconnects: int = 0
    """Streams opened after the first one."""
    queued_bytes: int = 0
    """Bytes of unacknowledged chunks in memory."""
    spilled_bytes: int = 0
    """Bytes of unacknowledged chunks on disk."""
    unreported_requests: int = 0
    """Requests dropped with all their rows and without a report, as memory for their names was
    exhausted."""
    connected: bool = False
    """Whether a stream to the server is open."""


@dataclass(frozen=True)
class CloseReport(Values):
    """Final counters of rows."""

    acknowledged_rows: int = 0
    """Rows that the server has stored."""
    dropped_rows: dict[str, int] = field(default_factory=dict)
    """Dropped rows by reason, as in AgentStats, but for unsent ones."""
    unsent_rows: int = 0
    """Rows in flight when close() ran out of time."""


def bury(words: memoryview, taken: int) -> int:
    """Count the death of the background.

    Args:
        words: the counters, as "Q".
        taken: rows that backgrounds took out of the ring so far.

    Returns:
        Rows that it held, which are lost.
    """
    lost = taken - sum(words[word] for word in _SETTLED)
    words[Word.AGENT_LOST] += lost
    words[Word.DEATHS] += 1
    for word in (Word.QUEUED_BYTES, Word.SPILLED_BYTES, Word.CONNECTED, Word.UP):
        words[word] = 0
    return lost


def read(words: memoryview, leftover: str | None) -> AgentStats:
    """Read the counters.

    Args:
        words: the counters, as "Q".
        leftover: drop reason of the remaining rows; None while they are in flight.
    """
    # Read before OFFERED: rows that arrive in between must not make the rest negative.
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
        unreported_requests=words[Word.UNREPORTED],
        connected=bool(words[Word.CONNECTED]) and not leftover,
    )
