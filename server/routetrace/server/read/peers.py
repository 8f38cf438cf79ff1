"""Calls to the other workers of the server, for answers that no worker has alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc

from routetrace.common.errors import ERROR_METADATA_KEY, Unavailable
from routetrace.server.common.rpc import Context
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

#: Seconds in which the other workers have to answer.
_ANSWER_SECONDS = 5.0

_TOKEN = "authorization"


class Peers:
    """Other workers, by their sockets in a directory that only this server's user can enter.

    Args:
        sockets: paths of their sockets; none on a server with one worker.
    """

    def __init__(self, sockets: Sequence[str] = ()) -> None:
        self._sockets = sockets

    @staticmethod
    def calls(context: Context) -> bool:
        """Whether another worker makes a call: clients come over TCP."""
        return context.peer().startswith("unix:")

    async def infos(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> list[pb.GetServerInfoResponse]:
        """Return the status of each other worker, as the caller's token may see it.

        Those whose partition another server owns have none.

        Raises:
            Unavailable: if one of them does not answer; an answer never lacks a worker.
        """
        token = [(k, v) for k, v in context.invocation_metadata() or () if k == _TOKEN]
        found = await asyncio.gather(*(self._info(s, request, token) for s in self._sockets))
        return [info for info in found if info is not None]

    @staticmethod
    async def _info(
        path: str, request: pb.GetServerInfoRequest, token: Iterable[tuple[str, str | bytes]]
    ) -> pb.GetServerInfoResponse | None:
        try:
            async with grpc.aio.insecure_channel(
                f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub: Any = pb_grpc.TraceServiceStub(channel)
                info: pb.GetServerInfoResponse = await stub.GetServerInfo(
                    request, timeout=_ANSWER_SECONDS, metadata=tuple(token)
                )
                return info
        except grpc.aio.AioRpcError as error:
            if _is_moved(error):
                return None
            raise Unavailable(
                f"another worker of the server does not answer: {error.code().name}",
                retry_after=1.0,
            ) from error


def _is_moved(error: grpc.aio.AioRpcError) -> bool:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            detail = pb.ErrorDetail.FromString(cast("bytes", value))
            return detail.kind == pb.ERROR_KIND_MOVED
    return False


#: Of a server with one worker.
NO_PEERS = Peers()
