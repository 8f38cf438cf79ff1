"""`python -m faults`: runs scenarios, prints what they counted, fails if a promise was broken."""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import re
import signal
import subprocess
import sys
import time
import traceback

from faults.check import check
from faults.shares import SHARES, Options


def main() -> int:
    """Return 1 if a promise was broken."""
    parser = argparse.ArgumentParser("python -m faults", description=__doc__)
    parser.add_argument("--share", choices=tuple(SHARES), default="quick")
    parser.add_argument("--scenario", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; random if none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="an argument of scenarios"
    )
    args = parser.parse_args()
    # Whoever is told to end takes the servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What is refused on purpose is nothing to tell.
    logging.getLogger("routetrace").setLevel(logging.ERROR)
    seed = random.randrange(1 << 20) if args.seed is None else args.seed
    extra = {k: float(v) if "." in v else int(v) for k, v in (s.split("=") for s in args.set)}
    wanted = args.scenario or list(SHARES[args.share])
    failed = 0
    print(f"share {args.share}, seed {seed}", flush=True)
    for name in wanted:
        options = {**SHARES[args.share].get(name, {}), **extra}
        begun = time.monotonic()
        try:
            figures = _run(name, seed, options)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            again = " ".join(f"--set {k}={v}" for k, v in options.items())
            print(
                f"FAILED {name:<10} {time.monotonic() - begun:6.1f} s  {error}\n"
                f"  again: python -m faults --scenario {name} --seed {seed} {again}",
                flush=True,
            )
        else:
            counts = ", ".join(f"{k.replace('_', ' ')} {_show(v)}" for k, v in figures.items())
            print(f"ok     {name:<10} {time.monotonic() - begun:6.1f} s  {counts}", flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} scenarios kept every promise", flush=True)
    return 1 if failed else 0


#: Scenarios that are fuzzing: of which targets, all if none.
_FUZZING: dict[str, tuple[str, ...]] = {"fuzz": (), "calls": ("request", "page")}


def _run(name: str, seed: int, options: Options) -> dict[str, float]:
    if name in _FUZZING:
        # A command of its own: it works in processes that it can measure.
        words = [f"--{k}={v}" for k, v in options.items()]
        words += [f"--target={target}" for target in _FUZZING[name]]
        found = subprocess.run(
            [sys.executable, "-m", "faults.fuzz", "--seed", str(seed), *words],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        check(found.returncode == 0, f"fuzz: {found.returncode} findings\n{found.stdout}")
        counts = re.findall(r"^(\w+) +([\d,]+) inputs", found.stdout, re.MULTILINE)
        return {f"{target}_inputs": int(count.replace(",", "")) for target, count in counts}
    scenario = importlib.import_module(f"faults.scenarios.{name}")
    figures: dict[str, float] = scenario.run(seed, **options)
    return figures


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"  # type: ignore[str-format]


if __name__ == "__main__":
    sys.exit(main())
