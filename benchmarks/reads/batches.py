"""Reads of many traces in one stream, beside one call for each: CPU of both sides."""

from __future__ import annotations

import time
from collections.abc import Callable

from measure import Table, cpu_seconds, ratios, rounds
from reads.load import Array, fill
from routetrace.client import RouteClient
from routetrace.server.testing import ServerProcess


def batches(table: Table, client: RouteClient, server: ServerProcess, ids: Array) -> None:
    """Many short traces, then fewer long ones."""
    for tokens, most in ((256, 256), (2_048, 64)):
        count = most // 8 if table.quick else most
        name = f"batch-{tokens}"
        names = fill(server.target, ids, name, count, tokens + 1, lanes=min(64, count))
        used: dict[str, list[tuple[float, float]]] = {"together": [], "alone": []}

        def cell(
            way: str,
            read: Callable[[], int],
            names: list[str] = names,
            used: dict[str, list[tuple[float, float]]] = used,
        ) -> Callable[[], float]:
            def run() -> float:
                before, own = cpu_seconds(server.pid), time.process_time()
                start = time.perf_counter()
                assert read() == len(names)
                took = time.perf_counter() - start
                used[way].append((cpu_seconds(server.pid) - before, time.process_time() - own))
                return took

            return run

        def together(names: list[str] = names) -> int:
            return sum(1 for _ in client.get_many(names))

        def alone(names: list[str] = names) -> int:
            return sum(client.get(name) is not None for name in names)

        took = rounds(
            {"together": cell("together", together), "alone": cell("alone", alone)},
            2 if table.quick else 12,
        )
        what = f"get_many of traces of {tokens:,} tokens:"
        for side, part in enumerate(("server CPU", "client CPU")):
            figures = {way: [both[side] for both in used[way][1:]] for way in used}
            ratio = ratios(figures["together"], figures["alone"])
            table.add(f"{what} {part}", ratio, "x", "one get for each")
            each = [1e3 * value / count for value in figures["together"]]
            table.add(f"{what} {part} each", each, "ms", "this machine")
        table.add(f"{what} time", ratios(took["together"], took["alone"]), "x", "one get for each")
