"""A server with TLS and tokens on loopback, and credentials for its tenants."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import trustme

from faults.serving import Server, free_port
from neighbours import stepping
from neighbours.processors import Part, starting
from routetrace.common.security import Security
from support.proxied import Proxy

VICTIM = "victim"
#: Run of the honest neighbours, and pattern of the attacker's runs.
HONEST = "honest"
ATTACKER = "attack-*"

_SCOPES = ["ingest", "read", "admin"]


@dataclass(frozen=True)
class Access:
    """Address and credentials of one tenant, in a form that processes can be given.

    Attributes:
        target: host:port of the server.
        metrics_port: port of the server's metrics.
        ca_file: authority of the server's certificate.
        token: bearer token; empty for callers without one.
        pid: process of the server.
    """

    target: str
    metrics_port: int
    ca_file: str
    token: str
    pid: int

    @property
    def security(self) -> Security:
        return Security(ca_file=self.ca_file, token=self.token)

    def channel(self) -> grpc.Channel:
        """A connection of its own, with the token in each call."""
        return self.security.channel(self.target, _OPTIONS)

    def credentials(self) -> grpc.ChannelCredentials:
        """TLS alone, for asyncio's channels."""
        return grpc.ssl_channel_credentials(Path(self.ca_file).read_bytes())

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The token, for calls."""
        return list(self.security.metadata())


_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
]


class Place:
    """A server with three tenants, in a directory of its own.

    Args:
        folder: keeps all files.
        proxied: whether tenants reach the server through docker/proxy.
        settings: of `ServerConfig`.
    """

    def __init__(self, folder: Path, *, proxied: bool = False, **settings: Any) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("127.0.0.1", "localhost")
        cert, key, self._ca = folder / "server.pem", folder / "server.key", folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self._ca))
        cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        key.touch(0o600)
        leaf.private_key_pem.write_to_path(str(key))
        self._tokens = {name: secrets.token_urlsafe(32) for name in (VICTIM, HONEST, ATTACKER)}
        tokens = folder / "tokens.toml"
        tokens.write_text("\n".join(map(_entry, self._tokens, self._tokens.values())))
        tokens.chmod(0o600)
        self._certificate, self._key = cert, key
        self._proxied, self._proxy_port = proxied, 0
        self._proxy: Proxy | None = None
        self._steps_file = folder / "steps"
        self.server = Server(
            folder / "data",
            program=[stepping.__file__, str(self._steps_file)],
            tls_cert=cert,
            tls_key=key,
            tokens_file=tokens,
            **settings,
        )

    @property
    def steps(self) -> list[stepping.Step]:
        """Long steps of the server's event loop."""
        return stepping.steps(self._steps_file)

    def access(self, tenant: str) -> Access:
        """Access of a tenant, of a caller without a token if it is empty."""
        return Access(
            f"127.0.0.1:{self._proxy_port}" if self._proxied else self.server.target,
            self.server.metrics_port,
            str(self._ca),
            self._tokens.get(tenant, ""),
            self.server.process.pid,
        )

    def __enter__(self) -> Place:
        with starting(Part.SERVER):
            self.server.start()
            if self._proxied:
                self._start_proxy()
        return self

    def __exit__(self, *details: object) -> None:
        if self._proxy:
            self._proxy.close()
        self.server.__exit__(*details)

    def _start_proxy(self) -> None:
        self._proxy_port = free_port()
        pem = self._certificate.with_name("proxy.pem")
        pem.write_bytes(self._certificate.read_bytes() + self._key.read_bytes())
        pem.chmod(0o600)
        self._proxy = Proxy(
            f"127.0.0.1:{self._proxy_port}",
            self.server.target,
            pem,
            self._ca,
            self._certificate.with_name("proxy.log"),
        )


def _entry(run: str, token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    name = run.removesuffix("-*")
    return "\n".join(
        ["[[token]]", f'name = "{name}"', f'sha256 = "{digest}"', f"scopes = {_SCOPES}",
         f'runs = ["{run}"]', ""]
    )  # fmt: skip
