"""From phones to walls, light and dark: nothing too wide, small or faint, or without a name."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from .conftest import ODD_IDS
from .watched import expect_no_scroll, link

WIDTHS = (380, 768, 1440, 3840)
VIEWS = (
    "#/?run=r",
    "#/traces?run=r",
    "#/traces?run=r&q=nobody&label=a%3Db",
    link("holes"),
    link(ODD_IDS[-1]),
    link("twice", "&incarnation=1"),
    link("twice", "&against=%231"),
    link("elsewhere", "&run=second%20run"),
    link("large version"),
    "#/experts?run=r",
    "#/experts?run=second%20run&by=load",
    "#/mismatch?run=r",
    "#/mismatch?run=second%20run",
)

_FAINT = """() => {
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility()) continue;
    if (element.closest(".unseen, .skip, :disabled, [aria-disabled=true]")) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${element.tagName} ${element.textContent}`);
  }
  return faint;
}"""
_SMALL = """() => [...document.querySelectorAll("button, a, select, input")]
  .filter((e) => e.checkVisibility() && !e.closest(".skip"))
  .map((e) => [e.getBoundingClientRect(), e])
  .filter(([box]) => box.width < 24 || box.height < 24)
  .map(([box, e]) => `${box.width} x ${box.height} ${e.tagName} ${e.textContent}`)"""
_COVERED = """() => {
  const all = [...document.querySelectorAll("main :is(button, input, h1, dd, td, canvas)," +
    " #top :is(a, button, select)")].filter((e) => e.checkVisibility());
  const wrong = [];
  for (const [i, a] of all.entries())
    for (const b of all.slice(i + 1)) {
      if (a.contains(b) || b.contains(a)) continue;
      if (a.closest("#top") !== b.closest("#top")) continue;
      const [p, q] = [a.getBoundingClientRect(), b.getBoundingClientRect()];
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 1) wrong.push(`${a.outerHTML} / ${b.outerHTML}`);
    }
  return wrong;
}"""
_UNNAMED = """() => [...document.querySelectorAll("button, a, select, input, nav, dialog," +
    " [role=region], [role=group], [tabindex='0']")]
  .filter((e) => !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby"))
  .filter((e) => !e.textContent.trim() && e.checkVisibility())
  .map((e) => e.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_view_fits(page: Page, address: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(f"{address}/{view}")
        expect(page.locator("main h1")).to_be_visible()
        if "id=" in view:
            expect(page.locator("canvas.plot")).to_be_visible()
        elif "experts" in view:
            expect(page.locator("canvas.load-map")).to_be_visible()
        elif "mismatch?run=r" in view:
            expect(page.locator("canvas.mismatch")).to_be_visible()
        elif "traces" in view:
            expect(page.locator(".list .row:not(.coming), main .message").first).to_be_visible()
        where = f"{view[:40]} at {width} px"
        expect_no_scroll(page)
        for look in (_FAINT, _SMALL, _COVERED, _UNNAMED):
            assert page.evaluate(look) == [], where


def test_landmarks_and_the_skip_link(page: Page, open_trace) -> None:
    open_trace("short")
    for role in ("banner", "navigation", "main", "complementary", "status"):
        assert page.get_by_role(role).count() >= 1, role  # type: ignore[arg-type]
    assert page.get_by_role("heading", level=1).count() == 1
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    expect(page.locator("h1 bdi")).to_have_text("short")


def test_everything_is_reached_by_tab_and_shows_it(page: Page, open_trace) -> None:
    open_trace("holes")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.getAttribute('aria-label') ??"
            " document.activeElement.textContent,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        assert outline != "none", name
        seen.append(name)
    for name in ("Run", "Weights", "Next hole (n)", "Go to a position", "Missing ranges"):
        assert name in seen
    assert any(name.startswith("Cells of the trace") for name in seen)


def test_less_motion_and_forced_colours(page: Page, open_trace) -> None:
    page.emulate_media(reduced_motion="reduce", forced_colors="active")
    open_trace("holes")
    assert page.locator(".live i").evaluate("e => getComputedStyle(e).animationName") == "none"
    page.keyboard.press("n")
    expect(page.locator("aside h2")).to_have_text("Position 512, layer 1")
