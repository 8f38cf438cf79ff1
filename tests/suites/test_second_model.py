"""Orders of calls through agents and a server core, judged by the second model."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from second_model.lineage import LAW, ORDERS
from second_model.orders import FAMILIES, every, legal
from second_model.runs import Findings, drawn, exhaustive, worlds
from second_model.scenarios import SCENARIOS

KNOWN = SCENARIOS | ORDERS


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN)
def test_an_order_of_which_the_answer_is_known(name: str) -> None:
    family, order = KNOWN[name]
    for _, report in worlds((family, order, seed) for seed in range(4)):
        assert report.findings == []
        assert report.counts["cells"]


def test_each_order_of_lineage_has_an_answer() -> None:
    assert len(LAW) == len(ORDERS)
    assert all(LAW[order] for order in ORDERS.values())


@pytest.mark.long
def test_a_share_of_all_orders() -> None:
    counts, found = Counter[str](), Findings()
    for _, orders in exhaustive(8, 0.05, seed=1):
        found.run(islice(orders, 5), counts)
    assert found.first == {}, found.text()
    assert counts["orders"] > 4 * len(FAMILIES)


@pytest.mark.long
def test_orders_at_random() -> None:
    counts, found = Counter[str](), Findings()
    [(_, orders)] = drawn(1, 25, seed=1)
    found.run(orders, counts)
    assert found.first == {}, found.text()
    assert counts["orders"] == 2 * len(FAMILIES)


def test_runs_of_a_seed_are_the_same() -> None:
    [(_, one)], [(_, again)], [(_, other)] = (drawn(1, 25, seed) for seed in (1, 1, 2))
    tasks = list(one)
    assert tasks == list(again) != list(other)
    assert {family.name for family, _, _ in tasks} == {family.name for family in FAMILIES}


def test_orders_are_legal_and_come_once() -> None:
    for family in FAMILIES:
        orders = list(every(family, 4))
        assert len(orders) == len(set(orders)) > 1
        assert all(legal(family, order) for order in orders[:20])
