"""Load of experts on the page, against what the client counts and a count by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from page.conftest import Guarded
from routetrace.client import Corrupt, ExpertLoad, NotFound, RouteClient, Trace, Unavailable
from routetrace.common.layout import ModelLayout
from routetrace.page import expert_counts, experts
from routetrace.page.experts import Tally
from routetrace.page.trace_table import Ended
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import Answer, Browser, running_page
from support.ranks.rank_rows import trace_of
from support.servers.client_server import WIDE
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 4), 6, 8, 2)


def rows_of(seed: int, count: int, layout: ModelLayout = LAYOUT) -> np.ndarray:
    """Ids of which some experts are chosen more often, and the last one never."""
    rng = np.random.default_rng(seed)
    some = layout.num_experts - 1
    weight = rng.random((count, len(layout.layer_ids), some)) * np.arange(1, some + 1)
    return weight.argsort(axis=2)[..., -layout.top_k :].astype(layout.dtype)


def feed(feeder: Feeder, name: str, rows: np.ndarray, version: int, hole: int = 0, **begin: Any):
    """A trace whose first `hole` rows are missing."""
    feeder.set_weight_version(version)
    handle = feeder.begin(name, prompt_len=4, **begin)
    feeder.step(rows[hole:], [[handle, hole, len(rows) - hole]])
    feeder.finish(handle, len(rows) + 1)
    feeder.flush()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "r": traces of 20 to 70 rows, one with a hole, one that runs, one of another model."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        for i in range(6):
            feed(
                feeder, f"t{i}", rows_of(i, 20 + 10 * i), 100 + i, hole=5 * (i == 3),
                labels={"task": "math" if i % 2 else "code"},
            )  # fmt: skip
        feeder.step(rows_of(9, 30), [[feeder.begin("runs", prompt_len=4), 0, 30]])
        feeder.flush()
        other = Feeder(server.target, WIDE, run="r", engine_id="e1")
        feed(other, "other model", rows_of(7, 9, WIDE), 99)
        other.close()
        yield server
        feeder.close()


@pytest.fixture
def browser(server: ServerProcess) -> Iterator[Browser]:
    with running_page(server.target) as address:
        yield Browser(address)


def ask(browser: Browser, run: str = "r", tag: str = "", **params: Any) -> Answer:
    headers = {"if-none-match": tag} if tag else {}
    query = urlencode(params, doseq=True)
    return browser.call(f"/api/v1/runs/{run}/experts?{query}", headers=headers)


def counted(browser: Browser, run: str = "r", **params: Any) -> Answer:
    """Ask until the count is there."""
    answers: list[Answer] = []

    def there() -> bool:
        answers[:] = [ask(browser, run, **params)]
        if answers[0].status == 202:
            of = answers[0].json["counting"]
            assert 0 <= of["tokens"] <= of["of"]
        return answers[0].status != 202

    wait_for(there)
    assert answers[0].status == 200, answers[0].body
    return answers[0]


def check(found: dict[str, Any], load: ExpertLoad) -> None:
    assert (found["traces"], found["tokens"]) == (load.traces, load.tokens)
    assert (found["num_experts"], found["top_k"]) == (load.num_experts, load.top_k)
    assert found["layer_ids"] == list(load.layer_ids)
    assert found["cells"] == load.cells.tolist()
    shape = load.load.shape
    assert np.array(found["load"]).reshape(shape) == pytest.approx(load.relative, abs=1e-4)
    assert found["entropy"] == pytest.approx(load.entropy, abs=1e-4)
    assert found["balancedness"] == pytest.approx(load.balancedness, abs=1e-4)
    assert found["never"] == np.count_nonzero(load.load == 0)
    assert found["idle"] == np.count_nonzero(load.relative < 0.2)
    hottest = np.sort(load.relative.ravel())[::-1][: len(found["hot"])]
    assert [one["load"] for one in found["hot"]] == pytest.approx(hottest, abs=1e-4)
    for one in found["hot"]:
        at = load.layer_ids.index(one["layer"]), one["expert"]
        assert one["load"] == pytest.approx(load.relative[at], abs=1e-4)


def test_the_newest_traces_that_have_ended_are_counted(browser: Browser, server: ServerProcess):
    with RouteClient(server.target, run="r") as client:
        ids = [f"t{i}" for i in range(6)]
        found = counted(browser, version="100..").json
        check(found, client.expert_load(ids, missing="mask"))
        assert found["never"] >= 2  # the last expert of two layers
        assert found["left_out"] == {}
        assert found["weights"] == [100, 105]
        # Stretches of time, oldest first.
        loads, rest = [], ids
        for part in found["parts"]:
            some, rest = rest[: part["traces"]], rest[part["traces"] :]
            loads.append(client.expert_load(some, missing="mask"))
            assert part["tokens"] == loads[-1].tokens
            assert part["weights"] == [100 + int(some[0][1]), 100 + int(some[-1][1])]
        assert rest == []
        assert len(loads) > 3
        for one in found["hot"]:
            at = LAYOUT.layer_ids.index(one["layer"]), one["expert"]
            assert one["series"] == pytest.approx([load.relative[at] for load in loads], abs=1e-4)


def test_filters_and_tokens_choose_traces(browser: Browser, server: ServerProcess):
    with RouteClient(server.target, run="r") as client:
        code = counted(browser, label="task=code").json
        check(code, client.expert_load(["t0", "t2", "t4"]))
        last = counted(browser, version="100..", most=71).json
        check(last, client.expert_load(["t5", "t4"]))
        holed = counted(browser, state="incomplete").json
        check(holed, client.expert_load(["t3"], missing="mask"))
        assert holed["cells"] == [45, 45]
        wide = counted(browser, engine="e1").json
        check(wide, client.expert_load(["other model"]))
        # The newest trace says which model is counted.
        both = counted(browser).json
        assert (both["traces"], both["left_out"]) == (1, {"other_model": 6})
        none = counted(browser, label="task=none").json
        assert (none["traces"], none["tokens"], none["parts"]) == (0, 0, [])
        assert none["from"] is none["weights"] is None


def test_wrong_parameters_are_named(browser: Browser):
    for params, field in (
        ({"state": "running"}, "state"),
        ({"most": 0}, "most"),
        ({"after": "now"}, "after"),
        ({"after": "nan"}, "after"),
        ({"after": -1}, "after"),
        ({"label": "task"}, "label"),
    ):
        answer = ask(browser, **params)
        assert (answer.status, answer.error["field"]) == (400, field)


def test_a_count_is_kept_and_made_anew_on_request(monkeypatch: pytest.MonkeyPatch):
    with run_server() as server, running_page(server.target) as address:
        browser = Browser(address)
        feeder = Feeder(server.target, LAYOUT, run="r")
        handle = feeder.begin("first", prompt_len=4)
        feeder.step(rows_of(1, 20), [[handle, 0, 20]])
        feeder.flush()
        wait_for(lambda: ask(browser).status != 404)
        empty = counted(browser).json
        assert empty["traces"] == 0
        feeder.finish(handle, 21)
        feeder.flush()
        # That there is none is not kept for long.
        wait_for(lambda: counted(browser).json["traces"] == 1)
        answer = counted(browser)
        feed(feeder, "second", rows_of(2, 30), 5)
        feeder.close()
        mirrored = f"/api/v1/runs/r/traces?{urlencode({'state': 'complete'})}"
        wait_for(lambda: browser.call(mirrored).json["matching"] == 2)
        assert ask(browser, tag=answer.headers["etag"]).status == 304
        again = counted(browser, after=answer.json["counted_at"] + 1e-6).json
        assert (again["traces"], again["tokens"]) == (2, 50)
        assert again["counted_at"] > answer.json["counted_at"]
        assert counted(browser).json == again
        monkeypatch.setattr(expert_counts, "_KEPT_S", 0.0)
        assert ask(browser).status == 202


def test_more_counts_than_are_kept(browser: Browser, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_counts, "_MAX_COUNTS", 2)
    first = counted(browser, most=1).json
    counted(browser, most=2)
    counted(browser, most=3)
    assert counted(browser, most=1).json["counted_at"] > first["counted_at"]
    # None that is under way is dropped for another.
    held = asyncio.Semaphore(0)
    monkeypatch.setattr(expert_counts.asyncio, "Semaphore", lambda _: held)
    with running_page(browser_target(browser)) as address:
        other = Browser(address)
        wait_for(lambda: other.call("/api/v1/runs/r/traces").json["whole"])
        assert [ask(other, most=n).status for n in (1, 2, 3)] == [202, 202, 503]


def browser_target(browser: Browser) -> str:
    return browser.call("/api/v1/session").json["target"]


def test_each_token_sees_its_own_run(guarded_page: str, guarded: Guarded):
    browser, other = Browser(guarded_page), Browser(guarded_page)
    assert browser.sign_in("rt_a", run="a").status == 204
    assert other.sign_in("rt_b", run="b").status == 204
    assert counted(browser, "a").json["traces"] == 1
    assert ask(other, "a").status == 403
    text = guarded.tokens.read_text()
    try:
        guarded.tokens.write_text(text.partition('[[token]]\nname = "of-a"')[0])
        wait_for(lambda: ask(browser, "a").status == 401)
    finally:
        guarded.tokens.write_text(text)


# ------------------------------------------------------------------ the tally alone


@st.composite
def some_traces(draw: Any) -> list[tuple[Ended, Trace]]:
    made = []
    for i, count in enumerate(draw(st.lists(st.integers(0, 40), min_size=1, max_size=60))):
        version = draw(st.none() | st.integers(-5, 2**60))
        weights = () if version is None else (version, version + draw(st.integers(0, 3)))
        valid = np.random.default_rng(i).random((count, 2)) < draw(st.sampled_from([0.0, 0.7, 1.0]))
        trace = trace_of(LAYOUT, rows_of(i, count), valid)
        made.append((Ended(f"t{i}", count, weights, 1000.0 - i), trace))
    return made


@settings(max_examples=60, deadline=None)
@given(some_traces(), st.data())
def test_stretches_hold_each_trace_once(made: list[tuple[Ended, Trace]], data: Any):
    tally = Tally([ended for ended, _ in made])
    assert tally.tokens == sum(ended.num_rows for ended, _ in made)
    gone = data.draw(st.sets(st.sampled_from(made and [e.trace_id for e, _ in made])))
    for ended, trace in made:
        tally.add(ended.trace_id, NotFound("gone") if ended.trace_id in gone else trace)
    found = experts.json.loads(tally.json(5.0))
    left = [(ended, trace) for ended, trace in made if ended.trace_id not in gone]
    assert found["left_out"] == ({"gone": len(gone)} if gone else {})
    assert found["counted_at"] == 5.0
    if not left:
        assert (found["traces"], found["parts"]) == (0, [])
        assert "load" not in found
        return
    total = sum(ExpertLoad.of(trace) for _, trace in left)
    if (total.cells > 0).all():
        check(found, total)
    else:
        assert found["entropy"] == [None if not cells else found["entropy"][i]
                                    for i, cells in enumerate(total.cells)]  # fmt: skip
    # Oldest first, neighbours together, about as many tokens in each.
    parts = found["parts"]
    assert 1 <= len(parts) <= min(24, len(left))
    assert sum(part["traces"] for part in parts) == len(left)
    rest = left[::-1]
    for i, part in enumerate(parts):
        some, rest = rest[: part["traces"]], rest[part["traces"] :]
        versions = [version for ended, _ in some for version in ended.weights]
        assert part["tokens"] == sum(ended.num_rows for ended, _ in some)
        assert (part["from"], part["to"]) == (some[0][0].updated, some[-1][0].updated)
        bounds = [min(versions), max(versions)] if versions else None
        assert (part["weights"] and [int(v) for v in part["weights"]]) == bounds
        share = tally.tokens / min(24, len(made))
        assert part["tokens"] <= share + max(ended.num_rows for ended, _ in some)
        load = sum(ExpertLoad.of(trace) for _, trace in some)
        for one in found["hot"]:
            at = LAYOUT.layer_ids.index(one["layer"]), one["expert"]
            assert one["series"][i] == pytest.approx(load.relative[at], abs=1e-4)


def test_what_is_left_out_is_said():
    layout = ModelLayout((1, 4), 6, 9, 2)
    sizes = {"a": 3, "b": 4, "c": 5, "long": experts.MAX_ROWS + 1}
    tally = Tally([Ended(name, rows, (), 1.0) for name, rows in sizes.items()])
    assert tally.trace_ids == ["a", "b", "c"]
    tally.add("a", trace_of(LAYOUT, rows_of(1, 3)))
    tally.add("b", trace_of(layout, rows_of(1, 4)))
    tally.add("c", Corrupt("damaged"))
    found = experts.json.loads(tally.json(1.0))
    assert found["left_out"] == {"long": 1, "other_model": 1, "corrupt": 1}
    assert (found["traces"], found["tokens"]) == (1, 3)
    with pytest.raises(Unavailable):
        tally.add("b", Unavailable("away"))
