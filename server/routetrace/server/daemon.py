"""The process: settings, store and core behind a gRPC server, from start to clean end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from routetrace.server import logs
from routetrace.server.config import ConfigError, ServerConfig, load_config
from routetrace.server.core import Core
from routetrace.server.disk_store import DiskStore
from routetrace.server.scrape import Endpoint
from routetrace.server.store import MemoryStore, Store
from routetrace.server.telemetry import Telemetry
from routetrace.server.tokens import main_token
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import InvalidArgument, RouteTraceError
from routetrace.v1.security import Security

log = logging.getLogger("routetrace.server.daemon")

#: Ready once they are SERVING; "" alone means alive.
READY_SERVICES = ("routetrace.v1.IngestService", "routetrace.v1.TraceService")

_DEFAULT_TARGET = "127.0.0.1:7411"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class StartError(Exception):
    """The server can not start; the message says why, on one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.

    `health` as the first argument asks a running server, `token` makes a bearer token.

    Returns:
        0 after a clean end (health: ready), 1 if the server can not start (health: not ready),
        2 if the settings are wrong.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["health"]:
        return _health(args[1:])
    if args[:1] == ["token"]:
        return main_token(args[1:])
    try:
        config = load_config(args)
    except ConfigError as error:
        print(f"routetrace-server: {error}", file=sys.stderr)
        return 2
    logs.set_up(config.log_level, config.log_format)
    _keep_freed_memory()
    try:
        asyncio.run(_serve(config))
    except (ConfigError, StartError) as error:
        print(f"routetrace-server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


# ---------------------------------------------------------------------------- serving


async def _serve(config: ServerConfig) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    if config.ready_file:
        config.ready_file.unlink(missing_ok=True)
    store = await asyncio.to_thread(_open_store, config)
    try:
        await _serve_from(store, config, stop)
    finally:
        await asyncio.to_thread(store.close)
        if config.ready_file:
            config.ready_file.unlink(missing_ok=True)
    log.info("stopped")


async def _serve_from(store: Store, config: ServerConfig, stop: asyncio.Event) -> None:
    core = Core(store, config)
    files = [pb.DESCRIPTOR, health_pb2.DESCRIPTOR]
    if config.reflection:
        files.append(reflection_pb2.DESCRIPTOR)
    server = grpc.aio.server(
        interceptors=[Telemetry(core.metrics, files), *core.access.interceptors()],
        options=_server_options(config),
    )
    core.add_to(server)
    checks = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for service in READY_SERVICES:
        await checks.set(service, _NOT_SERVING)
    if config.reflection:
        reflection.enable_server_reflection(_services_of(files), server)
    address = _bind(server, config, core.access.credentials())
    endpoint = _open_endpoint(core, config)
    try:
        await server.start()
        log.info("listening on %s", address)
        addresses = [address, endpoint.address] if endpoint else [address]
        await _run_until(stop, server, core, checks, addresses)
    finally:
        if endpoint:
            await asyncio.to_thread(endpoint.close)


async def _run_until(
    stop: asyncio.Event, server: grpc.aio.Server, core: Core, checks: Any, addresses: list[str]
) -> None:
    running = asyncio.create_task(_run(core, checks, addresses))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    log.info("draining, for %g seconds at most", core.config.drain_seconds)
    _tell_systemd("STOPPING=1")
    await checks.enter_graceful_shutdown()
    stopping.cancel()
    running.cancel()
    await core.stop()
    await server.stop(core.config.drain_seconds)
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _run(core: Core, checks: Any, addresses: list[str]) -> None:
    """Until it is cancelled; ends by itself only where the start fails."""
    try:
        await core.start()
    except RouteTraceError as error:
        raise StartError(f"can not use what is in {core.config.data_dir}: {error}") from error
    for service in READY_SERVICES:
        await checks.set(service, _SERVING)
    if core.config.ready_file:
        _write_atomically(core.config.ready_file, "\n".join(addresses))
    _tell_systemd("READY=1")
    log.info("ready")
    while True:
        await core.sweep_due()
        try:
            await core.sweep()
        except Exception:
            log.exception("sweep failed; it is tried again at the next one")


def _open_store(config: ServerConfig) -> Store:
    if config.store == "memory":
        return MemoryStore(config.store_capacity)
    try:
        return DiskStore(
            config.data_dir, capacity_bytes=config.store_capacity, ack_mode=config.ack_mode
        )
    except (RouteTraceError, OSError) as error:
        raise StartError(f"can not open the store in {config.data_dir}: {error}") from error


def _bind(
    server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None
) -> str:
    host, port = config.host_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # gRPC does not say why it can not have an address; this does.
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        if credentials:
            port = server.add_secure_port(config.listen, credentials)
        else:
            port = server.add_insecure_port(config.listen)
    except (OSError, RuntimeError) as error:
        raise StartError(f"can not listen on {config.listen}: {error}") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_endpoint(core: Core, config: ServerConfig) -> Endpoint | None:
    if not config.metrics_listen:
        return None
    try:
        endpoint = Endpoint(core, config.metrics_listen)
    except OSError as error:
        raise StartError(f"can not serve metrics on {config.metrics_listen}: {error}") from error
    log.info("metrics on http://%s/metrics", endpoint.address)
    return endpoint


def _services_of(files: Sequence[FileDescriptor]) -> list[str]:
    return [service.full_name for file in files for service in file.services_by_name.values()]


def _server_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # gRPC's own is two minutes: connections that never get anywhere cost memory.
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Two servers on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        # From 1.82 on, the defaults cancel a third of a burst of 5,000 calls. Admission is ours.
        ("grpc.server.max_pending_requests", 1 << 30),
        ("grpc.server.max_pending_requests_hard_limit", 1 << 30),
        # Nor is a call cancelled that is not taken within 30 s: its deadline is its own.
        ("grpc.server_max_unrequested_time_in_server", 86_400),
        # Clients ping every 30 s, also between calls; that must not count as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A host that vanished must end its stream, or its agent would never count as lost.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # the store survives it, as it survives a crash
        log.info("%s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _tell_systemd(state: str) -> None:
    """Says how the service stands, where it was started with Type=notify."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(state.encode(), address)
        except OSError as error:
            log.warning("systemd can not be told %s: %s", state, error)


def _keep_freed_memory() -> None:
    # glibc hands what chunks took back to the kernel as soon as they are written, and faults the
    # same pages in again for the next ones: up to 1 s of CPU per GB that is ingested.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # other C libraries have none
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


# ---------------------------------------------------------------------------- health


def _health(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "routetrace-server health",
        description="Exits 0 if a server is ready, 1 if it is not, 2 if it can not be asked like "
        "that. No token is needed.",
    )
    parser.add_argument(
        "--target",
        default=os.environ.get("ROUTETRACE_TARGET", _DEFAULT_TARGET),
        help="host:port to ask (default: %(default)s) [env: ROUTETRACE_TARGET]",
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, help="seconds to wait (default: %(default)s)"
    )
    parser.add_argument(
        "--tls", action="store_true", default=None, help="use TLS [env: ROUTETRACE_TLS]"
    )
    for flag, text in (
        ("ca-file", "PEM file of the authorities to trust; the system's without it"),
        ("cert-file", "PEM file of a certificate, for servers that ask for one"),
        ("key-file", "PEM file of its key"),
        ("server-name", "name in the server's certificate, where it is not the target's host"),
    ):
        name = f"ROUTETRACE_{flag.upper().replace('-', '_')}"
        parser.add_argument(f"--{flag}", help=f"{text} [env: {name}]")
    args = vars(parser.parse_args(argv))
    target, timeout = args.pop("target"), args.pop("timeout")
    given = {name: value for name, value in args.items() if value is not None}
    try:
        # A token is not for those who only look.
        security = replace(Security.from_environment(), token="", token_file="", **given)
        with security.channel(target, []) as channel:
            return 0 if _ask(channel, timeout) else 1
    except InvalidArgument as error:
        print(f"routetrace-server health: {error}", file=sys.stderr)
        return 2


def _ask(channel: grpc.Channel, timeout: float) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    ready = True
    for service in READY_SERVICES:
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        except grpc.RpcError as error:
            status = f"{error.code().name}: {error.details()}"
        print(f"{service}: {status}")
        ready = ready and status == "SERVING"
    return ready


if __name__ == "__main__":
    sys.exit(main())
