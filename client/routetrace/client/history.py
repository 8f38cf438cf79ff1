"""History of the last minutes of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from routetrace.client.stat import moment
from routetrace.common import checks as check
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb

# Of pb.GetHistoryResponse.commit_counts.
_FIRST_SECONDS = 0.0005


@dataclass(frozen=True)
class AgentHistory(Values):
    """History of an agent, in the steps of its run."""

    engine_id: str
    shard: str
    """Part of the engine that it sees; "" if it sees all of it."""
    rows: tuple[int, ...]
    """Rows of it that were stored."""
    dropped_rows: tuple[int, ...]
    """Rows that it reported as dropped, but for drafts that its engine took back (rewound)."""


@dataclass(frozen=True)
class RunHistory(Values):
    """History of a run: a number for each step, the oldest first. It begins with the server."""

    last_step: int
    """Number of the last step, which has ended; `history` takes it as `after`."""
    step_seconds: float
    """Duration of a step."""
    ended_at: datetime
    """End of the last step, UTC."""
    rows: tuple[int, ...]
    """Rows stored."""
    stored_bytes: tuple[int, ...]
    """Bytes of chunks stored."""
    reads: tuple[int, ...]
    """Reads of traces that were answered."""
    agents: tuple[AgentHistory, ...]
    commit_counts: tuple[int, ...]
    """Chunks of the last 30 steps by time from arrival to commit: number i counts those up to
    0.5 * 2^(i / 2) ms, the last one all others."""

    def commit_seconds(self, share: float) -> float | None:
        """Return a time within which a share of the chunks was committed.

        Args:
            share: 0.5 for the median, at most 1.

        Returns:
            Seconds, at most 1.42 times too long; infinite if it is above the longest time that is
            counted; None without chunks.

        Raises:
            InvalidArgument: if `share` is no number from 0 to 1.
        """
        left = check.real("share", share, 0, 1) * sum(self.commit_counts)
        if not left:
            return None
        for at, count in enumerate(self.commit_counts[:-1]):
            left -= count
            if left <= 0:
                return _FIRST_SECONDS * math.sqrt(2.0) ** at
        return math.inf

    @classmethod
    def from_proto(cls, response: pb.GetHistoryResponse) -> RunHistory:
        """Convert a message."""
        return cls(
            last_step=response.last_step,
            step_seconds=response.step_ms / 1000,
            ended_at=moment((response.last_step + 1) * response.step_ms),
            rows=tuple(response.rows),
            stored_bytes=tuple(response.stored_bytes),
            reads=tuple(response.reads),
            agents=tuple(
                AgentHistory(a.engine_id, a.shard, tuple(a.rows), tuple(a.dropped_rows))
                for a in response.agents
            ),
            commit_counts=tuple(response.commit_counts),
        )
