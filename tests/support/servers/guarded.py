"""A server that asks for tokens, authorities and what they issue."""

from __future__ import annotations

import datetime
import hashlib
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from routetrace.client import Security
from routetrace.common.errors import ERROR_METADATA_KEY, RouteTraceError, from_detail
from routetrace.server.testing import ServerProcess
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of

UTC = datetime.timezone.utc
DAY = datetime.timedelta(days=1)


class Identity:
    """A certificate and its key, as files."""

    def __init__(self, folder: Path, name: str, cert: trustme.LeafCert) -> None:
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.key.touch(0o600)
        cert.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        self.of_client = {"cert_file": str(self.cert), "key_file": str(self.key)}
        self.of_server = {"tls_cert": self.cert, "tls_key": self.key}


class Pki:
    """Two authorities, and what they have issued."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = trustme.CA(), trustme.CA()
        self.ca, self.other_ca, self.both = (folder / n for n in ("ca", "other_ca", "both"))
        ours.cert_pem.write_to_path(str(self.ca))
        theirs.cert_pem.write_to_path(str(self.other_ca))
        self.both.write_bytes(self.ca.read_bytes() + self.other_ca.read_bytes())
        past = {"not_before": datetime.datetime.now(UTC) - 9 * DAY}
        past["not_after"] = past["not_before"] + DAY

        def issue(name: str, ca: trustme.CA, *names: str, **dates: Any) -> Identity:
            return Identity(folder, name, ca.issue_cert(*names, **dates))

        self.server = issue("server", ours, "127.0.0.1", "localhost")
        self.expired_server = issue("expired_server", ours, "127.0.0.1", **past)
        self.next_server = issue("next_server", theirs, "127.0.0.1")
        self.client = issue("client", ours, "worker@example.org")
        self.expired_client = issue("expired_client", ours, "worker@example.org", **past)
        self.foreign_client = issue("foreign_client", theirs, "worker@example.org")


def entry(
    token: str,
    name: str,
    scopes: tuple[str, ...] = ("ingest", "read", "admin"),
    runs: tuple[str, ...] = ("*",),
    expires: datetime.datetime | None = None,
    engines: tuple[str, ...] = (),
) -> str:
    """Entry of a token in a tokens file."""
    lines = [
        "[[token]]",
        f'name = "{name}"',
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"',
        f"scopes = {list(scopes)}",
        f"runs = {list(runs)}",
    ]
    if engines:
        lines.append(f"engines = {list(engines)}")
    if expires:
        lines.append(f"expires = {expires.isoformat()}")
    return "\n".join([*lines, ""])


def replace(path: Path, content: str | bytes) -> None:
    part = path.with_suffix(".part")
    part.touch(0o600)  # it may be a key
    part.write_bytes(content if isinstance(content, bytes) else content.encode())
    part.replace(path)


def feed(target: str, security: Security, run: str, *ids: str) -> None:
    feeder = Feeder(target, LAYOUT, run=run, block_size=4, num_blocks=8, security=security)
    for name in ids:
        feeder.step(rows_of(LAYOUT, 9), [(handle := feeder.begin(name), 0, 9)])
        feeder.finish(handle, 10)
    feeder.close()


def call_raw(target: str, security: Security, method: str, message: bytes) -> Any:
    """Call a method with the bytes of a message, as they are; return how it failed."""
    with security.channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(method)(
            iter([message]), timeout=20, metadata=security.metadata()
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        return caught.value


def error_of(failed: Any) -> RouteTraceError:
    """Return the typed error of a failed call."""
    details = [value for key, value in failed.trailing_metadata() if key == ERROR_METADATA_KEY]
    return from_detail(pb.ErrorDetail.FromString(details[0]))


def peak(server: ServerProcess) -> int:
    """The most memory [bytes] that a server has held so far."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10


HUGE = ["/routetrace.v1.IngestService/Ingest", "/routetrace.v1.TraceService/StatTrace"]


GOOD = entry("rt_a", "a")


def served(target: str, identity: Identity | None = None) -> bytes:
    """The certificate [DER] that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if identity:
        context.load_cert_chain(identity.cert, identity.key)
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw) as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


def der(identity: Identity) -> bytes:
    first = re.search(
        "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----",
        identity.cert.read_text(),
        re.DOTALL,
    )
    assert first
    return ssl.PEM_cert_to_DER_cert(first[0])
