"""The server without its sockets: state, services, and what must be done from time to time."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from routetrace.server.access import Access
from routetrace.server.admission import Admission
from routetrace.server.agents import Agents
from routetrace.server.config import ServerConfig
from routetrace.server.ingest import IngestServicer
from routetrace.server.journal import Journal
from routetrace.server.metrics import Metrics
from routetrace.server.reader import Reader
from routetrace.server.retention import Retention
from routetrace.server.state import State
from routetrace.server.store import Store
from routetrace.server.traces import TraceServicer
from routetrace.v1.errors import Unavailable

_log = logging.getLogger(__name__)


class Core:
    """The server without its sockets. All of it belongs to one event loop.

    Raises:
        ConfigError: if a file that the settings name can not be used.
    """

    def __init__(self, store: Store, config: ServerConfig) -> None:
        self.config = config
        self.store = store
        self.metrics = Metrics()
        self.access = Access(config, self.metrics)
        self.admission = Admission(config, self.metrics)
        self.state = State(config.default_ttl_seconds)
        self.journal = Journal(store, self.state)
        clock = self.journal.clock
        self.agents = Agents(self.state, clock, config.agent_timeout_seconds)
        self.reader = Reader(store, self.state, self.agents, clock, self.metrics)
        self.retention = Retention(self.journal, self.reader, self.agents, config, self.metrics)
        self.started = clock.now()
        #: Seconds that the last start took to rebuild the state, and from how many records.
        self.recovery_seconds = 0.0
        self.recovered_records = 0
        self._ingest = IngestServicer(self)
        self._state_name = "starting"

    @property
    def ready(self) -> bool:
        """Whether data calls are served."""
        return self._state_name == "ready"

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers both services."""
        self._ingest.add_to(server)
        TraceServicer(self).add_to(server)

    def check_ready(self) -> None:
        """Raises Unavailable while starting or draining."""
        if not self.ready:
            raise Unavailable(f"the server is {self._state_name}", retry_after=0.5)

    async def start(self) -> None:
        """Rebuilds the state from the store; data calls are refused until this is done."""
        before = time.monotonic()
        count = await asyncio.to_thread(self.journal.recover)
        self.recovery_seconds = time.monotonic() - before
        self.recovered_records = count
        self.retention.covered(self.state.number - count)
        # An expiry is no record: what it forgot since the snapshot has come back.
        self.retention.expire()
        self.retention.freeze()
        self._state_name = "ready"
        _log.info("replayed %d records: %d traces", count, len(self.state.traces.traces))

    async def stop(self) -> None:
        """Refuses new calls, ends the agents' streams, and wakes the calls that wait."""
        self._state_name = "draining"
        self._ingest.stop()
        self.journal.changes.notify_all()

    async def sweep_due(self) -> None:
        """Returns when it is time to sweep."""
        await self.retention.due()

    async def sweep(self) -> None:
        """Forgets what has expired, or must go for want of room, and gives its space back."""
        await self.retention.sweep()
