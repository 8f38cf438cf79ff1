"""Status of the server, over all its workers."""

from __future__ import annotations

import asyncio

from routetrace.common.version import installed_version
from routetrace.server.access.control import Access
from routetrace.server.access.partition import Partition
from routetrace.server.common.rpc import Context
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Journal
from routetrace.server.read.checks import Checks
from routetrace.server.read.peers import Peers
from routetrace.server.retention.limits import Limits
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.gathering import Gathering
from routetrace.server.store.interface import Store
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum runs in a response.
_MAX_RUNS = 1000


class Status:
    """Answers GetServerInfo."""

    def __init__(
        self,
        *,
        access: Access,
        agents: Agents,
        checks: Checks,
        config: ServerConfig,
        gathering: Gathering,
        journal: Journal,
        limits: Limits,
        partition: Partition,
        peers: Peers,
        started: float,
        store: Store,
    ) -> None:
        self._access = access
        self._agents = agents
        self._checks = checks
        self._config = config
        self._gathering = gathering
        self._journal = journal
        self._state = journal.state
        self._limits = limits
        self._partition = partition
        self._peers = peers
        self._started = started
        self._store = store

    async def info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return the status of all workers; to another worker, of this one."""
        if self._partition.count > 1 and self._peers.calls(context):
            self._access.check(context, "read", request.run)
            self._checks.ready()
            return await self._info(request.run, context)
        owner = self._checks.call(context, "read", request.run)
        info = await self._info(request.run, context)
        info.owner = owner
        info.limits.extend(self._limits.of(owner, request.run))
        runs = {*info.runs}
        for other in await self._peers.infos(request, context):
            info.used_bytes += other.used_bytes
            info.capacity_bytes += other.capacity_bytes
            info.damaged_records += other.damaged_records
            runs.update(other.runs)
        if self._partition.spreads(request.run):
            asked = pb.GetServerInfoRequest(run=request.run)
            answers = await self._gathering.ask("Info", asked, pb.GetServerInfoResponse)
            for other in answers.values():
                info.num_agents += other.num_agents
                info.num_traces += other.num_traces  # one in several workers counts in each
                info.run_bytes += other.run_bytes
                info.run_quota_bytes += other.run_quota_bytes
                runs.update(self._access.covered(context, other.runs))
        info.runs[:] = sorted(runs)[:_MAX_RUNS]
        return info

    async def _info(self, run: str, context: Context) -> pb.GetServerInfoResponse:
        """Return the status of this worker."""
        config = self._config
        stats = await asyncio.to_thread(self._store.stats)
        return pb.GetServerInfoResponse(
            version=installed_version(),
            ack_mode=config.ack_mode,
            store=config.store,
            started_ms=int(self._started * 1000),
            now_ms=int(self._journal.clock.now() * 1000),
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            damaged_records=stats.damaged_records,
            num_agents=sum(key.run == run for key in self._agents.connected),
            num_traces=len(self._state.traces.of_run.get(run, ())),
            run_bytes=self._state.run_bytes[run],
            run_quota_bytes=config.quota_of(run),
            runs=self._access.covered(context, self._state.runs())[:_MAX_RUNS],
        )
