"""Many orders, one after the other, and the smallest of those that were judged wrong."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from second_model.drive import LAYOUT, Report, Worlds, play
from second_model.lineage import ORDERS
from second_model.orders import FAMILIES, Event, Family, every, legal, random_order
from second_model.scenarios import SCENARIOS

Order = tuple[Event, ...]
Task = tuple[Family, Order, int]

#: Orders that one server core sees before the next one takes its place.
_ORDERS_A_WORLD = 100


def known(seed: int) -> Iterator[tuple[str, Iterator[Task]]]:
    """The orders that were wrong once, and those whose answers are known; several times over."""
    both = ("orders that were wrong once", SCENARIOS), ("orders with answers by hand", ORDERS)
    for name, known in both:
        yield name, ((f, order, seed + n) for f, order in known.values() for n in range(3))


def exhaustive(
    events: int, share: float, seed: int, name: str = ""
) -> Iterator[tuple[str, Iterator[Task]]]:
    """All orders of each family, or a part that the seed draws."""
    for family in FAMILIES:
        if name not in family.name:
            continue
        depth = min(events, family.depth)

        def orders(family: Family = family, depth: int = depth) -> Iterator[Task]:
            rng = random.Random(f"{seed} {family.name} {family.block_size}")
            for number, order in enumerate(every(family, depth)):
                if share >= 1 or rng.random() < share:
                    yield family, order, seed * 1_000_003 + number

        yield f"{family.name}, blocks of {family.block_size}, {depth} events", orders()


def drawn(
    count: int, length: int, seed: int, name: str = ""
) -> Iterator[tuple[str, Iterator[Task]]]:
    """Orders at random, families in turns: `count` of each as small as `exhaustive` has them, then
    longer ones, of more requests."""
    families = [family for family in FAMILIES if name in family.name]

    def orders() -> Iterator[Task]:
        for number, family in product(range(2 * count), families):
            rng = random.Random(f"{seed} {number} {family.name} {family.block_size}")
            drawn_from, events = family, family.depth
            if number % 2:
                requests = 5 if family.decode_engine else 6
                blocks = max(family.num_blocks, 16)
                drawn_from = family._replace(requests=requests, num_blocks=blocks)
                events = rng.randint(9, length)
            order = random_order(drawn_from, events, rng, _weight)
            yield drawn_from, order, seed * 1_000_003 + number

    if families:
        yield f"{2 * count} of each family at random", orders()


def _weight(event: Event) -> float:
    return 3.0 if event[-1][0] in ("step", "begin") else 1.0


def worlds(tasks: Iterable[Task], seconds: float = 0) -> Iterator[tuple[Task, Report]]:
    """Plays orders; several share a server, under names of their own."""
    world, started = None, time.monotonic()
    try:
        for number, task in enumerate(tasks):
            if seconds and time.monotonic() - started > seconds:
                break
            family, order, seed = task
            if number % _ORDERS_A_WORLD == 0:
                if world is not None:
                    world.close()
                world = Worlds(LAYOUT, seed)
            assert world is not None
            report = Report()
            play(world, family, order, f"{number}.", report, random.Random(seed))
            yield task, report
    finally:
        if world is not None:
            world.close()


@dataclass
class Findings:
    """The smallest order for each kind of finding of each family."""

    first: dict[tuple[str, str], tuple[Task, list[str]]] = field(default_factory=dict)

    def run(
        self,
        tasks: Iterable[Task],
        counts: Counter[str],
        seconds: float = 0,
        *,
        first: bool = False,
    ) -> int:
        """Plays orders; returns how many."""
        ran = 0
        for task, report in worlds(tasks, seconds):
            ran += 1
            counts.update(report.counts)
            for finding in report.findings:
                key = task[0].name, _kind(finding)
                before = self.first.get(key)
                if before is None or _size(task[1]) < _size(before[0][1]):
                    self.first[key] = task, [f for f in report.findings if _kind(f) == key[1]]
            if first and self.first:
                break
        return ran

    def shrink(self, seconds: float = 20) -> None:
        """Leaves events out of the orders that were found, as long as the finding stays."""
        for key, (first, wrong) in self.first.items():
            task, findings = first, wrong
            until = time.monotonic() + seconds
            smaller = True
            while smaller and time.monotonic() < until:
                smaller = False
                family, order, seed = task
                for at in reversed(range(len(order))):
                    shorter = order[:at] + order[at + 1 :]
                    if time.monotonic() > until or not legal(family, shorter):
                        continue
                    [(_, report)] = worlds([(family, shorter, seed)])
                    same = [f for f in report.findings if _kind(f) == key[1]]
                    if same:
                        task, findings, smaller = (family, shorter, seed), same, True
                        break
            self.first[key] = task, findings

    def text(self) -> str:
        """Every kind of finding, with the smallest order that shows it."""
        lines = []
        for (name, kind), ((family, order, seed), findings) in self.first.items():
            lines.append(f"{name} (blocks of {family.block_size}, seed {seed}): {kind}")
            lines += [f"    {call}" for event in order for call in event]
            lines += [f"  -> {finding}" for finding in findings[:4]]
        return "\n".join(lines) or "no findings"


def _kind(finding: str) -> str:
    """Which sort of finding it is, without what differs from order to order."""
    kind = finding.partition(":")[0]
    reader = next(
        (r for r in ("blocks", "bound", "latest", "version") if f" {r}" in finding), "get"
    )
    what = finding.rpartition(", expected")[2] if kind in ("reason", "state") else ""
    had = re.search(r": (\w+), expected| is (\S+),", finding) if what else None
    if kind == "wrong":
        what = "of no row" if finding.endswith("unknown") else "of another row"
    return f"{kind} {reader} {had[1] or had[2] if had else ''} {what}".strip()


def _size(order: Order) -> tuple[int, int]:
    return sum(len(event) for event in order), len(repr(order))
