"""`routetrace-server health`: whether a server is ready, asked without a token."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from routetrace.common.errors import InvalidArgument
from routetrace.common.security import Security
from routetrace.common.target import parse_target, targets_of, unreachable
from routetrace.server.ops.health import READY_SERVICES
from routetrace.server.settings import usage

_DEFAULT_TARGET = "127.0.0.1:7411"


def main(argv: Sequence[str]) -> int:
    """Run `health`; return 0 if the server is ready, 1 if not, 2 if the arguments are wrong."""
    parser = usage.new_parser(
        "health",
        "Check a server without a token. Exit code 0: ready, 1: not ready, 2: invalid arguments.",
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=os.environ.get("ROUTETRACE_TARGET", _DEFAULT_TARGET),
        help="host:port of the server (default: %(default)s) [env: ROUTETRACE_TARGET]",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="longest wait for an answer (default: 5)",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        default=None,
        help="use TLS, as --ca-file and --cert-file do too (default: off) [env: ROUTETRACE_TLS]",
    )
    for flag, metavar, text in (
        ("ca-file", "FILE", "PEM file of the trusted authorities (default: those of the system)"),
        ("cert-file", "FILE", "PEM file of a client certificate, if the server requires one "
         "(default: none)"),
        ("key-file", "FILE", "PEM file of the certificate's key (default: none)"),
        ("server-name", "NAME", "name in the server certificate (default: host of the target)"),
    ):  # fmt: skip
        name = f"ROUTETRACE_{flag.upper().replace('-', '_')}"
        parser.add_argument(f"--{flag}", metavar=metavar, help=f"{text} [env: {name}]")
    args = vars(parser.parse_args(argv))
    timeout = args.pop("timeout")
    try:
        target = parse_target(args.pop("target"))
        if len(targets_of(target)) > 1:
            raise InvalidArgument(field="target", value=target, expected="one server")
        given = {name: value for name, value in args.items() if value is not None}
        # The health service needs no token, so none is sent.
        security = replace(Security.from_environment(), token="", token_file="", **given)
        channel = security.channel(target, [])
    except InvalidArgument as error:
        print(f"routetrace-server health: {error}", file=sys.stderr)
        return 2
    with channel:
        try:
            return 0 if _ask(channel, timeout) else 1
        except grpc.RpcError as error:
            text = _explain(error, target, timeout, security)
            print(f"routetrace-server health: {text}", file=sys.stderr)
            return 1


def _ask(channel: grpc.Channel, timeout: float) -> bool:
    """Print the status of each service; return whether all are ready."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    ready = True
    for service in READY_SERVICES:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        print(f"{service}: {status}")
        ready = ready and status == "SERVING"
    return ready


def _explain(error: grpc.RpcError, target: str, timeout: float, security: Security) -> str:
    """Return one line for a check without an answer."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE:
        return unreachable(target, details, security.hint(details))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        late = f"no answer from {target} within {timeout:g} s"
        return f"{late}; check the port, and the log of the server"
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return f"{target} serves something else; is this the port of a routetrace-server?"
    return f"{target}: {code.name}: {details}"
