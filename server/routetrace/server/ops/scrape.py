"""Prometheus metrics over HTTP: counters, and gauges that are read at each scrape.

The state belongs to the event loop and the endpoint has its own thread: a scrape asks the loop for
a few counts and formats them here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from routetrace.common.drops import DROP_REASONS, OTHER_REASON
from routetrace.common.errors import Closed
from routetrace.common.version import installed_version
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle, Recovery
from routetrace.server.index.agents import Agents
from routetrace.server.index.agreements import Report
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.ops.census import Census, RunCount
from routetrace.server.retention.memory import Memory
from routetrace.server.retention.room import Room
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Store
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds that a scrape waits for the event loop: two of them with the pause between take less than
#: the timeout of Prometheus, 10 s.
_LOOP_SECONDS = 3.0

_AGENT = ("run", "engine_id", "shard")

#: Label values: TraceState, and MissingReason of ended traces, by name.
_STATES = {
    name.removeprefix("TRACE_STATE_").lower(): number
    for name, number in pb.TraceState.items()
    if number
}
_REASONS = {
    name.removeprefix("MISSING_REASON_").lower(): number
    for name, number in pb.MissingReason.items()
    if number and number not in (pb.MISSING_REASON_NOT_YET, pb.MISSING_REASON_OTHER_VERSION)
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Counts:
    """Counts of the event loop, all of one moment."""

    ready: bool
    connected: int
    reports: Mapping[WriterKey, bytes]
    weight_versions: Mapping[WriterKey, int]
    traces: Mapping[str, int]
    census: Mapping[str, RunCount]
    run_bytes: Mapping[str, int]
    waiting_reads: int
    sending_reads: int
    ingest_bytes: int
    memory_bytes: int
    index_bytes: int
    state_records: int
    agreements: Mapping[str, list[Report]]
    budgets: Mapping[str, tuple[int, Mapping[str, int]]]
    """Limit, and parts by owner, by the name of the budget."""


class Scrape(Collector):
    """Gauges of the server at the moment of a scrape. Construct it where the event loop runs."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        lifecycle: Lifecycle,
        recovery: Recovery,
        access: Access,
        admission: Admission,
        agents: Agents,
        census: Census,
        state: State,
        memory: Memory,
        room: Room,
        store: Store,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._access = access
        self._admission = admission
        self._agents = agents
        self._census = census
        self._server_state = state
        self._memory = memory
        self._room = room
        self._stored = store
        self._loop = asyncio.get_running_loop()
        self._version = installed_version()

    def collect(self) -> Iterator[Metric]:
        """Yield all families; those of the state only if the event loop answers in time."""
        config = self._config
        yield _gauge(
            "build_info",
            "Always 1; labels name version, store and ack mode.",
            ("version", "store", "ack_mode"),
            [((self._version, config.store, config.ack_mode), 1)],
        )
        yield _gauge("memory_limit_bytes", "Memory limit; 0: none.", value=config.memory_limit)
        expiry = self._access.certificate_expiry()
        if expiry is not None:
            yield _gauge(
                "certificate_expiry_timestamp_seconds",
                "Expiry of the server certificate, Unix seconds.",
                value=expiry,
            )
        yield from self._store()
        future = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            counts = future.result(_LOOP_SECONDS)
        except concurrent.futures.TimeoutError:
            future.cancel()
            _log.warning("scrape without state metrics: the server is busy")
        else:
            yield from self._loads(counts)
            # Until recovery ends, the state is incomplete and belongs to another thread.
            if self._recovery.seconds:
                yield from self._state(counts)
                yield from _completeness(counts)
                yield from _agents(counts)
                yield from _agreement(counts)

    async def _look(self) -> _Counts:
        recovered = bool(self._recovery.seconds)
        budgets = [*self._admission.budgets, *(self._room.budgets() if recovered else ())]
        return _Counts(
            ready=self._lifecycle.ready,
            connected=len(self._agents.connected),
            reports=self._agents.reports(),
            weight_versions=self._agents.weight_versions() if recovered else {},
            census=self._census.runs,
            traces=self._server_state.traces.counts() if recovered else {},
            run_bytes=dict(self._server_state.run_bytes) if recovered else {},
            waiting_reads=self._admission.waiting,
            sending_reads=self._admission.sending,
            ingest_bytes=self._admission.ingest_bytes,
            memory_bytes=self._memory.process_bytes(),
            index_bytes=self._memory.index_bytes,
            state_records=self._server_state.number,
            agreements=self._server_state.agreements.newest() if recovered else {},
            budgets={b.name: (b.limit, dict(b.held)) for b in budgets},
        )

    def _store(self) -> Iterator[Metric]:
        try:
            stats = self._stored.stats()
        except Closed:
            return
        for name, text, value in (
            ("failed_commits", "Commits and compactions refused by the disk.",
             stats.failed_commits),
            ("writable", "Whether the disk took the last commit.", stats.writable),
            ("records", "Records with a stored payload.", stats.records),
            ("payload_bytes", "Bytes of stored payloads.", stats.payload_bytes),
            ("used_bytes", "Bytes that count against the capacity.", stats.used_bytes),
            ("capacity_bytes", "Capacity of the store in bytes.", stats.capacity_bytes),
            ("file_bytes", "Disk space of the store.", stats.file_bytes),
            ("damaged_records", "Records that do not match their checksums.",
             stats.damaged_records),
            ("lost_records", "Records acknowledged from memory and never written.",
             stats.lost_records),
        ):  # fmt: skip
            yield _gauge(f"store_{name}", text, value=value)

    def _loads(self, counts: _Counts) -> Iterator[Metric]:
        yield _gauge("ready", "Whether data calls are served.", value=counts.ready)
        yield _gauge("agents", "Connected agents.", value=counts.connected)
        yield _gauge(
            "reads",
            "Reads under way.",
            ("state",),
            [(("waiting",), counts.waiting_reads), (("sending",), counts.sending_reads)],
        )
        yield _gauge(
            "ingest_waiting_bytes",
            "Bytes of chunks not committed yet.",
            value=counts.ingest_bytes,
        )
        yield _gauge("memory_bytes", "Resident memory.", value=counts.memory_bytes)
        yield _gauge(
            "index_bytes",
            "Memory of traces and chunks at the last sweep with half of memory_limit in use.",
            value=counts.index_bytes,
        )
        budgets = counts.budgets.items()
        yield _gauge(
            "budget_limit",
            "Limits that owners share.",
            ("limit",),
            (((name,), limit) for name, (limit, _) in budgets),
        )
        yield _gauge(
            "budget_held",
            "Parts of a limit by owner: a token, or a run without tokens.",
            ("limit", "owner"),
            (((name, owner), n) for name, (_, held) in budgets for owner, n in held.items()),
        )

    def _state(self, counts: _Counts) -> Iterator[Metric]:
        config = self._config
        yield _gauge("recovery_seconds", "Duration of the state's recovery at the last start.",
                     value=self._recovery.seconds)  # fmt: skip
        yield _gauge("recovered_records", "Records replayed at the last start.",
                     value=self._recovery.records)  # fmt: skip
        yield _gauge("state_records", "Number of the last record.", value=counts.state_records)
        for name, text, of_runs in (
            ("traces", "Stored traces.", counts.traces),
            ("run_bytes", "Bytes of stored chunks.", counts.run_bytes),
        ):
            yield _gauge(name, text, ("run",), (((run,), n) for run, n in of_runs.items()))
        runs = {*counts.traces, *counts.run_bytes, *config.run_quotas}
        quotas = (((run,), config.quota_of(run)) for run in sorted(runs))
        yield _gauge(
            "run_quota_bytes",
            "Quota in bytes, for runs with one.",
            ("run",),
            (sample for sample in quotas if sample[1]),
        )


def _completeness(counts: _Counts) -> Iterator[Metric]:
    """Yield the gauges of the last census."""
    runs = counts.census.items()
    yield _gauge(
        "counted_traces",
        "Traces at the last sweep.",
        ("run", "state"),
        (((run, name), n.traces[state]) for run, n in runs for name, state in _STATES.items()),
    )
    yield _gauge(
        "counted_cells",
        "Cells of the rows of ended traces at the last sweep.",
        ("run",),
        (((run,), n.cells) for run, n in runs),
    )
    yield _gauge(
        "counted_missing_cells",
        "Missing cells of the rows of ended traces at the last sweep.",
        ("run", "reason"),
        (((run, name), n.missing[reason]) for run, n in runs for name, reason in _REASONS.items()),
    )


def _agents(counts: _Counts) -> Iterator[Metric]:
    """Yield the gauges of each agent's last rows and heartbeat."""
    yield _gauge(
        "agent_weight_version",
        "Weight version of the last rows of a connected agent.",
        _AGENT,
        ((tuple(key), version) for key, version in counts.weight_versions.items()),
    )
    reports = [(key, pb.Heartbeat.FromString(data)) for key, data in counts.reports.items()]
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
        "Rows dropped by an agent.",
        (*_AGENT, "reason"),
        (
            ((*key, reason), report.dropped_rows.get(reason, 0))
            for key, report in reports
            for reason in (*DROP_REASONS, OTHER_REASON)
        ),
    )
    yield _gauge(
        "agent_queued_bytes",
        "Bytes queued in an agent's memory.",
        _AGENT,
        ((tuple(key), report.queued_bytes) for key, report in reports),
    )
    yield _gauge(
        "agent_spilled_bytes",
        "Bytes queued on an agent's disk.",
        _AGENT,
        ((tuple(key), report.spilled_bytes) for key, report in reports),
    )
    yield _gauge(
        "agent_lag_seconds",
        "Age of the oldest chunk of an agent that is not acknowledged; 0 if all are.",
        _AGENT,
        ((tuple(key), report.lag_ms / 1000) for key, report in reports),
    )


def _agreement(counts: _Counts) -> Iterator[Metric]:
    """Yield the gauges of the training step of each run that was reported last."""
    layers = {
        run: [
            layer.choices
            for report in reports
            for layer in pb.AgreementReport.FromString(report.message).by_layer
        ]
        for run, reports in counts.agreements.items()
    }
    for name, text, numbers in (
        ("agreement_step", "Training step that was reported last.",
         {run: reports[0].step for run, reports in counts.agreements.items()}),
        ("agreement_cells", "Cells that trainers compared in it.",
         {run: sum(choices.cells for choices in of) for run, of in layers.items()}),
        ("agreement_differing_cells", "Cells where their routers chose other experts.",
         {run: sum(choices.differing for choices in of) for run, of in layers.items()}),
    ):  # fmt: skip
        yield _gauge(name, text, ("run",), (((run,), n) for run, n in numbers.items()))


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
