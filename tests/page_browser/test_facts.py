"""Facts of a trace: the order of its labels, and the way to the load of its experts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from routetrace.server.testing import run_server
from support.agents.feeder import Feeder
from support.pages import running_page

from .test_reports import IDS, LAYOUT

NAMES = ["alpha", "beta", "dataset", "mid", "prompt", "step", "task", "zeta"]
ENGINE = "e &=#?1"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Run "r": traces of two engines and three weight versions, with labels in any order."""
    with run_server(agent_timeout_seconds=3600) as server:
        draw = random.Random(1)
        for engine, name, versions in (
            (ENGINE, "one", (5, 6)), (ENGINE, "earlier", (4, 4)), ("other", "elsewhere", (5, 6)),
        ):  # fmt: skip
            feeder = Feeder(server.target, LAYOUT, run="r", engine_id=engine)
            labels = dict.fromkeys(draw.sample(NAMES, len(NAMES)), "v")
            handle = feeder.begin(name, prompt_len=9, labels=labels)
            for start, version in zip((0, 50), versions, strict=True):
                feeder.set_weight_version(version)
                feeder.step(IDS[start : start + 50], [[handle, start, 50]])
            feeder.finish(handle, 101)
            feeder.close()
        with running_page(server.target) as address:
            yield address.rstrip("/")


def test_labels_are_in_the_order_of_their_names(page: Page, address: str) -> None:
    page.goto(f"{address}/#/traces?run=r")
    expect(page.locator(".row .labelled")).to_have_text(["  ".join(f"{n}=v" for n in NAMES)] * 3)
    page.goto(f"{address}/#/trace?run=r&id=one")
    expect(page.locator(".labels li")).to_have_text([f"{name}=v" for name in NAMES])


def test_the_load_of_experts_is_one_click_away(page: Page, address: str) -> None:
    page.goto(f"{address}/#/trace?run=r&id=one")
    page.get_by_role("link", name="Load of experts").click()
    expect(page.get_by_label("Engine")).to_have_value(ENGINE)
    expect(page.get_by_label("Weight versions: one, or a..b")).to_have_value("5..6")
    expect(page.locator(".title")).to_contain_text("100 tokens of the newest 1 trace")
    page.goto(f"{address}/#/trace?run=r&id=earlier")
    page.get_by_role("link", name="Load of experts").click()
    expect(page.get_by_label("Weight versions: one, or a..b")).to_have_value("4")
