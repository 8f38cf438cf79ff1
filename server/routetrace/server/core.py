"""The server without its sockets: state, services, and what must be done from time to time."""

from __future__ import annotations

import asyncio
import logging

import grpc

from routetrace.server.agents import Agents
from routetrace.server.config import ServerConfig
from routetrace.server.ingest import IngestServicer
from routetrace.server.journal import Journal
from routetrace.server.reader import Reader
from routetrace.server.state import State
from routetrace.server.store import Store
from routetrace.server.traces import TraceServicer
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from routetrace.v1.errors import Unavailable

#: Records after which a new snapshot spares the next start their replay.
_SNAPSHOT_RECORDS = 20_000

_log = logging.getLogger(__name__)


class Core:
    """The server without its sockets. All of it belongs to one event loop."""

    def __init__(self, store: Store, config: ServerConfig) -> None:
        self.config = config
        self.store = store
        self.state = State(config.default_ttl_seconds)
        self.journal = Journal(store, self.state)
        clock = self.journal.clock
        self.agents = Agents(self.state, clock, config.agent_timeout_seconds)
        self.reader = Reader(store, self.state, self.agents, clock)
        self._ingest = IngestServicer(self)
        self._state_name = "starting"
        self._snapshot_number = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers both services."""
        pb_grpc.add_IngestServiceServicer_to_server(self._ingest, server)
        pb_grpc.add_TraceServiceServicer_to_server(TraceServicer(self), server)

    def check_ready(self) -> None:
        """Raises Unavailable while starting or draining."""
        if self._state_name != "ready":
            raise Unavailable(f"the server is {self._state_name}", retry_after=0.5)

    async def start(self) -> None:
        """Rebuilds the state from the store; data calls are refused until this is done."""
        count = await asyncio.to_thread(self.journal.recover)
        self._snapshot_number = self.state.number - count
        # An expiry is no record: what it forgot since the snapshot has come back.
        self._expire()
        self._state_name = "ready"
        _log.info("replayed %d records: %d traces", count, len(self.state.traces.traces))

    def _expire(self) -> int:
        """Forgets traces whose lease has run out; returns their number."""
        now = self.journal.clock.now()
        traces = self.state.traces.traces
        expired = [key for key, trace in traces.items() if trace.expires <= now]
        for key in expired:
            self.state.forget(key)
            self.journal.changes.notify(key)
        return len(expired)

    async def stop(self) -> None:
        """Refuses new calls, ends the agents' streams, and wakes the calls that wait."""
        self._state_name = "draining"
        self._ingest.stop()
        self.journal.changes.notify_all()

    async def sweep(self) -> None:
        """Forgets what has expired and gives its space back.

        A chunk goes when no trace, no live slot and no open read points into it: marked anew each
        time, so that there is no count that could be wrong.
        """
        expired = self._expire()
        # An engine that nobody heard of for the life of a trace has no cache left to hit.
        for writer in [*self.state.writers]:
            if self.agents.idle_seconds(writer) > self.config.default_ttl_seconds:
                del self.state.writers[writer]
                self.agents.forget(writer)
        live = self.state.live_chunks() | self.reader.pinned_chunks()
        garbage = [number for number in self.state.frames if number not in live]
        # A snapshot is as large as the indexes: worth it for a twentieth of what is stored.
        behind = self.state.number - self._snapshot_number
        if behind < _SNAPSHOT_RECORDS and (
            not garbage or len(garbage) * 20 < len(self.state.frames)
        ):
            return
        dropped = {number: self.state.frames.pop(number) for number in garbage}
        snapshot = self.journal.snapshot()
        try:
            await asyncio.to_thread(self.store.compact, snapshot, garbage)
        except BaseException:
            # Still stored: forgotten here, their space would not come back before a restart.
            self.state.frames.update(dropped)
            raise
        self._snapshot_number = snapshot[0]
        _log.info("dropped %d traces and %d chunks", expired, len(garbage))
