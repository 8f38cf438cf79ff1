"""The agent and attempt behind each cell, and the course of a request, as the server knows them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from routetrace.client import RouteClient, RowOrigin
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import running_page

from .test_reports import IDS, LAYOUT
from .watched import drawn, pixels

TOKENS = 41


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "r": a request of two pipeline stages, preempted, read twice."""
    with run_server(agent_timeout_seconds=3600) as server:
        for stage, layers in (("pp0", LAYOUT.layer_ids[:1]), ("pp1", LAYOUT.layer_ids[1:])):
            layout = LAYOUT.select(layers)
            feeder = Feeder(server.target, layout, run="r", engine_id="<b>e0", shard=stage)
            columns = [LAYOUT.layer_ids.index(i) for i in layers]
            handle = feeder.begin("t", prompt_len=4)
            feeder.step(IDS[:20, columns], [[handle, 0, 20]])
            feeder.preempt(handle, 15)
            feeder.resume(handle, 0)
            feeder.step(IDS[: TOKENS - 1, columns], [[handle, 0, TOKENS - 1]])
            # By a clock hours behind: the engine ended it before the server heard of it.
            feeder.finish(handle, TOKENS, unix_ms=int(1000 * (time.time() - 5 * 3600)))
            feeder.close()
        with RouteClient(server.target, run="r") as client:
            client.get("t")
            client.get("t")
        yield server


@pytest.fixture
def origins(server: ServerProcess) -> tuple[RowOrigin, ...]:
    with RouteClient(server.target, run="r") as client:
        return client.describe("t").origins


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> Iterator[str]:
    with running_page(server.target) as address:
        yield address.rstrip("/")


@pytest.fixture
def view(page: Page, address: str) -> Page:
    page.goto(f"{address}/#/trace?run=r&id=t")
    expect(page.locator("canvas.plot")).to_be_visible()
    drawn(page)
    return page


def test_each_cell_names_its_agent_and_attempt(view: Page, origins: tuple[RowOrigin, ...]) -> None:
    known = view.locator("aside .kv")
    view.locator("canvas.plot").focus()
    for position in (0, 14, 15, TOKENS - 2):
        view.keyboard.press(":")
        view.keyboard.type(f"{position}\n")
        for column, layer in enumerate(LAYOUT.layer_ids):
            view.keyboard.press("ArrowUp" if column == 0 else "ArrowDown")
            for _ in range(len(LAYOUT.layer_ids) if column == 0 else 0):
                view.keyboard.press("ArrowUp")
            expect(view.locator("aside h2")).to_have_text(f"Position {position}, layer {layer}")
            [one] = [o for o in origins if o.start <= position < o.stop and layer in o.layer_ids]
            assert one.engine_id == "<b>e0"
            expect(known).to_contain_text(f"Engine{one.engine_id}")
            expect(known).to_contain_text(f"Shard{one.shard}")
            expect(known).to_contain_text(f"Attempt{one.attempt}")
    assert {(one.shard, one.attempt) for one in origins} == {
        ("pp0", 1), ("pp0", 2), ("pp1", 1), ("pp1", 2),
    }  # fmt: skip


def test_the_colouring_by_source_names_them(view: Page) -> None:
    view.get_by_role("group", name="Colour by").get_by_role("button", name="Source").click()
    names = view.locator(".legend .swatches").first.locator("li")
    expect(names).to_have_text(
        ["<b>e0 pp0", "<b>e0 pp1", "Computed again after a preemption", "End of the prompt"]
    )
    colours = [
        names.nth(i).locator(".swatch").evaluate(
            "e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"
        )
        for i in range(2)
    ]  # fmt: skip
    assert colours[0] != colours[1]
    for colour in colours:
        assert pixels(view, tuple(colour))[1] > 1000


def test_the_course_of_a_request(view: Page, server: ServerProcess) -> None:
    """In order of time, whatever the clock of the engine says."""
    steps = view.get_by_role("list", name="Course of the request").get_by_role("listitem")
    names = ["sampled", "begun", "acknowledged", "readable", "first read", "last read"]
    expect(steps.locator("b")).to_have_text(names)
    with RouteClient(server.target, run="r") as client:
        known = client.describe("t")
    hours = (known.begun_at - known.sampled_at).total_seconds() / 3600
    expect(steps.nth(0).locator(".took")).to_have_text(f"{hours:.1f}\u00a0h")


def test_reads_of_the_page_itself_do_not_count(view: Page, server: ServerProcess) -> None:
    with RouteClient(server.target, run="r") as client:
        assert client.describe("t").num_reads == 2
