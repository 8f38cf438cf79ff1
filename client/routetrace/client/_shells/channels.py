"""Channels of a client: a new one for new calls after a certificate or the route changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from routetrace.client._core.config import Config
from routetrace.client._core.messages import parser_of, unary_parser_of
from routetrace.common.errors import InvalidArgument
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

#: Seconds between two checks of the files.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


class Connection:
    """A channel, its methods by name, and the calls on it."""

    def __init__(self, channel: Any, target: str) -> None:
        self.channel = channel
        self.target = target
        self.methods = _methods(channel)
        self.calls = 0


class Connections:
    """The connections of a client. Not thread-safe.

    Args:
        config: route and credentials.
        make: returns a channel for a target and options.
    """

    def __init__(self, config: Config, make: Callable[[str, Any], Any]) -> None:
        self._config = config
        self._make = make
        self._all: list[Connection] = []  # the last is for new calls
        self._workers: dict[str, Connection] = {}  # those to workers, by target
        self._version: Any = None
        self._look_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._all)

    def enter(self, worker: str = "") -> Connection:
        """Return the connection for a new call, which must leave it.

        Args:
            worker: ":port" or host:port of the worker to ask; "": the one that serves the run.

        Raises:
            InvalidArgument: if there is none yet, and a file for it is not usable.
        """
        now = time.monotonic()
        if not self._all or now >= self._look_at:
            self._look_at = now + _LOOK_S
            version = self._config.security.version()  # before the files are read
            if not self._all or version != self._version:
                self._all[:0], self._workers = self._workers.values(), {}  # closed once unused
                self._connect()
                self._version = version
        if self._all[-1].target != self._config.route.target:
            self._connect()
        connection = self._to(worker) if worker else self._all[-1]
        connection.calls += 1
        return connection

    def _to(self, worker: str) -> Connection:
        target = self._config.route.of(worker)
        if target == self._all[-1].target:
            return self._all[-1]
        if target not in self._workers:
            channel = self._make(target, self._config.channel_options)
            self._workers[target] = Connection(channel, target)
        return self._workers[target]

    def leave(self, connection: Connection) -> list[Any]:
        """Remove an ended call; return unused channels, to be closed."""
        connection.calls -= 1
        done = [old for old in self._all[:-1] if not old.calls]
        self._all = [kept for kept in self._all if kept not in done]
        return [old.channel for old in done]

    def clear(self) -> list[Any]:
        """Remove all connections; return their channels, to be closed."""
        removed, self._all, self._workers = [*self._all, *self._workers.values()], [], {}
        return [connection.channel for connection in removed]

    def _connect(self) -> None:
        target = self._config.route.target
        try:
            channel = self._make(target, self._config.channel_options)
        except InvalidArgument as error:
            if not self._all:
                raise
            # The replacement may be incomplete; the next change is another attempt.
            _log.warning("routetrace: new certificates not usable, keeping the old ones: %s", error)
        else:
            self._all.append(Connection(channel, target))


def _methods(channel: Any) -> dict[str, Any]:
    """Return the methods of both services on a channel, by name."""
    # A stub's attributes are its methods, and the two services share no name.
    stubs = vars(pb_grpc.TraceServiceStub(channel)), vars(pb_grpc.IngestServiceStub(channel))
    reads = {
        name: channel.unary_stream(
            f"/routetrace.v1.TraceService/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=parser_of(response),
        )
        for name, request, response in (
            ("GetTrace", pb.GetTraceRequest, pb.GetTraceResponse),
            ("GetTraces", pb.GetTracesRequest, pb.GetTracesResponse),
            ("GetBlocks", pb.GetBlocksRequest, pb.GetBlocksResponse),
        )
    }
    sealed = {
        name: channel.unary_unary(
            f"/routetrace.v1.{service}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=unary_parser_of(response),
        )
        for service, name, request, response in (
            ("TraceService", "StatTrace", pb.StatTraceRequest, pb.StatTraceResponse),
            ("TraceService", "DescribeTrace", pb.DescribeTraceRequest, pb.DescribeTraceResponse),
            ("TraceService", "ExplainCell", pb.ExplainCellRequest, pb.ExplainCellResponse),
            ("TraceService", "ListTraces", pb.ListTracesRequest, pb.ListTracesResponse),
            (
                "TraceService",
                "LocateSequences",
                pb.LocateSequencesRequest,
                pb.LocateSequencesResponse,
            ),
            ("TraceService", "GetHistory", pb.GetHistoryRequest, pb.GetHistoryResponse),
            ("TraceService", "ListAgreement", pb.ListAgreementRequest, pb.ListAgreementResponse),
            ("IngestService", "BindRequest", pb.BindRequestRequest, pb.BindRequestResponse),
        )
    }
    watch = channel.unary_stream(
        "/routetrace.v1.TraceService/WatchTraces",
        request_serializer=pb.WatchTracesRequest.SerializeToString,
        response_deserializer=unary_parser_of(pb.WatchTracesResponse),
    )
    return {**stubs[0], **stubs[1], **reads, **sealed, "WatchTraces": watch}
