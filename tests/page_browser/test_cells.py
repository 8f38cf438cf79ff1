"""The grid shows what the server holds: every hole, and the ids of each cell."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from .conftest import HOLES, LARGE_VERSION, LAYOUT, NUM_TOKENS, ROWS
from .watched import NOT_CAPTURED, cell, drawn, is_whole, pixels


def test_a_whole_trace_has_no_hole(page: Page, open_trace) -> None:
    open_trace("whole")
    expect(page.get_by_text("100 %", exact=False).first).to_be_visible()
    assert pixels(page, NOT_CAPTURED) == [0, 0]
    assert pixels(page, NOT_CAPTURED, "canvas.strip") == [0, 0]
    expect(page.get_by_role("region", name="Missing", exact=True)).to_have_count(0)
    expect(page.get_by_role("button", name="Next hole (n)")).to_be_disabled()


@pytest.mark.quick
def test_a_hole_of_one_token_is_seen_at_fit(page: Page, open_trace) -> None:
    open_trace("one hole")
    assert is_whole(page)
    counted, columns = pixels(page, NOT_CAPTURED)
    assert columns >= 2, "a hole is never thinner than 1.5 px"
    assert counted == 100 * columns, "of all layers, as high as the grid"
    assert pixels(page, NOT_CAPTURED, "canvas.strip")[1] >= 2
    # 99.9990 % is not all.
    assert "100 %" not in page.locator(".facts").inner_text()


@pytest.mark.quick
def test_n_and_p_find_each_hole(page: Page, open_trace) -> None:
    open_trace("holes")
    titles = [f"Position {start:,}, layer 1" for start, _ in HOLES]
    for title in [*titles, titles[0]]:
        page.keyboard.press("n")
        expect(page.locator("aside h2")).to_have_text(title)
        expect(page.locator("aside .lost")).to_contain_text("Not captured")
        assert not is_whole(page)
        assert pixels(page, NOT_CAPTURED)[0] > 0
    for title in reversed(titles):
        page.keyboard.press("p")
        expect(page.locator("aside h2")).to_have_text(title)
    assert "Hole 1 of 3" in page.locator("#live").inner_text()


def test_n_and_p_go_on_from_where_one_is(page: Page, open_trace) -> None:
    open_trace("holes", "&at=70000")
    title = page.locator("aside h2")
    expect(title).to_have_text("Position 70,000, layer 1")
    page.keyboard.press("n")
    expect(title).to_have_text("Position 90,000, layer 1")
    page.keyboard.press(":")
    page.keyboard.type("70000")
    page.keyboard.press("Enter")
    expect(title).to_have_text("Position 70,000, layer 1")
    page.keyboard.press("p")
    expect(title).to_have_text("Position 61,803, layer 1")


def test_the_table_says_the_same(page: Page, open_trace) -> None:
    open_trace("holes")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1).locator("td").nth(0)).to_have_text("61,803")
    expect(rows.nth(1).locator("td").nth(2)).to_have_text("4")
    cells = 4 * sum(stop - start for start, stop in HOLES)
    expect(page.get_by_text(f"{cells:,} cells in 3 ranges")).to_be_visible()
    expect(page.get_by_role("button", name="Not captured")).to_contain_text(f"{cells:,}")
    for row in rows.all():
        assert "capture is attached" in row.inner_text()
    page.get_by_role("button", name="90,000 \u2013 92,047").click()
    expect(page.locator("aside h2")).to_have_text("Position 90,000, layer 1")
    assert page.evaluate("document.activeElement.className") == "plot"


@pytest.mark.quick
@pytest.mark.parametrize(("position", "column"), [(0, 0), (63, 3), (64, 1), (99_998, 2)])
def test_the_panel_has_the_ids_of_the_server(
    page: Page, open_trace, position: int, column: int
) -> None:
    open_trace("whole", f"&at={position}")
    expect(page.locator("aside h2")).to_have_text(f"Position {position:,}, layer 1")
    page.locator("canvas.plot").focus()
    for _ in range(column):
        page.keyboard.press("ArrowDown")
    layer = LAYOUT.layer_ids[column]
    expect(page.locator("aside h2")).to_have_text(f"Position {position:,}, layer {layer}")
    want = [str(i) for i in ROWS[position, column]]
    expect(page.locator("aside .ids li")).to_have_text(want)
    expect(page.locator("#live")).to_have_text(
        f"Position {position:,}, layer {layer}: experts {', '.join(want)}"
    )


def test_the_pointer_finds_cells(page: Page, open_trace) -> None:
    open_trace("whole", "&at=5000")
    drawn(page)
    box = page.locator("canvas.plot").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 20)
    expect(page.locator(".tip")).to_be_visible()
    title = cell(page)
    position = int(title.split(",")[0].split()[1] + title.split(",")[1].split(",")[0])
    want = [str(i) for i in ROWS[position, -1]]
    expect(page.locator("aside .ids li")).to_have_text(want)
    expect(page.locator(".tip .mono")).to_have_text(" ".join(want))
    page.mouse.move(5, 5)
    expect(page.locator(".tip")).to_be_hidden()
    expect(page.locator("aside h2")).to_have_text("Position 5,000, layer 1")


def test_each_colouring_is_drawn(page: Page, open_trace) -> None:
    open_trace("holes")
    group = page.get_by_role("group", name="Colour by")
    assert group.get_by_role("button").all_inner_texts() == ["State", "Weights", "Source", "Change"]
    # Weights 413, the last of the four, is the lightest of viridis that is used.
    group.get_by_role("button", name="Weights").click()
    expect(page.locator(".swatches").first).to_contain_text("410")
    last = (
        page.locator(".swatches .swatch")
        .nth(3)
        .evaluate("e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)")
    )
    assert pixels(page, tuple(last))[1] > 50
    with page.expect_response(lambda r: "/trace/tile" in r.url):
        group.get_by_role("button", name="Change").click()
    expect(page.get_by_text("Share of a token's experts")).to_be_visible()
    # Of three neighbours of 300, the next token, 7 further, shares none: all is the last colour.
    page.wait_for_load_state("networkidle")
    assert pixels(page, (18, 48, 99))[1] > 800


def test_incarnations_are_chosen_in_place(page: Page, open_trace) -> None:
    open_trace("twice")
    group = page.get_by_role("group", name="Incarnation")
    expect(group.get_by_role("button")).to_have_text(["#1 abort", "#2 stop"])
    expect(group.get_by_role("button", name="#2 stop")).to_have_attribute("aria-pressed", "true")
    group.get_by_role("button", name="#1 abort").click()
    expect(page.get_by_role("button", name="Aborted")).to_be_visible()
    expect(page.locator("[data-state=incomplete]")).to_be_visible()
    assert "incarnation=1" in page.evaluate("location.hash")
    expect(group.get_by_role("button", name="#1 abort")).to_be_focused()
    page.go_back()
    expect(page.locator("[data-state=complete]")).to_be_visible()


def test_rows_are_as_many_as_the_server_says(page: Page, open_trace) -> None:
    open_trace("whole")
    page.locator("canvas.plot").focus()
    page.keyboard.press("End")
    expect(page.locator("aside h2")).to_have_text(f"Position {NUM_TOKENS - 2:,}, layer 4")
    page.keyboard.press("Home")
    expect(page.locator("aside h2")).to_have_text("Position 0, layer 4")


def test_a_short_trace_shows_its_ids_in_the_cells(page: Page, open_trace) -> None:
    open_trace("short")
    expect(page.locator("[data-state=complete]")).to_be_visible()
    assert is_whole(page)
    plain = page.locator("canvas.plot").screenshot()
    with page.expect_response(lambda r: "/trace/rows" in r.url):
        page.keyboard.press("+")
        page.keyboard.press("+")
    page.wait_for_load_state("networkidle")
    assert pixels(page, (20, 24, 31))[0] > 200, "ink of the ids"
    page.keyboard.press("0")
    drawn(page)
    assert page.locator("canvas.plot").screenshot() == plain


@pytest.mark.parametrize("name", ["Weights", "Change"])
def test_a_hole_is_seen_among_other_colours(page: Page, open_trace, name: str) -> None:
    """With a margin of the card's white on both sides."""
    open_trace("one hole")
    page.get_by_role("group", name="Colour by").get_by_role("button", name=name).click()
    page.wait_for_load_state("networkidle")
    assert pixels(page, NOT_CAPTURED)[1] >= 2
    middle = page.locator("canvas.plot").evaluate(
        """(canvas) => {
          const context = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
          context.drawImage(canvas, 0, 0);
          const row = context.getImageData(0, canvas.height - 50, canvas.width, 1).data;
          return Array.from({ length: canvas.width }, (_, x) => [...row.slice(4 * x, 4 * x + 3)]);
        }"""
    )
    hole = [x for x, colour in enumerate(middle) if tuple(colour) == NOT_CAPTURED]
    assert middle[hole[0] - 1] == middle[hole[-1] + 1] == [255, 255, 255]


@pytest.mark.parametrize("trace_id", ["no rows", "just begun"])
def test_a_trace_without_rows(page: Page, open_trace, trace_id: str) -> None:
    open_trace(trace_id, "&at=3")
    for key in ("n", "p", "+", "-", "0", "c", "ArrowRight"):
        page.keyboard.press(key)
    page.locator("canvas.plot").click(position={"x": 200, "y": 60})
    page.keyboard.press("ArrowDown")
    expect(page.locator("aside h2")).to_have_text("Cell")
    expect(page.locator(".facts")).to_contain_text("Tokens")


def test_a_large_weight_version_is_exact(page: Page, open_trace) -> None:
    open_trace("large version", "&at=3")
    expect(page.locator(".facts")).to_contain_text(str(LARGE_VERSION))
    expect(page.locator("aside .kv")).to_contain_text(str(LARGE_VERSION))
    page.keyboard.press("c")
    expect(page.locator(".swatches").first).to_contain_text(str(LARGE_VERSION))


def test_rows_are_asked_for_up_to_the_last(page: Page, open_trace) -> None:
    """Rows are asked for in blocks of 64: here the last token, which has none, would begin one."""
    with page.expect_response(lambda r: "/trace/rows" in r.url and "start=64" in r.url):
        open_trace("whole blocks", "&at=127")
    page.keyboard.press("ArrowRight")
    page.wait_for_load_state("networkidle")
    expect(page.locator("aside .ids li")).to_have_text([str(i) for i in ROWS[127, 0]])
