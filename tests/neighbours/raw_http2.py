"""HTTP/2 frames by hand over TLS: for streams that no gRPC client would open."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from contextlib import suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_HEADERS, _ACK = 0x4, 0x1
_CANCEL = 8
_BATCH = 50
#: An empty message of gRPC.
EMPTY = bytes(5)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header of HPACK, literal and without indexing (RFC 7541, 6.2.2); both below 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _number(value: int, bits: int) -> bytes:
    """An integer of HPACK behind an empty prefix of that many bits (RFC 7541, 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    found, value = [most], value - most
    while value >= 128:
        found.append(value % 128 | 128)
        value //= 128
    return bytes([*found, value])


def kept_header(name: bytes, value: bytes) -> bytes:
    """A header of HPACK that the receiver keeps in its dynamic table (RFC 7541, 6.2.1)."""
    return b"\x40" + _number(len(name), 7) + name + _number(len(value), 7) + value


#: The header that was kept last, in one byte.
LAST_KEPT = b"\xbe"


def request_headers(path: str, **more: str) -> bytes:
    """The header block of a gRPC call."""
    headers = {
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        **more,
    }
    block = b"\x83\x87"  # :method POST, :scheme https, of the static table
    return block + b"".join(_literal(k.encode(), v.encode()) for k, v in headers.items())


class RawConnection:
    """A connection that answers pings and settings, and passes all else over.

    Args:
        target: host:port.
        ca_file: authority of the server's certificate.
        source: address to connect from.
        settled: whether it acknowledges the server's settings, from when on gRPC keeps to them.

    Attributes:
        refused: streams that the server has reset.
        closed: set once the server has closed the connection.
    """

    def __init__(
        self, target: str, ca_file: str, source: str = "127.0.0.1", *, settled: bool = True
    ) -> None:
        context = ssl.create_default_context(cafile=ca_file)
        context.set_alpn_protocols(["h2"])
        host, _, port = target.rpartition(":")
        raw = socket.create_connection((host, int(port)), 60, (source, 0))
        self._socket = context.wrap_socket(raw, server_hostname="localhost")
        self._lock = threading.Lock()
        self._next = 1
        self._settled = settled
        self.refused = 0
        self.closed = threading.Event()
        largest = struct.pack(">I", (1 << 31) - 1 - 65_535)
        self._send(_PREFACE + frame(_SETTINGS, 0, 0) + frame(_WINDOW, 0, 0, largest))
        threading.Thread(target=self._receive, daemon=True).start()

    def open(self, headers: bytes, count: int, *, reset: bool = False, message: bytes = b"") -> int:
        """Open streams, send a message on each if there is one, reset each at once if so asked.

        Returns:
            How many were opened.
        """
        sent = 0
        cancel = struct.pack(">I", _CANCEL)
        while sent < count and not self.closed.is_set():
            parts = []
            for _ in range(min(_BATCH, count - sent)):
                part = frame(_HEADERS, _END_HEADERS, self._next, headers)
                if message:
                    part += frame(_DATA, 0, self._next, message)
                if reset:
                    part += frame(_RESET, 0, self._next, cancel)
                parts.append(part)
                self._next += 2
            try:
                self._send(b"".join(parts))
            except OSError:
                self.closed.set()
                break
            sent += len(parts)
        return sent

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def _receive(self) -> None:
        try:
            while True:
                length, kind, flags, _ = self._header()
                payload = self._exactly(length)
                if kind == _PING and not flags & _ACK:
                    self._send(frame(_PING, _ACK, 0, payload))
                elif kind == _SETTINGS and self._settled and not flags & _ACK:
                    self._send(frame(_SETTINGS, _ACK, 0))
                elif kind == _RESET:
                    self.refused += 1
        except (OSError, EOFError, ValueError):
            self.closed.set()

    def _header(self) -> tuple[int, int, int, int]:
        head = self._exactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return int.from_bytes(head[:3], "big"), kind, flags, stream

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data
