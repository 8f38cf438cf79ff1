"""The view of experts: its figures, picture and words are the counts of the client."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from routetrace.client import ExpertLoad, RouteClient

from .conftest import LAYOUT, ODD_ENGINE
from .test_hostile import spelled
from .watched import drawn

#: Of the picture, in px: edges, where layers begin, height of a layer, and both bars of layers.
LEFT, RIGHT, UPPER, ROW, SIDES = 40, 4, 24, 16, 2 * (72 + 20)
EXPERTS = LAYOUT.num_experts


@pytest.fixture(scope="module")
def load(server) -> ExpertLoad:
    """Of all traces that have ended in run "r"."""
    with RouteClient(server.target, run="r") as client:
        ids = [one.trace_id for one in client.find(states=["complete", "incomplete"])]
        return client.expert_load(ids, missing="mask")


@pytest.fixture
def picture(page: Page, address: str) -> Locator:
    return opened(page, f"{address}/#/experts?run=r")


def opened(page: Page, address: str) -> Locator:
    page.goto(address)
    canvas = page.locator("canvas.load-map")
    expect(canvas).to_be_visible()
    drawn(page)
    return canvas


def place(picture: Locator, column: int, layer: int) -> dict[str, float]:
    wide = ((picture.bounding_box() or {})["width"] - LEFT - RIGHT - SIDES) / EXPERTS
    return {"x": LEFT + (column + 0.5) * wide, "y": UPPER + (layer + 0.5) * ROW}


def words(load: ExpertLoad, layer: int, expert: int) -> str:
    of = float(load.relative[layer, expert])
    which = f"Layer {LAYOUT.layer_ids[layer]}, expert {expert}: "
    if not of:
        return f"{which}chosen by no token"
    digits = 0 if of >= 10 else 3 if of < 0.1 else 2
    share = f"{100 * of / EXPERTS:.2f}\u00a0%"
    return f"{which}{of:.{digits}f} \u00d7 the even share, {share} of the layer\u2019s choices"


@pytest.mark.quick
def test_figures_are_those_of_the_client(page: Page, picture: Locator, load: ExpertLoad) -> None:
    title = page.locator(".title")
    expect(title).to_contain_text(f"{load.tokens:,} tokens of the newest {load.traces} traces")
    values = page.locator(".figures .value").all_inner_texts()
    assert values[0] == f"{load.entropy.mean():.3f}"
    assert values[1] == f"{load.balancedness.mean():.2f}"
    layer, expert = np.unravel_index(load.relative.argmax(), load.relative.shape)
    assert values[2].startswith(f"{load.relative.max():.2f}")
    assert int(values[3].replace(",", "")) == np.count_nonzero(load.relative < 0.2)
    hottest = page.locator(".figures > div").nth(2)
    expect(hottest).to_contain_text(f"layer {LAYOUT.layer_ids[layer]}, expert {expert}")
    rows = page.locator(".hot tbody tr")
    assert rows.count() == 12
    top = np.sort(load.relative.ravel())[::-1]
    for i in range(12):
        cells = rows.nth(i).locator("td").all_inner_texts()
        of = load.relative[LAYOUT.layer_ids.index(int(cells[0])), int(cells[1])]
        assert of == pytest.approx(top[i])
        assert cells[2] == f"{of:.2f} \u00d7"


def test_the_pointer_reads_each_cell(page: Page, picture: Locator, load: ExpertLoad) -> None:
    tip = page.locator(".tip")
    for layer, expert in ((0, 0), (0, 299), (3, 150), (2, 7), (1, 298)):
        picture.hover(position=place(picture, expert, layer))
        expect(tip).to_contain_text(words(load, layer, expert))
    side = (picture.bounding_box() or {})["width"] - RIGHT - 30
    picture.hover(position={"x": side, "y": UPPER + 2.5 * ROW})
    expect(tip).to_have_text(
        f"Layer {LAYOUT.layer_ids[2]}: entropy {load.entropy[2]:.3f}, "
        f"balancedness {load.balancedness[2]:.2f}"
    )
    picture.hover(position={"x": 300, "y": UPPER / 2})
    expect(tip).to_be_hidden()


def test_hottest_first_sorts_each_layer(page: Page, picture: Locator, load: ExpertLoad) -> None:
    page.get_by_role("button", name="Hottest first").click()
    assert "by=load" in page.evaluate("location.hash")
    for layer in range(4):
        order = np.argsort(-load.relative[layer], kind="stable")
        for column in (0, 1, 299):
            picture.hover(position=place(picture, column, layer))
            expect(page.locator(".tip")).to_contain_text(words(load, layer, int(order[column])))
    page.keyboard.press("s")
    assert "by=" not in page.evaluate("location.hash")
    expect(page.get_by_role("button", name="By id")).to_have_attribute("aria-pressed", "true")


def test_colours_say_how_far_from_even(page: Page, picture: Locator, load: ExpertLoad) -> None:
    """Blue below the even share, orange above it, and more so further away."""
    page.keyboard.press("s")
    drawn(page)
    colours = [colour(picture, place(picture, column, 0)) for column in range(0, 300, 20)]
    warm = [red - blue for red, _, blue in colours]
    shares = np.sort(load.relative[0])[::-1][::20]
    for tone, share in zip(warm, shares, strict=True):
        if share > 1.2:
            assert tone > 0
        elif share < 0.8:
            assert tone < 0


def colour(picture: Locator, at: dict[str, float]) -> tuple[int, ...]:
    found = picture.evaluate(
        """(canvas, [x, y]) => {
          const copy = new OffscreenCanvas(1, 1).getContext("2d");
          copy.drawImage(canvas, -Math.floor(x), -Math.floor(y));
          return [...copy.getImageData(0, 0, 1, 1).data];
        }""",
        [at["x"], at["y"]],
    )
    return tuple(found[:3])


def test_keys_move_the_cell(page: Page, picture: Locator, load: ExpertLoad) -> None:
    picture.focus()
    for key, layer, expert in (
        ("ArrowRight", 0, 0), ("Shift+ArrowRight", 0, 16), ("ArrowDown", 1, 16), ("End", 1, 299),
        ("ArrowRight", 1, 299), ("ArrowUp", 0, 299), ("Home", 0, 0), ("ArrowUp", 0, 0),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect(page.locator("#live")).to_contain_text(words(load, layer, expert))
    assert words(load, 0, 0) in (picture.get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    expect(picture).to_have_attribute("aria-label", re.compile("The arrows go from cell to cell"))


def test_filters_choose_the_traces(page: Page, picture: Locator, server, watched) -> None:
    label = page.get_by_label("Add a label, as name=value")
    label.fill("task=math")
    label.press("Enter")
    with RouteClient(server.target, run="r") as client:
        one = client.expert_load(["short"])
    expect(page.locator(".title")).to_contain_text(f"{one.tokens} tokens of the newest 1 trace,")
    assert "label=task%3Dmath" in page.evaluate("location.hash")
    picture.hover(position=place(picture, 0, 0))
    expect(page.locator(".tip")).to_contain_text(words(one, 0, 0))
    # One trace has no course over time.
    expect(page.locator(".hot .spark").first).to_have_class("spark unseen")
    versions = page.get_by_label("Weight versions: one, or a..b")
    watched.allowed.append("status of 400")
    versions.fill("9..1")
    versions.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("version")
    versions.fill("7")
    versions.press("Enter")
    expect(page.get_by_role("heading", name="No trace matches")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    page.locator("main .message").get_by_role("button", name="Clear the filters").click()
    expect(page.locator("canvas.load-map")).to_be_visible()
    assert "label" not in page.evaluate("location.hash")


def test_a_count_is_made_again(page: Page, picture: Locator) -> None:
    with page.expect_response(lambda answer: "after=" in answer.url) as told:
        page.get_by_role("button", name="Count again").click()
    assert told.value.status == 202
    with page.expect_response(lambda answer: "after=" in answer.url and answer.status == 200):
        pass
    expect(page.locator(".title")).to_contain_text("counted now")
    expect(picture).to_be_visible()


def test_a_clock_that_is_ahead_does_not_count_for_ever(page: Page, address: str) -> None:
    page.add_init_script("const now = Date.now; Date.now = () => now() + 3_600_000;")
    opened(page, f"{address}/#/experts?run=second%20run")
    again = page.get_by_role("button", name="Count again")
    with page.expect_response(lambda answer: "after=" in answer.url and answer.status == 200):
        again.click()
    expect(again).to_be_visible()
    with page.expect_response(lambda answer: "after=" in answer.url) as told:
        pass
    assert told.value.status == 304


@pytest.mark.quick
def test_odd_names_are_text_and_another_run_has_its_own(page: Page, address: str) -> None:
    opened(page, f"{address}/#/experts?run=second%20run")
    expect(page.locator(".title")).to_contain_text("29 tokens of the newest 1 trace,")
    engine = page.get_by_label("Engine")
    expect(engine.locator("option").nth(1)).to_have_text(spelled(ODD_ENGINE))
    engine.select_option(ODD_ENGINE)
    expect(page.locator(".title")).to_contain_text("29 tokens")
    assert page.locator("main u").count() == 0


def test_links_and_keys_lead_here(page: Page, address: str) -> None:
    page.goto(f"{address}/#/overview?run=r")
    expect(page.locator("main h1")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page.locator("canvas.load-map")).to_be_visible()
    assert page.title() == "Experts · routetrace"
    expect(page.get_by_role("link", name="Experts")).to_have_attribute("aria-current", "page")
