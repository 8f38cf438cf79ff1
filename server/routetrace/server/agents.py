"""Which agents are there: whether a request that has not ended may still grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routetrace.server.journal import Clock
from routetrace.server.state import State
from routetrace.server.trace_index import Source, WriterKey
from routetrace.v1 import routetrace_pb2 as pb

if TYPE_CHECKING:
    from routetrace.server.ingest import Session


class Agents:
    """Open streams, and when each writer was last heard of."""

    def __init__(self, state: State, clock: Clock, timeout: float) -> None:
        self._state = state
        self._clock = clock
        self.timeout = timeout
        self._started = clock.now()
        self._sessions: dict[WriterKey, Session] = {}
        self._seen: dict[WriterKey, float] = {}
        self._reports: dict[WriterKey, pb.Heartbeat] = {}
        self._lost: set[WriterKey] = set()

    @property
    def connected(self) -> list[WriterKey]:
        """Writers whose stream is open."""
        return list(self._sessions)

    def reports(self) -> dict[WriterKey, pb.Heartbeat]:
        """What each agent said last of its rows; those that have left included."""
        return self._reports

    def opened(self, session: Session) -> None:
        """A stream opened; one that is there is over."""
        key = session.writer.key
        previous = self._sessions.get(key)
        if previous:
            previous.over = True
        self._sessions[key] = session
        self.seen(session)

    def seen(self, session: Session) -> None:
        """A stream said something."""
        self._seen[session.writer.key] = self._clock.now()

    def heartbeat(self, session: Session, report: pb.Heartbeat) -> None:
        """An agent gave a sign of life, and said what became of its rows."""
        session.beats = True
        self._reports[session.writer.key] = report

    def closed(self, session: Session) -> None:
        """A stream ended."""
        if self._sessions.get(session.writer.key) is session:
            del self._sessions[session.writer.key]
            self.seen(session)

    def idle_seconds(self, key: WriterKey) -> float:
        """Seconds since a writer was last heard of.

        0 while it is there and has no heartbeat, or is held up by us.
        """
        session = self._sessions.get(key)
        if session and (session.held or not session.beats):
            return 0.0
        return self._clock.now() - self._seen.get(key, self._started)

    def running(self, source: Source) -> bool:
        """Whether a source may still grow: not ended, not replaced, its agent there."""
        writer = self._state.writers.get(source.writer)
        if source.ended or writer is None or writer.epoch != source.epoch:
            return False
        live = writer.live.get(source.request_id)
        return (
            live is not None
            and live[1] is source
            and self.idle_seconds(source.writer) <= self.timeout
        )

    def count_lost(self) -> int:
        """Writers with running requests that have gone silent since the last call."""
        lost = {
            key
            for key, writer in self._state.writers.items()
            if writer.live and self.idle_seconds(key) > self.timeout
        }
        new, self._lost = lost - self._lost, lost
        return len(new)

    def forget(self, key: WriterKey) -> None:
        """The writer is gone for good."""
        self._seen.pop(key, None)
        self._reports.pop(key, None)
