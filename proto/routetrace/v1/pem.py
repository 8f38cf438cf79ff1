"""Certificates and keys in PEM files, read whole and looked at before anything relies on them."""

from __future__ import annotations

import calendar
import os
import re
import ssl
import time
from pathlib import Path

#: Times and sizes of files; differs once one of them was written or replaced.
Stamp = tuple[tuple[int, int, int], ...]

_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
# Of DER, the encoding of certificates.
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17


def stamp(*paths: str | Path) -> Stamp:
    """When files were last written; zeros for those that are not there."""
    return tuple(map(_stamp, paths))


def _stamp(path: str | Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def read_pair(cert: str | Path, key: str | Path) -> tuple[bytes, bytes]:
    """A certificate (with those above it) and its key.

    Raises:
        OSError: if a file can not be read.
        ValueError: if they hold something else, or do not belong together; names them.
    """
    while True:
        before = stamp(cert, key)
        try:
            return _read_pair(cert, key)
        except (OSError, ValueError):
            # One of them may be of before a replacement, and the other of after it.
            if stamp(cert, key) == before:
                raise


def _read_pair(cert: str | Path, key: str | Path) -> tuple[bytes, bytes]:
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    try:
        # The password keeps OpenSSL from asking a terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
        expiry(pair[0])
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"{cert} and {key}: expected a PEM certificate and its PEM key, without a password"
        ) from None
    # OpenSSL has read the files itself.
    if pair != (Path(cert).read_bytes(), Path(key).read_bytes()):
        raise ValueError(f"{cert} and {key}: they are being replaced")
    return pair


def read_authorities(path: str | Path) -> bytes:
    """Certificates of authorities.

    Raises:
        OSError: if the file can not be read.
        ValueError: if it holds none; names it.
    """
    pem = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path}: expected PEM certificates of authorities") from None
    return pem


def expiry(pem: bytes) -> float:
    """When the first certificate expires, in seconds of the Unix clock.

    Raises:
        ValueError: if there is none.
    """
    found = _CERTIFICATE.search(pem.decode("ascii", "replace"))
    if not found:
        raise ValueError("expected a PEM certificate")
    try:
        # RFC 5280, 4.1: Certificate > TBSCertificate > version?, serial, algorithm, issuer,
        # validity > notBefore, notAfter.
        fields, _ = _enter(_enter(ssl.PEM_cert_to_DER_cert(found[0]), _SEQUENCE)[0], _SEQUENCE)
        if fields[0] == _VERSION:
            fields = _enter(fields)[1]
        for _ in range(3):
            fields = _enter(fields)[1]
        not_after = _enter(_enter(fields, _SEQUENCE)[0])[1]
        text = _enter(not_after)[0].decode("ascii")
        if not_after[0] == _UTC_TIME:  # two digits of the year: of 1950 to 2049
            text = ("19" if text >= "5" else "20") + text
        return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))
    except (IndexError, ValueError):
        raise ValueError("expected an X.509 certificate") from None


def _enter(der: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """What the first element holds, and what follows it."""
    if tag is not None and der[0] != tag:
        raise ValueError("another element was expected")
    size, start = der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start], "big")
    return der[start : start + size], der[start + size :]
