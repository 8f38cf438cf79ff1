"""Calls of the trace service about a run as a whole, and the server."""

from __future__ import annotations

from abc import abstractmethod

from routetrace.common.limits import check_id
from routetrace.server.access.control import Access
from routetrace.server.common.rpc import Context, unary
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Journal
from routetrace.server.read.agreements import report_agreement
from routetrace.server.read.catalog import Catalog
from routetrace.server.read.checks import Checks
from routetrace.server.read.engines import forget_engine
from routetrace.server.read.status import Status
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc


class RunCalls(pb_grpc.TraceServiceServicer):
    """Part of routetrace.v1.TraceService."""

    _access: Access
    _agents: Agents
    _checks: Checks
    _journal: Journal
    _status: Status

    @abstractmethod
    def _catalog(self, run: str) -> Catalog:
        """Return the catalog that has a run."""

    @unary
    async def ListAgents(  # noqa: N802, D102
        self, request: pb.ListAgentsRequest, context: Context
    ) -> pb.ListAgentsResponse:
        self._checks.call(context, "read", request.run)
        return await self._catalog(request.run).agents(request)

    @unary
    async def GetHistory(  # noqa: N802, D102
        self, request: pb.GetHistoryRequest, context: Context
    ) -> pb.GetHistoryResponse:
        self._checks.call(context, "read", request.run)
        return await self._catalog(request.run).history(request)

    @unary
    async def ReportAgreement(  # noqa: N802, D102
        self, request: pb.ReportAgreementRequest, context: Context
    ) -> pb.ReportAgreementResponse:
        self._checks.call(context, "read", request.run)
        await report_agreement(self._journal, request.run, request.report)
        return pb.ReportAgreementResponse()

    @unary
    async def ListAgreement(  # noqa: N802, D102
        self, request: pb.ListAgreementRequest, context: Context
    ) -> pb.ListAgreementResponse:
        self._checks.call(context, "read", request.run)
        return await self._catalog(request.run).agreement(request)

    @unary
    async def ForgetEngine(  # noqa: N802, D102
        self, request: pb.ForgetEngineRequest, context: Context
    ) -> pb.ForgetEngineResponse:
        self._checks.call(context, "admin", request.run, request.engine_id)
        self._access.check(context, "admin", request.run, request.engine_id)
        check_id("engine_id", request.engine_id)
        count = await forget_engine(self._agents, self._journal, request.run, request.engine_id)
        return pb.ForgetEngineResponse(num_forgotten=count)

    @unary
    async def GetServerInfo(  # noqa: N802, D102
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return await self._status.info(request, context)
