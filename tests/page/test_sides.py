"""Reports of trainers on the page: against the comparison of the client, and cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from page.conftest import Guarded, column_of
from routetrace.client import RouteClient, Security
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.comparison import compare_traces
from support.agents.feeder import Feeder
from support.pages import Answer, Browser, running_page
from support.servers.client_server import LAYOUT, WIDE, rows_of
from support.servers.guarded import entry, feed

ROWS, LAYERS, TOP_K = 600, len(LAYOUT.layer_ids), LAYOUT.top_k
IDS = rows_of(LAYOUT, ROWS, 1)
TOKENS = np.arange(ROWS + 1)
#: Two of the layers.
FEWER = ModelLayout(
    LAYOUT.layer_ids[1:3], LAYOUT.num_hidden_layers, LAYOUT.num_experts, LAYOUT.top_k
)
HOLE = (100, 120)


def theirs(seed: int = 2, share: float = 0.1) -> np.ndarray:
    """The rollout's choices, with other ones for a share of the tokens."""
    other = np.random.default_rng(seed).random(ROWS) < share
    return np.where(other[:, None, None], rows_of(LAYOUT, ROWS, seed), IDS)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "r": a trace with a hole that trainers have reported, and one that none has."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        for name in ("t", "other"):
            handle = feeder.begin(name, prompt_len=9, prompt_token_ids=TOKENS[:9])
            for version, (start, stop) in enumerate([(0, HOLE[0]), (HOLE[1], ROWS)], 40):
                feeder.set_weight_version(version)
                feeder.step(IDS[start:stop], [[handle, start, stop - start]])
            feeder.finish(handle, ROWS + 1, token_ids=TOKENS)
        again = feeder.begin("again", trace_id="t", prompt_len=9, prompt_token_ids=TOKENS[:9])
        feeder.step(IDS, [[again, 0, ROWS]])
        for request, rows in (("first", 100), ("second", ROWS)):
            handle = feeder.begin(request, trace_id="short", prompt_len=9)
            feeder.step(IDS[:rows], [[handle, 0, rows]])
            feeder.finish(handle, rows + 1)
        feeder.finish(again, ROWS + 1, token_ids=np.where(TOKENS < 300, TOKENS, 7))
        handle = feeder.begin("all", trace_id="fewer")
        feeder.step(IDS[:100], [[handle, 0, 100]])
        feeder.finish(handle, 101)
        feeder.close()
        other = Feeder(server.target, FEWER, run="r", engine_id="fewer")
        handle = other.begin("some", trace_id="fewer")
        other.step(IDS[:100, 1:3], [[handle, 0, 100]])
        other.finish(handle, 101)
        other.close()
        with RouteClient(server.target, run="r") as client:
            known = {"incarnation": 1}
            client.report_routing("t", theirs(), step=1563, weight_version=2**60, **known)
            client.report_routing("t", IDS[:, 1:3], layer_ids=LAYOUT.layer_ids[1:3],
                                  reporter="part/ü", token_start=0, **known)  # fmt: skip
        yield server


@pytest.fixture
def browser(server: ServerProcess) -> Iterator[Browser]:
    with running_page(server.target) as address:
        yield Browser(address)


def ask(browser: Browser, end: str, trace_id: str = "t", **params: Any) -> Answer:
    return browser.trace("r", end, id=trace_id, **params)


def test_reports_are_listed(browser: Browser):
    part, whole = sorted(
        ask(browser, "reports", incarnation=1).json["reports"], key=lambda one: one["reporter"]
    )
    assert (part["reporter"], part["step"], part["weight_version"]) == ("part/ü", None, None)
    assert (whole["reporter"], whole["step"]) == ("trainer", "1563")
    assert whole["weight_version"] == str(2**60)
    assert ask(browser, "reports", "other").json == {"reports": []}
    assert browser.call("/api/v1/session").json["runs"] == ["r"]


def test_the_comparison_is_that_of_the_client(browser: Browser, server: ServerProcess):
    with RouteClient(server.target, run="r") as client, client.reports() as reports:
        mine = client.get("t", incarnation=1, missing="mask")
        of = compare_traces(mine, reports.get("t"), worst=100)
    answer = ask(browser, "diff", incarnation=1, against="report:trainer")
    found = answer.json
    for name in (
        "start", "stop", "cells", "differing", "tokens", "differing_tokens", "overlap", "missing",
        "other_tokens_from", "diagnosis", "cause",
    ):  # fmt: skip
        assert found[name] == getattr(of, name), name
    assert found["missing"] == 20 * LAYERS
    assert 0 < found["differing"] < found["cells"]
    assert found["by_layer"] == [
        {"layer": layer, "cells": one.cells, "differing": one.differing}
        for layer, one in of.by_layer.items()
    ]
    assert [one["version"] for one in found["by_version"]] == ["40", "41"]
    assert [one["position"] for one in found["worst"]] == [one.position for one in of.worst]
    tag = answer.headers["etag"]
    again = browser.call(
        "/api/v1/runs/r/trace/diff?id=t&incarnation=1&against=report%3Atrainer",
        headers={"if-none-match": tag},
    )
    assert again.status == 304


def test_tiles_say_where_it_differs(browser: Browser):
    given = {"incarnation": 1, "what": "differing", "z": 0, "against": "report:trainer"}
    tiles = [column_of(ask(browser, "tile", x=x, **given).body, LAYERS) for x in range(3)]
    shown = np.concatenate(tiles, axis=1)[:, :ROWS]
    ours, reported = IDS, theirs()
    for row in range(ROWS):
        for column in range(LAYERS):
            differing = TOP_K - len(
                {*ours[row, column].tolist()} & {*reported[row, column].tolist()}
            )
            expected = 255 if HOLE[0] <= row < HOLE[1] else round(254 * differing / TOP_K)
            assert shown[column, row] == expected
    part = ask(browser, "tile", x=0, **given | {"against": "report:part/ü"}).body
    cells = column_of(part, LAYERS)[:, :50]
    assert (cells[1:3] == 0).all()
    assert (cells[[0, *range(3, LAYERS)]] == 255).all()


def test_rows_of_the_other_side(browser: Browser):
    answer = ask(browser, "rows", incarnation=1, start=90, stop=130, against="report:trainer")
    size = 40 * LAYERS * TOP_K
    ids = np.frombuffer(answer.body[:size], np.uint8).reshape(40, LAYERS, TOP_K)
    assert np.array_equal(ids, theirs()[90:130])
    assert answer.body[size:] == b"\x01" * (40 * LAYERS)  # also where the rollout has a hole
    own = ask(browser, "rows", incarnation=1, start=90, stop=130).body
    assert own != answer.body


def test_a_shorter_side_has_no_rows_beyond_its_end(browser: Browser):
    part = ask(browser, "rows", "short", start=90, stop=130, against="#1")
    assert len(part.body) == 10 * LAYERS * (TOP_K + 1)
    beyond = ask(browser, "rows", "short", start=100, stop=130, against="#1")
    assert (beyond.status, beyond.body) == (200, b"")
    assert ask(browser, "rows", "short", start=ROWS, stop=ROWS + 9).status == 400


def test_a_side_of_other_layers_has_no_rows(browser: Browser):
    """Its cells are compared by their layers; rows would be read as those of all layers."""
    found = ask(browser, "diff", "fewer", incarnation=1, against="#2").json
    assert [one["layer"] for one in found["by_layer"]] == [*FEWER.layer_ids]
    assert (found["cells"], found["differing"]) == (100 * len(FEWER.layer_ids), 0)
    rows = ask(browser, "rows", "fewer", incarnation=1, start=0, stop=9, against="#2")
    assert (rows.status, rows.body) == (200, b"")


def test_incarnations_and_policies_are_sides(browser: Browser):
    found = ask(browser, "diff", incarnation=1, against="#2").json
    assert (found["differing"], found["start"], found["stop"]) == (0, 0, 256)
    assert found["other_tokens_from"] == 256
    shown = column_of(
        ask(browser, "tile", incarnation=1, against="#2", what="differing", z=0, x=0).body, LAYERS
    )
    expected = np.zeros((LAYERS, 256), np.uint8)
    expected[:, slice(*HOLE)] = 255
    assert np.array_equal(shown, expected)
    beyond = ask(browser, "tile", incarnation=1, against="#2", what="differing", z=0, x=1).body
    assert set(beyond) == {255}
    found = ask(browser, "diff", incarnation=1, against="latest").json
    assert found["differing"] == 0
    assert ask(browser, "diff", incarnation=1, against="#9").status == 404
    assert ask(browser, "diff", incarnation=1, against="report:unknown").status == 404


def test_nothing_is_shown_beyond_tokens_that_differ(browser: Browser):
    """The report is of incarnation 1; 2 has other tokens from 300 on, by digests at each 64th."""
    given = {"incarnation": 2, "against": "report:trainer"}
    assert ask(browser, "diff", **given).json["other_tokens_from"] == 256
    tile = column_of(ask(browser, "tile", what="differing", z=0, x=1, **given).body, LAYERS)
    assert (tile == 255).all()


def test_a_later_report_is_seen_at_once(browser: Browser, server: ServerProcess):
    with RouteClient(server.target, run="r") as client:
        seen: list[int] = []
        tags: list[str] = []
        for share in (0.0, 1.0):
            client.report_routing("other", theirs(5, share), reporter="late")
            seen.append(ask(browser, "diff", "other", against="report:late").json["differing"])
            tile = {"id": "other", "what": "differing", "z": 0, "x": 0, "against": "report:late"}
            path = f"/api/v1/runs/r/trace/tile?{urlencode(tile)}"
            headers = {"if-none-match": tags[-1]} if tags else {}
            answer = browser.call(path, headers=headers)
            assert answer.status == 200
            tags.append(answer.headers["etag"])
            assert browser.call(path, headers={"if-none-match": tags[-1]}).status == 304
    assert seen[0] == 0
    assert seen[1] > 500


def test_reports_of_another_model_are_refused():
    with run_server(agent_timeout_seconds=3600) as server, running_page(server.target) as address:
        for run, layout in (("r", LAYOUT), ("r@report:trainer", WIDE)):
            feeder = Feeder(server.target, layout, run=run)
            feeder.step(rows_of(layout, 9), [[handle := feeder.begin("t"), 0, 9]])
            feeder.finish(handle, 10)
            feeder.close()
        answer = ask(Browser(address), "diff", against="report:trainer")
        assert (answer.status, answer.error["field"]) == (400, "b.num_experts")


def test_only_tokens_of_the_run_see_its_reports(tmp_path):
    tokens = tmp_path / "tokens.toml"
    entries = [
        entry("rt_all", "all"),
        entry("rt_a", "of-a", ("read",), ("a",)),
        entry("rt_b", "of-b", ("read",), ("b",)),
    ]
    tokens.write_text("\n".join(entries))
    tokens.chmod(0o600)
    with run_server(tokens_file=tokens, agent_timeout_seconds=3600) as server:
        security = Security(token="rt_all")
        feed(server.target, security, "a", "one")
        with RouteClient(server.target, run="a", security=security) as client:
            client.report_routing("one", client.get("one").topk_ids)
        with running_page(server.target, runs=("a", "b")) as address:
            browser, other = Browser(address), Browser(address)
            assert browser.sign_in("rt_a", run="a").status == 204
            assert other.sign_in("rt_b", run="b").status == 204
            given = {"id": "one", "against": "report:trainer"}
            assert browser.trace("a", "diff", **given).json["differing"] == 0
            assert other.trace("a", "diff", **given).status == 403
            assert other.trace("a@report:trainer", "rows", id="one", start=0, stop=1).status == 403


def test_sessions_do_not_list_runs_of_reports(guarded: Guarded):
    with running_page(guarded.target) as address:
        browser = Browser(address)
        browser.sign_in("rt_all", run="a")
        assert browser.call("/api/v1/session").json["runs"] == ["a", "b"]
