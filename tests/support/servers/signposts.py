"""Servers that send every call on to another port, as workers that do not serve its run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import grpc

from routetrace.common.errors import ERROR_METADATA_KEY, Moved


class Signpost:
    """A server that answers every call with MOVED.

    Attributes:
        to: target that it names; its own ":port" until it is set.
        asked: number of calls.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers((_Anything(self),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.target = f"127.0.0.1:{self.port}"
        self.to = f":{self.port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def answer(self, _: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked += 1
        error = Moved("this run is elsewhere", target=self.to)
        context.set_trailing_metadata(
            ((ERROR_METADATA_KEY, error.to_detail().SerializeToString()),)
        )
        context.abort(error.status, error.message)
        yield


class _Anything(grpc.GenericRpcHandler):
    def __init__(self, signpost: Signpost) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(signpost.answer)

    def service(self, details: Any) -> Any:
        return self._handler


@contextmanager
def signposts(count: int, target: str = "") -> Iterator[list[Signpost]]:
    """A chain of them, the last of which names `target`, or the first one again."""
    with ExitStack() as stack:
        chain = [Signpost() for _ in range(count)]
        for signpost in chain:
            stack.callback(signpost.stop)
        for one, other in pairwise(chain):
            one.to = f":{other.port}"
        chain[-1].to = f":{target.rpartition(':')[2] or chain[0].port}"
        yield chain
