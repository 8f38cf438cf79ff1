"""Certificates and keys in PEM files, checked when they are read."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from routetrace.common.errors import InvalidArgument

#: Times, sizes, inodes and modes of files; changes when one is written or replaced.
Stamp = tuple[tuple[int, int, int, int], ...]


def stamp(*paths: str | Path) -> Stamp:
    """Return the stamp of files; zeros for those that do not exist."""
    return tuple(map(_stamp, paths))


def _stamp(path: str | Path) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


def read_pair(cert: str | Path, key: str | Path, *, field: str) -> tuple[bytes, bytes]:
    """Read a certificate (with its chain) and its key.

    Args:
        cert: PEM file of the certificate.
        key: PEM file of the key.
        field: setting that names the key, for errors.

    Raises:
        OSError: if a file cannot be read.
        InvalidArgument: if others can read the key.
        ValueError: naming the files, if they are no PEM certificate and its key.
    """
    while True:
        before = stamp(cert, key)
        try:
            pair = _read_pair(cert, key)
            _check_private(key, field)
            return pair
        except (OSError, ValueError):
            # The files may be from before and after a replacement.
            if stamp(cert, key) == before:
                raise


def _check_private(key: str | Path, field: str) -> None:
    """Check that a key is its owner's alone; a group may read one that root owns."""
    status = os.stat(key)
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        raise InvalidArgument(
            field=field,
            value=f"{key} with mode {stat.S_IMODE(status.st_mode):04o}",
            expected="a private key that others cannot read, of mode 0600 or less, or 0640 where "
            "root owns it",
            remedy=f"run chmod 600 {key}",
        )


def _read_pair(cert: str | Path, key: str | Path) -> tuple[bytes, bytes]:
    pair = Path(cert).read_bytes(), Path(key).read_bytes()
    try:
        # The password keeps OpenSSL from prompting for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"{cert} and {key}: expected a PEM certificate and its PEM key, without a password"
        ) from None
    # OpenSSL has read the files separately.
    if pair != (Path(cert).read_bytes(), Path(key).read_bytes()):
        raise ValueError(f"{cert} and {key}: they are being replaced")
    return pair


def read_authorities(path: str | Path) -> bytes:
    """Read certificates of authorities.

    Raises:
        OSError: if the file cannot be read.
        ValueError: naming the file, if it holds none.
    """
    pem = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path}: expected PEM certificates of authorities") from None
    return pem


def expiry(pem: bytes) -> float:
    """Return when the first certificate expires, in seconds of the Unix clock.

    Raises:
        ValueError: if there is none.
        ImportError: if the package `cryptography` is not installed.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc
    except (ValueError, IndexError, x509.InvalidVersion):
        raise ValueError("expected a PEM certificate") from None
    return found.timestamp()
