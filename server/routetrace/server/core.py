"""Composition of the server without its sockets.

Makes the parts of the server and passes them to the constructors of each other. No package of the
server imports this module but the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from routetrace.common.limited import LimitedLog
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle, Recovery, ServerState
from routetrace.server.access.partition import WHOLE, Partition
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.agents import Agents
from routetrace.server.index.demand import Demand
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.index.state import State
from routetrace.server.ingest.service import IngestServicer
from routetrace.server.ops.census import Census
from routetrace.server.ops.scrape import Scrape
from routetrace.server.process import ownership
from routetrace.server.read.parts import PartsServicer
from routetrace.server.read.peers import NO_PEERS, Peers
from routetrace.server.read.service import TraceServicer
from routetrace.server.retention.retention import Retention
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.summaries import Summaries
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.gathering import Gathering
from routetrace.server.spread.workers import NO_WORKERS, Workers
from routetrace.server.store.interface import Store

_log = logging.getLogger(__name__)
_sweeps = LimitedLog(_log, "failed sweeps")


class Core:
    """Parts of the server, wired together; all calls belong to one event loop.

    Raises:
        ConfigError: if a file named in the settings cannot be used.
    """

    def __init__(
        self,
        store: Store,
        config: ServerConfig,
        partition: Partition = WHOLE,
        peers: Peers = NO_PEERS,
        workers: Workers = NO_WORKERS,
    ) -> None:
        self.config = config
        self._partition = partition
        self.store = store
        self.metrics = Metrics()
        self.access = Access(config, self.metrics)
        self.admission = Admission(config, self.metrics)
        self.state = State(config.default_ttl_seconds, partition.spreads)
        self.journal = Journal(store, self.state, self._fail)
        clock = self.journal.clock
        self.agents = Agents(self.state, clock, config.agent_timeout_seconds)
        self.reader = Reader(
            store, self.state, self.agents, clock, self.metrics, config.forbids_prefix_rows
        )
        summaries = Summaries(self.reader, self.agents)
        self.census = Census(self.state, summaries)
        self.started = clock.now()
        self.recovery = Recovery()
        self.lifecycle = Lifecycle()
        demand = Demand()
        history = History(clock)
        self.gathering = Gathering(self.journal, partition, workers, self.reader.frames.remote)
        self.reader.frames.bring = self.gathering.bring
        self.retention = Retention(
            self.journal, self.reader, self.agents, config, self.metrics, self.gathering
        )
        self.failed = asyncio.Event()
        """Set when a committed record could not be applied: the process must end."""
        self.lost = asyncio.Event()
        """Set when another server has taken over the store: this one starts over."""
        self._ingest = IngestServicer(
            config=config,
            lifecycle=self.lifecycle,
            access=self.access,
            admission=self.admission,
            agents=self.agents,
            demand=demand,
            gathering=self.gathering,
            history=history,
            journal=self.journal,
            reader=self.reader,
            retention=self.retention,
            room=self.retention.room,
            metrics=self.metrics,
            partition=partition,
        )
        self._traces = TraceServicer(
            config=config,
            lifecycle=self.lifecycle,
            access=self.access,
            admission=self.admission,
            agents=self.agents,
            demand=demand,
            gathering=self.gathering,
            history=history,
            journal=self.journal,
            reader=self.reader,
            retention=self.retention,
            summaries=summaries,
            store=store,
            started=self.started,
            partition=partition,
            peers=peers,
            workers=workers,
        )

    @property
    def parts(self) -> PartsServicer:
        """Service for the other workers of the server."""
        return self._traces.parts

    @property
    def ready(self) -> bool:
        """Whether data calls are served."""
        return self.lifecycle.ready

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register both services."""
        self._ingest.add_to(server)
        self._traces.add_to(server)

    def register_scrape(self) -> None:
        """Add the gauges of the state to the metrics; call it where the event loop runs."""
        self.metrics.registry.register(
            Scrape(
                config=self.config,
                lifecycle=self.lifecycle,
                recovery=self.recovery,
                access=self.access,
                admission=self.admission,
                agents=self.agents,
                census=self.census,
                state=self.state,
                memory=self.retention.memory,
                room=self.retention.room,
                store=self.store,
            )
        )

    async def start(self) -> None:
        """Wait for the ownership of the store, then rebuild the state from it.

        Data calls are refused until this is done.

        Raises:
            RouteTraceError: if the store cannot be used.
            InvalidArgument: if it has a run of another partition.
        """
        ownership.watch(self.store, self.lifecycle, self.lost)
        await ownership.take_over(self.store, self.lifecycle)
        before = time.monotonic()
        count = await asyncio.to_thread(self.journal.recover)
        for run in self.state.runs():
            self._partition.check_stored(run)
        self.recovery.seconds = time.monotonic() - before
        self.recovery.records = count
        self.agents.reachable()
        self.retention.covered(self.state.number - count)
        # An expiry is no record, so traces that expired since the snapshot are replayed.
        self.retention.expire()
        self.lifecycle.enter(ServerState.READY)
        _log.info("replayed %d records: %d traces", count, len(self.state.traces.traces))

    async def stop(self) -> None:
        """Refuse new calls, end the agents' streams, and wake waiting calls."""
        self.lifecycle.enter(ServerState.DRAINING)
        self._ingest.stop()
        self.journal.changes.notify_all()

    def _fail(self) -> None:
        """Refuse all data calls: the state may hold a part of a record."""
        self.lifecycle.enter(ServerState.FAILED)
        self._ingest.stop()
        self.journal.changes.notify_all()
        self.failed.set()

    async def sweep_due(self) -> None:
        """Wait until the next sweep is due."""
        await self.retention.due()

    async def sweep(self) -> None:
        """Delete expired traces, evict where a limit is near, and reclaim space."""
        await self.retention.sweep()

    async def sweep_always(self) -> None:
        """Sweep whenever it is due, until cancelled; a disk that fails may do so at each sweep."""
        while True:
            await self.sweep_due()
            try:
                await self.sweep()
            except Exception as error:
                _sweeps.failed("a sweep", error)

    async def count(self) -> None:
        """Count traces every `sweep_interval_seconds` until cancelled, if metrics are served.

        A count computes the view of each trace that ended. Sweeps do not wait for it: near a limit,
        they are urgent.
        """
        if self.config.metrics_listen:
            await self.census.count_every(self.config.sweep_interval_seconds)
