"""States of the server process, and the transitions between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from routetrace.common.errors import Moved, RouteTraceError, Unavailable
from routetrace.server.store.interface import NO_OWNER, Owner

_RETRY_SECONDS = 0.5


class ServerState(Enum):
    """Phase of one server process."""

    STARTING = "starting"
    """The state is being rebuilt from the store; data calls are refused."""
    STANDBY = "standby"
    """Another server owns the store; data calls are refused until this one takes over."""
    READY = "ready"
    """Data calls are served while this server owns its store."""
    FAILED = "failed"
    """A committed record could not be applied: data calls are refused, and the process ends."""
    DRAINING = "draining"
    """New calls are refused; open ones end."""


#: States that may follow each state. A server that is stopped while it starts drains at once.
TRANSITIONS: dict[ServerState, frozenset[ServerState]] = {
    ServerState.STARTING: frozenset({ServerState.STANDBY, ServerState.READY, ServerState.DRAINING}),
    ServerState.STANDBY: frozenset({ServerState.STARTING, ServerState.DRAINING}),
    ServerState.READY: frozenset({ServerState.FAILED, ServerState.DRAINING}),
    ServerState.FAILED: frozenset({ServerState.DRAINING}),
    ServerState.DRAINING: frozenset({ServerState.DRAINING}),
}


@dataclass(slots=True)
class Recovery:
    """Cost of the last start; zeros until it is complete."""

    seconds: float = 0.0
    records: int = 0
    """Replayed records."""


class Lifecycle:
    """Current state of the server."""

    def __init__(self) -> None:
        self.state = ServerState.STARTING
        self.owns: Callable[[], bool] = lambda: True
        """Whether the server owns its store at the moment."""
        self.owner = NO_OWNER
        """Server that owns the store while this one stands by."""
        self.on_change: Callable[[], object] = lambda: None
        """Called after each change of the state or of the owner."""

    def enter(self, state: ServerState) -> bool:
        """Change to a state; return False, and stay, where `TRANSITIONS` has no such change."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        self.on_change()
        return True

    def stand_by(self, owner: Owner) -> None:
        """Stand by for a store that another server owns, or owned."""
        self.owner = owner
        if not self.enter(ServerState.STANDBY):
            self.on_change()

    @property
    def ready(self) -> bool:
        """Whether data calls are served."""
        return self.state is ServerState.READY and self.owns()

    @property
    def directs(self) -> bool:
        """Whether data calls are sent on to the owner of the store."""
        return self.state is ServerState.STANDBY and bool(self.owner.address)

    def check_ready(self) -> None:
        """Raise Unavailable, or Moved, unless the server is ready."""
        if not self.ready:
            raise self.unavailable()

    def unavailable(self) -> RouteTraceError:
        """Return the error for calls that the current state refuses."""
        if self.directs:
            to = self.owner.address
            return Moved(
                f"the server at {to} owns the partition of this run: expected a client or agent "
                "with the addresses of all servers as its target",
                target=to,
            )
        if self.state is ServerState.READY and not self.owns():
            return Unavailable(
                "the server is not ready: its lease on the object store is over; retry later",
                retry_after=_RETRY_SECONDS,
            )
        return Unavailable(
            f"the server is not ready (state: {self.state.value}); retry later",
            retry_after=_RETRY_SECONDS,
        )
