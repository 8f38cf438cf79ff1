"""From the engine's output to the trainer's tensor: ours beside what engines and trainers do today.

All processes of a way live at once, and the ways take turns. The CPU time of a round is that of all
of a way's processes, less what the same processes take for a round that carries no rows,
and less what comparing the tensors with the truth takes.
"""

from __future__ import annotations

from measure import Table, area, ratios
from ways.load import Load
from ways.processes import TITLES, Setting, run

WHOLE = Load(sessions=64, prompt=512, answer=1536)
QUICK = Load(sessions=16, prompt=256, answer=512)
TURNS = Load(sessions=32, prompt=256, answer=128, turns=10, more=64)
QUICK_TURNS = Load(sessions=8, prompt=128, answer=64, turns=10, more=32)
RATE = 100_000  # tokens a second of the engine

MEMORY_GOAL = "<= 0.35"


def measure(table: Table) -> None:
    """See the module."""
    load = QUICK if table.quick else WHOLE
    names = [name for name in TITLES if name != "ray uint8" or not table.quick]
    found = run(Setting(load, RATE), names, 1 if table.quick else 4)
    for name, each in found.items():
        idle = f"beside {each.idle.seconds:.2f} s without a way"
        table.add(f"CPU: {TITLES[name]}", each.costs(load.tokens), "s/Mtok", idle)
    for part in found["ours"].parts() if "ours" in found else ():
        table.add(f"CPU: ours, {part}", found["ours"].costs(load.tokens, part), "s/Mtok", "")
    for name, each in found.items():
        table.add(f"peak memory: {TITLES[name]}", each.peak / 2**20, "MiB", "beyond idle")
    for name, each in found.items():
        if name != "ours" and "ours" in found:
            ours = found["ours"]
            cost = ratios(ours.costs(load.tokens), each.costs(load.tokens))
            table.add("CPU, engine to tensor", cost, "x", TITLES[name])
            memory = ours.peak / each.peak
            table.add("peak memory, engine to tensor", memory, "x", TITLES[name], MEMORY_GOAL)
    turns(table, QUICK_TURNS if table.quick else TURNS)


def turns(table: Table, load: Load) -> None:
    """Sessions of ten turns, each of whose answers repeats all that came before."""
    names, count = (["ours"], 1) if table.quick else (["ours", "vllm", "sglang"], 2)
    for name, each in run(Setting(load, RATE), names, count).items():
        note = "of them each once" if name == "ours" else "of them each answer the whole"
        table.add(f"10 turns, CPU: {TITLES[name]}", each.costs(load.tokens), "s/Mtok", note)
        sent = [one.sent / load.tokens for one in each.rounds]
        table.add(f"10 turns, bytes: {TITLES[name]}", sent, "B/token", "from engine to trainer")


if __name__ == "__main__":
    area(measure)
