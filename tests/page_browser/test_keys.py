"""Every key does what the list of keys says, and none while somebody writes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from .watched import cell, is_whole

KEYS = [
    "g o", "g t", "g e", "g m", "/", "t", "?", "Esc", "n", "p", "← → ↑ ↓", "+", "\u2212", "0",
    "Enter", ":", "c",
]  # fmt: skip


def test_the_list_is_complete(page: Page, open_trace) -> None:
    """Each of these has a test below, or in test_cells.py."""
    open_trace("holes")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    listed = page.locator("dialog dt").all()
    assert [" ".join(one.locator("kbd").all_inner_texts()) for one in listed] == KEYS
    page.keyboard.press("n")  # has no effect while the list is open
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    assert cell(page) == "Cell"


def test_zoom(page: Page, open_trace) -> None:
    open_trace("holes")
    assert is_whole(page)
    for key in ("+", "="):
        page.keyboard.press(key)
        assert not is_whole(page)
        page.keyboard.press("-")
        assert is_whole(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert is_whole(page)


def test_arrows_move_the_view_and_in_the_grid_the_cell(page: Page, open_trace) -> None:
    open_trace("whole", "&at=50000")
    page.keyboard.press("ArrowRight")
    assert cell(page) == "Position 50,000, layer 1", "the cursor stays"
    page.locator("canvas.plot").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("aside h2")).to_have_text("Position 50,001, layer 1")
    page.keyboard.press("ArrowDown")
    expect(page.locator("aside h2")).to_have_text("Position 50,001, layer 2")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("aside h2")).to_have_text("Position 50,000, layer 1")
    page.keyboard.press("Shift+ArrowRight")
    expect(page.locator("aside h2")).to_have_text("Position 50,010, layer 1")
    page.keyboard.press("Shift+ArrowDown")
    expect(page.locator("aside h2")).to_have_text("Position 50,010, layer 5")


def test_the_view_moves_with_the_arrows(page: Page, open_trace) -> None:
    open_trace("holes")
    for _ in range(6):
        page.keyboard.press("+")
    assert not is_whole(page)
    plot = page.locator("canvas.plot")
    before = plot.screenshot()
    page.keyboard.press("ArrowRight")
    moved = plot.screenshot()
    assert moved != before
    page.keyboard.press("ArrowLeft")
    assert plot.screenshot() == before


def test_a_position_is_gone_to(page: Page, open_trace) -> None:
    open_trace("whole")
    page.keyboard.press(":")
    expect(page.get_by_role("textbox", name="Go to a position")).to_be_focused()
    page.keyboard.type("12,345")
    page.keyboard.press("Enter")
    expect(page.locator("aside h2")).to_have_text("Position 12,345, layer 1")
    expect(page.locator("canvas.plot")).to_be_focused()
    page.keyboard.press(":")
    page.keyboard.type("99999999")
    page.keyboard.press("Enter")
    expect(page.locator("aside h2")).to_have_text("Position 99,998, layer 1")


def test_colourings_in_turn(page: Page, open_trace) -> None:
    open_trace("short")
    pressed = page.locator("[aria-label='Colour by'] [aria-pressed=true]")
    for name in ("State", "Weights", "Source", "Change", "State"):
        expect(pressed).to_have_text(name)
        page.keyboard.press("c")


def test_theme(page: Page, open_trace) -> None:
    open_trace("short")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(246, 247, 249)"
    page.keyboard.press("t")
    assert page.evaluate(ground) == "rgb(13, 17, 23)"
    expect(page.get_by_role("button", name="Light theme (t)")).to_be_visible()
    page.reload()
    expect(page.locator("canvas.plot")).to_be_visible()
    assert page.evaluate(ground) == "rgb(13, 17, 23)", "the choice is kept"
    page.keyboard.press("t")
    assert page.evaluate("localStorage.length") == 0, "the system is followed again"


def test_finding(page: Page, open_trace) -> None:
    open_trace("short")
    page.keyboard.press("/")
    field = page.get_by_role("searchbox", name="Part of the id")
    expect(field).to_be_focused()
    page.keyboard.type("n?t:c0")  # keys of a view are letters here
    expect(field).to_have_value("n?t:c0")
    page.keyboard.press("Escape")
    expect(field).not_to_be_focused()


def test_the_wheel_zooms_once_the_grid_is_entered(page: Page, open_trace) -> None:
    page.set_viewport_size({"width": 1200, "height": 500})
    open_trace("holes")
    page.locator("canvas.plot").hover()
    page.evaluate(
        "() => { window.wheeled = new Promise((done) =>"
        " addEventListener('wheel', () => done(true), { once: true })); }"
    )
    page.mouse.wheel(0, -300)
    assert page.evaluate("window.wheeled")
    assert is_whole(page), "the wheel is the page's"
    page.locator("canvas.plot").focus()
    page.locator("canvas.plot").hover()
    page.mouse.wheel(0, -300)
    expect(page.get_by_role("button", name="Show the whole trace (0)")).not_to_have_attribute(
        "aria-disabled", "true"
    )


def test_escape_leaves_the_grid(page: Page, open_trace) -> None:
    open_trace("short")
    plot = page.locator("canvas.plot")
    plot.click(position={"x": 300, "y": 80})
    expect(plot).to_be_focused()
    assert cell(page).startswith("Position ")
    page.keyboard.press("Escape")
    expect(plot).not_to_be_focused()
