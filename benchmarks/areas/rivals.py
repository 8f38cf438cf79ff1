"""From the engine's output to the trainer's tensor: ours beside what engines and trainers do today.

All processes of a way live at once, and the ways take turns. The CPU time of a round is that of all
of a way's processes, less what the same processes take for a round that carries no rows (the median
of several), and less what comparing the tensors with the truth takes.
"""

from __future__ import annotations

from measure import Table, area, ratios
from ways.load import Load
from ways.processes import RIVALS, TITLES, Setting, run

WHOLE = Load(sessions=64, prompt=512, answer=1536)
QUICK = Load(sessions=16, prompt=256, answer=512)
TURNS = Load(sessions=32, prompt=256, answer=128, turns=10, more=64)
QUICK_TURNS = Load(sessions=8, prompt=128, answer=64, turns=10, more=32)
RATE = 100_000  # tokens a second of the engine


def measure(table: Table) -> None:
    """See the module."""
    load = QUICK if table.quick else WHOLE
    setting = Setting(load, RATE, checkouts=table.checkouts)
    rivals = [name for name in RIVALS if name != "ray uint8" or not table.quick]
    found = run(setting, [*setting.our_ways, *rivals], 1 if table.quick else 4)
    ours = found["ours"]
    for name, each in found.items():
        idle = f"beside {each.idle_seconds():.2f} s without a way"
        table.add(f"CPU: {TITLES[name]}", each.costs(load.tokens), "s/Mtok", idle)
    for part in ours.parts():
        table.add(f"CPU: ours, {part}", ours.costs(load.tokens, part), "s/Mtok", "")
    for name, each in found.items():
        table.add(f"peak memory: {TITLES[name]}", each.peak / 2**20, "MiB", "beyond idle")
    for name, each in found.items():
        if name != "ours":
            cost = ratios(ours.costs(load.tokens), each.costs(load.tokens))
            goal = "<= 0.7" if name == "0.7.0" else ""
            table.add("CPU, engine to tensor", cost, "x", TITLES[name], goal)
            memory = ours.peak / each.peak
            table.add("peak memory, engine to tensor", memory, "x", TITLES[name])
    turns(table, QUICK_TURNS if table.quick else TURNS)


def turns(table: Table, load: Load) -> None:
    """Sessions of ten turns, each of whose answers repeats all that came before."""
    rivals = ["vllm"] if table.quick else ["vllm", "sglang"]
    setting = Setting(load, RATE, checkouts=table.checkouts)
    found = run(setting, [*setting.our_ways, *rivals], 1 if table.quick else 2)
    costs = {name: each.costs(load.tokens) for name, each in found.items()}
    sent = {name: [one.sent / load.tokens for one in each.rounds] for name, each in found.items()}
    for name in found:
        note = "of them each answer the whole" if name in rivals else "of them each once"
        table.add(f"10 turns, CPU: {TITLES[name]}", costs[name], "s/Mtok", note)
        table.add(f"10 turns, bytes: {TITLES[name]}", sent[name], "B/token", "engine to trainer")
    for part in found["ours"].parts():
        cost = found["ours"].costs(load.tokens, part)
        table.add(f"10 turns, CPU: ours, {part}", cost, "s/Mtok", "")
    for what, values, goal in (("CPU", costs, "<= 1.1"), ("bytes", sent, "<= 0.11")):
        if "vllm" in found:
            ratio = ratios(values["ours"], values["vllm"])
            before = ratios(values["0.7.0"], values["vllm"]) if "0.7.0" in found else None
            table.add(f"10 turns, {what}", ratio, "x", TITLES["vllm"], goal, before)


if __name__ == "__main__":
    area(measure)
