"""Other incarnations and the last attempt beside the rows of a trace: chosen, shown, taken back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from routetrace.client import RouteClient
from routetrace.page.comparing import report_of
from routetrace.page.one_file import Other, document
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.comparison import compare_traces
from support.agents.feeder import Feeder
from support.pages import running_page

from .test_reports import IDS, LAYOUT, choices
from .watched import drawn

#: Rows of the first incarnation, which was aborted, and of the second one.
FIRST, SECOND = 600, 900
#: Positions where all layers of the first incarnation have other experts, and one layer of one.
ODD, ONE, LAYER = (200, 260), 400, 2
EARLIER = IDS[:FIRST].copy()
EARLIER[slice(*ODD)] = choices(ODD[1] - ODD[0], 7)
EARLIER[ONE, LAYER] = (IDS[ONE, LAYER] + 1) % 300
#: Rows of a request before it is preempted; the positions that it computes otherwise after that.
BEFORE, AGAIN = 300, (150, 170)
RECOMPUTED = IDS[:BEFORE].copy()
RECOMPUTED[slice(*AGAIN)] = choices(AGAIN[1] - AGAIN[0], 8)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        for name, earlier in (("twice", EARLIER), ("both", EARLIER), ("shifted", IDS[1:])):
            for request, (ids, rows, end) in enumerate(
                ((earlier, FIRST, "abort"), (IDS, SECOND, "stop"))
            ):
                handle = feeder.begin(f"{name}{request}", trace_id=name, prompt_len=40)
                feeder.step(ids[:rows], [[handle, 0, rows]])
                feeder.finish(handle, rows + 1, reason=end)
                feeder.flush()
        handle = feeder.begin("preempted", prompt_len=40)
        for position in range(0, BEFORE, 50):
            feeder.step(IDS[position : position + 50], [[handle, position, 50]])
        feeder.preempt(handle, BEFORE)
        feeder.resume(handle, 0)
        feeder.step(RECOMPUTED, [[handle, 0, BEFORE]])
        feeder.step(IDS[BEFORE:400], [[handle, BEFORE, 100]])
        feeder.finish(handle, 401)
        tokens = [int(t) for t in np.random.default_rng(5).integers(0, 9000, 400)]
        for request, text in enumerate((tokens, [*tokens[:192], *reversed(tokens[:208])])):
            handle = feeder.begin(
                f"diverging{request}", trace_id="diverging", prompt_len=64,
                prompt_token_ids=text[:64],
            )  # fmt: skip
            feeder.step(IDS[:399], [[handle, 0, 399]])
            feeder.finish(handle, 400, token_ids=text)
            feeder.flush()
        handle = feeder.begin("running", prompt_len=40)
        feeder.step(IDS[:80], [[handle, 0, 80]])
        feeder.flush()
        handle = feeder.begin("told", prompt_len=40)
        feeder.step(IDS[:FIRST], [[handle, 0, FIRST]])
        feeder.finish(handle, FIRST + 1)
        feeder.close()
        with RouteClient(server.target, run="r") as client:
            client.report_routing("both", IDS[:SECOND], step=3)
            client.report_routing("told", EARLIER, step=3)
        yield server


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> Iterator[str]:
    with running_page(server.target) as address:
        yield address.rstrip("/")


def opened(page: Page, address: str, name: str, more: str = "") -> Locator:
    page.goto(f"{address}/#/trace?run=r&id={name}{more}")
    expect(page.locator("canvas.plot")).to_be_visible()
    card = page.locator("section.mismatch")
    expect(card).to_be_visible()
    return card


def compared(server: ServerProcess, name: str, **other):
    with RouteClient(server.target, run="r") as client:
        mine = client.get(name, missing="mask")
        return compare_traces(mine, client.get(name, missing="mask", **other), worst=10)


def check_figures(card: Locator, of) -> None:
    expect(card.locator(".value").first).to_have_text(f"{100 * of.differing / of.cells:.2f}\u00a0%")
    values = card.locator(".value").all_inner_texts()
    assert values[1] == f"{100 * of.differing_tokens / of.tokens:.1f}\u00a0%"
    assert values[2] == f"{100 * of.overlap:.2f}\u00a0%"
    worst = card.locator(".worst li button").all_inner_texts()
    assert worst == [f"Position {one.position:,}" for one in of.worst]


def check_cell(page: Page, at: int, column: int, ids: np.ndarray, others: np.ndarray) -> None:
    """Go to a cell, and compare the panel with the ids of both sides."""
    page.get_by_label("Go to a position").fill(str(at))
    page.get_by_label("Go to a position").press("Enter")
    for _ in range(4):
        page.keyboard.press("ArrowUp")
    for _ in range(column):
        page.keyboard.press("ArrowDown")
    title = f"Position {at:,}, layer {LAYOUT.layer_ids[column]}"
    expect(page.locator("aside h2")).to_have_text(title)
    lists = page.locator("aside .ids")
    for one, own, other in ((lists.nth(0), ids, others), (lists.nth(1), others, ids)):
        expect(one.locator("li")).to_have_text([str(n) for n in own])
        expect(one.locator(".odd")).to_have_text([str(n) for n in own if n not in other])


def shades(page: Page, tokens: int, places: list[int]) -> list[int]:
    """Return the lightness of the first layer at positions, the whole trace being seen."""
    page.wait_for_load_state("networkidle")
    drawn(page)
    return page.locator("canvas.plot").evaluate(
        """(canvas, [tokens, places]) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
          copy.drawImage(canvas, 0, 0);
          const [left, upper] = [56, canvas.height - 30];
          const wide = (canvas.width - left) / (tokens + 1);
          const { data } = copy.getImageData(0, upper, canvas.width, 1);
          return places.map((at) => {
            const i = 4 * Math.floor(left + (at + 0.5) * wide);
            return data[i] + data[i + 1] + data[i + 2];
          });
        }""",
        [tokens, places],
    )


def test_nothing_is_compared_until_a_side_is_chosen(page: Page, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    card = opened(page, address, "twice")
    choice = card.get_by_label("Compare with")
    expect(choice.locator("option")).to_have_text(["compare with …", "#1 abort"])
    expect(card.locator("h2")).to_have_text("Comparison")
    expect(card.locator(".figures")).to_be_hidden()
    page.wait_for_load_state("networkidle")
    expect(page.get_by_role("button", name="Mismatch", exact=True)).to_have_count(0)
    assert not [url for url in asked if "/diff" in url or "against" in url]
    page.goto(f"{address}/#/trace?run=r&id=preempted&against=%239")
    expect(choice).to_have_value("")


def test_another_incarnation_is_chosen_kept_and_taken_back(
    page: Page, address: str, server
) -> None:
    card = opened(page, address, "twice")
    choice = card.get_by_label("Compare with")
    choice.select_option("#1 abort")
    of = compared(server, "twice", incarnation=1)
    assert (of.cells, of.differing) == (FIRST * 4, (ODD[1] - ODD[0]) * 4 + 1)
    check_figures(card, of)
    expect(card.locator("h2")).to_have_text("Against incarnation #1")
    page.get_by_role("button", name="Mismatch", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("experts not chosen by incarnation #1")
    before, odd, after = shades(page, SECOND, [100, 230, 350])
    assert odd < min(before, after) - 150
    check_cell(page, ODD[0] + 9, 1, IDS[ODD[0] + 9, 1], EARLIER[ODD[0] + 9, 1])
    expect(page.locator("aside")).to_contain_text("Incarnation #1 chose")
    check_cell(page, ONE, LAYER, IDS[ONE, LAYER], EARLIER[ONE, LAYER])
    check_cell(page, ONE + 1, LAYER, IDS[ONE + 1, LAYER], EARLIER[ONE + 1, LAYER])
    assert f"against={quote('#1')}" in page.evaluate("location.hash")

    page.reload()
    expect(choice).to_have_value("#1")
    check_figures(card, of)

    choice.select_option("nothing")
    expect(card.locator(".figures")).to_be_hidden()
    expect(page.get_by_role("button", name="Mismatch", exact=True)).to_have_count(0)
    assert "against" not in page.evaluate("location.hash")
    page.go_back()
    check_figures(card, of)


def test_cells_beyond_a_shorter_side(page: Page, address: str) -> None:
    opened(page, address, "twice", "&against=%231&at=850")
    expect(page.locator("aside h2")).to_have_text(f"Position 850, layer {LAYOUT.layer_ids[0]}")
    expect(page.locator("aside .ids").first.locator("li")).to_have_text(
        [str(n) for n in IDS[850, 0]]
    )
    page.wait_for_load_state("networkidle")
    expect(page.locator("aside .theirs")).to_be_hidden()
    expect(page.locator(".note")).to_be_hidden()


def test_the_other_way_round(page: Page, address: str, server) -> None:
    """The incarnation that is shown is no side; the colouring stays while another one is shown."""
    card = opened(page, address, "twice", "&incarnation=1")
    choice = card.get_by_label("Compare with")
    expect(choice.locator("option")).to_have_text(["compare with …", "#2 stop"])
    choice.select_option("#2 stop")
    page.get_by_role("button", name="Mismatch", exact=True).click()
    check_cell(page, ONE, LAYER, EARLIER[ONE, LAYER], IDS[ONE, LAYER])
    expect(page.locator("aside")).to_contain_text("Incarnation #2 chose")
    page.get_by_role("button", name="#2 stop", exact=True).click()
    expect(choice.locator("option")).to_have_text(["compare with …", "#1 abort"])
    expect(card.locator(".figures")).to_be_hidden()


def test_a_report_comes_first_and_stays_the_default(page: Page, address: str, server) -> None:
    card = opened(page, address, "both")
    choice = card.get_by_label("Compare with")
    expect(choice.locator("option")).to_have_text(["report of trainer", "#1 abort"])
    expect(card.locator("h2")).to_have_text("Against the report of a trainer")
    expect(card).to_contain_text("The same in all 3,600 cells.")
    page.get_by_role("button", name="Mismatch", exact=True).click()
    choice.select_option("#1 abort")
    check_figures(card, compared(server, "both", incarnation=1))
    pressed = page.locator(".segmented [aria-pressed=true]", has_text="Mismatch")
    expect(pressed).to_be_visible()
    choice.select_option("report of trainer")
    expect(card).to_contain_text("The same in all 3,600 cells.")


def test_the_last_attempt(page: Page, address: str, server) -> None:
    card = opened(page, address, "preempted")
    choice = card.get_by_label("Compare with")
    expect(choice.locator("option")).to_have_text(["compare with …", "last attempt"])
    choice.select_option("last attempt")
    of = compared(server, "preempted", policy="latest")
    assert of.differing == (AGAIN[1] - AGAIN[0]) * 4
    check_figures(card, of)
    expect(card.locator("h2")).to_have_text("Against the last attempt")
    at = AGAIN[0] + 3
    check_cell(page, at, 3, IDS[at, 3], RECOMPUTED[at, 3])
    expect(page.locator("aside")).to_contain_text("The last attempt chose")


def test_words_name_the_side(page: Page, address: str, server) -> None:
    card = opened(page, address, "shifted", "&against=%231")
    of = compared(server, "shifted", incarnation=1)
    assert "the trainer chose" in of.diagnosis
    expect(card.locator("p.bad")).to_have_text(
        f"{of.diagnosis.replace('the trainer', 'incarnation #1')}."
    )


@pytest.mark.parametrize("name", ["both", "preempted"])
def test_one_file_has_no_other_side(watched, server, tmp_path: Path, name: str) -> None:
    """A file holds one side, and no view of experts."""
    with RouteClient(server.target, run="r") as client:
        trace = client.get(name, missing="mask")
        text, _ = document(trace, client.describe(name), server.target, 32 << 20)
    path = tmp_path / "trace.html"
    path.write_text(text, "utf-8")
    page = watched.page
    watched.allowed.append("file://")
    page.goto(path.as_uri())
    expect(page.locator("canvas.plot")).to_be_visible()
    drawn(page)
    expect(page.locator("section.mismatch")).to_be_hidden()
    expect(page.get_by_text("Load of experts")).to_be_hidden()
    expect(page.get_by_role("group", name="Incarnation")).to_be_hidden()


@pytest.mark.parametrize(
    ("name", "side", "title"),
    [
        ("told", "report:trainer", "Against the report of a trainer"),
        ("twice", "#1", "Against incarnation #1"),
        ("preempted", "latest", "Against the last attempt"),
    ],
)
def test_one_file_with_another_side(
    watched, server, tmp_path: Path, name: str, side: str, title: str
) -> None:
    with RouteClient(server.target, run="r") as client:
        trace = client.get(name, missing="mask")
        with client.reports("trainer") as reports:
            source, more = (reports, {}) if side.startswith("report") else (client, {})
            if side == "latest":
                more = {"policy": "latest"}
            if side == "#1":
                more = {"incarnation": 1}
            theirs = source.get(name, missing="mask", **more)
            about = report_of(reports.stat(name), "trainer") if source is reports else None
        other = Other(side, theirs, about)
        text, _ = document(trace, client.describe(name), server.target, 32 << 20, other)
    path = tmp_path / "trace.html"
    path.write_text(text, "utf-8")
    page = watched.page
    watched.allowed.append("file://")
    page.goto(path.as_uri())
    card = page.locator("section.mismatch")
    expect(card.locator("h2")).to_have_text(title)
    check_figures(card, compare_traces(trace, theirs, worst=10))
    expect(card.locator("select")).to_be_hidden()
    expect(page.get_by_role("group", name="Incarnation")).to_be_hidden()
    page.get_by_role("button", name="Mismatch", exact=True).click()
    for at in (ODD[0], ONE, AGAIN[0]):
        if at < min(len(trace), theirs.token_stop):
            check_cell(page, at, LAYER, trace.topk_ids[at, LAYER], theirs.topk_ids[at, LAYER])


@pytest.mark.parametrize(
    ("name", "side"),
    [("running", "#1"), ("running", "latest"), ("told", "latest"), ("twice", "#2")],
)
def test_one_file_shows_each_side_that_it_holds(
    watched, server, tmp_path: Path, name: str, side: str
) -> None:
    """Also one that the view of a server does not offer: of a trace that runs, or the same rows."""
    path = tmp_path / "trace.html"
    command = [sys.executable, "-m", "routetrace.cli", "view", name, "-o", str(path)]
    options = ["--against", side, "--target", server.target, "--run", "r"]
    subprocess.run([*command, *options], check=True, timeout=60)
    page = watched.page
    watched.allowed.append("file://")
    page.goto(path.as_uri())
    expect(page.locator("section.mismatch")).to_contain_text("The same in all")


def test_experts_of_other_tokens_are_not_compared(page: Page, address: str, server) -> None:
    """Beyond the position where digests prove that an incarnation has other tokens."""
    card = opened(page, address, "diverging", "&against=%231")
    with RouteClient(server.target, run="r") as client:
        both = (client.get("diverging"), client.get("diverging", incarnation=1))
        until = compare_traces(*both).other_tokens_from
    assert until is not None
    expect(card).to_contain_text(f"From position {until:,} on the tokens are not the same")
    page.wait_for_load_state("networkidle")
    others = page.locator("aside .theirs")
    for at, compared_there in ((until - 1, True), (until, False), (until + 30, False)):
        page.get_by_label("Go to a position").fill(str(at))
        page.get_by_label("Go to a position").press("Enter")
        expect(page.locator("aside h2")).to_contain_text(f"Position {at:,},")
        expect(page.locator("aside .ids").first.locator("li").first).to_be_visible()
        expect(others).to_be_visible(visible=compared_there)
        expect(page.locator("aside .ids").first.locator(".odd")).to_have_count(0)
