"""Progress and reports of a load."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from routetrace.cli.output import note, plain, size
from routetrace.simulation.plan import Load
from routetrace.simulation.run import Tally
from routetrace.simulation.totals import Latencies
from routetrace.simulation.verdict import failures

_LINE_SECONDS = 5.0


class Progress:
    """Progress on stderr: a live line on terminals, else one every few seconds."""

    def __init__(self) -> None:
        self._live: Live | None = None
        if sys.stderr.isatty():
            console = Console(file=sys.stderr)
            self._live = Live(console=console, transient=True, auto_refresh=False)
        self._begun = self._printed = time.monotonic()
        self._last: tuple[float, dict[str, float]] = self._begun, {}
        self._rates: dict[str, float] = {}

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, phase: str, tally: Tally) -> None:
        """Show the phase and the tally."""
        now = time.monotonic()
        self._measure(now, tally)
        line = f"{now - self._begun:5.0f} s  {phase}: {self._line(tally)}"
        if self._live is not None:
            self._live.update(Text(plain(line)), refresh=True)
        elif now - self._printed >= _LINE_SECONDS:
            self._printed = now
            note(line)

    def _measure(self, now: float, tally: Tally) -> None:
        """Update rates about once a second."""
        values = {
            "rows": float(tally.stats.get("acknowledged_rows", 0)),
            "bytes": float(tally.stats.get("sent_bytes", 0)),
            "read": float(tally.found["rows"]),
        }
        then, before = self._last
        if now - then >= 1:
            self._rates = {
                name: (value - before.get(name, 0)) / (now - then) for name, value in values.items()
            }
            self._last = now, values

    def _line(self, tally: Tally) -> str:
        rates, stats, found = self._rates, tally.stats, tally.found
        dropped = " ".join(f"{k} {v:,}" for k, v in stats.get("dropped_rows", {}).items())
        parts = [
            f"{rates.get('rows', 0):,.0f} rows/s",
            f"{rates.get('bytes', 0) / 1e6:.1f} MB/s",
            f"{stats.get('in_flight_rows', 0):,} in flight ({tally.oldest:.1f} s)",
            f"dropped {dropped or 0}",
            f"read {rates.get('read', 0):,.0f} rows/s",
            f"get p50 {seconds(tally.get.at(0.5))} p99 {seconds(tally.get.at(0.99))}",
            f"unread {tally.unread:,}",
            f"wrong {found['wrong']:,}",
            f"failed {found['failed']:,}",
        ]
        return ", ".join(parts)


def report_json(load: Load, tally: Tally) -> dict[str, Any]:
    """Return the report of `--json`, in seconds and bytes."""
    stats, counts, found = tally.stats, tally.counts, tally.found
    rows = max(1, stats.get("acknowledged_rows", 0))
    problems = list(failures(tally))
    return {
        "version": 1,
        "ok": not problems,
        "failures": problems,
        "errors": tally.errors,
        "interrupted": tally.interrupted,
        "load": load.facts(),
        "seconds": tally.seconds,
        "engines": counts,
        "agents": stats,
        "reads": {
            **found,
            "reads": tally.reads,
            "followed": tally.followed,
            "skipped": tally.skipped,
            "seconds": tally.reading_seconds,
        },
        "rates": {
            "rows_per_second": stats.get("acknowledged_rows", 0) / max(tally.seconds, 1e-9),
            "bytes_per_second": stats.get("sent_bytes", 0) / max(tally.seconds, 1e-9),
            "read_rows_per_second": found["rows"] / max(tally.reading_seconds, 1e-9),
        },
        "bytes_per_row": {
            "raw": load.shape_of().layout.row_bytes,
            "sent": stats.get("sent_bytes", 0) / rows,
        },
        "latency": {
            "acknowledged": tally.ack.facts(),
            "get": tally.get.facts(),
            "ended_to_readable": tally.ready.facts(),
        },
        "cpu_seconds": tally.cpu,
        "cpu_us_per_row": {
            "engine_thread": tally.cpu.get("engine", 0) / rows * 1e6,
            "agent_background": tally.cpu.get("worker", 0) / rows * 1e6,
            "reader": tally.cpu.get("read", 0) / max(1, found["rows"]) * 1e6,
        },
        "agent_background_bytes": tally.worker_bytes,
        "server": {
            name: None if info is None else info.to_dict()
            for name, info in (("before", tally.before), ("after", tally.after))
        },
        "deleted_traces": tally.deleted,
    }


def report_rows(load: Load, tally: Tally) -> Iterator[tuple[str, str]]:
    """Yield names and values of the printed report."""
    value = report_json(load, tally)
    stats, counts, found = tally.stats, tally.counts, tally.found
    model = load.shape_of()
    layers = len(model.layout.layer_ids)
    shape = f"{layers} layers, top-{model.layout.top_k} of {model.layout.num_experts}"
    yield "model", f"{model.name}: {shape}" if load.model else shape
    yield "ran", f"{tally.seconds:.1f} s, {load.agents} engines, seed {load.seed}"
    yield "requests", _requests(counts)
    yield "tokens", _sum(counts, ("tokens", "sampled"), ("cached_tokens", "from the prefix cache"))
    yield "rows offered", f"{stats.get('offered_rows', 0):,}"
    rate = f"{value['rates']['rows_per_second']:,.0f} rows/s"
    rate += f", {value['rates']['bytes_per_second'] / 1e6:.1f} MB/s"
    yield "  acknowledged", f"{stats.get('acknowledged_rows', 0):,} ({rate})"
    dropped = stats.get("dropped_rows", {})
    yield "  dropped", ", ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "0"
    sent = value["bytes_per_row"]
    yield "bytes a row", f"{sent['sent']:.1f} sent, {sent['raw']} raw"
    yield "offered to acknowledged", _latency(tally.ack)
    if load.readers or load.followers:
        part = "whole" if load.reads == "whole" else "a rank's share"
        passed = f", {tally.skipped:,} left unread" if tally.skipped else ""
        followed = f", {tally.followed:,} followed" if tally.followed else ""
        yield "sessions read", f"{tally.reads:,} {part}{followed}{passed}"
        yield "  rows right", f"{found['rows']:,}"
        if found["later"]:
            yield "  in place of dropped ones", f"{found['later']:,} of a later pass"
        yield "  wrong, failed", f"{found['wrong']:,}, {found['failed']:,}"
        missing = ", ".join(f"{n:,} {reason}" for reason, n in found.get("missing", {}).items())
        yield "  cells missing", missing or "0"
        yield "get", _latency(tally.get)
        yield "session's end to readable", _latency(tally.ready)
    cpu = value["cpu_us_per_row"]
    text = f"{cpu['engine_thread']:.2f} engine's thread, {cpu['agent_background']:.2f} background"
    if tally.reads:
        text += f", {cpu['reader']:.2f} reader"
    yield "CPU, us a row", text
    if tally.worker_bytes:
        yield "agent's background", f"{size(tally.worker_bytes)} at most"
    if tally.after is not None:
        yield "server", _server(tally)


def seconds(value: float | None) -> str:
    """Format a duration."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _latency(latencies: Latencies) -> str:
    facts = latencies.facts()
    return ", ".join(f"{name} {seconds(facts[name])}" for name in ("p50", "p90", "p99"))


def _requests(counts: dict[str, int]) -> str:
    names = (
        ("requests", "in"),
        ("sessions", "sessions"),
        ("preemptions", "preemptions"),
        ("rejected_drafts", "rejected drafts"),
        ("weight_updates", "weight updates"),
        ("aborted", "aborted"),
    )
    first, second, *others = (f"{counts.get(key, 0):,} {text}" for key, text in names)
    rest = [text for text in others if not text.startswith("0 ")]
    return ", ".join([f"{first} {second}", *rest])


def _sum(counts: dict[str, int], *names: tuple[str, str]) -> str:
    return ", ".join(f"{counts.get(key, 0):,} {text}" for key, text in names)


def _server(tally: Tally) -> str:
    info = tally.after
    assert info is not None
    held = f"{info.num_traces:,} traces of {size(info.run_bytes)}"
    left = "left to their lease" if not tally.deleted else f"{tally.deleted:,} deleted now"
    return f"{info.version}, store {info.store}, acks {info.ack_mode}; held {held}, {left}"
