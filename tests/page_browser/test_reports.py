"""A trainer's report in the view of a trace: picture, figures, worst tokens, the chosen cell."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.comparison import compare_traces
from support.agents.feeder import Feeder
from support.pages import running_page

from .test_hostile import spelled
from .watched import drawn, expect_no_scroll

LAYOUT = ModelLayout((1, 2, 4, 5), 6, 300, 3)
TOKENS, HOLE = 2_000, (500, 540)
#: Positions whose rows the second report has shifted by one token.
SHIFTED = (1_200, 1_500)
ODD = '<img src=x onerror="alert(4)">\u202e'


def choices(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((count, 4, 300)).argsort(axis=2)[..., :3].astype(np.uint16)


IDS = choices(TOKENS, 1)
#: The trainer's own: one layer of every tenth token differs, another one each time.
THEIRS = IDS.copy()
for _at in range(0, TOKENS, 10):
    THEIRS[_at, _at // 10 % 4] = choices(1, _at)[0, 0]
LATE = THEIRS.copy()
LATE[slice(*SHIFTED)] = IDS[SHIFTED[0] - 1 : SHIFTED[1] - 1]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        for name in ("reported", "plain"):
            handle = feeder.begin(name, prompt_len=40)
            for start, stop in ((0, HOLE[0]), (HOLE[1], TOKENS)):
                feeder.step(IDS[start:stop], [[handle, start, stop - start]])
            feeder.finish(handle, TOKENS + 1)
        feeder.close()
        with RouteClient(server.target, run="r") as client:
            client.report_routing("reported", THEIRS, step=1563, weight_version=2**60 + 1)
            client.report_routing("reported", LATE, reporter=ODD)
        yield server


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> Iterator[str]:
    with running_page(server.target) as address:
        yield address.rstrip("/")


def opened(page: Page, address: str, more: str = "", name: str = "reported") -> Locator:
    page.goto(f"{address}/#/trace?run=r&id={name}{more}")
    expect(page.locator("canvas.plot")).to_be_visible()
    return page.locator("section.mismatch")


@pytest.fixture
def card(page: Page, address: str) -> Locator:
    card = opened(page, address, f"&against={quote('report:trainer')}")
    expect(card.locator(".figures")).to_be_visible()
    return card


def compared(server: ServerProcess, reporter: str = "trainer"):
    with RouteClient(server.target, run="r") as client, client.reports(reporter) as reports:
        mine = client.get("reported", missing="mask")
        return compare_traces(mine, reports.get("reported"), worst=10)


def test_figures_are_those_of_the_client(page: Page, card: Locator, server) -> None:
    of = compared(server)
    values = card.locator(".value").all_inner_texts()
    assert values[0] == f"{100 * of.differing / of.cells:.2f}\u00a0%"
    assert values[1] == f"{100 * of.differing_tokens / of.tokens:.1f}\u00a0%"
    assert values[2] == f"{100 * of.overlap:.2f}\u00a0%"
    expect(card).to_contain_text("the differences show no pattern with a known cause")
    expect(card).to_contain_text(f"step 1563, trained with weights {2**60 + 1}")
    expect(card).to_contain_text(f"{40 * 4} are there on one side alone")
    worst = card.locator(".worst li").all_inner_texts()
    assert [text.split("\n")[0] for text in worst] == [
        f"Position {one.position:,}" for one in of.worst
    ]


@pytest.mark.quick
def test_a_cause_is_named_and_odd_names_are_text(page: Page, card: Locator, server) -> None:
    choice = card.get_by_label("Compare with")
    assert [one.inner_text() for one in choice.locator("option").all()] == sorted(
        ["report of trainer", f"report of {spelled(ODD)}"]
    )
    choice.select_option(f"report:{ODD}")
    diagnosis = compared(server, ODD).diagnosis
    assert "shifted by" in diagnosis
    expect(card.locator("p.bad")).to_have_text(f"{diagnosis}.")
    # A browser leaves parentheses as they are.
    assert f"against={quote('report:' + ODD, safe='()')}" in page.evaluate("location.hash")
    assert page.locator("main img").count() == 0
    page.go_back()
    expect(choice).to_have_value("report:trainer")
    expect(card.locator("p.bad")).to_have_count(0)


def test_cells_that_differ_are_coloured(page: Page, card: Locator) -> None:
    page.get_by_role("button", name="Mismatch", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("not chosen by the trainer")
    card.locator(".worst button").first.click()
    expect(page.locator("aside h2")).to_contain_text("Position")
    drawn(page)
    at = int(card.locator(".worst button").first.inner_text().split()[1].replace(",", ""))
    assert at % 10 == 0
    expect(page.locator("aside")).to_contain_text("The trainer chose")
    column = at // 10 % 4
    for _ in range(column):
        page.keyboard.press("ArrowDown")
    where = f"layer {LAYOUT.layer_ids[column]}"
    expect(page.locator("aside h2")).to_have_text(f"Position {at:,}, {where}")
    lists = page.locator("aside .ids")
    for one, ids, others in ((lists.nth(0), IDS, THEIRS), (lists.nth(1), THEIRS, IDS)):
        expect(one.locator("li")).to_have_text([str(n) for n in ids[at, column]])
        odd = [str(n) for n in ids[at, column] if n not in others[at, column]]
        expect(one.locator(".odd")).to_have_text(odd)
        assert odd
    page.keyboard.press("ArrowRight")
    expect(page.locator("aside h2")).to_have_text(f"Position {at + 1:,}, {where}")
    expect(lists.nth(1).locator("li")).to_have_text([str(n) for n in THEIRS[at + 1, column]])
    expect(page.locator("aside .odd")).to_have_count(0)


def test_the_picture_is_that_of_the_rows(page: Page, address: str) -> None:
    """Shifted positions are dark over all layers, others light, at fit."""
    opened(page, address, f"&against={quote('report:' + ODD, safe='')}")
    page.get_by_role("button", name="Mismatch", exact=True).click()
    page.wait_for_load_state("networkidle")
    drawn(page)
    shades = page.locator("canvas.plot").evaluate(
        """(canvas, [tokens, places]) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
          copy.drawImage(canvas, 0, 0);
          const [left, upper] = [56, canvas.height - 30];
          const wide = (canvas.width - left) / (tokens + 1);
          const { data } = copy.getImageData(0, upper, canvas.width, 1);
          return places.map((at) => {
            const i = 4 * Math.floor(left + at * wide);
            return data[i] + data[i + 1] + data[i + 2];
          });
        }""",
        [TOKENS, [100, 900, 1_250, 1_350, 1_450, 1_700]],
    )
    light, dark = [shades[i] for i in (0, 1, 5)], shades[2:5]
    assert max(dark) < min(light) - 150


def test_colouring_by_key_and_without_a_report(page: Page, card: Locator, address: str) -> None:
    page.locator("canvas.plot").focus()
    for _ in range(4):
        page.keyboard.press("c")
    pressed = page.locator(".segmented [aria-pressed=true]", has_text="Mismatch")
    expect(pressed).to_be_visible()
    plain = opened(page, address, name="plain")
    expect(page.get_by_role("button", name="Change", exact=True)).to_be_visible()
    expect(plain).to_be_hidden()
    expect(page.get_by_role("button", name="Mismatch", exact=True)).to_have_count(0)


@pytest.mark.parametrize("width", [380, 1440])
def test_the_card_fits(page: Page, card: Locator, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    expect_no_scroll(page)
    wide = [one.bounding_box()["width"] for one in card.locator(".worst li").all()]
    assert max(wide) < width
