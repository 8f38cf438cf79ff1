"""A cell that is pressed, or chosen with Enter, is explained in the server's words."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from routetrace.client import RouteClient
from support.agents.feeder import Feeder

from .conftest import HOLES, LAYOUT, ODD_ENGINE, ROWS
from .test_layout import _COVERED, _FAINT, _SMALL, _UNNAMED
from .watched import Watched, expect_no_scroll
from .watched import open_trace as open_trace_of


def explanation(page: Page) -> Locator:
    return page.get_by_role("complementary", name="Cell").get_by_role("region", name="Explanation")


@pytest.mark.quick
def test_enter_explains_the_cell_of_the_cursor(page: Page, open_trace, server) -> None:
    open_trace("loaded", "&at=70")
    plot = page.locator("canvas.plot")
    plot.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("aside h2")).to_have_text("Position 70, layer 2")
    expect(explanation(page)).to_have_count(0)
    page.keyboard.press("Enter")
    with RouteClient(server.target, run="r") as client:
        found = client.explain("loaded", 70, layer_id=2)
    expect(explanation(page).locator("dt")).to_have_text(
        ["row", "because", "remedy", "owner", "because", "chain"]
    )
    texts = [text for name, text in found.lines() if name not in ("cell", "trace")]
    expect(explanation(page).locator("dd")).to_have_text(texts)
    assert "kv_unknown" in texts[0]
    assert "transfer_id" in found.remedy
    # To readers of screens, what is missing and what helps; the focus stays.
    expect(page.locator("#live")).to_contain_text(f"remedy: {found.remedy}")
    expect(plot).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("aside h2")).to_have_text("Position 71, layer 2")
    expect(explanation(page)).to_have_count(0)
    page.keyboard.press("ArrowLeft")
    expect(explanation(page)).to_contain_text("kv_unknown")
    page.keyboard.press("Tab")
    expect(explanation(page)).to_be_focused()


def test_a_press_explains_the_cell_under_it(page: Page, open_trace) -> None:
    open_trace("whole")
    page.locator("canvas.plot").click(position={"x": 300, "y": 80})
    expect(explanation(page)).to_contain_text("own pass: attempt 1 of request 1")
    expect(page.locator("aside h2")).to_contain_text("Position ")
    expect(page.locator("aside .ids li")).to_have_count(3)


@pytest.mark.parametrize("key", [None, "Enter"])
def test_a_range_of_the_table_is_explained(page: Page, open_trace, key: str | None) -> None:
    open_trace("holes")
    [_, (start, _), _] = HOLES
    chosen = page.get_by_role("button", name=f"{start:,}", exact=True)
    if key:
        chosen.press(key)
    else:
        chosen.click()
    expect(page.locator("aside h2")).to_have_text(f"Position {start:,}, layer 1")
    expect(explanation(page)).to_contain_text("none: not_captured")
    expect(page.locator("#live")).to_contain_text("remedy: look for warnings of the agent")


def test_odd_names_in_it_are_text(page: Page, open_trace) -> None:
    open_trace("elsewhere", "&run=second%20run&at=3")
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text(f"request 1 ('elsewhere' at engine '{ODD_ENGINE}')")
    assert page.locator("main u").count() == 0


def test_it_follows_a_trace_that_runs(page: Page, address: str, server) -> None:
    feeder = Feeder(server.target, LAYOUT, run="r", engine_id="follows")
    handle = feeder.begin("resumed", prompt_len=10)
    feeder.step(ROWS[:5], [[handle, 0, 5]])
    feeder.flush()
    open_trace_of(page, address, "resumed", "&at=2")
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text("own pass: attempt 1 of request 1")
    feeder.preempt(handle, 5)
    feeder.resume(handle, 0)
    feeder.step(ROWS[:12], [[handle, 0, 12]])
    feeder.flush()
    expect(explanation(page)).to_contain_text("own pass: attempt 2 of request 1")
    feeder.finish(handle, 13)
    feeder.close()


def test_another_incarnation_is_not_explained_by_the_first(page: Page, open_trace) -> None:
    open_trace("twice", "&at=3")
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text("request 2")
    page.get_by_role("button", name="#1 abort").click()
    expect(page.locator("[data-state=incomplete]")).to_be_visible()
    expect(explanation(page)).to_have_count(0)
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text("attempt 1 of request 1")


def test_an_error_is_words(page: Page, open_trace, watched: Watched) -> None:
    watched.allowed.append("status of 503")
    open_trace("short", "&at=3")
    error = {"kind": "overloaded", "message": "Too much is being read."}
    page.route(
        "**/trace/explain?*",
        lambda route: route.fulfill(status=503, json={"error": error}),
        times=1,
    )
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_have_text("explanation" + error["message"])
    expect(page.locator("#live")).to_contain_text(error["message"])
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text("own pass")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1440])
def test_it_fits(page: Page, open_trace, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_trace("loaded", "&at=70")
    page.locator("canvas.plot").press("Enter")
    expect(explanation(page)).to_contain_text("kv_unknown")
    expect_no_scroll(page)
    for look in (_FAINT, _SMALL, _COVERED, _UNNAMED):
        assert page.evaluate(look) == []
