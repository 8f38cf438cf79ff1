"""Calls to the other workers that share the partitions, about their parts of spread runs.

Workers of one server are reached over sockets that only their user can enter. Where several servers
share a bucket, the worker of this server that stands by for a partition names the owner, on another
host, which is then called until it does not own the partition any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import grpc

from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    InvalidArgument,
    Moved,
    RouteTraceError,
    Unavailable,
    from_detail,
)
from routetrace.common.security import Security
from routetrace.server.settings.config import ServerConfig
from routetrace.v1 import routetrace_pb2 as pb

#: Service that workers serve each other.
SERVICE = "routetrace.Parts"

#: Seconds in which another worker has to answer; calls that look at all traces of a run, or commit
#: many records, take turns with others there.
_ANSWER_SECONDS = 10.0
_LONG_SECONDS = {"Retirable": 120.0, "Forget": 120.0, "Renew": 60.0}

#: Maximum times that a call is sent on to another owner.
_MOST_HOPS = 3

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Workers(Protocol):
    """The other workers."""

    @property
    def numbers(self) -> Sequence[int]:
        """Their numbers."""

    def address(self, worker: int) -> str:
        """Return the host:port of a worker on another host; "": it is on this one."""

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        """Return the response, of the class `response`, of another worker.

        Raises:
            Unavailable: if it does not answer.
        """


class NoWorkers:
    """Of a server with one worker."""

    numbers: Sequence[int] = ()

    def address(self, _: int) -> str:
        """There is none on another host."""
        return ""

    async def call(self, worker: int, method: str, *_: Any) -> Any:
        """There is none to be called."""
        raise AssertionError(f"{method}: worker {worker} of one")


#: Of a server with one worker.
NO_WORKERS: Workers = NoWorkers()


def security_of(config: ServerConfig) -> Security:
    """Return the security of calls to servers that share the bucket."""
    shows_certificate = config.tls_client_ca is not None
    return Security(
        tls=config.tls_cert is not None,
        ca_file=str(config.peer_ca_file or ""),
        cert_file=str(config.tls_cert) if shows_certificate else "",
        key_file=str(config.tls_key) if shows_certificate else "",
        token_file=str(config.peer_token_file or ""),
        insecure=config.insecure,
    )


class SocketWorkers:
    """Other workers by the sockets of those of this server, and by the addresses of owners.

    Args:
        sockets: path of the socket of each, by its number.
        security: of calls to other hosts.
    """

    def __init__(self, sockets: Mapping[int, str], security: Security) -> None:
        self.numbers = sorted(sockets)
        self._sockets = sockets
        self._security = security
        self._owners: dict[int, str] = {}  # those on other hosts
        self._channels: dict[str, grpc.aio.Channel] = {}  # by target

    def address(self, worker: int) -> str:
        """Return the host:port of a worker on another host; see `Workers`."""
        return self._owners.get(worker, "")

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        """Return the response of another worker; see `Workers`."""
        error: RouteTraceError | None = None
        for _ in range(_MOST_HOPS):
            try:
                return await self._call(worker, method, request, response)
            except grpc.aio.AioRpcError as failure:
                error = _meaning(failure)
            except InvalidArgument as unusable:  # files of the security, or the owner's address
                self._owners.pop(worker, "")
                error = unusable
                break
            known = self._owners.pop(worker, "")
            if isinstance(error, Moved):
                self._owners[worker] = error.target
            elif not known:
                break
        text = error.message if error else "its owner changes"
        raise Unavailable(f"worker {worker} does not answer: {text}", retry_after=1.0) from None

    async def _call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        owner = self._owners.get(worker, "")
        target = owner or f"unix:{self._sockets[worker]}"
        channel = self._channels.get(target)
        if channel is None:
            if owner:
                channel = self._security.aio_channel(owner, _OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(target, _OPTIONS)
            self._channels[target] = channel
        ask: Any = channel.unary_unary(
            f"/{SERVICE}/{method}", type(request).SerializeToString, response.FromString
        )
        metadata = self._security.metadata() if owner else ()
        seconds = _LONG_SECONDS.get(method, _ANSWER_SECONDS)
        return await ask(request, timeout=seconds, metadata=metadata)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()


def _meaning(failure: grpc.aio.AioRpcError) -> RouteTraceError:
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return from_detail(pb.ErrorDetail.FromString(cast("bytes", value)))
    return Unavailable(failure.code().name)
