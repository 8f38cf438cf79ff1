"""Counters and histograms of the server; docs/operations.md has a row for each metric.

Names end in the unit; labels are few. Gauges that can be read at a scrape are in `ops/scrape.py`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

#: Buckets for disk and event loop operations, in seconds.
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
#: Buckets for the age of evicted traces, in seconds: a minute to a day.
_AGES = (60, 600, 3600, 21600, 86400)
#: Buckets for calls, which may wait, in seconds.
_CALLS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"routetrace_{name}", help_text, labels, registry=registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...] = _QUICK) -> Histogram:
            return Histogram(f"routetrace_{name}", help_text, registry=registry, buckets=buckets)

        # Ingest.
        self.chunks = counter("ingest_chunks_total", "Chunks stored and acknowledged.")
        self.rows = counter("ingest_rows_total", "Rows in stored chunks.")
        self.ingest_bytes = counter("ingest_bytes_total", "Header and payload bytes stored.")
        self.duplicates = counter(
            "ingest_duplicates_total", "Resent chunks that were stored already."
        )
        self.conflicts = counter(
            "ingest_conflicts_total",
            "Chunks refused: their sequence is stored with other content.",
        )
        self.rejected = counter("ingest_rejected_total", "Chunks refused.", "kind")
        self.commit = histogram("commit_seconds", "Time from arrival of a record to its commit.")
        self.agents_closed = counter("agents_closed_total", "Agents that were closed.")
        self.agents_lost = counter("agents_lost_total", "Agents lost after agent_timeout_seconds.")
        self.restarted = counter(
            "agents_restarted_total", "Agents whose background died and was started again.", "run"
        )
        self.fenced = counter(
            "agents_fenced_total", "Agents refused: a later one has their engine_id.", "run"
        )

        # Reads.
        self.read_bytes = counter("read_bytes_total", "Bytes of frames sent to readers.")
        self.read_corrupt = counter(
            "read_corrupt_total", "Stored frames that are missing or damaged."
        )

        self.stalled_reads = counter(
            "stalled_reads_total", "Reads ended because their reader did not take a message."
        )

        # Calls refused before they are handled.
        self.overloaded = counter("overloaded_total", "Calls refused at a limit.", "what")
        self.denied = counter("denied_total", "Calls refused for their credentials.", "reason")

        # Retention.
        self.forgotten = counter("forgotten_traces_total", "Traces deleted.", "reason")
        self.evicted_age = histogram(
            "evicted_age_seconds", "Time from the last change of an evicted trace.", _AGES
        )
        self.dropped_chunks = counter("dropped_chunks_total", "Chunks whose space was reclaimed.")
        self.sweep = histogram("sweep_seconds", "Rounds of expiry and compaction.")

        # The conventional metrics of gRPC servers.
        call = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter(
            "grpc_server_started_total", "Calls started.", call, registry=registry
        )
        self.handled = Counter(
            "grpc_server_handled_total",
            "Calls ended, by status.",
            (*call, "grpc_code"),
            registry=registry,
        )
        self.received = Counter(
            "grpc_server_msg_received_total", "Messages received.", call, registry=registry
        )
        self.sent = Counter("grpc_server_msg_sent_total", "Messages sent.", call, registry=registry)
        self.handling = Histogram(
            "grpc_server_handling_seconds",
            "Duration of calls.",
            call,
            registry=registry,
            buckets=_CALLS,
        )
