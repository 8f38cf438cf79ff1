"""The view of mismatch: its words, figures and picture are those of the reports."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from routetrace.client import Agreement, RouteClient
from routetrace.client.agreement import Choices

from .conftest import LAYOUT, ODD_IDS, STEPS, UPDATE, WORSE, agreement_at, report
from .test_hostile import spelled
from .watched import drawn

#: Of picture and axis, in px: the left edge, the right one, where layers begin, height of a layer.
LEFT, RIGHT, UPPER, ROW = 52, 12, 150, 14


@pytest.fixture
def picture(page: Page, address: str) -> Locator:
    page.goto(f"{address}/#/mismatch?run=r")
    canvas = page.locator("canvas.mismatch")
    expect(canvas).to_be_visible()
    drawn(page)
    return canvas


def place(picture: Locator, step: int, column: int | None) -> dict[str, float]:
    """Where a step, and one of its layers, is on the picture."""
    slots = STEPS[-1] - STEPS[0] + 1
    width = (picture.bounding_box() or {})["width"]
    x = LEFT + (step - STEPS[0] + 0.5) * (width - LEFT - RIGHT) / slots
    return {"x": x, "y": 60 if column is None else UPPER + (column + 0.5) * ROW}


def words(step: int, layer: int | None) -> str:
    of = agreement_at(step)
    cells, differing, _, _ = of.choices if layer is None else of.by_layer[layer]
    where = "" if layer is None else f", layer {layer}"
    share = f"{100 * differing / cells:.2f}\u00a0% of cells differ" if cells else "no cell compared"
    return f"Step {step}, weights {step // UPDATE}{where}: {share}"


def bars(page: Page, name: str) -> list[str]:
    return page.get_by_role("region", name=name).locator("li").all_inner_texts()


@pytest.mark.quick
def test_the_verdict_is_that_of_the_client(page: Page, picture: Locator, server) -> None:
    with RouteClient(server.target, run="r") as client:
        change = client.agreement_history().change()
    assert change is not None
    assert change.step == WORSE
    expect(page.locator(".notices li").first).to_contain_text(change.words)
    # Layers 2 and 4 are worse, 5, which sees what they compute, is not.
    expect(page.locator(".notices li").first).to_contain_text("Likely: some layers differ more")
    expect(page.locator(".notices li").first).to_contain_text("they compute: 4 (30%): their own")
    expect(page.locator(".title")).to_contain_text(f"{len(STEPS)} steps of r")
    page.get_by_role("button", name="First worse step").click()
    expect(page.locator("#mismatch-words")).to_have_text(
        f"Step {WORSE}, trained with weights {WORSE // UPDATE}"
    )


@pytest.mark.quick
def test_odd_words_and_ids_are_text(page: Page, picture: Locator, address: str) -> None:
    notice = page.locator(".notices li").nth(1)
    expect(notice).to_contain_text(f"Step {STEPS[-1]}: ")
    expect(notice).to_contain_text("<img src=x onerror=alert(3)>\\u202erows are shifted")
    assert page.locator("main img").count() == 0
    links = notice.get_by_role("link")
    assert links.all_inner_texts() == list(map(spelled, ODD_IDS[:3]))
    links.nth(2).click()
    expect(page.locator("h1 bdi")).to_have_text(spelled(ODD_IDS[2]))


def test_figures_are_those_of_the_step(page: Page, picture: Locator) -> None:
    for step in (STEPS[-1], 140, STEPS[0]):
        picture.click(position=place(picture, step, None))
        expect(page.locator("#mismatch-words")).to_contain_text(f"Step {step},")
        assert f"step={step}" in page.evaluate("location.hash")
        of = agreement_at(step)
        cells, differing, _, _ = of.choices
        found = page.locator(".figures .value").all_inner_texts()
        assert found[0] == f"{100 * differing / cells:.2f}\u00a0%"
        assert found[1] == f"{100 * of.differing_tokens / of.tokens:.1f}\u00a0%"
        assert found[3].startswith(f"{cells / 1000:.2f}")
        expect(page.locator(".figures")).to_contain_text("1 reporter")
        worst = sorted((-c.differing / c.cells, i) for i, c in of.by_layer.items() if c.cells)
        expected = [f"Layer {i}\n{-100 * share:.2f}\u00a0%" for share, i in worst]
        assert [text.replace("\n\n", "\n") for text in bars(page, "Layers")] == expected
        ages = [text.split("\n")[0] for text in bars(page, "Weights of the rows")]
        version = step // UPDATE
        assert ages == [
            f"{version}, the trainer\'s", f"{version - 1}, 1 behind", f"{version - 2}, 2 behind"
        ]  # fmt: skip


@pytest.mark.parametrize("column", [None, 0, 1, 2, 3])
def test_the_pointer_reads_each_cell(page: Page, picture: Locator, column: int | None) -> None:
    layer = None if column is None else LAYOUT.layer_ids[column]
    for step in (STEPS[0], 107, WORSE, 140, STEPS[-1]):
        picture.hover(position=place(picture, step, column))
        expect(page.locator(".tip")).to_have_text(words(step, layer))


def test_cells_have_the_colour_of_their_share(page: Page, picture: Locator) -> None:
    """The more differs, the darker; steps left out, and layers without cells, are empty."""
    ground = colour(picture, place(picture, 135, 1))
    dark = [colour(picture, place(picture, step, 1)) for step in (125, WORSE, 110)]
    assert dark == sorted(dark, key=sum)
    assert len(set(dark)) == 3
    assert ground == (255, 255, 255)
    assert colour(picture, place(picture, STEPS[-1] - 1, 3)) != ground
    picture.click(position=place(picture, STEPS[0], 0))  # the cursor is elsewhere
    assert colour(picture, place(picture, STEPS[-1], 3)) == ground


def test_no_line_crosses_steps_that_were_left_out(page: Page, picture: Locator) -> None:
    picture.click(position=place(picture, STEPS[-1], 0))  # the cursor is elsewhere
    for step, there in ((104, True), (140, True), (132, False), (137, False), (145, False)):
        x = place(picture, step, None)["x"]
        column = [colour(picture, {"x": x, "y": y}) for y in range(8, 132)]
        assert any(blue > red + 40 for red, _, blue in column) == there, step


def colour(picture: Locator, at: dict[str, float]) -> tuple[int, ...]:
    found = picture.evaluate(
        """(canvas, [x, y]) => {
          const copy = new OffscreenCanvas(1, 1).getContext("2d");
          copy.drawImage(canvas, -Math.floor(x), -Math.floor(y));
          return [...copy.getImageData(0, 0, 1, 1).data];
        }""",
        [at["x"], at["y"]],
    )
    return tuple(found[:3]) if found[3] else (255, 255, 255)


def test_keys_move_step_and_layer(page: Page, picture: Locator) -> None:
    picture.focus()
    said = page.locator("#live")
    for key, step, layer in (
        ("ArrowLeft", 158, None), ("Shift+ArrowLeft", 129, None), ("ArrowDown", 129, 1),
        ("ArrowDown", 129, 2), ("ArrowUp", 129, 1), ("ArrowUp", 129, 1), ("Home", 100, 1),
        ("ArrowRight", 101, 1), ("Escape", 101, None), ("ArrowUp", 101, 5),
        ("End", STEPS[-1], 5), ("ArrowRight", STEPS[-1], 5),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect(said).to_have_text(words(step, layer))
    expect(picture).to_be_focused()
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.keyboard.press("g")
    page.keyboard.press("m")
    expect(page.get_by_role("heading", level=1)).to_have_text("Mismatch")


def test_a_step_of_the_address_is_chosen_and_stays(
    page: Page, address: str, server, watched
) -> None:
    run = "follows"
    with RouteClient(server.target, run=run) as client:
        for step in range(9):
            client.report_agreement(step, Agreement(by_layer={1: Choices(10, step, 0, 0)}))
        page.goto(f"{address}/#/mismatch?run={run}&step=3")
        chosen = page.locator("#mismatch-words")
        expect(chosen).to_have_text("Step 3")
        page.get_by_role("button", name="step >").focus()
        client.report_agreement(9, Agreement(by_layer={1: Choices(10, 9, 0, 0)}))
        expect(page.locator(".title")).to_contain_text("10 steps")  # the next poll
        expect(chosen).to_have_text("Step 3")
        expect(page.get_by_role("button", name="step >")).to_be_focused()
        # Without one in the address, the last step is followed.
        page.goto(f"{address}/#/mismatch?run={run}")
        expect(chosen).to_have_text("Step 9")
        client.report_agreement(10, Agreement(by_layer={1: Choices(10, 1, 0, 0)}))
        expect(chosen).to_have_text("Step 10")


def test_an_early_step_of_the_address_is_shown(page: Page, address: str, server) -> None:
    """One that is not among the last 500."""
    with RouteClient(server.target, run="long") as client:
        for step in range(510):
            client.report_agreement(step, Agreement(by_layer={1: Choices(10, 1, 0, 0)}))
    page.goto(f"{address}/#/mismatch?run=long&step=4")
    expect(page.locator("#mismatch-words")).to_have_text("Step 4")
    expect(page.locator(".title")).to_have_text("Mismatch510 steps of long")


def test_the_layer_stays_chosen_where_layers_come_and_go(page: Page, address: str, server) -> None:
    def layers(*ids: int) -> Agreement:
        return Agreement(by_layer={layer: Choices(1000, layer, 0, 0) for layer in ids})

    with RouteClient(server.target, run="layers") as client:
        client.report_agreement(1, layers(4, 6))
        page.goto(f"{address}/#/mismatch?run=layers&step=1")
        picture = page.locator("canvas.mismatch")
        expect(picture).to_be_visible()
        picture.focus()
        page.keyboard.press("ArrowUp")
        expect(page.locator("#live")).to_contain_text("layer 6: 0.60")
        client.report_agreement(2, layers(1, 2, 4, 6))
        expect(page.locator(".title")).to_contain_text("2 steps")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#live")).to_have_text("Step 2, layer 6: 0.60\u00a0% of cells differ")
        client.report_agreement(1, layers(4))
        client.report_agreement(2, layers(4))
        expect(page.locator(".figures")).to_contain_text("1.00")  # k cells
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#live")).to_have_text("Step 1: 0.40\u00a0% of cells differ")


def test_steps_without_a_compared_cell(page: Page, address: str, server) -> None:
    """A trainer may compare log-probabilities alone."""
    with RouteClient(server.target, run="no cells") as client:
        for step in range(3):
            client.report_agreement(step, Agreement())
    page.goto(f"{address}/#/mismatch?run=no%20cells")
    picture = page.locator("canvas.mismatch")
    expect(picture).to_be_visible()
    expect(page.locator(".notices li")).to_contain_text("No cell was compared.")
    picture.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#live")).to_have_text("Step 1: no cell compared")
    picture.hover(position={"x": 300, "y": 100})
    expect(page.locator(".tip")).to_contain_text("no cell compared")


def test_without_a_report_it_says_what_to_do(page: Page, address: str) -> None:
    page.goto(f"{address}/#/mismatch?run={quote('second run')}")
    expect(page.get_by_role("heading", level=1)).to_have_text("No trainer has reported its choices")
    page.get_by_role("button", name="Copy").click()
    code = "client.report_agreement(step, agreement)"
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_steady_steps_are_said_to_be_so(page: Page, address: str, server) -> None:
    with RouteClient(server.target, run="steady") as client:
        for step in range(0, 500, 10):
            client.report_agreement(step, Agreement(by_layer={1: Choices(200, 3, 0, 0)}))
    page.goto(f"{address}/#/mismatch?run=steady")
    expect(page.locator(".notices li")).to_have_text(
        "good1.50\u00a0% of cells differ in the last 20 steps, and no step is clearly worse than "
        "those before it. "
    )


def test_the_reports_of_these_tests_are_valid(server) -> None:
    with RouteClient(server.target, run="again") as client:
        report(client)
        assert tuple(s.step for s in client.agreement_history().steps) == STEPS
