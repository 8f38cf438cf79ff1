"""`make test-exact`: so many cells, compared one by one."""

from __future__ import annotations

import argparse
import random
import sys
import time

from oracle.compare import Wrong
from oracle.runs import WORLDS, Outcome, run
from oracle.taken import TakenWorld

#: Share of the cells that goes through sockets, processes and a store on disk.
_SOCKET_SHARE = 0.25

#: Seconds between two lines that say how far it is.
_PROGRESS_S = 10.0


def main() -> int:
    """Returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser("python -m oracle", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; random if none")
    parser.add_argument("--cells", type=int, default=10_000_000, help="at least so many")
    parser.add_argument("--world", choices=(*WORLDS, "both"), default="both")
    parser.add_argument("--once", action="store_true", help="only the run of this very seed")
    parser.add_argument("--requests", type=int, default=0, help="of each run; 0: the seed says")
    parser.add_argument("--object-url", default="", help="bucket of the world taken; in memory")
    parser.add_argument("--object-endpoint", default="", help="of that bucket")
    args = parser.parse_args()
    TakenWorld.url, TakenWorld.endpoint = args.object_url.rstrip("/"), args.object_endpoint
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    worlds = ["inline", "socket"] if args.world == "both" else [args.world]
    print(f"seeds from {seed} on", flush=True)

    total = Outcome()
    cells = dict.fromkeys(worlds, 0)
    started = told = time.monotonic()
    while total.tally.cells < args.cells and not (args.once and total.runs):
        socket = len(worlds) > 1 and cells["socket"] < _SOCKET_SHARE * total.tally.cells
        world = "socket" if socket else worlds[0]
        try:
            outcome = run(seed, world, args.requests)
        except Wrong as error:
            print(f"\nWRONG: {error}", flush=True)
            return 1
        total += outcome
        cells[world] += outcome.tally.cells
        now = time.monotonic()
        if now - told > _PROGRESS_S:
            told = now
            print(
                f"{now - started:6.0f} s  seed {seed}  {total.tally.cells:,} cells "
                f"({', '.join(f'{n:,} {w}' for w, n in cells.items())})",
                flush=True,
            )
        seed += 1

    tally = total.tally
    print(f"\n{time.monotonic() - started:.0f} s, last seed {seed - 1}")
    table = {"runs": total.runs, "traces": tally.traces, "reads": tally.reads}
    read = ("prefix_rows", "weighed_rows", "handed_rows", "lawful_rows", "ambiguous", "otherwise")
    table |= {f"{name}_read": getattr(tally, name) for name in read} | total.counts
    for name, count in table.items():
        print(f"  {name.replace('_', ' '):<28}{count:>12,}")
    print(f"{tally.cells} cells compared, 0 wrong, {tally.missing} missing with reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
