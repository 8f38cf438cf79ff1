"""A TCP relay on the loopback that counts the bytes which it passes on."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """Passes bytes between clients, or agents, and a server.

    Attributes:
        target: where clients connect to.
        to_server: bytes that clients have sent.
        to_clients: bytes that the server has sent.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.to_server = self.to_clients = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                for pair in ((near, far, "to_server"), (far, near, "to_clients")):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counter: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, counter, getattr(self, counter) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
