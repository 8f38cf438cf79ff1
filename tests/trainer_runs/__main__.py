"""`make test-trainers`: rows in the code of trainers, each compared with what it must be.

Every module here whose name ends with _checks has a function run(), which yields what each layout
came to: (layout, ranks, rows compared, wrong), and how many rows the live router chose, if any may.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from importlib import import_module
from pkgutil import iter_modules

import trainer_runs

_LINE = "{:<52} {:>6} {:>9} {:>6} {:>9}"


def main() -> int:
    """Return 1 if a row is wrong, or anything fails."""
    found = [m.name for m in iter_modules(trainer_runs.__path__) if m.name.endswith("_checks")]
    parser = argparse.ArgumentParser("python -m trainer_runs", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(found)}; all if none is named")
    names = parser.parse_args().names or found

    # Foreign packages warn by the thousand, of each other; also in the processes that ranks run in.
    os.environ |= {"PYTHONWARNINGS": "ignore", "VERL_LOGGING_LEVEL": "ERROR"}
    warnings.simplefilter("ignore")
    started = time.monotonic()
    print(_LINE.format("layout", "ranks", "rows", "wrong", "live rows"), flush=True)
    results = [_run(name) for name in names]
    rows, wrong, failed = (sum(counts) for counts in zip(*results, strict=True))
    print(f"{time.monotonic() - started:.0f} s")
    print(f"{rows:,} rows compared, {wrong} wrong{f', {failed} failed' if failed else ''}")
    return 1 if wrong or failed or not rows else 0


def _run(name: str) -> tuple[int, int, int]:
    """Print what a module finds, and return (rows, wrong, 1 if it failed)."""
    rows = wrong = 0
    try:
        for layout, ranks, compared, bad, *live in import_module(f"trainer_runs.{name}").run():
            print(_LINE.format(layout, ranks, compared, bad, *live or "-"), flush=True)
            rows += compared
            wrong += bad
    except Exception:
        traceback.print_exc()
        return rows, wrong, 1
    return rows, wrong, 0


if __name__ == "__main__":
    sys.exit(main())
