"""PageConfig: the settings of the page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from routetrace.client import _arguments as check
from routetrace.common.errors import InvalidArgument, quoted
from routetrace.common.security import Security, is_local
from routetrace.common.target import parse_target
from routetrace.common.values import Values

DEFAULT_TARGET = "127.0.0.1:7411"
DEFAULT_LISTEN = "127.0.0.1:7410"

_LAST_PORT = 65535
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@?#]+):([0-9]{1,5})")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@?#]+)(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class PageConfig(Values):
    """Settings of the page.

    Raises:
        InvalidArgument: if a field is wrong, or other machines could reach the page without TLS.
    """

    target: str = DEFAULT_TARGET
    """The routetrace-server."""
    shown_target: str = ""
    """Name of the server in texts, and in code to be copied; `target` if empty."""
    listen: str = DEFAULT_LISTEN
    """host:port to listen on; port 0 picks a free port."""
    runs: tuple[str, ...] = ()
    """Runs that the page shows; all that the token covers if empty."""
    hosts: tuple[str, ...] = ()
    """Further names of this machine, host or host:port, by which browsers reach the page."""
    insecure: bool = False
    """Whether other machines may reach the page without TLS or tokens."""
    timeout: float = 60.0
    """Seconds of a read of rows."""
    tls_cert: str = ""
    """PEM file of the page's certificate and its chain; enables HTTPS."""
    tls_key: str = ""
    """PEM file of the private key of `tls_cert`."""
    security: Security = field(default_factory=Security)
    """TLS files for the connection to the server. The page has no token of its own: one here is
    dropped, as each person signs in with theirs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", parse_target(self.target))
        object.__setattr__(self, "security", replace(self.security, token="", token_file=""))
        check.seconds("timeout", self.timeout)
        split_address(self.listen)
        for run in self.runs:
            check.identifier("run", run)
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise InvalidArgument(
                    field="hosts", value=quoted(host), expected="host or host:port"
                )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidArgument(
                field="tls_key" if self.tls_cert else "tls_cert",
                value="empty",
                expected="tls_cert and tls_key, or neither",
            )
        if not self.tls_cert and self.needs_tokens:
            raise self.exposed("tls_cert and tls_key")

    @property
    def shown(self) -> str:
        """Name of the server in texts, and in code to be copied."""
        return self.shown_target or self.target

    @property
    def needs_tokens(self) -> bool:
        """Whether every reader needs a token, as other machines can reach the page."""
        return not (self.insecure or is_local(self.listen))

    def exposed(self, lacking: str) -> InvalidArgument:
        """Return the error of a page that other machines can reach without protection."""
        expected = f"{lacking}, a loopback address, or insecure to be set"
        return InvalidArgument(
            f"listen is {self.listen!r}, which other machines can reach: expected {expected}",
            field="listen",
            value=self.listen,
            expected=expected,
        )


def split_address(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[v6 host]:port".

    Raises:
        InvalidArgument: if the address has neither form.
    """
    found = _ADDRESS.fullmatch(address)
    if not found or int(found[2]) > _LAST_PORT:
        raise InvalidArgument(field="listen", value=quoted(address), expected="host:port")
    return found[1].strip("[]"), int(found[2])
