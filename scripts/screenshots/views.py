"""Takes the pictures, in a browser in which nothing may go wrong unseen."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from .reports import WORSE
from .rollouts import LONG, NUM_ENGINES, RUN, TOP_K

WIDTH, HEIGHT = 1440, 900
#: Bytes of a picture, and of all together, at most: who clones the repository fetches them.
MOST_BYTES, MOST_BYTES_IN_ALL = 150_000, 800_000
#: Colours of a picture that are kept as they are.
_KEPT = 96
LIGHT, DARK = "light", "dark"
#: Milliseconds that the page may count experts for.
_COUNT_MS = 120_000
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_DRAWN = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"""
#: What the page shows in place of a view, or above it, when something is wrong.
_TROUBLE = ".alarm, .message, .live.stale, .cells .note"


class Unfit(Exception):
    """A picture that must not be published; the message says why."""


def _overview(page: Page) -> None:
    expect(page.locator(".figures .value").first).to_contain_text("%")
    expect(page.locator("tbody tr")).to_have_count(NUM_ENGINES + 1)
    expect(page.locator(".notices li").first).to_be_visible()


def _traces(page: Page) -> None:
    expect(page.locator(".list .row:not(.coming)").nth(12)).to_be_visible()


def _trace(page: Page) -> None:
    """Zoom in on holes of one stage and of both; choose a cell between them."""
    expect(page.locator("canvas.plot")).to_be_visible()
    expect(page.locator("aside h2")).to_contain_text("Position 3,025")
    page.locator("canvas.plot").focus()
    for _ in range(10):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("-")
    expect(page.locator("aside h2")).to_have_text("Position 3,025, layer 10")
    expect(page.locator("aside .ids li")).to_have_count(TOP_K)
    # The server waits some seconds for an agent that is gone.
    expect(page.get_by_role("button", name="Agent lost")).to_be_visible()
    page.wait_for_load_state("networkidle")


def _mismatch(page: Page) -> None:
    expect(page.locator("canvas.mismatch")).to_be_visible()
    expect(page.locator(".notices li").first).to_contain_text(str(WORSE))


def _report(page: Page) -> None:
    """Colour the trace by mismatch; wait for the tiles."""
    expect(page.locator("section.mismatch .figures")).to_be_visible(timeout=_COUNT_MS)
    page.get_by_role("button", name="Mismatch", exact=True).click()
    expect(page.locator("section.mismatch p.bad")).to_contain_text(
        "such as in the weights of its experts"
    )
    page.wait_for_load_state("networkidle")


def _experts(page: Page) -> None:
    expect(page.locator("canvas.load-map")).to_be_visible(timeout=_COUNT_MS)
    expect(page.locator(".hot tbody tr")).to_have_count(12)


@dataclass(frozen=True)
class View:
    """A view of the page: its address, its themes, and what is done and waited for there."""

    address: str
    ready: Callable[[Page], None]
    themes: tuple[str, ...] = (LIGHT,)


VIEWS: Mapping[str, View] = {
    "overview": View(f"overview?run={RUN}", _overview, (LIGHT, DARK)),
    "traces": View(f"traces?sort=coverage&order=asc&run={RUN}", _traces),
    "trace": View(f"trace?id={quote(LONG, safe='')}&run={RUN}&at=3025", _trace, (LIGHT, DARK)),
    "report": View(f"trace?id={quote(LONG, safe='')}&run={RUN}", _report),
    "experts": View(f"experts?run={RUN}", _experts),
    "mismatch": View(f"mismatch?run={RUN}", _mismatch),
}


class Camera:
    """Takes pictures of one page.

    Args:
        browser: a Chromium.
        address: of the page.
    """

    def __init__(self, browser: Browser, address: str) -> None:
        self._browser = browser
        self._address = address.rstrip("/")
        self._wrong: list[str] = []

    @contextmanager
    def opened(self, address: str, theme: str) -> Iterator[Page]:
        """Open an address of the page in a tab of its own.

        Raises:
            Unfit: if something went wrong in the tab.
        """
        context = self._browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT},
            device_scale_factor=1,
            color_scheme="dark" if theme == DARK else "light",
            reduced_motion="reduce",
            locale="en-GB",
            timezone_id="UTC",
        )
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("console", lambda said: self._wrong.append(f"the console says: {said.text}"))
        page.on("pageerror", lambda error: self._wrong.append(f"a script failed: {error}"))
        page.on("requestfailed", lambda asked: self._failed(asked.url, asked.failure))
        try:
            page.goto(f"{self._address}/#/{address}")
            yield page
            self._check(page)
        finally:
            context.close()

    def take(self, name: str, theme: str) -> bytes:
        """Return a picture of a view as PNG.

        Raises:
            Unfit: if the view shows an error, or something went wrong in the tab.
        """
        with self.opened(VIEWS[name].address, theme) as page:
            VIEWS[name].ready(page)
            page.evaluate("scrollTo(0, 0)")  # the header stays above what is scrolled
            page.evaluate(_DRAWN)
            taken = page.screenshot(full_page=True, animations="disabled", caret="hide")
        return compressed(taken)

    def _failed(self, url: str, why: str | None) -> None:
        # The page itself ends calls whose answers it does not need any more.
        if why != "net::ERR_ABORTED":
            self._wrong.append(f"{url} failed: {why}")

    def _check(self, page: Page) -> None:
        for shown in page.locator(_TROUBLE).all():
            if shown.is_visible():
                self._wrong.append(f"the view says: {shown.inner_text()}")
        if self._wrong:
            raise Unfit("; ".join(self._wrong))


def compressed(png: bytes) -> bytes:
    """Return a PNG of 256 colours: the most frequent as they are, and shades between."""
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.int64)
    colours, places, counts = np.unique(
        image @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True, return_counts=True
    )
    rgb = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    order = np.argsort(-counts, kind="stable")
    # Of rarer ones each counts once, so that marks and ramps keep their colours.
    rare = Image.fromarray(rgb[None, order[_KEPT:]].astype(np.uint8))
    shades = rare.quantize(256 - _KEPT, method=Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = np.concatenate([rgb[order[:_KEPT]], np.reshape(shades, (-1, 3))])
    nearest = np.argmin(((rgb[:, None] - palette) ** 2).sum(axis=2), axis=1)
    few = Image.fromarray(nearest[places].reshape(image.shape[:2]).astype(np.uint8))
    few.putpalette(palette.astype(np.uint8).tobytes())
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    return written.getvalue()


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check the bytes of pictures by name.

    Raises:
        Unfit: if one is larger than MOST_BYTES, or all together than MOST_BYTES_IN_ALL.
    """
    for name, size in sizes.items():
        if size > MOST_BYTES:
            raise Unfit(f"{name} takes {size:,} bytes: expected at most {MOST_BYTES:,}")
    total = sum(sizes.values())
    if total > MOST_BYTES_IN_ALL:
        raise Unfit(
            f"the pictures take {total:,} bytes: expected at most {MOST_BYTES_IN_ALL:,} in all"
        )


@contextmanager
def camera(chromium: str, address: str) -> Iterator[Camera]:
    """Start a browser for a page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        try:
            yield Camera(browser, address)
        finally:
            browser.close()
