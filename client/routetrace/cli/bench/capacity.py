"""Resources of a deployment from model shape, token rate and measured costs.

All constants are here: docs/capacity.md shows the output of `routetrace bench capacity`, and a test
compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from routetrace.cli.output import size
from routetrace.simulation.models import Model

_MB, _MIB = 1e6, 1 << 20


@dataclass(frozen=True)
class Costs:
    """Cost of a token: bytes, and microseconds of one core of the measured machine.

    From benchmarks/capacity_costs.py: batches of 256 that decode 50 tokens/s each.
    """

    sent: float
    """Bytes on the wire and on disk: frames, headers, digests, block ids."""
    engine: float
    """Engine thread, in calls of the capture agent."""
    worker: float
    """Background of the agent."""
    ingest: float
    """Server, until acknowledgement."""
    read: float
    """Server, per read."""
    reader: float
    """Trainer, per read."""

    def scaled(self, factor: float) -> Costs:
        """Return the costs of rows `factor` times as long."""
        return Costs(*(getattr(self, name) * factor for name in self.__annotations__))


#: By model.
MEASURED: Mapping[str, Costs] = {
    "qwen3-30b-a3b": Costs(336, 2.8, 15.4, 7.5, 9.7, 11.7),
    "deepseek-v3": Costs(470, 2.4, 15.5, 6.8, 7.1, 11.0),
    "kimi-k2": Costs(523, 2.1, 14.9, 6.3, 7.4, 12.7),
}
#: Maximum load of a server core; latencies grow above it.
BUSY = 0.7
#: Memory of an empty server process.
SERVER_BYTES = 100e6
#: Server memory per trace with a few labels, per token (digests), per frame.
TRACE_BYTES, TOKEN_BYTES, FRAME_BYTES = 2_000, 0.31, 50
#: Rows per frame, as in the costs.
FRAME_ROWS = 50
#: Server memory per slot of a KV cache, with short frames as in most engines.
SLOT_BYTES = 19
#: Server defaults: bytes of uncommitted chunks; concurrent streaming reads of 2 MiB each.
INGEST_BYTES, SENDING_READS, READ_BYTES = 256 * _MIB, 256, 2 * _MIB
#: Share of the store's capacity at which eviction starts.
FULL = 0.9
#: Memory of an agent: Python and gRPC, ring shared with the engine, default limit of its queue.
WORKER_BYTES, RING_BYTES, QUEUE_BYTES = 60 * _MIB, 64 * _MIB, 256 * _MIB


def costs_of(model: Model) -> Costs:
    """Return measured costs, or those of Qwen3-30B-A3B scaled by row length."""
    if model.name in MEASURED:
        return MEASURED[model.name]
    known = MEASURED["qwen3-30b-a3b"]
    return known.scaled(model.layout.row_bytes / 384)


@dataclass(frozen=True)
class Job:
    """Load of a deployment."""

    model: Model
    tokens_per_second: float
    """Rows computed on all nodes, for prompts and answers."""
    nodes: int = 1
    engines: int = 8
    """KV caches per node."""
    batch: int = 256
    """Concurrent requests of an engine."""
    kv_tokens: int = 1_000_000
    """Slots of the KV cache of an engine."""
    trace_tokens: int = 2_000
    """Tokens of an average trace."""
    hours: float = 1.0
    """Lease of a trace."""
    reads: float = 1.0
    """Reads per row, summed over all ranks: 1 where each rank reads its own share."""
    core: float = 1.0
    """Speed of cores relative to the measured ones."""


@dataclass(frozen=True)
class Need:
    """Resources of a job."""

    raw: int
    """Bytes of a row in memory."""
    sent: float
    """Bytes of a row on the wire and on disk."""
    servers: int
    server_tokens_per_second: float
    """Capacity of one server."""
    server_cores: float
    """Total of all servers."""
    server_memory: float
    """Indexes and slots of one server."""
    server_buffers: float
    """Maximum additional buffers of one server."""
    server_disk: float
    """Disk of one server."""
    engine_core: float
    """Share of a core per engine thread."""
    worker_cores: float
    """Cores per agent background."""
    worker_memory: float
    """Memory per agent background in normal operation."""
    worker_most: float
    """Memory per agent background while the server is unreachable."""
    trainer_cores: float
    """Total of all ranks."""


def need_of(job: Job) -> Need:
    """Apply the formulas of docs/capacity.md."""
    costs, rate = costs_of(job.model), job.tokens_per_second
    row = job.model.layout.row_bytes
    server_us = (costs.ingest + job.reads * costs.read) / job.core
    one = BUSY * 1e6 / server_us
    servers = max(1, math.ceil(rate / one))
    seconds = 3600 * job.hours
    traces = rate * seconds / job.trace_tokens / servers
    frames = max(1.0, job.trace_tokens / FRAME_ROWS)
    trace = TRACE_BYTES + job.trace_tokens * TOKEN_BYTES + frames * FRAME_BYTES
    engines = job.nodes * job.engines
    slots = SLOT_BYTES * job.kv_tokens * math.ceil(engines / servers)
    lingering = job.batch * FRAME_ROWS * row / 2
    worker = WORKER_BYTES + RING_BYTES + lingering
    return Need(
        raw=row,
        sent=costs.sent,
        servers=servers,
        server_tokens_per_second=one,
        server_cores=rate * server_us / 1e6,
        server_memory=SERVER_BYTES + slots + traces * trace,
        server_buffers=INGEST_BYTES + SENDING_READS * READ_BYTES,
        server_disk=rate * seconds * costs.sent / servers / FULL,
        engine_core=rate / engines * costs.engine / job.core / 1e6,
        worker_cores=rate / engines * costs.worker / job.core / 1e6,
        worker_memory=worker,
        worker_most=WORKER_BYTES + RING_BYTES + QUEUE_BYTES,
        trainer_cores=rate * job.reads * costs.reader / job.core / 1e6,
    )


def need_json(job: Job) -> dict[str, Any]:
    """Return the job and its needs for `--json`, in bytes, cores and seconds."""
    need, rate = need_of(job), job.tokens_per_second
    sent = rate * need.sent
    return {
        "model": job.model.name,
        "tokens_per_second": rate,
        "nodes": job.nodes,
        "engines_per_node": job.engines,
        "row_bytes": need.raw,
        "sent_bytes_per_row": need.sent,
        "to_servers_bytes_per_second": sent,
        "to_trainers_bytes_per_second": sent * job.reads,
        "cores_per_engine_thread": need.engine_core,
        "cores_per_agent": need.worker_cores,
        "memory_bytes_per_agent": need.worker_memory,
        "max_memory_bytes_per_agent": need.worker_most,
        "servers": need.servers,
        "tokens_per_second_per_server": need.server_tokens_per_second,
        "server_cores": need.server_cores,
        "memory_bytes_per_server": need.server_memory,
        "buffer_bytes_per_server": need.server_buffers,
        "disk_bytes_per_server": need.server_disk,
        "trainer_cores": need.trainer_cores,
    }


def need_rows(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield table rows: name, per unit, total."""
    need, rate = need_of(job), job.tokens_per_second
    engines = job.nodes * job.engines
    sent = rate * need.sent
    yield "tokens/s", f"{rate / job.nodes:,.0f} a node", f"{rate:,.0f}"
    yield "bytes a token", f"{need.raw} in memory", f"{need.sent:.0f} sent and stored"
    yield "to servers", f"{_wire(sent / job.nodes)} a node", _wire(sent)
    yield "to trainers", "", _wire(sent * job.reads)
    yield (
        "engine's thread",
        f"{need.engine_core:.1%} of a core an engine",
        _cores(need.engine_core * engines),
    )
    yield (
        "agents' background",
        f"{need.worker_cores:.1%} of a core an engine",
        _cores(need.worker_cores * engines),
    )
    memory = f"{size(round(need.worker_memory))} an engine"
    yield "agents' memory", memory, f"{size(round(need.worker_most))} if the server is away"
    yield (
        "servers' CPU",
        f"{need.server_tokens_per_second:,.0f} tokens/s each",
        _cores(need.server_cores),
    )
    yield "servers", f"one for {_engines(engines, need.servers)}", f"{need.servers:,}"
    memory = f"{size(round(need.server_memory))} each"
    yield "servers' memory", memory, f"and up to {size(round(need.server_buffers))} of buffers"
    disk = need.server_disk
    yield "servers' disk", f"{size(round(disk))} each", size(round(disk * need.servers))
    yield "trainers' CPU", "", _cores(need.trainer_cores)


def _wire(rate: float) -> str:
    return f"{rate / _MB:,.1f} MB/s ({rate * 8 / 1e9:.2g} Gbit/s)"


def _cores(cores: float) -> str:
    return f"{cores:.2f} cores" if cores < 10 else f"{cores:,.0f} cores"


def _engines(engines: int, servers: int) -> str:
    if engines % servers and engines > servers:
        return f"some {engines / servers:.1f} engines"
    return f"{max(1, engines // servers)} engine{'s' * (engines // servers > 1)}"
