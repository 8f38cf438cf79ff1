"""Engines at the rates that users have: 5,000 tokens a second each, from engine to tensor.

As rivals.py, with engines of a node side by side and a trainer that reads its batch when the
last request has ended. Costs per message, per read and per frame show here; the one engine of
100,000 tokens a second there is a stress test.
"""

from __future__ import annotations

import os
import sys

from areas.rates_readable import readable
from measure import Table, area, ratios
from ways.load import Load
from ways.processes import COMPILED, OURS, TITLES, Found, Setting, run

RATE = 5_000  # tokens a second of an engine
#: Engines side by side; skipped where the machine has too few cores for them and their rivals.
ENGINES = (1, 8, 64)
_ENGINES_A_CORE = 4
_NODE_RATE = 8 * RATE

#: Many short requests, and few long ones.
SHORT = Load(sessions=64, prompt=128, answer=384)
LONG = Load(sessions=16, prompt=512, answer=1536)
QUICK = Load(sessions=16, prompt=64, answer=192)

GOALS = {"vllm": "<= 1.7", "ray uint8": "<= 0.8"}


def measure(table: Table) -> None:
    """See the module."""
    names = [name for name in OURS if table.beside or name != "beside"]
    if table.quick:
        setting = Setting(QUICK, RATE, together=True, beside=table.beside)
        show(table, "1 engine, short", setting, [*names, "vllm"], 1)
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
            setting = Setting(load, RATE, engines, together=True, beside=table.beside)
            ours = names if engines == 1 else [name for name in names if name not in COMPILED]
            show(table, what, setting, [*ours, *GOALS], 3)
    readable(table)


def show(table: Table, what: str, setting: Setting, names: list[str], count: int) -> None:
    """Add the lines of one setting."""
    found = run(setting, names, count)
    tokens, ours = setting.tokens, found["ours"]
    for name, each in found.items():
        idle = f"beside {each.idle.seconds:.2f} s without a way"
        table.add(f"{what}, CPU: {TITLES[name]}", each.costs(tokens), "us/tok", idle)
    for part in ours.parts():
        table.add(f"{what}, CPU: ours, {part}", ours.costs(tokens, part), "us/tok", "")
    for name, each in found.items():
        if name != "ours":
            cost = ratios(ours.costs(tokens), each.costs(tokens))
            table.add(f"{what}, engine to tensor", cost, "x", TITLES[name], GOALS.get(name, ""))
    if setting.engines == 1 and not table.quick:
        return
    _sides(table, what, tokens, ours)


def _sides(table: Table, what: str, tokens: int, ours: Found) -> None:
    """Add the cores of a node, and the tokens of a server's core."""
    node = [cost * _NODE_RATE / 1e6 for cost in ours.costs(tokens, "engine", "agent")]
    against = f"engines and agents with {_NODE_RATE:,} tokens/s"
    table.add(f"{what}, cores of a node", node, "cores", against, "<= 0.12")
    rate = [1 / cost for cost in ours.costs(tokens, "server")]
    table.add(f"{what}, in and out per core", rate, "Mtok/s", "a second of server CPU", ">= 0.6")


if __name__ == "__main__":
    area(measure)
