"""A trace in one file: it opens from a disk without a network, and shows what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from routetrace.client import RouteClient, Trace
from routetrace.page.one_file import document
from routetrace.server.testing import ServerProcess

from .conftest import HOLES, NUM_TOKENS, ODD_IDS, ROWS
from .test_hostile import spelled
from .test_layout import _COVERED, _FAINT, _SMALL, _UNNAMED
from .watched import NOT_CAPTURED, Watched, drawn, expect_no_scroll, pixels

Open = Callable[..., Trace]


@pytest.fixture
def tab(context) -> Iterator[Watched]:
    """A tab without a network. Any request but that for the file fails the test."""
    context.set_offline(True)
    watched = Watched(context.new_page(), {""})
    yield watched
    watched.check()


@pytest.fixture
def opened(tab: Watched, server: ServerProcess, tmp_path: Path) -> Open:
    def open_file(trace_id: str, *, whole: bool = True) -> Trace:
        with RouteClient(server.target, run="r") as client:
            trace = client.get(trace_id, missing="mask")
            description = client.describe(trace_id)
        path = tmp_path / "trace.html"
        text, _ = document(trace, description, server.target, 32 << 20)
        if not whole:
            text, _ = document(trace, description, server.target, len(text.encode()) - 1)
        path.write_text(text, "utf-8")
        tab.page.goto(path.as_uri())
        expect(tab.page.locator("canvas.plot")).to_be_visible()
        drawn(tab.page)
        return trace

    return open_file


@pytest.mark.quick
def test_facts_and_holes(tab: Watched, opened: Open) -> None:
    page = tab.page
    trace = opened("holes")
    expect(page.locator("h1 bdi")).to_have_text("holes")
    facts = page.get_by_role("region", name="Facts")
    expect(facts).to_contain_text(f"{100 * trace.coverage:.2f}")
    expect(facts).to_contain_text(f"{NUM_TOKENS:,}")
    expect(facts).not_to_contain_text("Forgotten")
    missing = int((~trace.valid).sum())
    told = f"{missing:,} cells in {len(HOLES)} ranges"
    expect(page.locator("main")).to_contain_text(told)
    for start, _ in HOLES:
        page.keyboard.press("n")
        expect(page.locator("aside h2")).to_have_text(f"Position {start:,}, layer 1")
    expect(page.locator("aside")).to_contain_text("Not captured")


def test_a_hole_of_one_token_is_seen(tab: Watched, opened: Open) -> None:
    opened("whole")
    assert pixels(tab.page, NOT_CAPTURED) == [0, 0]
    opened("one hole")
    count, columns = pixels(tab.page, NOT_CAPTURED)
    assert count > 100
    assert columns >= 1


@pytest.mark.quick
@pytest.mark.parametrize("trace_id", ["whole", "twice"])
def test_the_cursor_reads_the_experts_of_the_trace(
    tab: Watched, opened: Open, trace_id: str
) -> None:
    page = tab.page
    trace = opened(trace_id)
    for position in (0, len(trace) // 2, len(trace) - 1):
        page.keyboard.press(":")
        page.keyboard.type(str(position))
        page.keyboard.press("Enter")
        expect(page.locator("aside h2")).to_have_text(f"Position {position:,}, layer 1")
        expected = [str(expert) for expert in trace.topk_ids[position, 0]]
        expect(page.locator("aside .ids li")).to_have_text(expected)
        assert expected == [str(expert) for expert in ROWS[position, 0]]


def test_experts_that_are_not_in_the_file_are_said_to_be_so(tab: Watched, opened: Open) -> None:
    page = tab.page
    opened("holes", whole=False)
    expect(page.locator("#top")).to_contain_text(f"of {NUM_TOKENS - 1:,} tokens, around holes")
    for position, there in ((HOLES[1][0] - 3, True), (40_000, False), (HOLES[0][1] + 9, True)):
        page.keyboard.press(":")
        page.keyboard.type(str(position))
        page.keyboard.press("Enter")
        expect(page.locator("aside h2")).to_have_text(f"Position {position:,}, layer 1")
        if there:
            expected = [str(expert) for expert in ROWS[position, 0]]
            expect(page.locator("aside .ids li")).to_have_text(expected)
        else:
            expect(page.locator("aside")).to_contain_text("Its experts are not in this file.")


def test_changes_are_drawn_at_every_zoom(tab: Watched, opened: Open) -> None:
    """Neighbours of these rows share two of three experts or fewer: no cell is without a colour."""
    page = tab.page
    opened("whole")
    plot = page.locator("canvas.plot")
    seen = {plot.screenshot()}
    for _ in range(3):
        page.keyboard.press("c")
    for _ in range(5):
        expect(page.locator("[aria-label='Colour by'] [aria-pressed=true]")).to_have_text("Change")
        expect(page.locator("main")).not_to_contain_text("Reading")
        drawn(page)
        seen.add(plot.screenshot())
        page.keyboard.press("+")
    assert len(seen) >= 3


@pytest.mark.quick
@pytest.mark.parametrize("trace_id", ODD_IDS, ids=range(len(ODD_IDS)))
def test_an_odd_id_is_text(tab: Watched, opened: Open, trace_id: str) -> None:
    page = tab.page
    opened(trace_id)
    assert page.locator("h1 bdi").evaluate("e => e.textContent") == spelled(trace_id)
    assert page.locator("main img, main script").count() == 0
    assert page.locator("script").count() == 1
    expect_no_scroll(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1440, 3840])
def test_it_fits(tab: Watched, opened: Open, width: int, scheme: str) -> None:
    page: Page = tab.page
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened("holes")
    expect_no_scroll(page)
    for look in (_FAINT, _SMALL, _COVERED, _UNNAMED):
        assert page.evaluate(look) == []


def test_the_theme_changes_with_its_key(tab: Watched, opened: Open) -> None:
    opened("short")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert tab.page.evaluate(ground) == "rgb(246, 247, 249)"
    tab.page.keyboard.press("t")
    assert tab.page.evaluate(ground) == "rgb(13, 17, 23)"
    expect(tab.page.get_by_role("button", name="Light theme")).to_be_visible()


def test_a_file_that_was_cut_says_so(tab: Watched, opened: Open, tmp_path: Path) -> None:
    opened("short")
    path = tmp_path / "trace.html"
    text = path.read_text("utf-8")
    at = text.index('id="data">') + 400
    path.write_text(text[:at] + text[at + 40 :], "utf-8")
    tab.allowed.append("error:")
    tab.page.goto(path.as_uri())
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("This file cannot be shown")
