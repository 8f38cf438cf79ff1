"""The whole table: each area in a process of its own, then one print, results.json and a PNG.

`--quick` shows that everything runs, and writes nothing: its figures mean little. `--draw` makes
the PNG and the tables of docs/performance.md again from results.json.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from measure import HERE, Row, program
from report.page import write
from report.picture import draw

AREAS = {
    "engine": "The engine's step thread: hand-over of its rows",
    "agent": "The agent's background: compression and sending",
    "codec": "Frames: bytes and decoding of compressed rows",
    "ingest": "The server takes chunks in",
    "reads": "Trainers read rows",
    "rates": "Engine output to trainer tensor, engines of 5,000 tokens/s",
    "rivals": "Engine output to trainer tensor, one engine of 100,000 tokens/s",
    "scale": "More agents, traces and tokens",
}
_MINUTES = 20
#: Commit of version 0.7.0, whose figures stand beside ours.
_PREVIOUS = "8dbf293"


def main() -> int:
    """Measures; 1 if an area did not come to its end. A goal that is missed is no failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[[], *AREAS], help="all of them by default")
    parser.add_argument("--quick", action="store_true", help="only that everything runs")
    parser.add_argument("--draw", action="store_true", help="only picture and page of results.json")
    args = parser.parse_args()
    file, picture = HERE / "results.json", HERE / "results.png"
    if args.draw:
        results = json.loads(file.read_text())
        draw(results, AREAS, picture)
        write(results, AREAS)
        return 0
    wanted = args.areas or list(AREAS)
    with tempfile.TemporaryDirectory() as folder:
        previous = checked_out(Path(folder))
        found = {area: measured(area, args.quick, previous) for area in wanted}
        # Once more: a rival that did not start is no reason to lose half an hour of the others.
        for area in (area for area in wanted if found[area] is None):
            found[area] = measured(area, args.quick, previous)
    broken = [area for area, rows in found.items() if rows is None]
    rows = [dict(row, area=area) for area in wanted for row in found[area] or []]
    show(rows)
    if not args.quick and not args.areas and not broken:
        results = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "version": version("routetrace"),
            "machine": machine(),
            "rows": rows,
        }
        file.write_text(json.dumps(results, indent=1) + "\n")
        draw(results, AREAS, picture)
        write(results, AREAS)
    for area in broken:
        print(f"{area} did not come to its end", file=sys.stderr)
    return 1 if broken else 0


def checked_out(folder: Path) -> Path | None:
    """Write the files of 0.7.0 to a folder; None where the repository does not have them."""
    command = ["git", "-C", str(HERE.parent), "archive", _PREVIOUS]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        print(f"skipped: 0.7.0: commit {_PREVIOUS} is not in this clone", file=sys.stderr)
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def measured(area: str, quick: bool, previous: Path | None) -> list[dict[str, Any]] | None:
    """The rows of one area; None if it failed."""
    print(f"\n{AREAS[area]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = program(f"areas.{area}", "--json", str(file), *(["--quick"] * quick))
        if previous:
            command += ["--previous", str(previous)]
        try:
            ended = subprocess.run(command, timeout=_MINUTES * 60, check=False)
        except subprocess.TimeoutExpired:
            return None
        if ended.returncode or not file.exists():
            return None
        rows: list[dict[str, Any]] = json.loads(file.read_text())
        return rows


def show(rows: list[dict[str, Any]]) -> None:
    """One table of everything."""
    for area, title in AREAS.items():
        mine = [row for row in rows if row["area"] == area]
        if mine:
            print(f"\n{title}")
        for row in mine:
            print(Row(**{key: row[key] for key in row if key != "area"}))
    judged = [row for row in rows if row["met"] is not None]
    print(f"\n{sum(row['met'] for row in judged)} of {len(judged)} goals met")


def machine() -> dict[str, Any]:
    """Description of the machine."""
    packages = ("grpcio", "protobuf", "numpy", "zstandard")
    return {
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


if __name__ == "__main__":
    sys.exit(main())
