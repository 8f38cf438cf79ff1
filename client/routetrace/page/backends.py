"""Clients of the server, one for each token and run, and the calls that pages share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from routetrace.client import (
    AgentStat,
    AgreementHistory,
    AsyncRouteClient,
    ClientConfig,
    Explanation,
    RunHistory,
    ServerInfo,
    Trace,
    TraceChanges,
    TraceDescription,
    TraceStat,
)
from routetrace.client.options import Policy
from routetrace.common.errors import NotFound, PermissionDenied, RouteTraceError
from routetrace.common.report_runs import reported_run
from routetrace.common.viewer import USER_AGENT
from routetrace.page.budgets import Gate, Shared
from routetrace.page.config import PageConfig
from routetrace.page.errors import lost_trace
from routetrace.page.sessions import Caller

#: Seconds of a call without rows.
_CALL_S = 5.0
#: Clients that are kept; each has a connection of its own.
_MAX_CLIENTS = 64

#: The server does not count the page's reads among those of a trace.
_OPTIONS = {"grpc.primary_user_agent": USER_AGENT}

_MAX_READS = 4
_MAX_WAITING_READS = 32
_MAX_WAIT_S = 10.0


@dataclass
class _Lent:
    client: AsyncRouteClient
    calls: int = 0


class Backends:
    """The server as each caller may see it: calls carry the token of the caller.

    Args:
        config: server and TLS files.
    """

    def __init__(self, config: PageConfig) -> None:
        self._config = config
        self._clients: OrderedDict[tuple[str, str], _Lent] = OrderedDict()
        self._calls = Shared()
        self._reads = Gate(_MAX_READS, _MAX_WAITING_READS, _MAX_WAIT_S)

    async def aclose(self) -> None:
        """End all calls and disconnect."""
        while self._clients:
            await self._clients.popitem()[1].client.aclose()

    async def info(self, caller: Caller, run: str) -> ServerInfo:
        """Return the state of the server.

        Raises:
            RouteTraceError: as `AsyncRouteClient.server_info`.
        """

        async def call() -> ServerInfo:
            async with self._lend(caller, run) as client:
                return await client.server_info(timeout=_CALL_S)

        return await self._calls.call(("info", caller.digest, run), call)

    async def stat(
        self, caller: Caller, run: str, trace_id: str, incarnation: int | None
    ) -> TraceStat:
        """Return the facts about a trace, as of now.

        Raises:
            NotFound: in words for the page.
            RouteTraceError: as `AsyncRouteClient.stat`.
        """

        async def call() -> TraceStat:
            async with self._lend(caller, run) as client:
                return await client.stat(trace_id, incarnation=incarnation, timeout=_CALL_S)

        try:
            return await self._calls.call(("stat", caller.digest, run, trace_id, incarnation), call)
        except NotFound as error:
            raise lost_trace(error, run, trace_id) from error

    async def describe(
        self,
        caller: Caller,
        run: str,
        trace_id: str,
        incarnation: int | None,
        policy: Policy = "as_sampled",
        *,
        origins: bool = True,
    ) -> TraceDescription:
        """Return the origin of a trace, as of now.

        Raises:
            NotFound: in words for the page.
            RouteTraceError: as `AsyncRouteClient.describe`.
        """

        async def call() -> TraceDescription:
            async with self._lend(caller, run) as client:
                return await client.describe(
                    trace_id,
                    incarnation=incarnation,
                    policy=policy,
                    origins=origins,
                    timeout=_CALL_S,
                )

        key = ("describe", caller.digest, run, trace_id, incarnation, policy, origins)
        try:
            return await self._calls.call(key, call)
        except NotFound as error:
            raise lost_trace(error, run, trace_id) from error

    async def explain(
        self,
        caller: Caller,
        run: str,
        trace_id: str,
        incarnation: int | None,
        policy: Policy,
        position: int,
        layer_id: int | None,
    ) -> Explanation:
        """Return where the row of one cell comes from, or why there is none, as of now.

        Raises:
            NotFound: in words for the page.
            RouteTraceError: as `AsyncRouteClient.explain`.
        """

        async def call() -> Explanation:
            async with self._lend(caller, run) as client:
                return await client.explain(
                    trace_id,
                    position,
                    layer_id=layer_id,
                    incarnation=incarnation,
                    policy=policy,
                    timeout=_CALL_S,
                )

        key = ("explain", caller.digest, run, trace_id, incarnation, policy, position, layer_id)
        try:
            return await self._calls.call(key, call)
        except NotFound as error:
            raise lost_trace(error, run, trace_id) from error

    async def traces(
        self, caller: Caller, run: str, trace_ids: Sequence[str]
    ) -> AsyncGenerator[Trace | RouteTraceError, None]:
        """Return the rows of traces, with missing ones masked, or the error of each: one read.

        Raises:
            Overloaded: if too many reads are under way.
        """
        async with self._reads.enter(), self._lend(caller, run) as client:
            reads = client.get_many(
                trace_ids,
                concurrency=2,
                errors="return",
                missing="mask",
                timeout=self._config.timeout,
            )
            async with aclosing(reads):
                async for read in reads:
                    yield read

    async def read(
        self,
        caller: Caller,
        stat: TraceStat,
        policy: Policy,
        token_start: int = 0,
        token_stop: int | None = None,
    ) -> Trace:
        """Return the rows of an incarnation, with missing ones masked; at most 4 reads at a time.

        Raises:
            Overloaded: if too many reads are under way.
            RouteTraceError: as `AsyncRouteClient.get`.
        """

        async def call() -> Trace:
            async with self._reads.enter(), self._lend(caller, stat.run) as client:
                return await client.get(
                    stat.trace_id,
                    incarnation=stat.incarnation,
                    token_start=token_start,
                    token_stop=token_stop,
                    missing="mask",
                    policy=policy,
                    timeout=self._config.timeout,
                )

        key = ("read", caller.digest, stat.run, stat.trace_id, stat.incarnation, policy)
        try:
            return await self._calls.call((*key, token_start, token_stop), call)
        except NotFound as error:  # forgotten since the facts were asked for
            raise lost_trace(error, stat.run, stat.trace_id) from error

    async def watch(self, caller: Caller, run: str) -> AsyncGenerator[TraceChanges, None]:
        """Yield summaries of the traces of a run, then of those that change.

        Raises:
            RouteTraceError: as `AsyncRouteClient.watch`.
        """
        async with (
            self._lend(caller, run) as client,
            aclosing(client.watch(timeout=_CALL_S)) as changes,
        ):
            async for some in changes:
                yield some

    async def agents(self, caller: Caller, run: str) -> list[AgentStat]:
        """Return the agents of a run, which callers that ask meanwhile share.

        Raises:
            RouteTraceError: as `AsyncRouteClient.agents`.
        """

        async def call() -> list[AgentStat]:
            async with self._lend(caller, run) as client:
                return [agent async for agent in client.agents(timeout=_CALL_S)]

        return await self._calls.call(("agents", caller.digest, run), call)

    async def history(self, caller: Caller, run: str, after: int) -> RunHistory:
        """Return the last minutes of a run.

        Raises:
            RouteTraceError: as `AsyncRouteClient.history`.
        """

        async def call() -> RunHistory:
            async with self._lend(caller, run) as client:
                return await client.history(after=after, timeout=_CALL_S)

        return await self._calls.call(("history", caller.digest, run, after), call)

    async def agreement(self, caller: Caller, run: str, start: int) -> AgreementHistory:
        """Return the agreement of trainer and rollout from a training step on.

        Raises:
            RouteTraceError: as `AsyncRouteClient.agreement_history`.
        """
        async with self._lend(caller, run) as client:
            return await client.agreement_history(start=start, timeout=_CALL_S)

    @asynccontextmanager
    async def _lend(self, caller: Caller, run: str) -> AsyncIterator[AsyncRouteClient]:
        """Lend the client of a token and a run for one call."""
        if self._config.runs and reported_run(run) not in self._config.runs:
            raise PermissionDenied(
                f"This page does not show run {run!r}; it shows: {', '.join(self._config.runs)}.",
                field="run",
                value=run,
                expected=f"one of {', '.join(self._config.runs)}",
            )
        key = caller.digest, run
        lent = self._clients.get(key)
        if lent is None:
            security = replace(self._config.security, token=caller.token)
            settings = ClientConfig(
                target=self._config.target, run=run, security=security, grpc_options=_OPTIONS
            )
            lent = self._clients[key] = _Lent(AsyncRouteClient(config=settings))
        self._clients.move_to_end(key)
        lent.calls += 1
        try:
            yield lent.client
        except PermissionDenied as error:
            other_run = error.field == "runs"
            raise PermissionDenied(
                f"Your token does not cover run {run!r}." if other_run else error.message,
                field=error.field,
                value=error.value,
                expected=error.expected,
            ) from error
        finally:
            lent.calls -= 1
            await self._close_idle()

    async def _close_idle(self) -> None:
        """Close the clients used least lately, if there are too many and no call uses them."""
        for key, lent in list(self._clients.items())[: max(0, len(self._clients) - _MAX_CLIENTS)]:
            if not lent.calls:
                del self._clients[key]
                await lent.client.aclose()
