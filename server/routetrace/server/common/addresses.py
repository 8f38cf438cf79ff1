"""Addresses of listening sockets and of object stores."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def split_address(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[v6 host]:port".

    Raises:
        ValueError: if the address has neither form.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("expected host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or localhost; other names may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_object_url(url: str) -> tuple[str, str]:
    """Return (bucket, prefix) of s3://bucket/prefix.

    Raises:
        ValueError: if it has another form.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ValueError("object_url: expected s3://bucket or s3://bucket/prefix")
    return parts.netloc, parts.path.strip("/")
