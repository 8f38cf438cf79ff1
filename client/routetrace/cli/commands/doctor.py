"""`routetrace doctor`: checks from installed packages to the quota of the run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import grpc
import typer

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection, has_run, runs_of
from routetrace.cli.errors import describe
from routetrace.cli.output import plain, size, write_json
from routetrace.client import ServerInfo
from routetrace.common import pem
from routetrace.common.errors import (
    InvalidArgument,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    counted,
)
from routetrace.common.target import targets_of
from routetrace.common.version import installed_version

# As declared in pyproject.toml.
_OLDEST = {"grpcio": (1, 62), "protobuf": (4, 25), "numpy": (1, 24), "zstandard": (0, 22)}
_OPTIONAL = {
    "numba": "compiled loops for frames",
    "pyarrow": "get -o FILE.parquet",
    "torch": "Trace.to_torch and replay",
}
_SECONDS = 5.0
_CLOCK_SECONDS = 5.0
_CERTIFICATE_DAYS = 14
_FULL = 0.9
# Encoded HealthCheckResponse with status SERVING, and with its other statuses.
_SERVING = b"\x08\x01"
_STATUS = {b"": "UNKNOWN", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    verdict: Literal["ok", "warning", "problem"]
    subject: str
    details: str
    advice: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.advice}" if self.advice else ""
        return plain(f"{self.subject}: {self.details}{remedy}")


def doctor(connection: Connection, as_json: AsJson = False) -> None:
    """Check the connection from this machine to the server, and suggest remedies."""
    problems = 0
    for check in _checks(connection):
        problems += check.verdict == "problem"
        if as_json:
            write_json(asdict(check))
        else:
            print(f"{check.verdict:8} {check}", flush=True)
    if problems:
        raise typer.Exit(1)


def _checks(connection: Connection) -> Iterator[Check]:
    """Run the checks in order, of several servers for each.

    A problem that makes later checks of a server meaningless ends them.
    """
    yield from _packages()
    yield from _allocator()
    for target in targets_of(connection.target):
        yield from _checks_of(replace(connection, target=target))


def _checks_of(connection: Connection) -> Iterator[Check]:
    yield from _environment(connection.target)
    address = _address(connection.target)
    if address is not None:
        reached = _reach(*address)
        yield from reached
        if reached[-1].verdict == "problem":
            return
    try:
        connection.security.check(connection.target)
    except InvalidArgument as error:
        yield Check("problem", "credentials", describe(error))
        return
    if address is not None:
        certificate = _certificate(connection, *address)
        yield certificate
        if certificate.verdict == "problem":
            return
    health = _health(connection)
    yield health
    if health.verdict != "problem":
        yield from _server(connection)


def _packages() -> Iterator[Check]:
    for name, oldest in _OLDEST.items():
        found = importlib.metadata.version(name)
        wanted = ".".join(map(str, oldest))
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            advice = f"pip install '{name}>={wanted}'"
            yield Check("problem", name, f"{found} is older than {wanted}", advice)
        else:
            yield Check("ok", name, found)
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    for name, use in _OPTIONAL.items():
        details = installed.get(name, f"not installed; only needed for {use}")
        if "+cpu" in details:
            details += " has no CUDA support; to_torch('cuda') fails"
        yield Check("ok", name, details)


def _allocator() -> Iterator[Check]:
    """Check for the setting of torch with which vLLM refuses KV connectors.

    vLLM reads this variable alone: under PYTORCH_ALLOC_CONF it refuses none.
    """
    setting = "expandable_segments:True"
    if setting not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return
    if importlib.util.find_spec("vllm") is not None:
        details = f"vLLM refuses KV connectors under PYTORCH_CUDA_ALLOC_CONF={setting}"
        advice = (
            "attach with --additional-config or ROUTETRACE_VLLM=1 in place of --kv-transfer-config"
        )
        yield Check("warning", "allocator", details, advice)


def _environment(target: str) -> Iterator[Check]:
    """Check for proxies that gRPC takes from the environment."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        if os.environ.get(name):
            advice = (
                f"if it does not lead to the server, add {target.rpartition(':')[0]} to no_proxy"
            )
            yield Check("warning", "proxy", f"gRPC may use ${name}", advice)
            return


def _address(target: str) -> tuple[str, int] | None:
    """Return host and port; None for targets that only gRPC resolves."""
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def _reach(host: str, port: int) -> list[Check]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "check --target, DNS and /etc/hosts"
        return [Check("problem", "name", f"cannot resolve {host}: {error}", advice)]
    addresses = list(dict.fromkeys(entry[4][0] for entry in found))
    name = Check("ok", "name", f"{host} is {', '.join(map(str, addresses))}")
    begun = time.monotonic()
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError as error:
        advice = (
            "check that the server is running, and that its --listen names this port and an "
            "address reachable from this machine (127.0.0.1 is local to the server)"
        )
        return [name, Check("problem", "connection", f"{host}:{port}: {error}", advice)]
    took = (time.monotonic() - begun) * 1000
    return [name, Check("ok", "connection", f"{host}:{port} in {took:.1f} ms")]


def _certificate(connection: Connection, host: str, port: int) -> Check:
    ours = connection.security.uses_tls
    try:
        found = ssl.get_server_certificate((host, port), timeout=_SECONDS)
        days = (pem.expiry(found.encode()) - time.time()) / 86400
    except TimeoutError:
        details = f"{host}:{port} takes connections, and does not answer in {_SECONDS:g} s"
        advice = "check that the server there is not stopped, and the port"
        return Check("problem", "connection", details, advice)
    except (OSError, ValueError) as error:
        if not ours:
            return Check("ok", "TLS", "off on both sides")
        advice = "check the port, and TLS on the server (--tls-cert, --tls-key)"
        return Check("problem", "TLS", f"handshake failed: {error}", advice)
    if not ours:
        advice = "set --ca-file, or --tls if a public authority signed its certificate"
        return Check("problem", "TLS", "on at the server, off here", advice)
    advice = "replace the file; the server reloads it"
    if days < 0:
        return Check("problem", "TLS", f"the certificate expired {-days:.1f} days ago", advice)
    if days < _CERTIFICATE_DAYS:
        return Check("warning", "TLS", f"the certificate expires in {days:.1f} days", advice)
    return Check("ok", "TLS", f"the certificate is valid for {days:.0f} days")


def _health(connection: Connection) -> Check:
    """Call the health service, with raw bytes as the client has no stubs of it."""
    service = b"routetrace.v1.TraceService"
    request = b"\x0a" + bytes([len(service)]) + service
    security = connection.security
    try:
        with security.channel(connection.target, ()) as channel:
            ask: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer = ask(request, timeout=_SECONDS, metadata=security.metadata())
    except grpc.RpcError as error:
        details, code = error.details() or "", error.code().name
        if code == "UNIMPLEMENTED":
            return Check(
                "warning", "health", "not served", "check that the target is a routetrace-server"
            )
        if code == "DEADLINE_EXCEEDED":
            details = f"no answer in {_SECONDS:g} s"
        advice = security.hint(details) or "see the log of the server"
        return Check("problem", "health", f"{code}: {' '.join(details.split())}", advice)
    if answer == _SERVING:
        return Check("ok", "health", "SERVING")
    status = _STATUS.get(answer, repr(answer))
    advice = "the server is starting or draining: wait, and see its log"
    return Check("problem", "health", status, advice)


def _server(connection: Connection) -> Iterator[Check]:
    begun = time.time()
    try:
        with connection.client() as client:
            info = client.server_info()
    except Unauthenticated as error:
        advice = "set --token-file or ROUTETRACE_TOKEN to a token that the server accepts"
        yield Check("problem", "token", describe(error), advice)
        return
    except PermissionDenied as error:
        advice = f"use a token that may read run {connection.run!r}"
        yield Check("problem", "token", describe(error), advice)
        return
    except RouteTraceError as error:
        yield Check("problem", "server", describe(error), "see the log of the server")
        return
    if connection.security.metadata():
        yield Check("ok", "token", f"accepted for run {connection.run!r}")
    yield from _info(info, connection.run, (begun + time.time()) / 2)


def _info(info: ServerInfo, run: str, now: float) -> Iterator[Check]:
    ours = installed_version()
    hours = (info.now - info.started_at) / timedelta(hours=1)
    up = f"up {hours:.1f} h, store {info.store}, acks {info.ack_mode}"
    if info.version == ours:
        yield Check("ok", "server", f"{info.version}, {up}")
    else:
        advice = "install the same release on both sides if possible"
        yield Check("warning", "server", f"{info.version}, here {ours}, {up}", advice)
    skew = info.now.timestamp() - now
    if abs(skew) > _CLOCK_SECONDS:
        advice = "only displayed times are affected; run NTP on both machines"
        yield Check("warning", "clock", f"server clock off by {skew:+.1f} s", advice)
    else:
        yield Check("ok", "clock", f"{skew:+.2f} s apart")
    if info.damaged_records:
        advice = "routetrace verify --all lists the affected traces; check the disk"
        yield Check("warning", "store", f"{info.damaged_records} damaged records", advice)
    yield _room("store", info.used_bytes, info.capacity_bytes, "--store-capacity")
    if info.run_quota_bytes:
        yield _room(f"quota of run {run!r}", info.run_bytes, info.run_quota_bytes, "--run-quota")
    traces, agents = counted(info.num_traces, "trace"), counted(info.num_agents, "agent")
    content = f"{traces}, {size(info.run_bytes)}, {agents} connected"
    if not has_run(info, run):
        content = f"no run {run!r}; runs: {runs_of(info)}"
    advice = "check that agents use this run (--run, ROUTETRACE_RUN)"
    if info.num_traces or info.num_agents:
        yield Check("ok", f"run {run!r}", content)
    else:
        yield Check("warning", f"run {run!r}", content, advice)


def _room(subject: str, used: int, limit: int, flag: str) -> Check:
    share = used / limit if limit else 0
    details = f"{size(used)} of {size(limit)} ({share:.1%})"
    if share < _FULL:
        return Check("ok", subject, details)
    advice = f"traces may be evicted or chunks refused: retire old traces, or raise {flag}"
    return Check("warning", subject, details, advice)
