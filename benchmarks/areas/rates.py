"""Engines at the rates that users have: 5,000 tokens a second each, from engine to tensor.

As rivals.py, with engines of a node side by side and a trainer that reads its batch when the
last request has ended. Costs per message, per read and per frame show here; the one engine of
100,000 tokens a second there is a stress test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from areas.rates_readable import readable
from measure import Table, area, ratios
from ways.load import Load
from ways.processes import TITLES, Found, Setting, run

RATE = 5_000  # tokens a second of an engine
#: Engines side by side; skipped where the machine has too few cores for them and their rivals.
ENGINES = (1, 8, 64)
_ENGINES_A_CORE = 4
_NODE_RATE = 8 * RATE

#: Many short requests, and few long ones.
SHORT = Load(sessions=64, prompt=128, answer=384)
LONG = Load(sessions=16, prompt=512, answer=1536)
QUICK = Load(sessions=16, prompt=64, answer=192)

RIVALS = ("vllm", "ray uint8")
#: Of our CPU beside that of a rival: of ours as it is installed, and packed by compiled loops.
GOALS = {
    "ours": {"vllm": "<= 2.6", "ray uint8": "<= 1.2"},
    "packed": {"vllm": "<= 1.7", "ray uint8": "<= 0.8"},
}


def measure(table: Table) -> None:
    """See the module."""
    if table.quick:
        setting = Setting(QUICK, RATE, together=True, checkouts=table.checkouts)
        show(table, "1 engine, short", setting, ["vllm"], 1)
        readable(table)
        return
    cores = len(os.sched_getaffinity(0))
    for engines in ENGINES:
        if engines > _ENGINES_A_CORE * cores:
            print(f"skipped: {engines} engines: too many for {cores} cores", file=sys.stderr)
            continue
        loads = {"short": SHORT, "long": LONG} if engines == 1 else {"short": SHORT}
        for kind, load in loads.items():
            what = f"{engines} engine{'s' * (engines > 1)}, {kind}"
            setting = Setting(load, RATE, engines, True, table.checkouts)
            show(table, what, setting, RIVALS, 3)
    readable(table)


def show(table: Table, what: str, setting: Setting, rivals: Sequence[str], count: int) -> None:
    """Add the lines of one setting."""
    found = run(setting, [*setting.our_ways, *rivals], count)
    tokens, ours = setting.tokens, found["ours"]
    for name, each in found.items():
        idle = f"beside {each.idle_seconds():.2f} s without a way"
        table.add(f"{what}, CPU: {TITLES[name]}", each.costs(tokens), "us/tok", idle)
    for part in ours.parts():
        table.add(f"{what}, CPU: ours, {part}", ours.costs(tokens, part), "us/tok", "")
    costs = {name: each.costs(tokens) for name, each in found.items()}
    for name in found:
        if name in RIVALS:
            _beside_rival(table, what, costs, name)
        elif name != "ours":
            ratio = ratios(costs["ours"], costs[name])
            table.add(f"{what}, engine to tensor", ratio, "x", TITLES[name])
    if setting.engines == 1 and not table.quick:
        return
    node = [cost * _NODE_RATE / 1e6 for cost in ours.costs(tokens, "engine", "agent")]
    against = f"engines and agents with {_NODE_RATE:,} tokens/s"
    table.add(f"{what}, cores of a node", node, "cores", against)
    before = _per_core(found["0.7.0"], tokens) if "0.7.0" in found else None
    against, rate = "a second of server CPU", _per_core(ours, tokens)
    table.add(f"{what}, in and out per core", rate, "Mtok/s", against, ">= 0.4", before)


def _beside_rival(table: Table, what: str, costs: dict[str, list[float]], rival: str) -> None:
    """Add the costs of our ways beside those of a rival."""
    before = ratios(costs["0.7.0"], costs[rival]) if "0.7.0" in costs else None
    for way, goals in GOALS.items():
        if way in costs:
            name = (
                f"{what}{'' if way == 'ours' else ', packed by compiled loops'}, engine to tensor"
            )
            ratio = ratios(costs[way], costs[rival])
            table.add(name, ratio, "x", TITLES[rival], goals[rival], before)


def _per_core(ours: Found, tokens: int) -> list[float]:
    """Return the millions of tokens that a second of the server's CPU stores and sends once."""
    return [1 / cost for cost in ours.costs(tokens, "server")]


if __name__ == "__main__":
    area(measure)
