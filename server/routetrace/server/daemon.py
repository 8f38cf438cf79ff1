"""Server process: settings, store and core behind a gRPC server, from start to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.server import backup
from routetrace.server.access.lifecycle import Lifecycle
from routetrace.server.access.partition import WHOLE
from routetrace.server.access.tokens import main_token
from routetrace.server.core import Core
from routetrace.server.ops import logs
from routetrace.server.ops.endpoint import Endpoint, on_loop
from routetrace.server.ops.health import TRACE_SERVICE, Health
from routetrace.server.ops.telemetry import Telemetry
from routetrace.server.process import announce, pauses, probe
from routetrace.server.process.link import Link
from routetrace.server.process.ownership import open_object_store
from routetrace.server.process.page import PageProcess
from routetrace.server.process.partitions import check_partitions
from routetrace.server.process.readiness import Readiness, watch_store
from routetrace.server.process.workers import Seat, supervise
from routetrace.server.read.peers import Peers
from routetrace.server.settings import usage
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.settings.loading import load_config
from routetrace.server.spread.workers import NO_WORKERS, SocketWorkers, security_of
from routetrace.server.store.disk.failures import explain
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Store
from routetrace.server.store.memory import MemoryStore
from routetrace.v1 import routetrace_pb2 as pb

log = logging.getLogger("routetrace.server.daemon")

#: Maximum open calls of one connection, those included that are not cleaned up yet.
MAX_STREAMS = 6000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class ServeError(Exception):
    """The server cannot start or continue; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    `health` as the first argument checks a running server, `token` makes a bearer token, `backup`
    and `restore` copy a data directory.

    Returns:
        0 after a clean shutdown (health: ready), 1 if the server cannot start or continue (health:
        not ready), 2 if the settings are wrong.
    """
    os.umask(0o077)  # what is written here is its user's alone
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["health"]:
        return probe.main(args[1:])
    if args[:1] == ["token"]:
        return main_token(args[1:])
    if args[:1] in (["backup"], ["restore"]):
        return backup.main(args[0], args[1:])
    if {"-h", "--help", "--version"} & {*args}:
        usage.parser().parse_args([a for a in args if a in ("-h", "--help", "--version")])
    try:
        config = load_config(args)
    except ConfigError as error:
        print(f"routetrace-server: {error}", file=sys.stderr)
        return 2
    logs.set_up(config.log_level, config.log_format)
    _keep_freed_memory()
    if config.workers == 1:
        return _run_server(config)
    try:
        return supervise(config, _run_server)
    except (ConfigError, OSError) as error:
        print(f"routetrace-server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run_server(config: ServerConfig, seat: Seat | None = None) -> int:
    """Run a server, or one worker of it in its seat; return the exit code."""
    # asyncio.run would wait for all threads; see `end_process`.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_serve(config, seat))
    except (ConfigError, ServeError) as error:
        print(f"routetrace-server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


# ---------------------------------------------------------------------------- serving


async def _serve(config: ServerConfig, seat: Seat | None = None) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    collecting = asyncio.create_task(pauses.collect_garbage())
    if config.ready_file:
        config.ready_file.unlink(missing_ok=True)
    if seat is None and config.store == "disk":
        check_partitions(config.data_dir, 1)
    link = Link(seat.link, stop) if seat else None
    again = False
    while True:
        store = await asyncio.to_thread(_open_store, config, seat, first=not again)
        try:
            again = await _serve_from(store, config, stop, seat, link)
        finally:
            await _in_own_thread(store.close)
            if config.ready_file:
                config.ready_file.unlink(missing_ok=True)
        if not again:
            break
        log.warning("starting over as a standby")
        pauses.collect_frozen()  # the previous state is part of reference cycles
    collecting.cancel()
    log.info("stopped")


async def _in_own_thread(call: Callable[[], object]) -> None:
    """Make a call in a thread of its own: all those of the loop may wait for the object store."""
    with ThreadPoolExecutor(1) as thread:
        await asyncio.get_running_loop().run_in_executor(thread, call)


async def _serve_from(
    store: Store, config: ServerConfig, stop: asyncio.Event, seat: Seat | None, link: Link | None
) -> bool:
    """Serve until stopped; return True if the store is another server's, or to be left to it."""
    others = None
    if seat and config.spread_runs:
        others = SocketWorkers(seat.parts_sockets, security_of(config))
    if seat:
        core = Core(store, config, seat.partition, Peers(seat.peers), others or NO_WORKERS)
    else:
        core = Core(store, config)
    files = [pb.DESCRIPTOR, health_pb2.DESCRIPTOR]
    if config.reflection:
        files.append(reflection_pb2.DESCRIPTOR)
    gate = core.access.interceptors(core.admission.pace)
    server = grpc.aio.server(
        interceptors=[Telemetry(core.metrics, files), *gate],
        options=_server_options(config),
    )
    core.add_to(server)
    if others and config.object_url:
        core.parts.add_to(server, trusted=False)
    health = Health(core.metrics)
    health.add_to(server)
    readiness = Readiness(health, core.lifecycle, store)
    if link:
        _follow(link, core.lifecycle, readiness)
    if config.reflection:
        reflection.enable_server_reflection(_services_of(files), server)
    address = _bind(server, config, core.access.credentials())
    parts = None
    if seat:
        server.add_insecure_port(f"unix:{seat.socket}")
    if seat and others:
        parts = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        core.parts.add_to(parts, trusted=True)
        parts.add_insecure_port(f"unix:{seat.parts_socket}")
    endpoint = _open_endpoint(core, config, health)
    page = PageProcess(config, address)
    page.add_to(server)
    try:
        if parts:
            await parts.start()
        await server.start()
        log.info("listening on %s", address)
        addresses = [address, endpoint.address] if endpoint else [address]
        running = _run(core, readiness, addresses, alone=link is None)
        async with page.running():
            await _run_until(stop, server, core, readiness, running)
    finally:
        if parts and others:
            await parts.stop(0)
            await others.close()
        if link:
            link.on_change = lambda: None
        if endpoint:
            await _in_own_thread(endpoint.close)
    return core.lost.is_set() and not stop.is_set()


async def _run_until(
    stop: asyncio.Event,
    server: grpc.aio.Server,
    core: Core,
    readiness: Readiness,
    run: Coroutine[Any, Any, None],
) -> None:
    running = asyncio.create_task(run)
    ends = [asyncio.create_task(event.wait()) for event in (stop, core.failed, core.lost)]
    await asyncio.wait({running, *ends}, return_when=asyncio.FIRST_COMPLETED)
    # Calls on what another server owns have no time left.
    seconds = 0 if core.lost.is_set() else core.config.drain_seconds
    log.info("draining; open calls have up to %g seconds", seconds)
    if not core.lost.is_set():
        announce.stopping()
    readiness.health.drain()
    for task in (running, *ends):
        task.cancel()
    await core.stop()
    await server.stop(seconds)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    if core.failed.is_set():
        raise ServeError(
            f"record {core.journal.failed} cannot be applied; a restart rebuilds the state without "
            "it. The log has the error; please report it"
        )


async def _run(core: Core, readiness: Readiness, addresses: Sequence[str], *, alone: bool) -> None:
    """Start the core, then sweep until cancelled; return only if the start fails."""
    try:
        await core.start()
    except RouteTraceError as error:
        if core.lost.is_set():
            return
        place = core.config.object_url or core.config.data_dir
        raise ServeError(f"cannot use the data in {place}: {error}") from error
    if alone:  # else the server is ready once all workers are
        readiness.serving = True
        readiness.report()
        announce.ready(core.config.ready_file, addresses)
    beside = [
        asyncio.create_task(watch_store(core.store, readiness)),
        asyncio.create_task(core.count()),
    ]
    try:
        await core.sweep_always()
    finally:
        for task in beside:
            task.cancel()


def _follow(link: Link, lifecycle: Lifecycle, readiness: Readiness) -> None:
    """Report readiness to the watching process, and with the other workers to health checks."""

    def on_change() -> None:
        if lifecycle.ready or lifecycle.directs:
            link.report_ready()
        readiness.serving = link.all_ready
        readiness.report()

    link.on_change = lifecycle.on_change = on_change


def _open_store(config: ServerConfig, seat: Seat | None, *, first: bool) -> Store:
    if config.store == "memory":
        return MemoryStore(config.store_capacity)
    if config.store == "object":
        try:
            return open_object_store(config, seat.partition if seat else WHOLE, first=first)
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error
        except RouteTraceError as error:
            raise ServeError(f"cannot open the store in {config.object_url}: {error}") from error
    try:
        return DiskStore(
            config.data_dir, capacity_bytes=config.store_capacity, ack_mode=config.ack_mode
        )
    except OSError as error:
        raise ServeError(explain(error, config.data_dir)) from error
    except RouteTraceError as error:
        raise ServeError(f"cannot open the store in {config.data_dir}: {error}") from error


def _bind(
    server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None
) -> str:
    host, port = config.host_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # gRPC does not report why it cannot bind an address; a socket does.
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        if credentials:
            port = server.add_secure_port(config.listen, credentials)
        else:
            port = server.add_insecure_port(config.listen)
    except (OSError, RuntimeError) as error:
        raise ServeError(f"cannot listen on {config.listen}: {error}") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_endpoint(core: Core, config: ServerConfig, health: Health) -> Endpoint | None:
    if not config.metrics_listen:
        return None
    # Not ready without reads alone: while the disk is full, stored traces are still served.
    probes = {
        "/livez": on_loop(lambda: True),
        "/readyz": on_loop(lambda: health.serving(TRACE_SERVICE)),
    }
    try:
        endpoint = Endpoint(core.metrics.registry, config.metrics_listen, probes)
    except OSError as error:
        raise ServeError(f"cannot serve metrics on {config.metrics_listen}: {error}") from error
    core.register_scrape()
    log.info("metrics on http://%s/metrics", endpoint.address)
    return endpoint


def _services_of(files: Sequence[FileDescriptor]) -> list[str]:
    return [service.full_name for file in files for service in file.services_by_name.values()]


def _server_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # The default is two minutes, in which connections without a handshake cost memory.
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Two servers on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        # A stream that its client resets at once still costs 13 kB and a turn of the event loop.
        # It counts here until both are free again, so that one connection cannot pile them up.
        # Lower limits refuse calls of honest bursts of 5,000, whose ends gRPC has yet to clean up.
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Of all connections together. The defaults, 1000 and 3000, cancel calls of honest bursts.
        ("grpc.server.max_pending_requests", 6000),
        ("grpc.server.max_pending_requests_hard_limit", 8000),
        # By default, a call that waits for 30 s is cancelled; only its own deadline counts.
        ("grpc.server_max_unrequested_time_in_server", 86_400),
        # Clients ping every 30 s, also between calls, which must not count as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without pings, the stream of a vanished host stays open and its agent is never lost.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # the store survives a crash
        log.info("%s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _keep_freed_memory() -> None:
    # glibc returns the memory of each chunk to the kernel and faults it in again for the next one:
    # up to 1 s of CPU per ingested GB.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # other C libraries have none
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)


def end_process(code: int) -> NoReturn:
    """End this process without a wait for its threads.

    After a clean shutdown, some may still wait for the object store, for calls that have ended.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
