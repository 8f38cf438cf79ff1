"""Calls about a run as a whole, and the server, as those of `calls.py`."""

from __future__ import annotations

from collections.abc import Sequence

from routetrace.client import _arguments as check
from routetrace.client._core.config import Config
from routetrace.client._core.reads import pages, unary
from routetrace.client._core.reads import watch as watch_run
from routetrace.client._core.steps import Plan
from routetrace.client.agreement import Agreement
from routetrace.client.history import RunHistory
from routetrace.client.stat import AgentStat, ServerInfo
from routetrace.client.summary import TraceChanges
from routetrace.common.errors import InvalidArgument, RouteTraceError, kind_of, typed
from routetrace.common.limits import MAX_STEP, is_text
from routetrace.v1 import routetrace_pb2 as pb


def watch(config: Config, *, timeout: float | None) -> Plan[TraceChanges]:
    """See RouteClient.watch."""
    request = pb.WatchTracesRequest(run=config.run)
    return watch_run(request, config.limit(timeout), TraceChanges.from_proto)


def history(config: Config, *, after: int, timeout: float | None) -> Plan[RunHistory]:
    """See RouteClient.history."""
    request = pb.GetHistoryRequest(run=config.run, after=check.whole("after", after, 0, MAX_STEP))
    return unary("GetHistory", request, config.limit(timeout), RunHistory.from_proto)


def report_agreement(
    config: Config,
    step: int,
    agreement: Agreement,
    *,
    weight_version: int | None,
    reporter: str,
    diagnosis: str,
    trace_ids: Sequence[str],
    timeout: float | None,
) -> Plan[None]:
    """See RouteClient.report_agreement."""
    if not isinstance(agreement, Agreement):
        raise InvalidArgument(field="agreement", value=kind_of(agreement), expected="an Agreement")
    report = _converted(agreement)
    report.step = check.whole("step", step, 0, MAX_STEP)
    report.reporter = check.identifier("reporter", reporter)
    report.trace_ids.extend(check.identifiers("trace_ids", trace_ids))
    if not is_text(diagnosis):
        raise InvalidArgument(field="diagnosis", value=typed(diagnosis), expected="Unicode text")
    report.diagnosis = diagnosis
    if weight_version is not None:
        report.weight_version = check.weight_version(weight_version)
    request = pb.ReportAgreementRequest(run=config.run, report=report)
    return unary("ReportAgreement", request, config.limit(timeout), lambda _: None)


def _converted(agreement: Agreement) -> pb.AgreementReport:
    try:
        return agreement.to_proto()
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            field="agreement", value=str(error), expected="counts that are integers from 0 on"
        ) from error


def agreement_history(
    config: Config, *, start: int, stop: int | None, timeout: float | None
) -> Plan[pb.AgreementReport | RouteTraceError]:
    """See RouteClient.agreement_history: emit its messages."""
    first = check.whole("start", start, 0, MAX_STEP)
    last = 0 if stop is None else check.whole("stop", stop, first + 1, MAX_STEP)
    request = pb.ListAgreementRequest(run=config.run, start=first, stop=last)
    limit = config.limit(timeout)
    return pages("ListAgreement", request, limit, lambda page: page.reports, lambda each: each)


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
