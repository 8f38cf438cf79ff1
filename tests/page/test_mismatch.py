"""Agreement by training step on the page, against what the client says of the same server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from page.conftest import Guarded
from routetrace.client import Agreement, RouteClient, Security
from routetrace.client.agreement import Choices
from routetrace.page import mismatch, run_endpoints
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.causes import likely_cause
from support.pages import Answer, Browser, running_page

LAYERS = (3, 5, 8)


def agreement(step: int) -> Agreement:
    """Of two or three layers, one of them without cells at times; worse from step 20 on."""
    jump = 300 if step >= 20 else 0
    layers = {
        layer: Choices(1000, 10 + layer + jump, 7900 - jump, 8000)
        for layer in LAYERS[: 2 + step % 2]
    }
    if step % 5 == 0:
        layers[3] = Choices()
    versions = {step // 4: Choices(900, 20, 7000, 7200), 2**60: Choices(50, 1, 390, 400)}
    return Agreement(by_layer=layers, by_version=versions, tokens=40, differing_tokens=7)


@pytest.fixture
def own_server() -> Iterator[ServerProcess]:
    with run_server() as server:
        yield server


def report(client: RouteClient, steps: Any) -> None:
    for step in steps:
        client.report_agreement(
            step, agreement(step), weight_version=step // 4, trace_ids=[f"t{step}"] * (step % 2)
        )


def ask(browser: Browser, run: str = "default", tag: str = "", **params: Any) -> Answer:
    headers = {"if-none-match": tag} if tag else {}
    return browser.call(f"/api/v1/runs/{run}/mismatch?{urlencode(params)}", headers=headers)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shared between polls."""
    monkeypatch.setattr(run_endpoints, "_POLL_S", 0.0)


def check(found: dict[str, Any], client: RouteClient, most: int = 500) -> None:
    history = client.agreement_history()
    steps = history.steps[-most:]
    assert (found["total"], found["superseded"]) == (len(history.steps), 0)
    assert found["step"] == [step.step for step in steps]
    for i, step in enumerate(steps):
        of = step.agreement
        assert found["reported_at"][i] == step.reported_at.timestamp()
        assert found["weight_version"][i] == str(step.weight_version)
        assert found["reporters"][i] == len(step.reporters)
        assert (found["cells"][i], found["differing"][i]) == of.choices[:2]
        assert found["overlap"][i] == pytest.approx(
            of.choices.matched / of.choices.chosen, abs=1e-6
        )
        assert (found["tokens"][i], found["differing_tokens"][i]) == (40, 7)
        assert found["trace_ids"][i] == list(step.trace_ids)
        for layer, share in zip(found["layer_ids"], found["by_layer"][i], strict=True):
            cells, differing, _, _ = of.by_layer.get(layer, Choices())
            assert share == (pytest.approx(differing / cells, abs=1e-6) if cells else None)
        assert found["by_version"][i] == [
            {"version": str(version), "cells": n.cells, "differing": n.differing}
            for version, n in sorted(of.by_version.items())
        ]
    change = history.change()
    if change is None:
        assert found["since"] is None
    else:
        assert found["since"]["words"] == change.words
        assert found["since"]["step"] == change.step
        worse = [step.agreement for step in history.steps if step.step >= change.step]
        assert found["since"]["cause"] == likely_cause(sum(worse[1:], worse[0]).by_layer)
        assert found["since"]["weight_version"] == str(change.weight_version)


def test_columns_are_the_history_of_the_client(own_server: ServerProcess, at_once: None):
    with RouteClient(own_server.target) as client, running_page(own_server.target) as address:
        browser = Browser(address)
        empty = ask(browser).json
        assert (empty["total"], empty["step"], empty["since"]) == (0, [], None)
        report(client, range(18))
        check(ask(browser).json, client)
        report(client, [*range(19, 28), 40])
        answer = ask(browser)
        check(answer.json, client)
        assert answer.json["since"]["step"] == 20
        check(ask(browser, most=3).json, client, 3)
        part = ask(browser, **{"from": 5, "to": 9}).json
        assert part["step"] == [5, 6, 7, 8]
        # What has not changed is not sent again.
        assert ask(browser, tag=answer.headers["etag"]).status == 304
        report(client, [41])
        assert ask(browser, tag=answer.headers["etag"]).status == 200


def test_only_late_steps_are_asked_for_again_until_all_are(
    own_server: ServerProcess, at_once: None, monkeypatch: pytest.MonkeyPatch
):
    with RouteClient(own_server.target) as client, running_page(own_server.target) as address:
        browser = Browser(address)
        report(client, range(60))
        ask(browser)
        client.report_agreement(2, Agreement(), reporter="trainer")  # as after a restart
        client.report_agreement(45, Agreement(), reporter="late")
        found = ask(browser).json
        assert found["cells"][2] > 0
        assert found["reporters"][45] == 2
        monkeypatch.setattr(mismatch, "_ALL_S", 0.0)
        assert ask(browser).json["cells"][2] == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [({"most": 0}, "most"), ({"from": "x"}, "from"), ({"to": 0}, "to"), ({"to": -3}, "to")],
)
def test_wrong_parameters(browser: Browser, params: dict[str, Any], field: str):
    answer = ask(browser, "r", **params)
    assert answer.status == 400
    assert answer.json["error"]["field"] == field


def test_a_token_sees_its_own_runs_alone(guarded: Guarded, guarded_page: str, at_once: None):
    with RouteClient(guarded.target, run="b", security=Security(token="rt_b")) as client:
        report(client, range(3))
    browser = Browser(guarded_page)
    assert ask(browser, "b").status == 401
    browser.sign_in("rt_b", run="b")
    assert ask(browser, "b").json["step"] == [0, 1, 2]
    assert ask(browser, "a").status == 403
    other = Browser(guarded_page)
    other.sign_in("rt_a", run="a")
    assert ask(other, "b").status == 403
    assert ask(other, "a").json["step"] == []


def test_the_cause_since_a_change_is_named(own_server: ServerProcess, at_once: None):
    """Experts of layer 5 are corrupted from step 30 on: layers after it differ."""
    with RouteClient(own_server.target) as client, running_page(own_server.target) as address:
        for step in range(60):
            layers = {
                layer: Choices(1000, 800 if step >= 30 and layer > 5 else 10 + layer, 7000, 8000)
                for layer in (3, 5, 8, 9)
            }
            client.report_agreement(step, Agreement(by_layer=layers), weight_version=step // 10)
        since = ask(Browser(address)).json["since"]
    assert (since["step"], since["weight_version"]) == (30, "3")
    assert since["cause"].startswith("1% of cells differ up to layer 5, and 80% from layer 8 on")
