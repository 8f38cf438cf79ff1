"""Calls to the other workers of the server about their parts of spread runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from routetrace.common.errors import Unavailable

#: Service that workers serve each other, on sockets that only their user can reach.
SERVICE = "routetrace.Parts"

#: Seconds in which another worker has to answer.
_ANSWER_SECONDS = 10.0


class Workers(Protocol):
    """The other workers."""

    @property
    def numbers(self) -> Sequence[int]:
        """Their numbers."""

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        """Return the response, of the class `response`, of another worker.

        Raises:
            Unavailable: if it does not answer.
        """


class NoWorkers:
    """Of a server with one worker."""

    numbers: Sequence[int] = ()

    async def call(self, worker: int, method: str, *_: Any) -> Any:
        """There is none to be called."""
        raise AssertionError(f"{method}: worker {worker} of one")


#: Of a server with one worker.
NO_WORKERS: Workers = NoWorkers()


class SocketWorkers:
    """Other workers by their sockets.

    Args:
        sockets: path of the socket of each, by its number.
    """

    def __init__(self, sockets: dict[int, str]) -> None:
        self.numbers = sorted(sockets)
        self._sockets = sockets
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        """Return the response of another worker; see `Workers`."""
        channel = self._channels.get(worker)
        if channel is None:
            options = [("grpc.max_receive_message_length", -1)]
            channel = grpc.aio.insecure_channel(f"unix:{self._sockets[worker]}", options)
            self._channels[worker] = channel
        ask: Any = channel.unary_unary(
            f"/{SERVICE}/{method}", type(request).SerializeToString, response.FromString
        )
        try:
            return await ask(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(
                f"worker {worker} of the server does not answer: {error.code().name}",
                retry_after=1.0,
            ) from error

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()
