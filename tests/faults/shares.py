"""Sizes of each scenario in each share.

`quick`, the share of the gate, takes about a minute on an idle machine, `ci` a quarter of an hour;
`full` has the numbers that the project is judged by. Scenarios are modules of this package with a
`run(seed, ...)`. `quick` lacks four, of whose code `make test` drives the parts: clocks, readers,
pressure and calls.
"""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]

SHARES: dict[str, dict[str, Options]] = {
    "quick": {
        "kill": {"seeds": 1, "memory_seeds": 1},
        "torn": {"seeds": 1, "kills": 1},
        "cut": {"count": 15, "rounds": 1, "seconds": 0.5},
        "order": {"runs": 2, "actions": 100, "real_runs": 1, "real_actions": 30},
        "disk": {"disks": 1},
        "lost_agent": {},
        "background": {"kills": 1},
        "drain": {"restarts": 1},
        "images": {"images": 5, "flips": 100},
        "power": {"images": 100},
        "server_power": {"images": 40, "worlds": 1, "lives": 3},
        "fuzz": {"seconds": 5},
    },
    "ci": {
        "kill": {"seeds": 5, "memory_seeds": 1},
        "torn": {"seeds": 2, "kills": 3},
        "cut": {"count": 150, "rounds": 3, "seconds": 2.0},
        "order": {"runs": 6, "actions": 300, "real_runs": 3, "real_actions": 150},
        "disk": {"disks": 3},
        "lost_agent": {"runs": 2},
        "background": {"kills": 5},
        "clocks": {"runs": 2, "jumps": 6},
        "readers": {
            "reads": 4000,
            "processes": 2,
            "client_reads": 1000,
            "slow_readers": 20,
            "fast_reads": 1000,
            "kills": 200,
        },
        "drain": {"restarts": 3},
        "pressure": {"times": 1.5},
        "images": {"images": 25, "flips": 1000},
        "power": {"images": 700},
        "server_power": {"images": 300, "worlds": 3},
        "fuzz": {"seconds": 20},
        "calls": {"inputs": 25_000, "seconds": 3600},
    },
    "full": {
        "kill": {"seeds": 200, "memory_seeds": 20},
        "torn": {"seeds": 20, "kills": 5},
        "cut": {"count": 1000, "rounds": 10, "seconds": 30.0},
        "order": {"runs": 300, "actions": 500, "real_runs": 10, "real_actions": 300},
        "disk": {"disks": 10},
        "lost_agent": {"runs": 5},
        "background": {"kills": 200},
        "clocks": {"runs": 5, "jumps": 20},
        "readers": {
            "reads": 10000,
            "processes": 4,
            "client_reads": 10000,
            "slow_readers": 40,
            "fast_reads": 3000,
            "kills": 1000,
            "streams": 50,
        },
        "drain": {"restarts": 20, "every_s": 3.0},
        "pressure": {"times": 10.0},
        "images": {"images": 300, "flips": 10_000},
        "power": {"images": 50_000},
        "server_power": {"images": 20_000, "worlds": 200},
        "fuzz": {"seconds": 3600},
        "calls": {"inputs": 250_000, "seconds": 36_000},
    },
}
