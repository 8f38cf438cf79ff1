"""Which agents are there: whether a request that has not ended may still grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routetrace.server.journal import Clock
from routetrace.server.state import State
from routetrace.server.trace_index import Source, WriterKey

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

    def opened(self, session: Session) -> Session | None:
        """A stream opened; returns the one that it replaces."""
        key = session.writer.key
        previous = self._sessions.get(key)
        if previous:
            previous.replaced = True
        self._sessions[key] = session
        self.seen(session)
        return previous

    def seen(self, session: Session) -> None:
        """A stream said something."""
        self._seen[session.writer.key] = self._clock.now()

    def closed(self, session: Session) -> None:
        """A stream ended."""
        if self._sessions.get(session.writer.key) is session:
            del self._sessions[session.writer.key]
            self.seen(session)

    def idle_seconds(self, key: WriterKey) -> float:
        """Seconds since a writer was last connected; 0 while it is."""
        if key in self._sessions:
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

    def forget(self, key: WriterKey) -> None:
        """The writer is gone for good."""
        self._seen.pop(key, None)
