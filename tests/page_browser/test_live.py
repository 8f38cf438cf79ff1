"""What changes is shown in place; what cannot be asked is said, and asked again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route, expect

from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import running_page

from .conftest import LAYOUT, ROWS
from .watched import Watched, link, open_tab, open_trace


def test_a_running_trace_grows_under_the_hands(page: Page, address: str, server) -> None:
    feeder = Feeder(server.target, LAYOUT, run="r", engine_id="live")
    handle = feeder.begin("growing", prompt_len=10)
    feeder.step(ROWS[:40], [[handle, 0, 40]])
    feeder.flush()
    open_trace(page, address, "growing")
    expect(page.locator("[data-state=running]")).to_be_visible()
    tokens = page.locator(".facts div", has_text="Tokens").locator("bdi")
    expect(tokens).to_have_text("40")
    field = page.get_by_role("textbox", name="Go to a position")
    field.fill("123")
    field.evaluate("e => e.setSelectionRange(1, 2)")
    page.evaluate("window.kept = document.querySelector('canvas.plot')")
    feeder.step(ROWS[40:90], [[handle, 40, 50]])
    feeder.flush()
    expect(tokens).to_have_text("90")
    expect(field).to_be_focused()
    expect(field).to_have_value("123")
    assert field.evaluate("e => [e.selectionStart, e.selectionEnd]") == [1, 2]
    assert page.evaluate("window.kept === document.querySelector('canvas.plot')")
    feeder.finish(handle, 91)
    feeder.close()
    expect(page.locator("[data-state=complete]")).to_be_visible()
    expect(field).to_be_focused()


@pytest.fixture
def own_server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        handle = feeder.begin("one", prompt_len=10)
        feeder.step(ROWS[:40], [[handle, 0, 40]])
        feeder.finish(handle, 41)
        feeder.close()
        yield server


def test_the_page_goes_and_comes_back(context, own_server: ServerProcess) -> None:
    with running_page(own_server.target) as first:
        host = urlsplit(first).netloc
        tab = Watched(context.new_page(), {host})
        tab.allowed.append("net::ERR")
        page = tab.page
        open_trace(page, first.rstrip("/"), "one")
        expect(page.locator(".live")).to_have_text("live")
    expect(page.locator(".live")).to_have_text(re.compile(r"^not live since \d\d:\d\d:\d\d$"))
    expect(page.locator("canvas.plot")).to_be_visible()
    page.keyboard.press("+")
    with running_page(own_server.target, listen=host):
        expect(page.locator(".live")).to_have_text("live")
        expect(page.locator(".alarm")).to_be_hidden()
    tab.check()


def test_the_server_behind_the_page_goes(context, own_server: ServerProcess) -> None:
    with running_page(own_server.target) as address:
        tab = Watched(context.new_page(), {urlsplit(address).netloc})
        tab.allowed.append("status of 503")
        page = tab.page
        open_trace(page, address.rstrip("/"), "one")
        own_server.kill()
        expect(page.locator(".alarm")).to_contain_text("Not up to date", timeout=90_000)
        expect(page.locator(".live")).to_have_text(re.compile("^not live since"))
        expect(page.locator("canvas.plot")).to_be_visible()
        tab.check()


def test_what_is_not_there(page: Page, address: str, watched: Watched) -> None:
    watched.allowed.append("status of 404")
    page.goto(f"{address}/{link('nobody')}")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such trace")
    expect(page.locator("main")).to_contain_text("ids are exact")
    field = page.get_by_role("textbox", name="Id of a trace")
    field.fill("short")
    field.press("Enter")
    expect(page.locator("h1 bdi")).to_have_text("short")
    page.goto(f"{address}/{link('nobody', '&run=none')}")
    expect(page.get_by_role("heading", level=1)).to_have_text("Run none has no traces")
    page.get_by_role("button", name="second run").click()
    expect(page.locator(".title")).to_contain_text("1 trace of second run")
    assert "run=second%20run" in page.url


def test_runs_are_chosen(page: Page, address: str) -> None:
    page.goto(f"{address}/#/")
    page.get_by_role("combobox", name="Run").select_option("second run")
    expect(page.locator(".title")).to_contain_text("1 trace of second run")
    page.keyboard.press("/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Traces")
    page.get_by_role("combobox", name="Run").select_option("r")
    expect(page.get_by_role("link", name="holes", exact=True)).to_be_visible()
    page.get_by_role("combobox", name="Run").select_option("second run")
    page.get_by_role("link", name="elsewhere").click()
    expect(page.locator("h1 bdi")).to_have_text("elsewhere")
    expect(page.get_by_role("combobox", name="Run")).to_have_value("second run")


def test_an_empty_server_says_what_to_do(context) -> None:
    with run_server() as server, open_tab(context, server.target) as tab:
        expect(tab.page.get_by_role("heading", name="No traces yet")).to_be_visible()
        expect(tab.page.locator("pre")).to_contain_text(f'"target": "{server.target}"')


BUSY = {"error": {"kind": "overloaded", "message": "Too much is being read. Trying again in 1 s."}}


class Once:
    """Answers the first call with "busy", and lets the others through."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, route: Route) -> None:
        self.calls += 1
        if self.calls > 1:
            route.continue_()
            return
        route.fulfill(status=503, headers={"Retry-After": "1"}, json=BUSY)


def test_a_busy_server_is_asked_again(page: Page, address: str, watched: Watched) -> None:
    watched.allowed.append("status of 503")
    facts, tiles = Once(), Once()
    page.route("**/trace?id=*", facts)
    page.route("**/trace/tile?*", tiles)
    page.goto(f"{address}/{link('whole')}")
    expect(page.get_by_role("heading", level=1)).to_have_text("The server is busy")
    expect(page.locator("main")).to_contain_text("Too much is being read.")
    expect(page.locator("h1 bdi")).to_have_text("whole")
    assert facts.calls >= 2
    page.get_by_role("group", name="Colour by").get_by_role("button", name="Change").click()
    expect(page.locator(".note")).to_have_text("Too much is being read. Trying again in 1 s.")
    expect(page.locator(".note")).to_be_hidden()
    assert tiles.calls >= 2


def test_what_has_not_changed_is_not_sent_again(page: Page, address: str) -> None:
    with page.expect_response(lambda r: r.status == 304 and "/trace?" in r.url):
        page.goto(f"{address}/{link('short')}")
    expect(page.locator("h1 bdi")).to_have_text("short")


def test_text_that_cannot_be_copied_is_shown(page: Page, address: str) -> None:
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    open_trace(page, address, "short")
    page.get_by_role("button", name="Copy as Python").click()
    area = page.get_by_role("textbox", name="Read this trace in Python")
    expect(area).to_be_focused()
    assert ".get('short'," in area.input_value()
    assert page.evaluate("getSelection().toString()").strip() == area.input_value().strip()
    page.get_by_role("button", name="Close").click()
    expect(area).to_have_count(0)
