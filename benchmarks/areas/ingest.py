"""Ingest: one server, one stream, chunks as agents send them, against plainer ways to keep bytes.

The driver replays chunks that were built beforehand, with as many under way as an agent has, to a
server in a process and on a core of its own. Each rival is treated the same: same bytes, same
messages under way, same core, in turns.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ingest.load import WINDOW, Load, load, send_all
from ingest.rivals import FlightPut, Rival, send_tcp
from measure import OWN_CORE, PEER_CORE, QWEN3, Table, area, cpu_seconds, pin, ratios, rounds
from routetrace.server.testing import ServerProcess, run_server

#: Messages of a round, by their size.
_SIZES = {"1 MB": (1 << 20, 96), "256 KB": (256 << 10, 256)}

_runs = itertools.count()


def measure(table: Table) -> None:
    """See the module."""
    pin(OWN_CORE)
    count = 1 if table.quick else 7
    loads = {
        name: load(QWEN3, messages // 8 if table.quick else messages, message_bytes=size)
        for name, (size, messages) in _SIZES.items()
    }
    directory = Path(tempfile.mkdtemp(prefix="rows-ingest-"))
    try:
        with ExitStack() as stack:
            _durable(table, stack, loads, directory, count)
        with ExitStack() as stack:
            _in_memory(table, stack, loads["1 MB"], count)
    finally:
        shutil.rmtree(directory)


def _durable(
    table: Table, stack: ExitStack, loads: dict[str, Load], directory: Path, count: int
) -> None:
    server = stack.enter_context(run_server(data_dir=directory / "ours", store_capacity="16GB"))
    tcp = Rival("tcp", directory / "tcp")
    stack.callback(tcp.close)
    flight = Rival("flight", directory / "flight")
    stack.callback(flight.close)
    for pid in (server.pid, tcp.pid, flight.pid):
        pin(PEER_CORE, pid)
    put = FlightPut(flight.port)
    cpu: list[float] = []
    for name, one in loads.items():
        cells = {
            "ours": _ours(server, one, cpu),
            "tcp": _theirs(partial(send_tcp, tcp.port), one),
            "flight": _theirs(put.send, one),
        }
        cpu.clear()
        found = rounds(cells, count)
        mb = [value / 1e6 for value in found["ours"]]
        table.add(
            f"durable ingest, {name} messages", mb, "MB/s", "of payload; acknowledged = on the disk"
        )
        table.add(
            f"durable ingest, {name} messages",
            ratios(found["ours"], found["tcp"]),
            "x",
            "plain TCP socket -> file, fdatasync a group",
        )
        table.add(
            f"durable ingest, {name} messages, and Arrow Flight",
            ratios(found["ours"], found["flight"]),
            "x",
            "Arrow Flight do_put -> file, fdatasync a group",
        )
        table.add(
            f"ingest per core, {name} messages",
            [one.tokens / seconds / 1e6 for seconds in cpu[1:]],
            "M tok/s",
            f"a second of server CPU, {QWEN3.name}",
        )


def _in_memory(table: Table, stack: ExitStack, one: Load, count: int) -> None:
    flight = Rival("flight", "-")
    stack.callback(flight.close)
    pin(PEER_CORE, flight.pid)
    put = FlightPut(flight.port)

    server = stack.enter_context(run_server(store_capacity="8GB"))
    pin(PEER_CORE, server.pid)
    found = rounds(
        {
            "ours": _ours(server, one, []),
            "flight": _theirs(put.send, one),
        },
        count,
    )
    table.add(
        "ingest into memory, 1 MB messages, and Arrow Flight",
        ratios(found["ours"], found["flight"]),
        "x",
        "Arrow Flight do_put that keeps it in memory",
    )


def _ours(server: ServerProcess, one: Load, cpu: list[float]) -> Callable[[], float]:
    def cell() -> float:
        before = cpu_seconds(server.pid)
        took = send_all(server.target, QWEN3, f"run{next(_runs)}", one.messages)
        cpu.append(cpu_seconds(server.pid) - before)
        return one.payload_bytes / took

    return cell


def _theirs(send: Callable[[Sequence[bytes], int], float], one: Load) -> Callable[[], float]:
    return lambda: one.payload_bytes / send(one.messages, WINDOW)


if __name__ == "__main__":
    area(measure)
