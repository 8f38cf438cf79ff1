"""The list of traces: filters in the address, one jump to any row, keys, foreign text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Error, Locator, Page, Route, expect

from routetrace.client import RouteClient
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import running_page

from .conftest import LAYOUT, ODD_IDS, ODD_LABELS, ROWS
from .watched import Watched, expect_no_scroll

MANY = 3000
A_CHUNK = 100
WIDTHS = (380, 768, 1440, 3840)


@pytest.fixture(scope="module")
def many() -> Iterator[ServerProcess]:
    """Run "r": 3,000 traces of three engines and 30 versions, each tenth with a hole, odd ids."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeders = [
            Feeder(server.target, LAYOUT, run="r", engine_id=f"e{n}", boot_id=str(n))
            for n in range(3)
        ]
        for number in range(MANY - len(ODD_IDS)):
            feeder = feeders[number % 3]
            feeder.set_weight_version(number // 100)
            labels = {"task": ("math", "code")[number % 2], "step": str(number // 100)}
            handle = feeder.begin(f"t{number:04}", prompt_len=3, labels=labels)
            rows = 10 + number % 7 - 6 * (number % 10 == 0)
            feeder.step(ROWS[:rows], [[handle, 0, rows]])
            feeder.finish(handle, 11 + number % 7)
            if number % A_CHUNK < 3:
                feeder.flush()
        for name in ODD_IDS:
            handle = feeders[0].begin(name, prompt_len=3, labels=ODD_LABELS)
            feeders[0].step(ROWS[:20], [[handle, 0, 20]])
            feeders[0].finish(handle, 21)
        for feeder in feeders:
            feeder.close()
        yield server


@pytest.fixture(scope="module")
def list_address(many: ServerProcess) -> Iterator[str]:
    with running_page(many.target) as address:
        yield address.rstrip("/")


@pytest.fixture
def tab(context, list_address: str) -> Iterator[Watched]:
    watched = Watched(context.new_page(), {urlsplit(list_address).netloc})
    yield watched
    watched.check()


@pytest.fixture
def show(tab: Watched, list_address: str):
    """Open the list with filters of an address; wait for as many traces."""

    def show(query: str, count: int, of: int = MANY) -> Page:
        tab.page.goto("about:blank")
        tab.page.goto(f"{list_address}/#/traces?run=r&{query}")
        told(tab.page, count, of)
        return tab.page

    return show


def told(page: Page, count: int, of: int = MANY) -> None:
    """Wait for the number of traces that match."""
    noun = "trace" if of == 1 else "traces"
    words = f"{count:,} of {of:,} {noun}" if count < of else f"{of:,} {noun}"
    expect(page.locator(".title .muted")).to_have_text(words, timeout=60_000)


def names(page: Page) -> Locator:
    return page.locator(".list .row:not(.coming) .name")


def test_each_filter_is_in_the_address(show) -> None:
    page = show("", MANY)
    page.get_by_role("button", name="Incomplete").click()
    told(page, 300)
    page.get_by_role("combobox", name="Reason").select_option("not_captured")
    page.get_by_role("combobox", name="Engine").select_option("e1")
    told(page, 100)
    page.get_by_role("textbox", name="Weight versions").fill("10..12")
    page.keyboard.press("Enter")
    told(page, 10)
    page.get_by_role("textbox", name="Add a label").fill("task=math")
    page.keyboard.press("Enter")
    told(page, 10)
    page.get_by_role("textbox", name="Add a label").fill("step=11")
    page.keyboard.press("Enter")
    told(page, 3)
    page.get_by_role("combobox", name="Coverage").select_option("0.5")
    told(page, 1)
    assert page.evaluate("location.hash") == (
        "#/traces?state=incomplete&reason=not_captured&engine=e1&version=10..12&below=0.5"
        "&label=task%3Dmath&label=step%3D11&run=r"
    )
    expect(names(page)).to_have_text(["t1120"])
    page.reload()
    told(page, 1)
    expect(page.get_by_role("combobox", name="Engine")).to_have_value("e1")
    expect(page.get_by_role("textbox", name="Weight versions")).to_have_value("10..12")
    expect(page.locator(".chips li")).to_have_count(2)
    for count in (3, 10, 10, 100):
        page.go_back()
        told(page, count)
    page.go_forward()
    told(page, 10)
    expect(page.get_by_role("textbox", name="Weight versions")).to_have_value("10..12")
    page.get_by_role("button", name="Clear the filters").click()
    told(page, MANY)
    assert page.evaluate("location.hash") == "#/traces?run=r"


def test_any_row_is_one_jump_away(show) -> None:
    page = show("sort=id&order=asc", MANY)
    rows = page.locator(".list .row")
    expect(names(page).first).to_be_visible()
    assert rows.count() < 80
    page.locator(".list").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    expect(names(page).last).to_have_text("y" * 512)
    expect(rows.last).to_have_attribute("aria-rowindex", str(MANY + 1))
    assert rows.count() < 80
    page.locator(".list").evaluate("e => { e.scrollTop = 1500 * 36; }")
    expect(names(page).filter(has_text="t1500")).to_be_visible()
    assert rows.count() < 80


@pytest.mark.quick
def test_each_order_is_that_of_the_client(show, many: ServerProcess) -> None:
    with RouteClient(many.target, run="r") as client:
        stats = [stat for stat in client.find() if stat.trace_id.startswith("t0")]
    keys = {
        "Trace": (lambda stat: stat.trace_id, "ascending"),
        "Tokens": (lambda stat: stat.num_tokens, "descending"),
        "Coverage": (lambda stat: stat.coverage, "ascending"),
        "Missing because": (lambda stat: sum(stat.missing_cells.values()), "descending"),
        "Weights": (lambda stat: stat.max_weight_version, "descending"),
    }
    page = show("q=t0", len(stats))
    for name, (key, order) in keys.items():
        head = page.get_by_role("columnheader", name=name)
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", order)
        first = (min if order == "ascending" else max)(map(key, stats))
        equal = {stat.trace_id for stat in stats if key(stat) == first}
        expect(names(page).first).to_have_text(re.compile("^(" + "|".join(equal) + ")$"))
        head.get_by_role("button").click()
        expect(head).to_have_attribute(
            "aria-sort", "descending" if order == "ascending" else "ascending"
        )


def test_keys(show) -> None:
    page = show("sort=id&order=asc", MANY)
    page.keyboard.press("/")
    field = page.get_by_role("searchbox", name="Part of the id")
    expect(field).to_be_focused()
    page.keyboard.type("t000")
    told(page, 10)
    expect(names(page)).to_have_text([f"t000{n}" for n in range(10)])
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="t0000")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.get_by_role("link", name="t0002")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1 bdi")).to_have_text("t0002")
    page.go_back()
    told(page, 10)
    expect(page.locator(".row.chosen .name")).to_have_text("t0002")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="t0003")).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("link", name="t0009")).to_be_focused()
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.get_by_role("heading", level=1)).to_have_text("Traces")


def test_keys_are_listed(show) -> None:
    page = show("", MANY)
    page.keyboard.press("?")
    listed = page.locator("dialog dt").all()
    assert [" ".join(one.locator("kbd").all_inner_texts()) for one in listed] == [
        "g o", "g t", "g e", "g m", "/", "t", "?", "Esc", "j", "k", "Enter",
    ]  # fmt: skip


def test_one_comes_back_to_the_place_that_was_left(show) -> None:
    page = show("sort=id&order=asc&engine=e2", 998)
    expect(names(page).first).to_be_visible()
    page.locator(".list").evaluate("e => { e.scrollTop = 500 * 36; }")
    page.get_by_role("link", name="t1508").click()
    expect(page.locator("h1 bdi")).to_have_text("t1508")
    page.go_back()
    expect(page.locator(".row.chosen .name")).to_have_text("t1508")
    assert page.locator(".list").evaluate("e => e.scrollTop") == 500 * 36


@pytest.mark.quick
def test_an_id_is_pasted_and_opened(show, tab: Watched) -> None:
    tab.allowed.append("status of 404")
    page = show("", MANY)
    field = page.get_by_role("searchbox", name="Part of the id")
    field.fill("t1234")
    field.press("Enter")
    expect(page.locator("h1 bdi")).to_have_text("t1234")
    page.keyboard.press("/")
    field.fill("nobody")
    expect(page.get_by_role("heading", name="No trace matches")).to_be_visible()
    page.get_by_role("link", name="Why is there no trace with this id?").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such trace")
    page.go_back()
    page.locator("main").get_by_role("button", name="Clear the filters").last.click()
    told(page, MANY)


def test_the_focus_stays_where_a_far_row_is_on_its_way(show) -> None:
    page = show("q=t0&sort=id&order=asc", 1000)
    first, last = (page.get_by_role("link", name=name, exact=True) for name in ("t0000", "t0999"))
    first.focus()
    for _ in range(2):
        page.keyboard.press("End")
        expect(last).to_be_focused()
        page.keyboard.press("Home")
        expect(first).to_be_focused()


@pytest.mark.quick
def test_foreign_text_is_text(show, many: ServerProcess) -> None:
    page = show("engine=e0&sort=updated", 1004 - 4 + len(ODD_IDS) - 2)
    page.get_by_role("textbox", name="Add a label").fill("<b>k=\u202egnp")
    page.keyboard.press("Enter")
    told(page, len(ODD_IDS))
    assert sorted(names(page).all_inner_texts()) == sorted(
        name.replace("\u202e", "\\u202e").replace("\u200b", "\\u200b").replace("\n", "\\u000a")
        for name in ODD_IDS
    )
    expect(page.locator(".chips bdi")).to_have_text("<b>k=\\u202egnp")
    made = "main img, main script, .list b, .list i:not(.meter i, .swatch)"
    assert page.locator(made).count() == 0
    for name in ("</script><script>alert(2)</script>", "/ # ? % & = + %00 .."):
        page.get_by_role("link", name=name).click()
        expect(page.locator("h1 bdi")).to_have_text(name)
        page.go_back()
        told(page, len(ODD_IDS))


def test_a_wrong_filter_is_named(show, tab: Watched, list_address: str) -> None:
    tab.allowed.append("status of 400")
    page = show("", MANY)
    field = page.get_by_role("textbox", name="Weight versions")
    field.fill("9..1")
    field.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="a weight version, or a..b")).to_be_visible()
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("1..9")
    field.press("Enter")
    told(page, 900)
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_what_is_newer_waits_until_it_is_asked_for(context, list_address: str, many) -> None:
    with run_server(agent_timeout_seconds=3600) as server, running_page(server.target) as address:
        feeder = Feeder(server.target, LAYOUT, run="r")
        handles = [feeder.begin(f"a{n}", prompt_len=3) for n in range(3)]
        for handle in handles:
            feeder.step(ROWS[:9], [[handle, 0, 9]])
        feeder.finish(handles[0], 10)
        feeder.flush()
        tab = Watched(context.new_page(), {urlsplit(address).netloc})
        page = tab.page
        page.goto(f"{address}#/traces?run=r&sort=id&order=asc")
        told(page, 3, 3)
        link = page.get_by_role("link", name="a1")
        link.focus()
        handle = feeder.begin("a00", prompt_len=3)
        feeder.step(ROWS[:9], [[handle, 0, 9]])
        feeder.finish(handles[1], 10)
        feeder.flush()
        expect(page.get_by_role("button", name="2 newer: show")).to_be_visible()
        expect(page.locator(".row .is")).to_have_text(["complete", "complete", "running"])
        expect(names(page)).to_have_text(["a0", "a1", "a2"])
        expect(link).to_be_focused()
        page.get_by_role("button", name="2 newer: show").click()
        expect(names(page)).to_have_text(["a0", "a00", "a1", "a2"])
        expect(page.get_by_role("button", name="newer")).to_have_count(0)
        feeder.close()
        tab.check()


def test_the_list_stays_while_the_server_is_away(context) -> None:
    with run_server() as server, running_page(server.target) as address:
        feeder = Feeder(server.target, LAYOUT, run="r")
        handle = feeder.begin("one", prompt_len=3)
        feeder.step(ROWS[:9], [[handle, 0, 9]])
        feeder.finish(handle, 10)
        feeder.flush()
        tab = Watched(context.new_page(), {urlsplit(address).netloc})
        tab.allowed.append("status of 503")
        tab.page.goto(f"{address}#/traces?run=r")
        told(tab.page, 1, 1)
        server.kill()
        away = re.compile(r"^Not live since \d\d:\d\d:\d\d: the server does not answer\.")
        expect(tab.page.locator(".alarm")).to_have_text(away, timeout=90_000)
        expect(names(tab.page)).to_have_text(["one"])
        tab.check()


def test_a_list_that_is_forgotten_begins_anew(show, tab: Watched) -> None:
    tab.allowed.append("status of 409")
    page = show("", MANY)
    gone = {"error": {"kind": "view_gone", "message": "The list has changed too much."}}
    page.route("**/traces?view=*", lambda route: route.fulfill(status=409, json=gone), times=1)
    page.locator(".list").evaluate("e => { e.scrollTop = e.scrollHeight / 2; }")
    expect(names(page).first).to_be_visible()
    told(page, MANY)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits(show, width: int) -> None:
    page = show("", MANY)
    page.set_viewport_size({"width": width, "height": 900})
    expect(names(page).first).to_be_visible()
    expect_no_scroll(page)
    assert page.locator(".list .row").count() < 80
    if width == 380:
        assert page.locator(".list").evaluate("e => e.scrollWidth - e.clientWidth") <= 0
        assert page.locator(".row").first.evaluate("e => e.clientHeight") in (59, 60)


def test_enter_before_the_first_answer_opens_the_trace(page: Page, address: str) -> None:
    """The question for all traces is dropped for that of the id, which nothing may drop then."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/api/v1/runs/r/traces?*", hold)
    page.goto(f"{address}/#/traces?run=r")
    field = page.get_by_role("searchbox", name="Part of the id")
    field.fill("short")
    field.press("Enter")
    while not any("q=short" in route.request.url for route in held):
        page.wait_for_timeout(20)
    page.unroute("**/api/v1/runs/r/traces?*")
    for route in held:
        with suppress(Error):  # dropped by the page
            route.continue_()
    expect(page.locator("h1 bdi")).to_have_text("short")
