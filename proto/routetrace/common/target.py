"""Targets: the address of a server as gRPC takes it, and why a connection to it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from routetrace.common.errors import InvalidArgument, quoted, typed

DEFAULT_PORT = 7411

#: Schemes of gRPC's own resolvers, which take the rest as it is.
_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\],@?#]+)(:(?P<port>[0-9]{1,5}))?")

_TRAILING_PORT = re.compile(r":[0-9]+$")


def parse_target(value: Any) -> str:
    """Return a target with its port, 7411 where none is given.

    Several servers, of which one serves at a time, are separated by commas.

    Raises:
        InvalidArgument: if it is neither host, host:port, several of these, nor a target of a gRPC
            resolver.
    """
    if not isinstance(value, str):
        raise InvalidArgument(field="target", value=typed(value), expected="str host:port")
    if not value:
        raise InvalidArgument(
            "target is not set; expected host:port; pass target= or set ROUTETRACE_TARGET",
            field="target",
            value="not set",
            expected="host:port",
            remedy="pass target= or set ROUTETRACE_TARGET",
        )
    if not value.isprintable():
        expected = "host:port in printable characters"
        raise InvalidArgument(field="target", value=quoted(value), expected=expected)
    if _has_scheme(value):
        return value
    parts = (_host_port(part.strip(), value) for part in value.split(","))
    return ",".join(dict.fromkeys(parts))


def moved_target(target: str, to: str, targets: Sequence[str] = ()) -> str:
    """Return the target that a MOVED names.

    A host is taken only if it is one of the configured targets', so that no answer of a server
    leads a token to a host that the user did not name.

    Args:
        target: as given to gRPC, of the server that was called.
        to: ":port" of another worker of that server, or host:port of a worker of another one.
        targets: all that are configured.

    Raises:
        InvalidArgument: if the target is not one host, `to` has another form, or its host is not
            configured.
    """
    found = _HOST_PORT.fullmatch(to if not to.startswith(":") else f"host{to}")
    if not found or int(found["port"] or 0) not in range(1, 1 << 16):
        expected = "':port' of a worker, or its host:port; a client that is as new as the server"
        raise InvalidArgument(field="ErrorDetail.target", value=to, expected=expected)
    if not to.startswith(":"):
        if found["host"].lower() in {_host_of(known) for known in targets}:
            return to
        raise InvalidArgument(
            field="target",
            value=",".join(targets) or target,
            expected=f"{found['host']} among its hosts, as the server at {to} owns the partition "
            "of the run: host:port of each server, with commas",
        )
    scheme = target.partition(":")[0]
    host = _TRAILING_PORT.sub("", target)
    if "," in target or scheme in ("unix", "unix-abstract", "vsock", "xds"):
        expected = "one host or host:port, as each worker of the server has a port of its own there"
        raise InvalidArgument(field="target", value=target, expected=expected)
    return host + to


def targets_of(target: str) -> list[str]:
    """Return the servers of a parsed target, as gRPC takes each."""
    return [target] if _has_scheme(target) else target.split(",")


def resolver_options(target: str) -> tuple[tuple[str, Any], ...]:
    """Return channel options for one of `targets_of`.

    Behind a name with several addresses, the one server is used that says that it serves.
    """
    if target.partition(":")[0] not in ("dns", "ipv4", "ipv6") or not _has_scheme(target):
        return ()
    return (("grpc.service_config", _ONE_THAT_SERVES),)


#: Channel options for several servers: one that hangs is left after 16 s instead of 40.
FAILOVER_OPTIONS = {"grpc.keepalive_time_ms": 12_000, "grpc.keepalive_timeout_ms": 4_000}

_ONE_THAT_SERVES = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "routetrace.v1.TraceService"},
    }
)


def _has_scheme(value: str) -> bool:
    scheme, colon, rest = value.partition(":")
    return bool(colon and scheme in _SCHEMES and rest and not rest.isdigit())


def _host_of(target: str) -> str:
    """Return the host of a target without a scheme, in lower case; "" of others."""
    return "" if _has_scheme(target) else _TRAILING_PORT.sub("", target).lower()


def _host_port(part: str, target: str) -> str:
    """Return host:port of one server of a target.

    Raises:
        InvalidArgument: if it has another form.
    """
    found = _HOST_PORT.fullmatch(part)
    if found:
        port = int(found["port"] or DEFAULT_PORT)
        if port in range(1, 1 << 16):
            return f"{found['host']}:{port}"
        raise InvalidArgument(field="port", value=port, expected="a number in 1..65535")
    _, slashes, rest = part.rpartition("://")
    host, slash, _ = rest.partition("/")
    expected = "host:port"
    if slashes:
        expected += " without a scheme"
    elif slash:
        expected += " without a path"
    fits = (slashes or slash) and _HOST_PORT.fullmatch(host)
    remedy = f"use {quoted(host)}" if fits else "for example 'traces:7411' or '[::1]:7411'"
    raise InvalidArgument(field="target", value=quoted(target), expected=expected, remedy=remedy)


class _Cause(NamedTuple):
    words: re.Pattern[str]
    """Words of gRPC's message."""
    text: str
    """Error and remedy, with {target}, {host} and {seconds}."""
    lasting: bool = False
    """Whether another attempt is of no use."""
    alone: bool = False
    """Whether the words say enough of a call that may have begun, too."""


#: Channel option: milliseconds of an attempt to connect; and gRPC's default.
_CONNECT_OPTION, _CONNECT_MS = "grpc.min_reconnect_backoff_ms", 20_000

_CAUSES = (
    _Cause(
        re.compile("WRONG_VERSION_NUMBER"),
        "{target} does not speak TLS; leave tls off, or start the server with tls_cert",
        lasting=True,
    ),
    _Cause(
        # The fourth byte of "HTTP/1.1 ..." or "<!DOCTYPE ...", taken for the type of a frame.
        re.compile(r"frame type (80|79)\b|http1\.x server"),
        "{target} speaks HTTP/1, not gRPC; is this the metrics port?",
        lasting=True,
    ),
    _Cause(
        re.compile("parsing HTTP/2"),
        "{target} does not speak gRPC; is this the port of a routetrace-server, 7411 by default?",
        lasting=True,
    ),
    _Cause(
        # Of gRPC, of TLS, and of TLS in gRPC 1.62. The system takes connections for a process that
        # is stopped.
        re.compile(r"before receiving SETTINGS frame|Endpoint closing|Handshake read failed$"),
        "no answer from {target} in {seconds:g} s, though it takes connections; is the server "
        "there stopped, or is this the port of another program?",
    ),
    _Cause(
        re.compile("(?i)ping timeout|keepalive"),
        "no answer from {target} any more; is the server there stopped, or the network cut?",
        alone=True,
    ),
    _Cause(
        re.compile("(?i)connection refused"),
        "cannot connect to {target} (connection refused); is routetrace-server running there?",
    ),
    _Cause(
        re.compile("(?i)name not found|not known|lookup failed|dns resolution|name resolution"),
        "cannot resolve {host}; check the host name and DNS",
    ),
    _Cause(
        re.compile("(?i)network is unreachable|no route to host"),
        "cannot connect to {target} (no route to the host); check the network",
    ),
    _Cause(
        re.compile("(?i)timed? ?out|timer|deadline|handshaker shutdown|FD shutdown"),
        "cannot connect to {target} (no answer in {seconds:g} s); check the port, and firewalls on "
        "the way",
    ),
    _Cause(
        # gRPC's server does so, without words, with calls that it has not handed over.
        re.compile("(?i)^cancelled: cancelled$"),
        "{target} cancelled the call: the server stopped, or had too many calls",
        alone=True,
    ),
)
# gRPC's words for a call that got no connection or handler, in contrast to one that broke off.
_NOT_BEGUN = re.compile("(?i)failed to connect|errors resolving|resolution failed|settings fr")


def unreachable(
    target: str, details: str, hint: str = "", options: Sequence[tuple[str, Any]] = ()
) -> str:
    """Return one sentence for a failed connection, or the target and gRPC's words.

    Args:
        target: as given to gRPC.
        details: gRPC's message.
        hint: a likely cause that is known otherwise, such as `Security.hint`.
        options: options of the channel.
    """
    cause = next((c for c in _CAUSES if c.words.search(details)), None)
    if cause is None or not (cause.alone or _NOT_BEGUN.search(details)):
        if _NOT_BEGUN.search(details) and hint:
            return f"cannot connect to {target} ({_last(details)}); {hint}"
        return f"{target}: {details}" + (f"; {hint}" if hint else "")
    hosts = ", ".join(quoted(_TRAILING_PORT.sub("", one)) for one in targets_of(target))
    given = dict(options).get(_CONNECT_OPTION)
    seconds = (given if isinstance(given, int) else _CONNECT_MS) / 1000
    return cause.text.format(target=target, host=hosts, seconds=seconds)


def is_misfit(details: str) -> bool:
    """Whether gRPC's message says that the server speaks another protocol, which lasts."""
    return any(cause.lasting and cause.words.search(details) for cause in _CAUSES)


def _last(details: str) -> str:
    """Return the error of the last address that gRPC tried."""
    return details.rpartition("last error: ")[2]
