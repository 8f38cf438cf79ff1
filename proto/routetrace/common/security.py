"""TLS and bearer tokens of clients and agents."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc

from routetrace.common import pem
from routetrace.common.errors import InvalidArgument, kind_of, quoted
from routetrace.common.target import resolver_options
from routetrace.common.values import Values

_ENV_PREFIX = "ROUTETRACE_"
_SWITCH = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}
# RFC 6750, 2.1; servers accept about 8 KiB of metadata.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,4000}={0,8}")
_TOKEN_LIMIT = 65536
# Messages of gRPC about a connection that the peer closed, or that is not TLS.
_HUNG_UP = re.compile(r"(?i)socket closed|connection reset|broken pipe|end of tcp|goaway|eof")
_OTHER_NAME = "the server's certificate has another name: see server_name"
_CAUSES = {
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: is the port right, and TLS on there?",
    "certificate has expired": "the server's certificate has expired",
    "certificate is not yet valid": "the server's certificate is not valid yet, by the clock here",
    # Older gRPC does not distinguish the two.
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of an authority in {ca}, or has "
    "expired",
    "Hostname Verification": _OTHER_NAME,
    "is not in peer certificate": _OTHER_NAME,
}


@dataclass(frozen=True)
class Security(Values):
    """TLS files and a token; none of them: plain text, for loopback and closed networks.

    Files are read when a channel is created; the token file is checked at every call, and read when
    it has changed. Replace files by renaming, so that no partial file is read.

    Raises:
        InvalidArgument: if a field has a wrong type, fields contradict each other, or the token has
            characters that a header cannot carry. The message never shows the token.
    """

    _NOT_IN_DICT = frozenset({"token"})

    tls: bool = False
    """Whether to use TLS; implied by any of the files. Default authorities: the system's."""
    ca_file: str = ""
    """PEM file of the authorities that may sign the server's certificate."""
    cert_file: str = ""
    """PEM file of the client certificate, for servers that require one."""
    key_file: str = ""
    """PEM file of its key."""
    server_name: str = ""
    """Name in the server's certificate, if it differs from the target's host."""
    token: str = field(default="", repr=False)
    """Bearer token."""
    token_file: str = ""
    """File with the bearer token, in place of `token`."""
    insecure: bool = False
    """Whether the token may travel in plain text to other machines."""

    def __post_init__(self) -> None:
        self._check_types()
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidArgument(
                field="key_file" if self.cert_file else "cert_file",
                value="empty",
                expected="cert_file and key_file, or neither",
            )
        if self.server_name and not self.uses_tls:
            raise InvalidArgument(
                field="server_name", value=self.server_name, expected="tls beside it"
            )
        if self.token:
            if self.token_file:
                raise InvalidArgument(
                    field="token_file", value=self.token_file, expected="no token beside it"
                )
            _check_token(self.token, "token")

    def _check_types(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), type(item.default)
            if item.name.endswith("_file") and isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, item.name, value)
            if not isinstance(value, kind):
                raise InvalidArgument(field=item.name, value=kind_of(value), expected=kind.__name__)
            if item.name.endswith("_file") and "\0" in str(value):
                raise InvalidArgument(field=item.name, value=quoted(value), expected="a path")

    @classmethod
    def of(cls, given: Security | Mapping[str, Any] | None) -> Security:
        """Return the Security of a configuration.

        Args:
            given: a Security, or a mapping of its fields; the environment's if None.

        Raises:
            InvalidArgument: naming the wrong field, never its value: it may be a token.
        """
        if given is None:
            return cls.from_environment()
        if isinstance(given, Security):
            return given
        names = [item.name for item in fields(cls)]
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                field="security",
                value=kind_of(given),
                expected="Security",
                remedy="use Security(token=...), or a mapping of its fields",
            )
        for name in given:
            if name not in names:
                raise InvalidArgument(
                    field="security", value=f"with {name!r}", expected=f"a mapping of {names}"
                )
        try:
            return cls(**given)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"security.{error.message}",
                field=f"security.{error.field}",
                value=error.value,
                expected=error.expected,
                remedy=error.remedy,
            ) from None

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls or bool(self.ca_file or self.cert_file)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Security:
        """Read the environment: $ROUTETRACE_ and the name of each field.

        That is $ROUTETRACE_TLS, _CA_FILE, _CERT_FILE, _KEY_FILE, _SERVER_NAME, _TOKEN and
        _TOKEN_FILE; but $ROUTETRACE_INSECURE_CLIENT, since the server has its own `insecure`.

        Args:
            environ: variables; the process' environment if None.
        """
        environ = os.environ if environ is None else environ
        return cls(
            tls=_switch(environ, "TLS"),
            insecure=_switch(environ, "INSECURE_CLIENT"),
            **{
                name: environ.get(_ENV_PREFIX + name.upper(), "")
                for name in (
                    *("ca_file", "cert_file", "key_file"),
                    *("server_name", "token", "token_file"),
                )
            },
        )

    def check(self, target: str) -> None:
        """Check all files, and whether the token may travel to a target.

        Raises:
            InvalidArgument: if a file cannot be used, or the token would travel in plain text.
        """
        self.metadata()
        self._credentials(target)

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Create a channel for blocking calls.

        Raises:
            InvalidArgument: if a file cannot be read, or a token would travel in plain text.
        """
        credentials, options = self._credentials(target), self._options(target, options)
        if credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, credentials, options)

    def aio_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """Create a channel for asyncio."""
        credentials, options = self._credentials(target), self._options(target, options)
        if credentials is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, credentials, options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call.

        Raises:
            InvalidArgument: if the token file cannot be read.
        """
        if self.token_file:
            return _metadata_of(self.token_file, pem.stamp(self.token_file))
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def version(self) -> pem.Stamp:
        """Return the stamp of the files of a channel."""
        return pem.stamp(*filter(None, (self.ca_file, self.cert_file, self.key_file)))

    def hint(self, details: str, *, reached: bool = False) -> str:
        """Return the likely cause of a failed connection from gRPC's message, or "".

        Args:
            details: gRPC's message.
            reached: whether the server has answered before. It has closed a connection then, or was
                stopped, and what it asks for is known to be there.
        """
        for words, cause in _CAUSES.items():
            if words in details:
                return cause.format(ca=self.ca_file or "the system's store (see ca_file)")
        if not _HUNG_UP.search(details):
            return ""
        if reached and not self.cert_file:
            return ""
        if not self.uses_tls:
            return "if the server speaks TLS, switch it on here: see tls and ca_file"
        if not self.cert_file:
            return "if the server asks for client certificates, give one: see cert_file"
        return f"the server may not take the certificate in {self.cert_file}{self._expired()}"

    def _expired(self) -> str:
        try:
            expiry = pem.expiry(Path(self.cert_file).read_bytes())
        except ImportError:  # the hint is shorter without `cryptography`
            return ""
        except (OSError, ValueError):
            return ", which cannot be read any more"
        return ", which has expired" if expiry < time.time() else ""

    def _credentials(self, target: str) -> grpc.ChannelCredentials | None:
        if not self.uses_tls:
            if (self.token or self.token_file) and not self.insecure and not is_local(target):
                raise InvalidArgument(
                    f"the token would travel to {target} in plain text; expected tls, a loopback "
                    "target, or insecure to be set",
                    field="tls",
                    value=False,
                    expected="tls, a loopback target, or insecure",
                )
            return None
        name, authorities, cert, key = "ca_file", None, None, None
        try:
            if self.ca_file:
                authorities = pem.read_authorities(self.ca_file)
            name = "cert_file"
            if self.cert_file:
                cert, key = pem.read_pair(self.cert_file, self.key_file, field="key_file")
        except InvalidArgument:
            raise
        except (OSError, ValueError) as error:
            raise _unusable(name, getattr(self, name), error) from error
        return grpc.ssl_channel_credentials(authorities, key, cert)

    def _options(
        self, target: str, options: Sequence[tuple[str, Any]]
    ) -> tuple[tuple[str, Any], ...]:
        more: list[tuple[str, Any]] = []
        if self.server_name:
            more.append(("grpc.ssl_target_name_override", self.server_name))
        if is_local(target):
            # $http_proxy would send plain text, with the token, off this machine.
            more.append(("grpc.enable_http_proxy", 0))
        more += resolver_options(target)
        return (*more, *options)


def is_local(target: str) -> bool:
    """Whether all addresses of a gRPC target are on this machine; False where unknown."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]
    return all(_is_loopback(address) for address in target.split(","))


def _is_loopback(address: str) -> bool:
    found = re.fullmatch(r"\[(.+)\](:\d+)?|([^:]+)(:\d+)?", address)
    host = (found[1] or found[3]) if found else address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(_ENV_PREFIX + name, "")
    try:
        return _SWITCH[value.lower()]
    except (KeyError, AttributeError):  # or no str
        raise InvalidArgument(
            field=_ENV_PREFIX + name, value=value, expected="true or false"
        ) from None


@lru_cache(maxsize=16)
def _metadata_of(path: str, _: pem.Stamp) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a token file, which is read again when its stamp changes."""
    return (("authorization", f"Bearer {_read_token(path)}"),)


def _read_token(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(_TOKEN_LIMIT).strip()
    except (OSError, ValueError) as error:
        # A decoder's message contains bytes of the file.
        cause = error if isinstance(error, OSError) else ValueError(f"{path}: expected ASCII text")
        raise _unusable("token_file", path, cause) from None
    _check_token(token, "token_file", path)
    return token


def _check_token(token: str, name: str, value: str = "***") -> None:
    if not _TOKEN.fullmatch(token):
        expected = "1 to 4000 letters, digits and . _ ~ + / - (= at the end)"
        raise InvalidArgument(
            f"{name} is {value}, which is no token; expected {expected}",
            field=name,
            value=value,
            expected=expected,
        )


def _unusable(name: str, path: str, error: Exception) -> InvalidArgument:
    text = f"{name} cannot be used: {error}"
    if isinstance(error, OSError):
        cause, file = str(error.strerror), str(error.filename or path)
        text = f"{name} {file!r} cannot be read ({cause[:1].lower()}{cause[1:]})"
    return InvalidArgument(
        text,
        field=name,
        value=path,
        expected="a file that can be read",
    )
