"""Failures of a load."""

from __future__ import annotations

from collections.abc import Iterator

from routetrace.simulation.run import Tally


def failures(tally: Tally) -> Iterator[str]:
    """Yield one line per broken promise; none if the load succeeded."""
    stats, found = tally.stats, tally.found
    dropped: dict[str, int] = stats.get("dropped_rows", {})
    if found["wrong"]:
        yield f"{found['wrong']:,} rows or facts were wrong: {_first(tally)}"
    if found["failed"]:
        yield f"{found['failed']:,} reads failed: {_first(tally)}"
    # Dropped rejected drafts cause no missing rows.
    whole = not set(dropped) - {"rewound"}
    if found["later"] and whole:
        yield f"{found['later']:,} rows come from a later pass, although no agent dropped rows"
    missing = found.get("missing", {})
    if missing and whole:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in missing.items())
        yield f"cells are missing, although no agent dropped rows: {reasons}"
    offered, acknowledged = stats.get("offered_rows", 0), stats.get("acknowledged_rows", 0)
    left = offered - acknowledged - sum(dropped.values())
    if left or offered != tally.counts.get("rows", 0):
        yield (
            f"conservation: {tally.counts.get('rows', 0):,} rows computed, {offered:,} "
            f"offered, {acknowledged:,} acknowledged, {sum(dropped.values()):,} dropped"
        )
    if unsent := dropped.get("unsent", 0):
        yield f"{unsent:,} rows were not acknowledged in time"
    if unreported := stats.get("unreported_requests", 0):
        yield f"{unreported:,} requests were not reported to the server"


def _first(tally: Tally) -> str:
    return tally.errors[0] if tally.errors else "no details"
