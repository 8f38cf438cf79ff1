"""Access control: TLS, bearer tokens, and the scopes and runs that tokens cover."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc

from routetrace.common.errors import PermissionDenied, RouteTraceError, Unauthenticated
from routetrace.server.access.pace import CALL_SECONDS, UNKNOWN_OWNER, Pace
from routetrace.server.access.tls import Certificates, Handshakes
from routetrace.server.access.tokens import Scope, Token, Tokens
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import Context, fail
from routetrace.server.settings.config import ServerConfig

_log = logging.getLogger(__name__)

_SCOPES: dict[str, Scope] = {
    "/routetrace.v1.IngestService/Ingest": "ingest",
    "/routetrace.v1.IngestService/BindRequest": "ingest",
    "/routetrace.v1.TraceService/GetTrace": "read",
    "/routetrace.v1.TraceService/GetTraces": "read",
    "/routetrace.v1.TraceService/GetBlocks": "read",
    "/routetrace.v1.TraceService/StatTrace": "read",
    "/routetrace.v1.TraceService/DescribeTrace": "read",
    "/routetrace.v1.TraceService/ExplainCell": "read",
    "/routetrace.v1.TraceService/ListTraces": "read",
    "/routetrace.v1.TraceService/LocateSequences": "read",
    "/routetrace.v1.TraceService/WatchTraces": "read",
    "/routetrace.v1.TraceService/GetServerInfo": "read",
    "/routetrace.v1.TraceService/ListAgents": "read",
    "/routetrace.v1.TraceService/GetHistory": "read",
    "/routetrace.v1.TraceService/ReportAgreement": "read",
    "/routetrace.v1.TraceService/ListAgreement": "read",
    "/routetrace.v1.TraceService/RenewLease": "read",
    "/routetrace.v1.TraceService/DeleteTrace": "admin",
    "/routetrace.v1.TraceService/RetireTraces": "admin",
    "/routetrace.v1.TraceService/ForgetEngine": "admin",
}
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_OPEN_TO_ANY_TOKEN = (
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)

_Continuation = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
]


class Access:
    """TLS and tokens of the settings; files are reloaded when they change.

    Raises:
        ConfigError: if a file named in the settings cannot be used.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._unauthenticated = metrics.denied.labels("unauthenticated")
        self._permission_denied = metrics.denied.labels("permission_denied")
        self._failed_handshakes = metrics.denied.labels("handshake")
        self._certificates: Certificates | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._tokens = Tokens(config.tokens_file) if config.tokens_file else None
        self._handshakes: Handshakes | None = None

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of the port, for the running event loop; None: plain text."""
        if self._certificates is None:
            return None
        self._handshakes = Handshakes(self._failed_handshakes)
        return self._certificates.credentials(self._handshakes)

    def certificate_expiry(self) -> float | None:
        """Return the Unix time at which the certificate expires; None without TLS."""
        return self._certificates.expiry if self._certificates else None

    def interceptors(self, pace: Pace) -> list[grpc.aio.ServerInterceptor]:
        """Return the interceptor that checks tokens before a message is parsed, if needed.

        Args:
            pace: lets the calls of a token begin.
        """
        return [_Gate(self, pace)] if self._tokens or self._certificates else []

    def check(self, context: Context, scope: Scope, run: str, engine_id: str | None = None) -> str:
        """Check that the caller's token covers a scope, a run, and an engine that it feeds, if any.

        Returns:
            Owner of the call: its token, or its run on a server without tokens.

        Raises:
            Unauthenticated: if the token is not known, or no longer.
            PermissionDenied: if it does not cover one of them.
        """
        if self._tokens is None:
            return f"run {run}"
        token = self._find(self._tokens, context.invocation_metadata() or ())
        if scope not in token.scopes:
            raise self._denied(token, "scopes", scope)
        if not token.covers(run):
            raise self._denied(token, "runs", run)
        if engine_id is not None and not token.covers_engine(engine_id):
            raise self._denied(token, "engines", engine_id)
        return f"token {token.name}"

    def owner_of(self, context: Context) -> str:
        """Return the owner of a call whose run is not known yet.

        Raises:
            Unauthenticated: if the token is not known, or no longer.
        """
        if self._tokens is None:
            return UNKNOWN_OWNER
        return f"token {self._find(self._tokens, context.invocation_metadata() or ()).name}"

    def token_of(self, context: Context) -> str:
        """Return the name of the caller's token; "" on a server without tokens.

        Raises:
            Unauthenticated: if the token is not known, or no longer.
        """
        if self._tokens is None:
            return ""
        return self._find(self._tokens, context.invocation_metadata() or ()).name

    def may(self, context: Context, scope: Scope, run: str) -> bool:
        """Whether the caller's token covers a scope and a run.

        Raises:
            Unauthenticated: if the token is not known, or no longer.
        """
        if self._tokens is None:
            return True
        token = self._find(self._tokens, context.invocation_metadata() or ())
        return scope in token.scopes and token.covers(run)

    def covered(self, context: Context, runs: Iterable[str]) -> list[str]:
        """Return the runs that the caller's token covers, sorted; all on a server without tokens.

        Raises:
            Unauthenticated: if the token is not known, or no longer.
        """
        if self._tokens is None:
            return sorted(runs)
        token = self._find(self._tokens, context.invocation_metadata() or ())
        return sorted(filter(token.covers, runs))

    def check_method(self, method: str, metadata: Any) -> str:
        """Check that the token of a call covers its method.

        Returns:
            Owner of the call; "" of one without a token.

        Raises:
            Unauthenticated: if the metadata holds no known token.
            PermissionDenied: if the token does not cover the method.
        """
        if self._tokens is None or method.startswith(_OPEN_TO_ALL):
            return ""
        token = self._find(self._tokens, metadata)
        scope = _SCOPES.get(method, "admin")
        if scope not in token.scopes and not method.startswith(_OPEN_TO_ANY_TOKEN):
            raise self._denied(token, "scopes", scope)
        return f"token {token.name}"

    def called(self, context: Context) -> None:
        """Note a call, which proves that its connection works."""
        if self._handshakes is not None:
            self._handshakes.called(context.peer())

    def _find(self, tokens: Tokens, metadata: Any) -> Token:
        try:
            return tokens.find(metadata)
        except Unauthenticated:
            self._unauthenticated.inc()
            raise

    def _denied(self, token: Token, field: str, value: str) -> PermissionDenied:
        self._permission_denied.inc()
        what = {"scopes": "the scope", "runs": "run", "engines": "engine"}[field]
        return PermissionDenied(
            f"token {token.name} does not cover {what} {value!r}",
            field=field,
            value=value,
            expected=f"one that token {token.name} covers",
        )


class _Gate(grpc.aio.ServerInterceptor):
    """Passes calls on, or gives them a handler that refuses without reading."""

    def __init__(self, access: Access, pace: Pace) -> None:
        self._access = access
        self._pace = pace

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call."""
        method: str = handler_call_details.method
        try:
            owner = self._access.check_method(method, handler_call_details.invocation_metadata)
        except RouteTraceError as error:
            return self._refusal(method, error)
        if owner:
            await self._pace.step(owner)
            self._pace.charge(owner, CALL_SECONDS)
        handler = await continuation(handler_call_details)
        return handler and self._noted(handler, owner)

    def _refusal(self, method: str, error: RouteTraceError) -> Any:
        async def refuse(_: object, context: Context) -> None:
            self._access.called(context)
            _log.debug("refused %s of %s: %s", method, context.peer(), error)
            await fail(context, error)

        # A stream handler is called before the first message arrives, whatever the method takes;
        # without a deserializer, no message is parsed.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _noted(self, handler: Any, owner: str) -> Any:
        """Return the handler, wrapped to note that its connection works, and to count its time."""
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        behavior = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        noted = self._generator if inspect.isasyncgenfunction(behavior) else self._coroutine
        counted = noted(behavior, owner)
        return make(counted, handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, behavior: Callable[..., Awaitable[Any]], owner: str) -> Callable[..., Any]:
        async def run(request: Any, context: Context) -> Any:
            self._access.called(context)
            if owner:
                await self._pace.step(owner)  # counts the time until its first wait, if any
            return await behavior(request, context)

        return run

    def _generator(self, behavior: Callable[..., Any], owner: str) -> Callable[..., Any]:
        async def run(request: Any, context: Context) -> AsyncIterator[Any]:
            self._access.called(context)
            if owner:
                await self._pace.step(owner)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return run


def _word(streams: bool) -> str:
    return "stream" if streams else "unary"
