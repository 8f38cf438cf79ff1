"""Calls about a run as a whole, and the server, as those of `calls.py`."""

from __future__ import annotations

from routetrace.client import _arguments as check
from routetrace.client._core.config import Config
from routetrace.client._core.reads import pages, unary
from routetrace.client._core.reads import watch as watch_run
from routetrace.client._core.steps import Plan
from routetrace.client.history import RunHistory
from routetrace.client.stat import AgentStat, ServerInfo
from routetrace.client.summary import TraceChanges
from routetrace.common.limits import MAX_STEP
from routetrace.v1 import routetrace_pb2 as pb


def watch(config: Config, *, timeout: float | None) -> Plan[TraceChanges]:
    """See RouteClient.watch."""
    request = pb.WatchTracesRequest(run=config.run)
    return watch_run(request, config.limit(timeout), TraceChanges.from_proto)


def history(config: Config, *, after: int, timeout: float | None) -> Plan[RunHistory]:
    """See RouteClient.history."""
    request = pb.GetHistoryRequest(run=config.run, after=check.whole("after", after, 0, MAX_STEP))
    return unary("GetHistory", request, config.limit(timeout), RunHistory.from_proto)


def agents(config: Config, *, timeout: float | None) -> Plan[AgentStat]:
    """See RouteClient.agents."""
    request = pb.ListAgentsRequest(run=config.run)
    limit = config.limit(timeout)
    return pages("ListAgents", request, limit, lambda page: page.agents, AgentStat.from_proto)


def server_info(config: Config, *, timeout: float | None) -> Plan[ServerInfo]:
    """See RouteClient.server_info."""
    request = pb.GetServerInfoRequest(run=config.run)
    return unary("GetServerInfo", request, config.limit(timeout), ServerInfo.from_proto)


def forget_engine(config: Config, engine_id: str, *, timeout: float | None) -> Plan[int]:
    """See RouteClient.forget_engine."""
    request = pb.ForgetEngineRequest(
        run=config.run, engine_id=check.identifier("engine_id", engine_id)
    )
    return unary(
        "ForgetEngine", request, config.limit(timeout), lambda response: response.num_forgotten
    )
