"""The certificate of the page, replaced when its files change."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from cryptography import x509

from routetrace.common import pem
from routetrace.common.errors import InvalidArgument

_log = logging.getLogger(__name__)


class Certificate:
    """TLS of the page: certificate and key, read again at the first handshake after a change.

    Args:
        cert: PEM file of the certificate and its chain.
        key: PEM file of its key.

    Raises:
        InvalidArgument: if a file cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._stamp = pem.stamp(cert, key)
        try:
            self._current, self._names = self._read()
        except InvalidArgument:
            raise
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"tls_cert and tls_key cannot be used: {error}", field="tls_cert", value=cert
            ) from error
        self.context = self._current
        """Context of the listening socket; each handshake uses the newest certificate."""
        self.context.sni_callback = self._choose

    def names(self) -> tuple[str, ...]:
        """Return the names of the certificate, as hosts of an address."""
        return self._names

    def _choose(self, connection: Any, _: Any, __: Any) -> None:
        stamp = pem.stamp(self._cert, self._key)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current, self._names = self._read()
                _log.info("certificate reloaded from %s", self._cert)
            except (OSError, ValueError) as error:
                # Possibly half of a new pair; once the other half is there, the files differ again.
                _log.error("new certificate not loaded, keeping the old one: %s", error)
        connection.context = self._current

    def _read(self) -> tuple[ssl.SSLContext, tuple[str, ...]]:
        chain, _ = pem.read_pair(self._cert, self._key, field="tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert, self._key, password="")
        return context, _names(chain)


def _names(chain: bytes) -> tuple[str, ...]:
    certificate = x509.load_pem_x509_certificates(chain)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    hosts = (f"[{address}]" if address.version == 6 else str(address) for address in addresses)
    return (*names.get_values_for_type(x509.DNSName), *hosts)
