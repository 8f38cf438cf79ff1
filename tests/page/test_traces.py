"""Facts, segments, tiles and rows of traces of a real server, over HTTP."""

from __future__ import annotations

import gzip
import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routetrace.client import RouteClient
from routetrace.page.segments import segments_of, stamp_of
from routetrace.page.tiles import changed
from support.agents.feeder import Feeder
from support.agents.simulated import drive
from support.pages import Browser
from support.servers.client_server import LAYOUT, WIDE, rows_of

from .conftest import HOLE, IDS, NUM_ROWS, ODD, column_of

LAYERS = len(LAYOUT.layer_ids)


def test_facts(browser: Browser, server) -> None:
    answer = browser.trace("r", id="hole")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    facts = answer.json
    with RouteClient(server.target, run="r") as client:
        stat, description = client.stat("hole"), client.describe("hole")
    begun, ended = description.begun_at.timestamp(), description.acknowledged_at.timestamp()
    assert facts == {
        "trace_id": "hole",
        "run": "r",
        "incarnation": 1,
        "num_incarnations": 1,
        "incarnations": [
            {
                "number": 1,
                "state": "incomplete",
                "finish_reason": "stop",
                "num_tokens": NUM_ROWS + 1,
            }
        ],
        "state": "incomplete",
        "finish_reason": "stop",
        "num_tokens": NUM_ROWS + 1,
        "num_rows": NUM_ROWS,
        "prompt_len": 100,
        "num_attempts": 1,
        "coverage": stat.coverage,
        "missing_cells": {"not_captured": 30 * LAYERS},
        "layer_ids": [1, 2, 4, 5, 7],
        "num_experts": 40,
        "top_k": 3,
        "levels": 3,
        "weights": [7, 8],
        "engines": ["e0"],
        "stored_bytes": stat.stored_bytes,
        "labels": {"task": "math"},
        "expires": stat.expires_at.timestamp(),
        "created": stat.created_at.timestamp(),
        "updated": stat.updated_at.timestamp(),
        "timeline": [
            {"name": "begun", "at": begun},
            {"name": "acknowledged", "at": ended},
            {"name": "readable", "at": ended},
        ],
        "python": "from routetrace.client import RouteClient\n"
        f"trace = RouteClient('{server.target}', run='r')"
        ".get('hole', incarnation=1, missing='mask')\n",
    }
    assert stat.coverage == pytest.approx(1 - 30 / NUM_ROWS)


def test_ids_that_look_like_something_else(browser: Browser) -> None:
    facts = browser.trace("r", id=ODD).json
    assert facts["trace_id"] == ODD
    names: dict[str, object] = {}
    exec(facts["python"], names)
    assert names["trace"].trace_id == ODD  # type: ignore[attr-defined]
    assert facts["python"].isascii()
    assert browser.trace("r", "rows", id=ODD, start=0, stop=1).status == 200


def test_runs_with_slashes_and_versions_of_64_bits(browser: Browser) -> None:
    facts = browser.trace("a/trace", id="wide").json
    assert (facts["run"], facts["weights"]) == ("a/trace", [str(2**60)] * 2)
    present = browser.trace("a/trace", "segments", id="wide").json["present"]
    assert present["version"] == [str(2**60)]
    body = browser.trace("a/trace", "rows", id="wide", start=60, stop=90).body
    ids = np.frombuffer(body[: 30 * 2 * 2 * 2], "<u2").reshape(30, 2, 2)
    assert np.array_equal(ids, rows_of(WIDE, 90, 2)[60:])
    assert body[30 * 2 * 2 * 2 :] == b"\x01" * 60


def test_segments(browser: Browser, server) -> None:
    answer = browser.trace("r", "segments", id="hole")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == {
        "present": {
            "t0": [0, HOLE[1]],
            "t1": [HOLE[0], NUM_ROWS],
            "l0": [0, 0],
            "l1": [LAYERS, LAYERS],
            "version": [7, 8],
            "cached": [0, 0],
            "source": [0, 0],
            "attempt": [0, 0],
        },
        "sources": [{"engine": "e0", "shard": ""}],
        "missing": {
            "t0": [HOLE[0]],
            "t1": [HOLE[1]],
            "l0": [0],
            "l1": [LAYERS],
            "reason": ["not_captured"],
        },
        "joined": 0,
    }


def test_tiles(browser: Browser, server) -> None:
    with RouteClient(server.target, run="r") as client:
        levels = changed(client.get("hole", missing="mask"))
    for z, tiles in ((0, 3), (1, 2), (2, 1)):
        for x in range(tiles):
            answer = browser.trace("r", "tile", id="hole", what="changed", z=z, x=x)
            assert answer.headers["Content-Type"] == "application/octet-stream"
            assert answer.body == levels.tile(z, x)
    tile = column_of(browser.trace("r", "tile", id="hole", what="changed", z=0, x=0).body, LAYERS)
    assert (tile[:, HOLE[0] : HOLE[1] + 1] == 255).all()
    assert (tile[:, 1 : HOLE[0]] < 255).all()
    assert (tile[:, HOLE[1] + 1 :] < 255).all()


@pytest.mark.parametrize("kept", [False, True])
def test_rows(page: str, browser: Browser, kept: bool) -> None:
    if kept:  # the whole trace is in memory then
        assert browser.trace("r", "segments", id="hole").status == 200
    for start, stop in ((0, 64), (170, 234), (199, 200), (690, 754)):
        last = min(stop, NUM_ROWS)
        body = browser.trace("r", "rows", id="hole", start=start, stop=stop).body
        count = (last - start) * LAYERS
        ids = np.frombuffer(body[: count * 3], np.uint8).reshape(last - start, LAYERS, 3)
        valid = np.frombuffer(body[count * 3 :], np.uint8).reshape(last - start, LAYERS)
        there = np.array([not HOLE[0] <= row < HOLE[1] for row in range(start, last)])
        assert np.array_equal(valid, there[:, None].repeat(LAYERS, 1))
        assert np.array_equal(ids[there], IDS[start:last][there])


def test_answers_are_compressed_for_those_who_ask(browser: Browser) -> None:
    path = "/api/v1/runs/r/trace/tile?id=hole&what=changed&z=0&x=0"
    plain = browser.call(path)
    packed = browser.call(path, headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body


def test_an_answer_that_the_browser_has_is_not_sent_again(browser: Browser) -> None:
    for end in ("?id=hole", "/segments?id=hole", "/tile?id=hole&what=changed&z=0&x=0"):
        path = f"/api/v1/runs/r/trace{end}"
        tag = browser.call(path).headers["ETag"]
        again = browser.call(path, headers={"If-None-Match": tag})
        assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
        assert browser.call(path, headers={"If-None-Match": '"other"'}).status == 200


def test_a_trace_that_grows_is_read_again(browser: Browser, server) -> None:
    feeder = Feeder(server.target, LAYOUT, run="grows", engine_id="e9")
    handle = feeder.begin("running")
    tags = set()
    for stop in (10, 20, 30):
        feeder.step(IDS[stop - 10 : stop], [[handle, stop - 10, 10]])
        feeder.flush()
        answer = browser.trace("grows", "segments", id="running")
        assert answer.json["present"]["t1"] == [stop]
        tags.add(answer.headers["ETag"])
        tile = browser.trace("grows", "tile", id="running", what="changed", z=0, x=0).body
        assert (column_of(tile, LAYERS)[0, 1:] < 255).sum() == stop - 1
        assert browser.trace("grows", id="running").json["num_rows"] == stop
    feeder.finish(handle, 31)
    feeder.close()
    answer = browser.trace("grows", "segments", id="running")
    tags.add(answer.headers["ETag"])
    assert len(tags) == 4
    assert browser.trace("grows", id="running").json["state"] == "complete"


@pytest.mark.parametrize("seed", range(3))
def test_every_cell_of_simulated_engines(browser: Browser, server, seed: int) -> None:
    """Rewound, preempted, cached and aborted: rectangles say of each cell what a read says."""
    run = f"simulated-{seed}"
    drive(server.target, seed, run)
    cached = 0
    with RouteClient(server.target, run=run) as client:
        for stat in client.find():
            trace = client.get(stat.trace_id, missing="mask")
            # Else the page would read it again for each answer.
            assert stamp_of(client.stat(stat.trace_id)) == stamp_of(trace)
            found = browser.trace(run, "segments", id=stat.trace_id).json
            valid = np.zeros((len(trace), len(trace.layer_ids)), bool)
            reasons = np.full(valid.shape, "", object)
            present, missing = found["present"], found["missing"]
            for t0, t1, l0, l1, version, reused, source, attempt in zip(
                *present.values(), strict=True
            ):
                valid[t0:t1, l0:l1] = True
                assert found["sources"][source]["engine"] in trace.engine_ids
                assert attempt < trace.num_attempts
                for span in trace.weight_versions:
                    if span.start < t1 and t0 < span.stop:
                        assert span.weight_version == version
                origins = {p.source for p in trace.provenance if p.start < t1 and t0 < p.stop}
                assert origins <= ({"slot"} if reused else {"forward"})
                cached += reused
            for t0, t1, l0, l1, reason in zip(*missing.values(), strict=True):
                reasons[t0:t1, l0:l1] = reason
            assert np.array_equal(valid, trace.valid)
            for one in trace.missing:
                columns = [trace.layer_ids.index(layer) for layer in one.layer_ids]
                assert (reasons[one.start : one.stop, columns] == one.reason.value).all()
            assert ((reasons == "") == valid).all()
            if len(trace):
                params = {"what": "changed", "z": 0, "x": 0}
                tile = browser.trace(run, "tile", id=stat.trace_id, **params).body
                assert tile == changed(trace).tile(0, 0)
    assert cached


def test_incarnations_are_apart(browser: Browser, server) -> None:
    feeder = Feeder(server.target, LAYOUT, run="twice", engine_id="e8")
    for name, rows in (("first", 20), ("second", 12)):
        handle = feeder.begin(name, trace_id="one")
        feeder.step(IDS[:rows], [[handle, 0, rows]])
        feeder.finish(handle, rows + 1)
    feeder.close()
    facts = browser.trace("twice", id="one").json
    assert (facts["incarnation"], facts["num_incarnations"]) == (2, 2)
    for number, rows in ((1, 20), (2, 12), ("", 12)):
        assert browser.trace("twice", id="one", incarnation=number).json["num_rows"] == rows
        segments = browser.trace("twice", "segments", id="one", incarnation=number).json
        assert segments["present"]["t1"] == [rows]
    missing = browser.trace("twice", id="one", incarnation=5)
    assert (missing.status, missing.error["missing"]) == (404, "incarnation")
    assert "it has 1, 2" in missing.error["message"]


def test_policies(browser: Browser, server) -> None:
    """The rows of a preempted request's first pass, and of its second."""
    with RouteClient(server.target, run="r") as client:
        for policy in ("as_sampled", "latest"):
            trace = client.get("whole", policy=policy, missing="mask")
            expected = segments_of(trace, client.describe("whole", policy=policy).origins)
            answer = browser.trace("r", "segments", id="whole", policy=policy)
            assert answer.json == json.loads(json.dumps(expected))
    assert browser.trace("r", "segments", id="whole", policy="best").error["field"] == "policy"


# ---------------------------------------------------------------------------- not there


def test_a_trace_that_never_was(browser: Browser) -> None:
    for end, params in (
        ("", {}), ("segments", {}), ("tile", {"what": "changed", "z": 0, "x": 0}),
        ("rows", {"start": 0, "stop": 1}),
    ):  # fmt: skip
        answer = browser.trace("r", end, id="math-1", **params)
        assert answer.status == 404
        error = answer.error
        assert (error["kind"], error["missing"]) == ("not_found", "trace")
        assert error["message"] == "'math-1' was never seen in run 'r', or long ago; ids are exact."
        assert (error["reason"], error["forgotten_at"]) == ("", None)
        assert "is not in run 'r'" in error["details"]


def test_a_trace_that_was_forgotten(browser: Browser, server) -> None:
    feeder = Feeder(server.target, LAYOUT, run="gone", engine_id="e7")
    for name in ("gone", "stays"):
        handle = feeder.begin(name)
        feeder.step(IDS[:10], [[handle, 0, 10]])
        feeder.finish(handle, 11)
    feeder.close()
    assert browser.trace("gone", "segments", id="gone").status == 200
    with RouteClient(server.target, run="gone") as client:
        client.delete("gone")
    for end in ("", "segments"):
        answer = browser.trace("gone", end, id="gone")
        assert (answer.status, answer.error["reason"]) == (404, "deleted")
        words = answer.error["message"]
        assert words.startswith("'gone' was forgotten ")
        assert words.endswith(" ago: deleted.")
        assert abs(answer.error["forgotten_at"] - time.time()) < 120


def test_a_run_that_never_was(browser: Browser) -> None:
    answer = browser.trace("typo", id="math-1")
    assert (answer.status, answer.error["missing"]) == (404, "run")
    assert answer.error["message"].startswith("Run 'typo' has no traces. Runs that have: a/trace, ")


@pytest.mark.parametrize(
    ("end", "params", "field"),
    [
        ("", {}, "id"),
        ("", {"id": ""}, "id"),
        ("", {"id": "hole", "incarnation": "x"}, "incarnation"),
        ("", {"id": "hole", "incarnation": "0"}, "incarnation"),
        ("", {"id": "hole", "incarnation": "9" * 30}, "incarnation"),
        ("", {"id": "x" * 600}, "trace_id"),
        ("tile", {"id": "hole", "z": 0, "x": 0}, "what"),
        ("tile", {"id": "hole", "what": "hot", "z": 0, "x": 0}, "what"),
        ("tile", {"id": "hole", "what": "changed", "x": 0}, "z"),
        ("tile", {"id": "hole", "what": "changed", "z": 9, "x": 0}, "z"),
        ("tile", {"id": "hole", "what": "changed", "z": 0, "x": 3}, "x"),
        ("tile", {"id": "hole", "what": "changed", "z": 0, "x": "-1"}, "x"),
        ("rows", {"id": "hole", "start": 0, "stop": 65}, "stop"),
        ("rows", {"id": "hole", "start": 5, "stop": 5}, "stop"),
        ("rows", {"id": "hole", "stop": 5}, "start"),
        ("rows", {"id": "hole", "start": NUM_ROWS, "stop": NUM_ROWS + 1}, "start"),
        ("rows", {"id": "hole", "start": 0, "stop": 5, "against": "trainer"}, "against"),
        ("tile", {"id": "hole", "what": "differing", "z": 0, "x": 0}, "against"),
        ("diff", {"id": "hole"}, "against"),
        ("diff", {"id": "hole", "against": "#0"}, "against"),
        ("diff", {"id": "hole", "against": "report:" + "x" * 600}, "reporter"),
        ("reports", {}, "id"),
        ("rows", {"id": "hole", "start": "\u0661", "stop": 5}, "start"),
    ],
)
def test_wrong_arguments_are_named(
    browser: Browser, end: str, params: dict[str, object], field: str
) -> None:
    answer = browser.trace("r", end, **params)
    assert (answer.status, answer.error["kind"]) == (400, "invalid_argument")
    assert answer.error["field"] == field
    assert answer.error["expected"]
    assert answer.error["message"].startswith(f"{field} is ")


def test_wrong_runs_are_named(browser: Browser) -> None:
    answer = browser.trace("x" * 600, id="whole")
    assert (answer.status, answer.error["field"]) == (400, "run")


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.sampled_from(
        ["hole", "whole", ODD, "changed", "latest", "differing", "0", "1", "64", "699"]
    ),
    st.sampled_from(["#1", "#2", "report:trainer", "report:unknown"]),
    st.integers(-(2**70), 2**70).map(str),
)
PARAMETERS = (*("id", "incarnation", "policy"), *("what", "z", "x", "start", "stop"), "against")


@given(
    st.one_of(st.just("r"), VALUES.filter(bool)),
    st.sampled_from(["", "segments", "tile", "rows", "diff", "reports"]),
    st.dictionaries(st.sampled_from(PARAMETERS), VALUES),
)
@settings(suppress_health_check=[*HealthCheck], max_examples=300)
def test_no_parameters_make_the_page_fail(
    page: str, run: str, end: str, params: dict[str, str]
) -> None:
    answer = Browser(page).trace(run, end, **params)
    assert answer.status in (200, 400, 404)
    if answer.status != 200:
        assert answer.error["message"]
        assert answer.error["kind"] in ("invalid_argument", "not_found")
