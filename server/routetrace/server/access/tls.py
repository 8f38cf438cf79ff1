"""Certificates of the port, reloaded when they change, and the count of failed handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import Counter

from routetrace.common import pem
from routetrace.server.settings.config import ConfigError

_log = logging.getLogger(__name__)

#: Maximum seconds from the start of a handshake to the first call.
_GRACE_S = 5.0
#: Seconds for which a connection is kept after its last call.
_REMEMBERED_S = 3600.0

#: Seconds that a new certificate waits for handshakes that use the old one.
_PAUSE_S = 0.25


class Certificates:
    """Certificate, key, and the authorities of client certificates.

    Raises:
        ConfigError: if a file cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = self._look()
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls: {error}") from None

    def credentials(self, handshakes: Handshakes) -> grpc.ServerCredentials:
        """Return the credentials of the port."""

        # gRPC calls this at every handshake, in another thread, one at a time.
        def fetch() -> Any:
            handshakes.began()
            if not self._refresh():
                return None
            # gRPC frees the old configuration, and crashes if another handshake still uses it. No
            # other handshake can fetch it now; wait for those that have.
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
            # Possibly half of a new pair; once the other half is written, the files differ again.
            _log.error("new certificate not loaded, keeping the old one: %s", error)
            return False
        _log.info("certificate reloaded from %s", self._cert)
        return True

    def _read(self) -> None:
        cert, key = pem.read_pair(self._cert, self._key, field="tls_key")
        authorities = pem.read_authorities(self._client_ca) if self._client_ca else None
        #: Unix time at which the certificate expires.
        self.expiry = pem.expiry(cert)
        self._configuration = grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _look(self) -> pem.Stamp:
        return pem.stamp(*filter(None, (self._cert, self._key, self._client_ca)))


class Handshakes:
    """Counts connections without a call.

    gRPC does not report failed handshakes: of clients without a certificate or with an expired one,
    of clients that do not trust ours or send plain text. It reports each start, and calls prove
    success. The difference after some seconds is counted; a later call is deducted from the next
    count.
    """

    def __init__(self, failed: Counter) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, float] = {}  # by their last call, the latest last
        self._begun = self._proven = self._counted = 0

    def began(self) -> None:
        """Note the start of a handshake; thread-safe."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._began)

    def called(self, peer: str) -> None:
        """Note a call over the connection of `peer`, which includes the port."""
        now = time.monotonic()
        if self._peers.pop(peer, None) is None:
            self._proven += 1
        self._peers[peer] = now
        # Ports are reused.
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
