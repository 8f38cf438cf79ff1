"""The network under a sender: a protocol, and its implementation over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError

from routetrace.capture_agent.config import AgentConfig
from routetrace.common.errors import ERROR_METADATA_KEY, InvalidArgument
from routetrace.common.forks import keep_grpc_up
from routetrace.common.security import Security
from routetrace.common.target import FAILOVER_OPTIONS, moved_target, targets_of, unreachable
from routetrace.v1 import routetrace_pb2 as pb

_INGEST = f"/{pb.DESCRIPTOR.services_by_name['IngestService'].full_name}/Ingest"

_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    # A pool of its own: one shared with a process that forked is broken in the child.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of one attempt; gRPC's 20 seconds would outlast the trouble.
    ("grpc.min_reconnect_backoff_ms", 4_000),
)

#: Workers of a server that send an agent on before it counts as trouble.
_MOST_HOPS = 5

_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


class ConnectionFailed(Exception):
    """A stream failed.

    Attributes:
        kind: name of the failure, for one log line per kind.
        detail: the server's error; empty if the network failed.
        refused: whether credentials were refused, so that a retry needs a change of files.
        moved: whether the next attempt goes to the worker that the server named, which is no
            trouble.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        detail: pb.ErrorDetail,
        *,
        refused: bool = False,
        moved: bool = False,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.detail = detail
        self.refused = refused
        self.moved = moved


class Call(Protocol):
    """One open Ingest stream."""

    def __iter__(self) -> Iterator[pb.IngestResponse]:
        """Yield the server's messages; raise ConnectionFailed if the stream breaks."""
        ...

    def cancel(self) -> object:
        """Break the stream; callable from any thread."""
        ...


class Transport(Protocol):
    """Connects to a server."""

    def connect(self) -> AbstractContextManager[Callable[[Iterator[bytes]], Call]]:
        """Open a channel; its value starts the stream with serialized IngestRequests.

        Raises:
            InvalidArgument: if a certificate, a key or a token cannot be used.
        """
        ...


class GrpcTransport:
    """A gRPC channel per attempt: no back-off but the sender's, and no stale addresses."""

    def __init__(self, config: AgentConfig) -> None:
        self._targets = targets_of(config.target)
        self.configured = self.target = self._targets[0]
        """Server of the next attempt as configured, and the server itself or its worker."""
        self.options: tuple[tuple[str, int], ...] = _CHANNEL_OPTIONS
        """Options of the channel."""
        if len(self._targets) > 1:
            self.options = tuple({**dict(_CHANNEL_OPTIONS), **FAILOVER_OPTIONS}.items())
        self.security = cast("Security", config.security)
        self._hops = 0
        self.reached = False
        """Whether the server has answered."""

    @contextmanager
    def connect(self) -> Iterator[Callable[[Iterator[bytes]], Call]]:
        """Open a channel; see Transport."""
        keep_grpc_up()
        with self.security.channel(self.target, self.options) as channel:
            metadata = self.security.metadata()
            ingest: Any = channel.stream_stream(_INGEST, None, pb.IngestResponse.FromString)
            yield lambda requests: _GrpcCall(ingest(requests, metadata=metadata), self)

    def welcomed(self) -> None:
        """Note an answer that is no failure."""
        self.reached = True
        self._hops = 0

    def failed(self, detail: pb.ErrorDetail) -> bool:
        """Choose the target of the next attempt; return whether the server has named it.

        Raises:
            InvalidArgument: if the configured target cannot be combined with a worker's port, or
                the run belongs to a server that is not configured.
        """
        if detail.kind == pb.ERROR_KIND_MOVED and self._hops < _MOST_HOPS:
            self._hops += 1
            try:
                self.target = moved_target(self.configured, detail.target, self._targets)
            except InvalidArgument:
                self._leave()
                raise
            return True
        if len(self._targets) > 1 or not detail.message:  # no answer: the worker may be gone
            self._leave()
        self._hops = 0
        return False

    def _leave(self) -> None:
        at = self._targets.index(self.configured)
        self.configured = self.target = self._targets[(at + 1) % len(self._targets)]


class _GrpcCall:
    def __init__(self, call: Any, transport: GrpcTransport) -> None:
        self._call = call
        self._transport = transport

    def __iter__(self) -> Iterator[pb.IngestResponse]:
        try:
            for message in self._call:
                self._transport.welcomed()
                yield message
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def cancel(self) -> object:
        return self._call.cancel()

    def _failure(self, error: grpc.RpcError) -> ConnectionFailed:
        assert isinstance(error, grpc.Call)
        detail = pb.ErrorDetail()
        for item in error.trailing_metadata() or ():
            if item.key == ERROR_METADATA_KEY:
                with suppress(DecodeError):  # not ours: as an error without it
                    detail = pb.ErrorDetail.FromString(item.value)
        transport = self._transport
        code, target, configured = error.code(), transport.target, transport.configured
        moved = transport.failed(detail)
        if detail.message:
            text = f"{target}: {code.name}: {detail.message}"
        else:
            details = error.details() or ""
            hint = transport.security.hint(details, reached=transport.reached)
            text = unreachable(target, f"{code.name}: {details}", hint, transport.options)
            if target != configured:
                text += f" (a worker of {configured}; its port must be open, too)"
        return ConnectionFailed(code.name, text, detail, refused=code in _REFUSED, moved=moved)
