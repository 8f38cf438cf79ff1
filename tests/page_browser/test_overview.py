"""The overview says what is wrong, and its figures are those of the client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, expect

from routetrace.client import RouteClient, TraceState
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder

from .conftest import LAYOUT, ROWS
from .watched import Watched, drawn, open_tab, pixels

#: Colour of dropped rows in the light theme, as a canvas gives it.
BAD = (184, 58, 0)
HOST = "<img src=x>\u202eh"


@dataclass
class Run:
    """A server with a run of three engines, and its feeders by engine."""

    server: ServerProcess
    feeders: dict[str, Feeder]

    def beat(self, engine: str, **report: int) -> None:
        """Send a heartbeat; a number of dropped rows is named after its reason."""
        reasons = ("queue_full", "invalid_ids", "rewound")
        dropped = {name: report.pop(name) for name in reasons if name in report}
        beat = pb.Heartbeat(**report)
        beat.dropped_rows.update(dropped)
        self.feeders[engine].stream._out.put(pb.IngestRequest(heartbeat=beat))

    def add(self, engine: str, name: str, tokens: int, lost: int = 0, reason: str = "stop") -> None:
        """Add a trace whose last `lost` rows are not reported."""
        feeder = self.feeders[engine]
        handle = feeder.begin(name, prompt_len=5)
        rows = tokens - 1 - lost
        feeder.step(ROWS[:rows], [[handle, 0, rows]])
        if reason:
            feeder.finish(handle, tokens, reason=reason)
        feeder.flush()


def run_of(server: ServerProcess, tokens: dict[str, int]) -> Run:
    """Return a run of engines with one trace each, by its tokens, and a first heartbeat."""
    feeders = {n: Feeder(server.target, LAYOUT, run="r", engine_id=n) for n in tokens}
    run = Run(server, feeders)
    for name, count in tokens.items():
        run.add(name, f"of {name}", count)
        run.beat(name)
    return run


@pytest.fixture
def run() -> Iterator[Run]:
    """Dropped rows are a problem for a minute: each test has a run of its own."""
    with run_server(agent_timeout_seconds=3600) as server:
        about = {"host": HOST, "routetrace": "0.8.0"}
        run = Run(server, {
            name: Feeder(server.target, LAYOUT, run="r", engine_id=name, attributes=about)
            for name in ("calm", "drops", "slow")
        })  # fmt: skip
        for number in range(20):
            run.feeders["calm"].set_weight_version(3)
            run.add("calm", f"whole{number}", 50 + number)
        run.add("drops", "hole", 90, lost=30)
        run.add("drops", "hole too", 90, lost=2)
        run.add("slow", "aborted", 90, lost=60, reason="abort")
        run.add("slow", "running", 90, reason="")
        run.beat("drops")
        run.beat("drops", queue_full=1500, rewound=9, in_flight_rows=70)
        run.beat("slow", lag_ms=12_000, in_flight_rows=4000, queued_bytes=3 << 20)
        run.beat("calm", rewound=40)
        yield run
        for feeder in run.feeders.values():
            feeder.close()


@pytest.fixture
def opened(context, run: Run) -> Iterator[Watched]:
    """The overview, once its figures are those of the heartbeats."""
    with open_tab(context, run.server.target) as watched:
        expect(notice(watched.page, "drops")).to_be_visible()
        expect(notice(watched.page, "slow")).to_be_visible()
        yield watched


def notice(page: Page, subject: str):
    return page.locator(".notices li").filter(has=page.locator("strong", has_text=subject))


def figure(page: Page, name: str):
    return page.locator(".figures > div").filter(has=page.locator(f"dt:text-is('{name}')"))


@pytest.mark.quick
def test_figures_are_those_of_the_client(opened: Watched, run: Run) -> None:
    page = opened.page
    with RouteClient(run.server.target, run="r") as client:
        stats = list(client.find())
        agents = {agent.engine_id: agent for agent in client.agents()}
        info = client.server_info()
    ended = [stat for stat in stats if stat.state is not TraceState.RUNNING]
    cells = sum(stat.num_rows for stat in ended) * len(LAYOUT.layer_ids)
    missing = sum(sum(stat.missing_cells.values()) for stat in ended)
    share = f"{100 * (1 - missing / cells):.2f}\u00a0%"
    expect(figure(page, "Coverage").locator(".value")).to_have_text(share)
    expect(figure(page, "Traces").locator(".value")).to_have_text(str(len(stats)))
    for state in TraceState:
        number = sum(stat.state is state for stat in stats)
        link = figure(page, "Traces").get_by_role(
            "link", name=f"{number} {state.value}", exact=True
        )
        expect(link).to_be_visible()
    assert 0 < info.used_bytes / info.capacity_bytes < 0.01
    expect(figure(page, "Store").locator(".value")).to_have_text("< 1\u00a0%")
    expect(figure(page, "Store")).to_contain_text("of 64\u00a0GiB; in memory")
    for name, agent in agents.items():
        cells_of = page.locator("tbody tr").filter(has=page.locator("a", has_text=name))
        texts = cells_of.locator("td").all_inner_texts()
        version = "\u2013" if agent.weight_version is None else str(agent.weight_version)
        assert texts[7].split(",")[0] == version
        assert texts[8] == agent.attributes["routetrace"]
        assert texts[9] == "<img src=x>\\u202eh"
    assert page.locator("main img").count() == 0


@pytest.mark.quick
def test_what_is_wrong_comes_first_with_its_evidence(opened: Watched, run: Run) -> None:
    page = opened.page
    subjects = page.locator(".notices strong").all_inner_texts()
    assert subjects == ["drops", "slow", "3 traces are incomplete"]
    expect(notice(page, "drops")).to_contain_text("has dropped 1,500 rows in the last minute")
    expect(notice(page, "drops")).to_contain_text("queue full")
    expect(notice(page, "drops")).to_contain_text("raise queue_bytes")
    expect(notice(page, "slow")).to_contain_text("is 12\u00a0s late: 4,000 rows wait there, 3.0")
    expect(notice(page, "incomplete")).to_contain_text("not captured")
    states = page.locator("tbody .state").all_inner_texts()
    assert states == ["dropping", "late", "live"], "rows that an engine took back are no loss"
    notice(page, "drops").get_by_role("link", name="The incomplete ones").click()
    expect(page.locator(".list .row .name")).to_have_text(["hole too", "hole"])
    page.go_back()
    notice(page, "incomplete").get_by_role("link", name="Those of not captured").click()
    expect(page.locator(".list .row .name")).to_have_text(["hole too", "hole"])
    page.go_back()
    page.locator("tbody").get_by_role("link", name="slow").click()
    expect(page.locator(".list .row .name")).to_have_text(["running", "aborted"])
    assert page.evaluate("location.hash") == "#/traces?engine=slow&run=r"


def test_missing_cells_and_the_words_of_their_reasons(opened: Watched) -> None:
    page = opened.page
    reasons = page.locator(".reasons li")
    expect(reasons).to_have_count(2)
    expect(reasons.first).to_contain_text("Aborted240, 65\u00a0%")
    expect(reasons.last).to_contain_text("Not captured128, 35\u00a0%")
    expect(reasons.last).to_contain_text("Check that capture is attached")


def test_dropped_rows_are_seen_and_the_cursor_reads_values(opened: Watched) -> None:
    page = opened.page
    expect(page.locator("figcaption")).to_contain_text("1,500 rows dropped, the first at ")
    found, columns = pixels(page, BAD, "canvas.series")
    assert found >= 3, "1,500 rows of one step, beside all that were stored"
    canvas = page.locator("canvas.series")
    canvas.focus()
    # The last step may be that of the loss: the page shows a step as soon as it has ended.
    page.keyboard.press("End")
    for _ in range(60):
        if "rows/s dropped" in page.locator("figcaption").inner_text():
            break
        page.keyboard.press("ArrowLeft")
    expect(page.locator("figcaption")).to_contain_text("750 rows/s dropped")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("figcaption")).to_have_text(
        re.compile(r"^\d\d:\d\d:\d\d: \S+ rows/s stored, none dropped$")
    )
    page.keyboard.press("ArrowRight")
    expect(page.locator("figcaption")).to_contain_text("750 rows/s dropped")
    expect(page.locator("#live")).to_contain_text("750 rows/s dropped")
    page.keyboard.press("Escape")
    expect(page.locator("figcaption")).to_contain_text("1,500 rows dropped, the first at ")


def test_focus_and_selection_survive_a_poll(opened: Watched, run: Run) -> None:
    page = opened.page
    link = page.locator("tbody").get_by_role("link", name="calm")
    link.focus()
    page.evaluate(
        "() => { const words = document.querySelector('.notices p');"
        " getSelection().selectAllChildren(words);"
        " window.kept = document.activeElement; }"
    )
    chosen = page.evaluate("getSelection().toString()")
    before = figure(page, "Traces").locator(".value").inner_text()
    run.beat("calm", lag_ms=60_000)  # moves its row
    run.add("calm", "one more", 20)
    expect(figure(page, "Traces").locator(".value")).to_have_text(str(int(before) + 1))
    expect(notice(page, "calm")).to_be_visible()
    assert page.locator("tbody a").all_inner_texts() == ["drops", "calm", "slow"]
    assert page.evaluate("window.kept === document.activeElement")
    assert page.evaluate("getSelection().toString()") == chosen
    run.beat("calm")


def test_the_chart_fills_its_card(opened: Watched) -> None:
    """The card is as high as its neighbour, on one column as high as its own content."""
    page = opened.page
    body = page.get_by_role("region", name="Missing").locator(".body").first
    body.evaluate("(body) => { body.style.minHeight = '420px'; }")
    chart = page.locator("canvas.series")

    def left() -> float:
        card = page.get_by_role("region", name="Throughput").bounding_box()
        words = page.locator("figcaption").bounding_box()
        return card["y"] + card["height"] - words["y"] - words["height"]

    assert chart.bounding_box()["height"] > 400
    assert left() < 24
    drawn(page)
    assert chart.evaluate("(one) => one.height === Math.round(one.clientHeight * devicePixelRatio)")
    page.set_viewport_size({"width": 380, "height": 800})
    assert chart.bounding_box()["height"] == 216
    assert left() < 24


def test_many_engines_with_one_trouble_are_one_sentence(context) -> None:
    with run_server() as server:
        run = run_of(server, {f"e{n}": 20 for n in range(5)})
        for number in range(5):
            run.beat(f"e{number}", lag_ms=9000 + 1000 * number)
        with open_tab(context, server.target) as tab:
            told = notice(tab.page, "5 engines are late")
            expect(told).to_contain_text(": e4 is 13\u00a0s late")
            assert tab.page.locator(".notices li").count() == 1
            told.get_by_role("button", name="See the engines").click()
            expect(tab.page.get_by_role("region", name="Engines").last).to_be_focused()
            expect(tab.page.locator("tbody .state")).to_have_text(["late"] * 5)
            told.get_by_role("link", name="Traces of e4").click()
            expect(tab.page.locator(".list .row .name")).to_have_text(["of e4"])


def test_a_shard_that_is_gone_is_named(context) -> None:
    with run_server(agent_timeout_seconds=3600) as server:
        shards = [Feeder(server.target, LAYOUT, run="r", engine_id="e", shard=s) for s in "ab"]
        for feeder in shards:
            feeder.begin("one", prompt_len=5)
            feeder.flush()
        with open_tab(context, server.target) as tab:
            engine = tab.page.locator("tbody tr").filter(has_text="e").locator("td").first
            expect(engine).to_have_text("e a b")
            shards[1].close()
            expect(engine).to_have_text("e a without b")
            expect(engine.locator(".lost-rows")).to_have_text("without b")
            expect(notice(tab.page, "e")).to_contain_text("e: its shard b is gone, last heard of")
            shards[0].close()


def test_an_engine_that_was_closed_is_no_trouble(context) -> None:
    with run_server(agent_timeout_seconds=3600) as server:
        shards = [Feeder(server.target, LAYOUT, run="r", engine_id="e", shard=s) for s in "ab"]
        with open_tab(context, server.target) as tab:
            engine = tab.page.locator("tbody tr").filter(has_text="e").locator("td").first
            expect(engine).to_have_text("e a b")
            shards[1].close(closed=True)
            expect(engine).to_have_text("e a (closed: b)")
            shards[0].close(closed=True)
            expect(tab.page.locator("tbody .state")).to_have_text("closed")
            expect(tab.page.locator(".engines header .muted")).to_have_text(
                "none is connected, 1 closed"
            )
            expect(notice(tab.page, "All is well.")).to_contain_text("No engine is connected.")


def test_a_loss_of_few_rows_is_a_warning_below_real_trouble(context) -> None:
    """Of the same reason, many rows are a problem: the engine "most"."""
    with run_server() as server:
        run = run_of(server, {"few": 101, "late": 101, "most": 101, "share": 20_001})
        run.beat("few", invalid_ids=3)
        run.beat("late", lag_ms=9000)
        run.beat("most", invalid_ids=300)
        run.beat("share", invalid_ids=19)
        with open_tab(context, server.target) as tab:
            rest = "3 rows in the last minute (2.9\u00a0% of its rows): invalid ids"
            expect(notice(tab.page, "few")).to_contain_text(rest)
            expect(notice(tab.page, "late")).to_be_visible()
            tones = tab.page.locator(".notices li").evaluate_all(
                "(all) => all.map((one) => [one.querySelector('strong').textContent,"
                " one.dataset.tone])"
            )
            assert tones == [
                ["most", "bad"], ["late", "bad"], ["few", "warn"], ["share", "warn"],
            ]  # fmt: skip


def test_a_group_of_engines_has_the_tone_of_the_worst(context) -> None:
    """More rows are dropped by "many", but few of its own; of "half" they are half of them."""
    with run_server() as server:
        run = run_of(server, {"half": 16, "many": 20_001, "one": 16, "two": 16})
        for name, lost in {"half": 15, "many": 19, "one": 1, "two": 2}.items():
            run.beat(name, invalid_ids=lost)
        with open_tab(context, server.target) as tab:
            told = notice(tab.page, "4 engines drop rows")
            expect(told).to_contain_text(": half has dropped 15 rows")
            expect(tab.page.locator(".notices li").first).to_have_attribute("data-tone", "bad")


def test_a_prompt_that_no_engine_went_on_with_is_said(context) -> None:
    with run_server(agent_timeout_seconds=0.5) as server:
        run = Run(server, {"e": Feeder(server.target, LAYOUT, run="r", engine_id="e")})
        run.add("e", "prompt", 50, reason="handoff")
        run.feeders["e"].close()
        with open_tab(context, server.target, "#/trace?run=r&id=prompt") as tab:
            facts = tab.page.get_by_label("Facts")
            expect(facts.locator("p.bad")).to_contain_text("handed over to another engine")
            expect(facts.locator("p.bad")).not_to_contain_text("crash")


def test_a_request_that_was_running_when_its_agent_was_closed_says_so(context) -> None:
    with run_server(agent_timeout_seconds=3600) as server:
        run = Run(server, {"e": Feeder(server.target, LAYOUT, run="r", engine_id="e")})
        run.add("e", "cut", 50, reason="")
        run.feeders["e"].close(closed=True)
        with open_tab(context, server.target, "#/trace?run=r&id=cut") as tab:
            facts = tab.page.get_by_label("Facts")
            expect(facts.locator("p.bad")).to_contain_text("finish() was never called for it")
            expect(facts).to_contain_text("Finishclosed")


def test_an_end_that_was_never_reported_is_said(context) -> None:
    with run_server(agent_timeout_seconds=0.5) as server:
        run = Run(server, {"e": Feeder(server.target, LAYOUT, run="r", engine_id="e")})
        run.add("e", "cut", 50, reason="")
        run.feeders["e"].close()
        with open_tab(context, server.target) as tab:
            told = notice(tab.page, "1 trace is incomplete")
            expect(told).to_contain_text("the end was never reported. Look at the engine's log")
            told.get_by_role("link", name="All incomplete traces").click()
            expect(tab.page.locator(".row .because")).to_have_text("end not reported")
            tab.page.get_by_role("link", name="cut", exact=True).click()
            facts = tab.page.get_by_label("Facts")
            expect(facts).to_contain_text("100\u00a0% of what was reported")
            expect(facts).to_contain_text("49 reported, 5 of the prompt")
            expect(facts.locator("p.bad")).to_contain_text("The end of this request was never")
            expect(facts.locator("p.bad")).to_contain_text("Look at the engine's log")


def test_the_server_goes_away(context) -> None:
    with run_server() as server:
        run = Run(server, {"e": Feeder(server.target, LAYOUT, run="r", engine_id="e")})
        run.add("e", "one", 20)
        with open_tab(context, server.target, allowed=["status of 503"]) as tab:
            expect(notice(tab.page, "All is well.")).to_be_visible()
            expect(figure(tab.page, "Coverage").locator(".value")).to_have_text("100\u00a0%")
            server.kill()
            away = re.compile("^not live since")
            expect(tab.page.locator(".live")).to_have_text(away, timeout=90_000)
            expect(figure(tab.page, "Traces").locator(".value")).to_have_text("1")
            expect(tab.page.locator(".alarm")).to_contain_text("Not up to date")


def test_an_empty_run_names_those_that_are_not(context, run: Run) -> None:
    with open_tab(context, run.server.target, "#/overview?run=none") as tab:
        expect(tab.page.get_by_role("heading", level=1)).to_have_text("Run none has no traces")
        tab.page.get_by_role("button", name="r", exact=True).click()
        expect(notice(tab.page, "drops")).to_be_visible()
