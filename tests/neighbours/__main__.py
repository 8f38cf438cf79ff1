"""`python -m neighbours`: runs attacks beside a victim; fails if a promise broke.

Asserted: no row of the victim is wrong or lost, its reads go on, new engines of it are let in,
callers without a token evict no trace, the server neither ends nor exceeds its memory limit by over
64 MiB, and calls are refused by type.
Printed only, since they are times: the share, the p99 and the recovery.
"""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
import time
import traceback

from neighbours.campaign import Row, groups, run
from neighbours.shares import SCENARIOS, SHARES
from support.proxied import HAPROXY

_HEAD = (
    f"{'attack':<18} {'idle/s':>7} {'honest/s':>8} {'attack/s':>8} {'share':>6} {'p99 x':>6} "
    f"{'growth':>8} {'step':>8} {'hold':>8} {'back':>6} {'engine':>7}  goals missed"
)
#: Longest steps of the event loop that are shown of each attack.
_SHOWN_STEPS = 3
_GOALS = (
    ("share", lambda row: row.share >= 0.8),
    ("p99", lambda row: row.slower <= 5),
    ("step", lambda row: row.longest_step_ms <= 5),
    ("recovery", lambda row: row.recovery_s <= 2),
)


def main() -> int:
    """Return 1 if a promise was broken."""
    parser = argparse.ArgumentParser("python -m neighbours", description=__doc__)
    parser.add_argument("--share", choices=tuple(SHARES), default="full")
    parser.add_argument("--scenario", action="append", choices=tuple(SCENARIOS), help="only this")
    args = parser.parse_args()
    # Servers and attackers go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("routetrace").setLevel(logging.ERROR)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    share, begun = SHARES[args.share], time.monotonic()
    names = args.scenario or [
        name for name, scenario in SCENARIOS.items() if not share.small or scenario.ci is not None
    ]
    if not HAPROXY:
        without = [name for name in names if not SCENARIOS[name].proxied]
        print(f"{len(names) - len(without)} attacks left out: haproxy is not installed")
        names = without
    broken: list[str] = []
    evicted = 0
    print(_HEAD, flush=True)
    left = groups(names, share)
    while left:
        group = left.pop(0)
        try:
            rows, ran, found = run(group, share)
        except Exception as error:
            traceback.print_exc()
            rows, ran, found = [], 1, [f"{group[0]}: {error!r}"]
        for row in rows:
            _show(row)
            evicted += 0 if SCENARIOS[row.name].tenant else row.evicted
        for promise in found:
            print(f"BROKEN {promise}", flush=True)
        broken += found
        # A server on which a promise broke says nothing about the next attack.
        if rest := group[max(1, ran) :]:
            left.insert(0, rest)
    print(f"traces evicted by callers without a token: {evicted}")
    took = time.monotonic() - begun
    print(f"{len(names)} attacks in {took:.0f} s, {len(broken)} promises broken", flush=True)
    return 1 if broken else 0


def _show(row: Row) -> None:
    missed = ", ".join(name for name, met in _GOALS if not met(row)) or "none"
    if not SCENARIOS[row.name].judged:
        missed = "not judged: gRPC alone cannot keep them"
    print(
        f"{row.name:<18} {row.idle.rate:7.0f} {row.honest.rate:8.0f} {row.attacked.rate:8.0f} "
        f"{row.share:6.2f} {row.slower:6.1f} {row.peak_mib - row.before_mib:6.0f} M "
        f"{row.longest_step_ms:5.1f} ms {row.longest_ms:5.0f} ms {row.recovery_s:4.1f} s "
        f"{row.new_engine_s:5.1f} s  {missed}"
    )
    counts = ", ".join(f"{name} {count:,}" for name, count in sorted(row.outcomes.items()))
    idle = f"idle p99 {row.idle.p99_ms:.1f} ms, idle hold {row.longest_idle_ms:.0f} ms"
    cores = ", ".join(f"{name} {used:.2f}" for name, used in row.cores.items())
    print(f"    {idle}; processors: {cores}; {counts}")
    longest = sorted(row.steps, key=lambda step: step.computed)[: -_SHOWN_STEPS - 1 : -1]
    for step in longest:
        print(f"    step of {1e3 * step.computed:.1f} ms in {1e3 * step.took:.1f} ms: {step.place}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
