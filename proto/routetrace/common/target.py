"""Targets: the address of a server as gRPC takes it, and why a connection to it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from routetrace.common.errors import InvalidArgument

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
    if isinstance(value, str):
        if _has_scheme(value):
            return value
        parsed = [_host_port(part) for part in value.split(",")]
        if all(parsed):
            return ",".join(dict.fromkeys(parsed))
    expected = "host or host:port without a scheme, such as traces:7411 or [::1]:7411"
    if not value:
        expected += ", here or in ROUTETRACE_TARGET"
    raise InvalidArgument(field="target", value=value, expected=expected)


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


def _host_port(value: str) -> str:
    """Return host:port; "" if it has another form."""
    found = _HOST_PORT.fullmatch(value.strip())
    if found and (port := int(found["port"] or DEFAULT_PORT)) in range(1, 1 << 16):
        return f"{found['host']}:{port}"
    return ""


class _Cause(NamedTuple):
    words: re.Pattern[str]
    """Words of gRPC's message."""
    name: str
    remedy: str
    lasting: bool = False
    """Whether another attempt is of no use."""


_CAUSES = (
    _Cause(
        re.compile("WRONG_VERSION_NUMBER"),
        "the server does not speak TLS",
        "check that the port is right and that TLS is on there, or turn it off here",
        lasting=True,
    ),
    _Cause(
        re.compile(r"SETTINGS frame|parsing HTTP/2|http1\.x"),
        "the server does not speak gRPC",
        "check the port: 7411 is that of traces by default, and metrics have another",
        lasting=True,
    ),
    _Cause(
        re.compile("(?i)connection refused"),
        "refused",
        "check that routetrace-server runs and that its listen names this host and port",
    ),
    _Cause(
        re.compile("(?i)name not found|not known|lookup failed|dns resolution|name resolution"),
        "unknown host",
        "check the name of the host",
    ),
    _Cause(
        re.compile("(?i)network is unreachable|no route to host"),
        "no route to the host",
        "check the network",
    ),
    _Cause(
        re.compile("(?i)timed? ?out|timer|deadline"),
        "no answer",
        "check the port, and firewalls on the way",
    ),
)
# gRPC's words for a call that got no connection, in contrast to one that broke off.
_NO_CONNECTION = re.compile("(?i)failed to connect|errors resolving|resolution failed|settings fr")


def unreachable(target: str, details: str, hint: str = "") -> str:
    """Return one sentence for a failed connection, or the target and gRPC's words.

    Args:
        target: as given to gRPC.
        details: gRPC's message.
        hint: a likely cause that is known otherwise, such as `Security.hint`.
    """
    cause = next((c for c in _CAUSES if c.words.search(details)), None)
    if cause is None or not _NO_CONNECTION.search(details):
        if _NO_CONNECTION.search(details) and hint:
            return f"cannot connect to {target} ({_last(details)}); {hint}"
        return f"{target}: {details}" + (f"; {hint}" if hint else "")
    return f"cannot connect to {target} ({cause.name}); {cause.remedy}"


def is_misfit(details: str) -> bool:
    """Whether gRPC's message says that the server speaks another protocol, which lasts."""
    return any(cause.lasting and cause.words.search(details) for cause in _CAUSES)


def _last(details: str) -> str:
    """Return the error of the last address that gRPC tried."""
    return details.rpartition("last error: ")[2]
