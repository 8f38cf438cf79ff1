"""States of an agent's open stream, and the transitions between them."""

from __future__ import annotations

from enum import Enum

from routetrace.server.index.writer import Writer


class SessionState(Enum):
    """Phase of one open stream."""

    SILENT = "silent"
    """Open, without a heartbeat so far: the agent cannot be lost."""
    BEATING = "beating"
    """Open, with heartbeats: the agent is lost if they stop."""
    HELD = "held"
    """As BEATING, but the server does not read until earlier chunks are committed."""
    CLOSED = "closed"
    """Ended, or replaced by another stream: no new chunk counts."""


#: States that may follow each state. A silent agent cannot be lost, so it is never held.
TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.SILENT: frozenset({SessionState.BEATING, SessionState.CLOSED}),
    SessionState.BEATING: frozenset({SessionState.HELD, SessionState.CLOSED}),
    SessionState.HELD: frozenset({SessionState.BEATING, SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}


class Session:
    """Open stream of one writer epoch."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.state = SessionState.SILENT
        self.host = ""
        """Host that the agent reports; "" if it reports none."""
        self.reported = False
        """Whether the agent is reported: it has sent a message after one of a newer epoch
        connected."""

    def enter(self, state: SessionState) -> bool:
        """Change to a state; return False, and stay, where `TRANSITIONS` has no such change."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    @property
    def closed(self) -> bool:
        """Whether the stream has ended or another one has replaced it."""
        return self.state is SessionState.CLOSED

    def hold(self) -> None:
        """Stop counting the agent's silence."""
        self.enter(SessionState.HELD)

    def release(self) -> None:
        """Count the agent's silence again."""
        if self.state is SessionState.HELD:
            self.enter(SessionState.BEATING)
