"""What is wrong with how a load went; nothing, if all is well."""

from __future__ import annotations

from collections.abc import Iterator

from routetrace.cli.load.run import Tally


def failures(tally: Tally) -> Iterator[str]:
    """A line for each promise that was not kept."""
    stats, found = tally.stats, tally.found
    dropped: dict[str, int] = stats.get("dropped_rows", {})
    if found["wrong"]:
        yield f"{found['wrong']:,} rows or facts were wrong: {_first(tally)}"
    if found["failed"]:
        yield f"{found['failed']:,} reads failed: {_first(tally)}"
    # Rejected drafts are dropped by the way; nobody misses them.
    whole = not set(dropped) - {"rewound"}
    if found["later"] and whole:
        yield f"{found['later']:,} rows are those of a later pass, though no agent dropped rows"
    missing = found.get("missing", {})
    if missing and whole:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in missing.items())
        yield f"cells are missing, though no agent dropped rows: {reasons}"
    offered, acknowledged = stats.get("offered_rows", 0), stats.get("acknowledged_rows", 0)
    left = offered - acknowledged - sum(dropped.values())
    if left or offered != tally.counts.get("rows", 0):
        yield (
            f"conservation: {tally.counts.get('rows', 0):,} rows were computed, {offered:,} "
            f"offered, {acknowledged:,} acknowledged, {sum(dropped.values()):,} dropped"
        )
    if unsent := dropped.get("unsent", 0):
        yield f"{unsent:,} rows were not acknowledged in time"
    if untold := stats.get("untold_requests", 0):
        yield f"the server never heard of {untold:,} requests"


def _first(tally: Tally) -> str:
    return tally.errors[0] if tally.errors else "no details"
