"""A tab that is watched, and what tests read from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

from playwright.sync_api import BrowserContext, Page, expect

from support.pages import running_page

#: Longest wait for anything in a tab, on a busy machine too.
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)  # the default of a context does not hold for expectations

#: Colour of the reason not_captured in the light theme, as a canvas gives it.
NOT_CAPTURED = (232, 162, 31)

_COUNT = """(canvas, [red, green, blue]) => {
  const { width, height } = canvas;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const columns = new Set();
  let pixels = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i] !== red || data[i + 1] !== green || data[i + 2] !== blue) continue;
    pixels += 1;
    columns.add((i / 4) % width);
  }
  return [pixels, columns.size];
}"""
_DRAWN = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"""


class Watched:
    """Records all that a tab must not do.

    Args:
        page: the tab.
        hosts: hosts that it may ask.
    """

    def __init__(self, page: Page, hosts: set[str]) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.allowed: list[str] = []
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self._request(request.url, hosts))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`))"
        )

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, url: str, hosts: set[str]) -> None:
        if urlsplit(url).netloc not in hosts:
            self.wrong.append(f"request: {url}")

    def check(self) -> None:
        """Fail for what went wrong, but for answers that `allow` names."""
        self.page.evaluate(_DRAWN)
        wrong = [one for one in self.wrong if not any(part in one for part in self.allowed)]
        assert not wrong, wrong


@contextmanager
def open_tab(
    context: BrowserContext, target: str, where: str = "", allowed: Iterable[str] = ()
) -> Iterator[Watched]:
    """Run a page for a server, open it in a tab, and check the tab at the end.

    Args:
        context: of the browser.
        target: host:port of the server.
        where: part of the page.
        allowed: parts of messages that are no failure.
    """
    with running_page(target) as address:
        tab = Watched(context.new_page(), {urlsplit(address).netloc})
        tab.allowed += allowed
        tab.page.goto(f"{address}{where}")
        yield tab
        tab.check()


def link(trace_id: str, more: str = "") -> str:
    """Return the part of an address that opens a trace."""
    return f"#/trace?id={quote(trace_id, safe='')}{more}"


def open_trace(page: Page, address: str, trace_id: str, more: str = "") -> None:
    """Open a trace and wait until its grid is drawn."""
    page.goto("about:blank")
    page.goto(f"{address}/{link(trace_id, more)}")
    expect(page.locator("canvas.plot")).to_be_visible()
    drawn(page)


def drawn(page: Page) -> None:
    """Wait until the browser has drawn what is on its way."""
    page.evaluate(_DRAWN)


def expect_no_scroll(page: Page) -> None:
    """Wait until nothing is wider than the window; canvases get their new size in a later frame."""
    for _ in range(150):
        width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        if width <= window:
            return
        drawn(page)
    raise AssertionError(f"{page.url} is {width} px wide in a window of {window} px")


def pixels(page: Page, colour: tuple[int, int, int], canvas: str = "canvas.plot") -> list[int]:
    """Return how many pixels of a canvas have a colour, and in how many columns."""
    drawn(page)
    return page.locator(canvas).evaluate(_COUNT, list(colour))


def is_whole(page: Page) -> bool:
    """Whether the whole trace is seen: there is nothing to fit."""
    drawn(page)
    button = page.get_by_role("button", name="Show the whole trace (0)", disabled=None)
    return button.get_attribute("aria-disabled") == "true"


def cell(page: Page) -> str:
    """Return the title of the panel of the cell."""
    return page.locator("aside h2").inner_text()
