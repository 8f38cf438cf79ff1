"""Prometheus metrics over HTTP: the counters as they stand, and what is looked up when it is asked.

The state belongs to the event loop, and the endpoint has a thread of its own: a scrape asks the
loop for a few counts, and makes its text of them here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from routetrace.server.config import split_address
from routetrace.server.core import Core
from routetrace.server.trace_index import WriterKey
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Closed

#: Seconds that a scrape waits for the loop: less than Prometheus waits for the scrape.
_LOOP_SECONDS = 5.0
#: Seconds that a caller of the endpoint may take to say what it wants, or to take its answer.
_HTTP_SECONDS = 10.0

_AGENT = ("run", "engine_id", "shard")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Counts:
    """What the loop is asked for, all of one moment."""

    ready: bool
    connected: int
    reports: Mapping[WriterKey, pb.Heartbeat]
    traces: Mapping[str, int]
    run_bytes: Mapping[str, int]
    waiting_reads: int
    sending_reads: int
    ingest_bytes: int
    memory_bytes: int
    state_records: int


class Scrape(Collector):
    """What is known of a core at the moment of a scrape. To be made where its event loop runs."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """All families; without those of the state, where the loop does not answer in time."""
        config = self._core.config
        yield _gauge(
            "build_info",
            "1; what runs is in the labels.",
            ("version", "store", "ack_mode"),
            [((version("routetrace"), config.store, config.ack_mode), 1)],
        )
        yield _gauge("memory_limit_bytes", "Most memory; 0: no limit.", value=config.memory_limit)
        expiry = self._core.access.certificate_expiry()
        if expiry is not None:
            yield _gauge(
                "certificate_expiry_timestamp_seconds",
                "When the server's certificate ends, Unix seconds.",
                value=expiry,
            )
        yield from self._store()
        future = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            counts = future.result(_LOOP_SECONDS)
        except concurrent.futures.TimeoutError:
            future.cancel()
            _log.warning("a scrape goes without the state: the server is busy")
        else:
            yield from self._loads(counts)
            # Before that, the state is half of what it will be, and another thread's.
            if self._core.recovery_seconds:
                yield from self._state(counts)
                yield from _agents(counts)

    async def _look(self) -> _Counts:
        core = self._core
        recovered = bool(core.recovery_seconds)
        return _Counts(
            ready=core.ready,
            connected=len(core.agents.connected),
            reports=dict(core.agents.reports()),
            traces=dict(core.state.traces.run_counts) if recovered else {},
            run_bytes=dict(core.state.run_bytes) if recovered else {},
            waiting_reads=core.admission.waiting,
            sending_reads=core.admission.sending,
            ingest_bytes=core.admission.ingest_bytes,
            memory_bytes=core.retention.memory_bytes(),
            state_records=core.state.number,
        )

    def _store(self) -> Iterator[Metric]:
        try:
            stats = self._core.store.stats()
        except Closed:
            return
        for name, text, value in (
            ("failed_commits", "Commits and compactions that the disk refused.",
             stats.failed_commits),
            ("records", "Records whose payload is held.", stats.records),
            ("payload_bytes", "Bytes of these payloads.", stats.payload_bytes),
            ("used_bytes", "Bytes that count against the capacity.", stats.used_bytes),
            ("capacity_bytes", "Most bytes that are kept.", stats.capacity_bytes),
            ("file_bytes", "Disk space that the store takes.", stats.file_bytes),
            ("damaged_records", "Records that do not match their checksums.",
             stats.damaged_records),
            ("lost_records", "Records acknowledged from memory, and never written.",
             stats.lost_records),
        ):  # fmt: skip
            yield _gauge(f"store_{name}", text, value=value)

    def _loads(self, counts: _Counts) -> Iterator[Metric]:
        yield _gauge("ready", "Whether data calls are served.", value=counts.ready)
        yield _gauge("agents", "Agents that are connected.", value=counts.connected)
        yield _gauge(
            "reads",
            "Reads under way.",
            ("state",),
            [(("waiting",), counts.waiting_reads), (("sending",), counts.sending_reads)],
        )
        yield _gauge(
            "ingest_waiting_bytes",
            "Bytes of chunks that wait for their commit.",
            value=counts.ingest_bytes,
        )
        yield _gauge("memory_bytes", "Resident memory.", value=counts.memory_bytes)

    def _state(self, counts: _Counts) -> Iterator[Metric]:
        config = self._core.config
        yield _gauge("recovery_seconds", "What the start took to rebuild the state.",
                     value=self._core.recovery_seconds)  # fmt: skip
        yield _gauge("recovered_records", "Records that it replayed.",
                     value=self._core.recovered_records)  # fmt: skip
        yield _gauge("state_records", "Number of the last record.", value=counts.state_records)
        for name, text, of_runs in (
            ("traces", "Traces that are held.", counts.traces),
            ("run_bytes", "Bytes of the chunks that are held.", counts.run_bytes),
        ):
            yield _gauge(name, text, ("run",), (((run,), n) for run, n in of_runs.items()))
        runs = {*counts.traces, *counts.run_bytes, *config.run_quotas}
        quotas = (((run,), config.quota_of(run)) for run in sorted(runs))
        yield _gauge(
            "run_quota_bytes",
            "Most of them, for runs that have a quota.",
            ("run",),
            (sample for sample in quotas if sample[1]),
        )


def _agents(counts: _Counts) -> Iterator[Metric]:
    """What each agent said last."""
    reports = counts.reports.items()
    yield _gauge(
        "agent_rows",
        "Rows of an agent since it started.",
        (*_AGENT, "state"),
        (
            ((*key, state), number)
            for key, report in reports
            for state, number in (
                ("offered", report.offered_rows),
                ("acknowledged", report.acknowledged_rows),
                ("in_flight", report.in_flight_rows),
            )
        ),
    )
    yield _gauge(
        "agent_dropped_rows",
        "Rows that an agent will not send.",
        (*_AGENT, "reason"),
        (
            ((*key, reason), number)
            for key, report in reports
            for reason, number in report.dropped_rows.items()
        ),
    )
    yield _gauge(
        "agent_queued_bytes",
        "Bytes that wait in an agent's memory.",
        _AGENT,
        ((tuple(key), report.queued_bytes) for key, report in reports),
    )
    yield _gauge(
        "agent_spilled_bytes",
        "Bytes that wait on an agent's disk.",
        _AGENT,
        ((tuple(key), report.spilled_bytes) for key, report in reports),
    )


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...] = (),
    samples: Iterable[tuple[tuple[str, ...], float]] = (),
    *,
    value: float | None = None,
) -> Metric:
    family = GaugeMetricFamily(f"routetrace_{name}", text, value=value, labels=labels or None)
    for values, number in samples:
        family.add_metric(values, number)
    return family


# ---------------------------------------------------------------------------- HTTP


class Endpoint:
    """Answers scrapes of a core, on threads of its own.

    Attributes:
        address: "host:port" that it listens on.

    Raises:
        OSError: if it can not have the address.
    """

    def __init__(self, core: Core, listen: str) -> None:
        # They are a series more for each one, and say little.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        host, port = split_address(listen)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._server = _HttpServer(found[0])
        registry = core.metrics.registry
        registry.register(Scrape(core))
        prometheus_client.ProcessCollector(registry=registry)
        self._server.set_app(prometheus_client.make_wsgi_app(registry))
        port = self._server.server_port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Answers no more; blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...]) -> None:
        self.address_family = address[0]
        super().__init__(address[4][:2], _Handler)

    def server_bind(self) -> None:
        # The inherited one asks a name server for the host's name, which can take its time.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _HTTP_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes are not worth a line each."""
