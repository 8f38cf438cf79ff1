"""The certificates of the port, read again when they change, and connections that never got far."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import Counter

from routetrace.server.config import ConfigError
from routetrace.v1 import pem

_log = logging.getLogger(__name__)

#: Seconds from the first byte of a connection to its first call; calls follow handshakes at once.
_GRACE_S = 5.0
#: Seconds for which a connection without a new call is remembered.
_REMEMBERED_S = 3600.0

#: Seconds that a new certificate waits for handshakes that are about to use the old one.
_PAUSE_S = 0.25


class Certificates:
    """A certificate, its key, and the authorities that clients' certificates must come from.

    Raises:
        ConfigError: if a file can not be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = self._look()
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls: {error}") from None

    def credentials(self, handshakes: Handshakes) -> grpc.ServerCredentials:
        """What the port is opened with."""

        # gRPC calls this at every handshake, in a thread of its own, and one at a time.
        def fetch() -> Any:
            handshakes.began()
            if not self._refresh():
                return None
            # gRPC frees what it replaces, and crashes if another handshake has fetched that before
            # and just makes use of it. No other can fetch it now; this one waits for them.
            time.sleep(_PAUSE_S)
            return self._configuration

        return grpc.dynamic_ssl_server_credentials(
            self._configuration, fetch, require_client_authentication=self._client_ca is not None
        )

    def _refresh(self) -> bool:
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._read()
        except (OSError, ValueError) as error:
            # Half of a new pair, perhaps; once the other half is there, the files differ again.
            _log.error("the certificate in use is kept: %s", error)
            return False
        _log.info("certificate read again from %s", self._cert)
        return True

    def _read(self) -> None:
        cert, key = pem.read_pair(self._cert, self._key)
        authorities = pem.read_authorities(self._client_ca) if self._client_ca else None
        #: When the certificate expires, in seconds of the Unix clock.
        self.expiry = pem.expiry(cert)
        self._configuration = grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _look(self) -> pem.Stamp:
        return pem.stamp(*filter(None, (self._cert, self._key, self._client_ca)))


class Handshakes:
    """Counts connections that brought no call.

    gRPC does not tell which handshakes fail: of clients without a certificate, or with one that has
    expired, clients that do not trust ours, or speak plain text. It does tell of each that begins,
    and calls tell of those that succeeded. What is left over after some seconds is counted; a call
    that comes later makes up for it in what is counted next.
    """

    def __init__(self, failed: Counter) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, float] = {}  # by their last call, the latest last
        self._begun = self._proven = self._counted = 0

    def began(self) -> None:
        """A handshake begins; called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the server with it
            self._loop.call_soon_threadsafe(self._began)

    def called(self, peer: str) -> None:
        """A call came in over the connection of `peer`, which names its port."""
        now = time.monotonic()
        if self._peers.pop(peer, None) is None:
            self._proven += 1
        self._peers[peer] = now
        # Ports are used again.
        while now - self._peers[first := next(iter(self._peers))] > _REMEMBERED_S:
            del self._peers[first]

    def _began(self) -> None:
        self._begun += 1
        self._loop.call_later(_GRACE_S, self._settle, self._begun)

    def _settle(self, begun: int) -> None:
        missing = begun - self._proven - self._counted
        if missing > 0:
            self._counted += missing
            self._failed.inc(missing)
