"""Who may call what: TLS, bearer tokens, and the runs that they are bound to."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from routetrace.server.config import ServerConfig
from routetrace.server.metrics import Metrics
from routetrace.server.rpc import Context, fail
from routetrace.server.tls import Certificates, Handshakes
from routetrace.server.tokens import Scope, Token, Tokens
from routetrace.v1.errors import PermissionDenied, RouteTraceError, Unauthenticated

_log = logging.getLogger(__name__)

_SCOPES: dict[str, Scope] = {
    "/routetrace.v1.IngestService/Ingest": "ingest",
    "/routetrace.v1.IngestService/BindRequest": "ingest",
    "/routetrace.v1.TraceService/GetTrace": "read",
    "/routetrace.v1.TraceService/GetBlocks": "read",
    "/routetrace.v1.TraceService/StatTrace": "read",
    "/routetrace.v1.TraceService/ListTraces": "read",
    "/routetrace.v1.TraceService/GetServerInfo": "read",
    "/routetrace.v1.TraceService/RenewLease": "read",
    "/routetrace.v1.TraceService/DeleteTrace": "admin",
    "/routetrace.v1.TraceService/RetireTraces": "admin",
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
    """What the settings say about TLS and tokens; files are read again when they change.

    Raises:
        ConfigError: if a file that they name can not be used.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._unauthenticated = metrics.denied.labels("unauthenticated")
        self._permission_denied = metrics.denied.labels("permission_denied")
        self._failed_handshakes = metrics.denied.labels("handshake")
        self._certificates: Certificates | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._tokens = Tokens(config.tokens) if config.tokens else None
        self._handshakes: Handshakes | None = None

    def credentials(self) -> grpc.ServerCredentials | None:
        """What the port is opened with, by the running event loop; None: in plain text."""
        if self._certificates is None:
            return None
        self._handshakes = Handshakes(self._failed_handshakes)
        return self._certificates.credentials(self._handshakes)

    def certificate_expiry(self) -> float | None:
        """When the certificate in use expires, in seconds of the Unix clock; None without TLS."""
        return self._certificates.expiry if self._certificates else None

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Refuse calls without a token that covers their method, before a message is parsed."""
        return [_Gate(self)] if self._tokens or self._certificates else []

    def check(self, context: Context, scope: Scope, run: str) -> None:
        """Looks whether the caller's token covers a run.

        Raises:
            Unauthenticated: if it is no token of ours any more.
            PermissionDenied: if it does not cover the scope or the run.
        """
        if self._tokens is None:
            return
        token = self._find(self._tokens, context.invocation_metadata() or ())
        if scope not in token.scopes:
            raise self._denied(token, "scopes", scope)
        if not token.covers(run):
            raise self._denied(token, "runs", run)

    def check_method(self, method: str, metadata: Any) -> None:
        """Looks whether a call may go on to its handler.

        Raises:
            Unauthenticated: if its metadata holds no token of ours.
            PermissionDenied: if the token does not cover the method.
        """
        if self._tokens is None or method.startswith(_OPEN_TO_ALL):
            return
        token = self._find(self._tokens, metadata)
        if method.startswith(_OPEN_TO_ANY_TOKEN):
            return
        scope = _SCOPES.get(method, "admin")
        if scope not in token.scopes:
            raise self._denied(token, "scopes", scope)

    def called(self, context: Context) -> None:
        """A call came in, and with it word of a connection that works."""
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
        what = "the scope" if field == "scopes" else "run"
        return PermissionDenied(
            f"token {token.name} does not cover {what} {value!r}",
            field=field,
            value=value,
            expected=f"one of token {token.name}",
        )


class _Gate(grpc.aio.ServerInterceptor):
    """Lets calls in, or gives them a handler that reads nothing and refuses."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Hands out the handler of a call."""
        method: str = handler_call_details.method
        try:
            self._access.check_method(method, handler_call_details.invocation_metadata)
        except RouteTraceError as error:
            return self._refusal(method, error)
        handler = await continuation(handler_call_details)
        return handler and self._noted(handler)

    def _refusal(self, method: str, error: RouteTraceError) -> Any:
        async def refuse(_: object, context: Context) -> None:
            self._access.called(context)
            _log.debug("refused %s of %s: %s", method, context.peer(), error)
            await fail(context, error)

        # A handler of streams is called before the first message has come, whatever the method
        # takes; without a deserializer none would be parsed either.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _noted(self, handler: Any) -> Any:
        """The same handler, which tells that its connection works."""
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        behavior = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        noted = self._generator if inspect.isasyncgenfunction(behavior) else self._coroutine
        return make(noted(behavior), handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def run(request: Any, context: Context) -> Any:
            self._access.called(context)
            return await behavior(request, context)

        return run

    def _generator(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def run(request: Any, context: Context) -> AsyncIterator[Any]:
            self._access.called(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return run


def _word(streams: bool) -> str:
    return "stream" if streams else "unary"
