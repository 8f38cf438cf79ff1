"""Judges the product by the second model, order by order.

python -m second_model --events 8            every order of up to 8 events (hours by one core)
python -m second_model --share 0.02          a part of them, drawn from the seed
python -m second_model --random 500          and orders at random, drawn from the seed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from second_model.runs import Findings, drawn, exhaustive, known


def main() -> int:
    parser = argparse.ArgumentParser(prog="second_model", description=__doc__)
    parser.add_argument("--events", type=int, default=8, help="events of an order at most")
    parser.add_argument("--share", type=float, default=1.0, help="part of all orders that is run")
    parser.add_argument(
        "--random", type=int, default=0, help="short orders to draw of each family, and longer ones"
    )
    parser.add_argument("--length", type=int, default=40, help="events of a longer order at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", default="", help="only families whose name holds this")
    parser.add_argument(
        "--seconds", type=float, default=0, help="for all orders of a family at most; 0: any"
    )
    parser.add_argument("--first", action="store_true", help="end with the first finding")
    parser.add_argument("--shrink", type=float, default=5, help="seconds for each finding")
    args = parser.parse_args()
    started, counts, found = time.monotonic(), Counter[str](), Findings()
    print(f"second model: seed {args.seed}, {args.events} events, share {args.share}", flush=True)
    every = exhaustive(args.events, args.share, args.seed, args.family) if args.events else ()
    at_random = drawn(args.random, args.length, args.seed, args.family) if args.random else ()
    parts = [
        *((*part, 0.0) for part in known(args.seed)),
        *((*part, args.seconds) for part in every),
        *((*part, 0.0) for part in at_random),
    ]
    for name, orders, seconds in parts:
        before, at = counts["cells"], time.monotonic()
        ran = found.run(orders, counts, seconds, first=args.first)
        print(
            f"  {name}: {ran:,} orders, {counts['cells'] - before:,} cells, "
            f"{time.monotonic() - at:.1f} s",
            flush=True,
        )
        if found.first and args.first:
            break
    found.shrink(args.shrink)
    print(found.text())
    print(
        f"{counts['orders']:,} orders of {counts['events']:,} events, {counts['cells']:,} cells, "
        f"{counts['bad orders']:,} orders with findings, {time.monotonic() - started:.1f} s"
    )
    return 1 if found.first else 0


if __name__ == "__main__":
    sys.exit(main())
