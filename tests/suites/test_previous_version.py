"""Data and messages of the previous version, recorded with its own code (see `tests/previous`)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from previous import wire
from previous.scenario import AGAIN, answers, go_on
from previous.serving import Serving
from routetrace.client import RouteClient
from routetrace.v1 import routetrace_pb2 as pb

FIXTURES = Path(__file__).parents[1] / "fixtures" / "previous"


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


@pytest.fixture
def data(tmp_path):
    with zipfile.ZipFile(FIXTURES / "data.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def assert_same(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Compare answers with those of 0.8, whose rows of version 0 stood in for others.

    Version 0 may be one that nobody gave, and proves nothing now.
    """
    found, recorded = dict(found), dict(recorded)
    restored, before = found.pop("a/restored"), recorded.pop("a/restored")
    assert restored["missing"] == [[0, 4, [], pb.MISSING_REASON_KV_UNKNOWN]]
    assert restored["cells"] < before["cells"]
    lost, before = found.pop("a/lost"), recorded.pop("a/lost")
    assert lost["cells"] == 0 < before["cells"], "its begin never came"
    assert_sampled(found, recorded, {"a/later10", "a/waiting"})


def assert_sampled(found: dict[str, Any], recorded: dict[str, Any], preempted: set[str]) -> None:
    """Compare answers; the first attempt of some requests sampled nothing, and counted in 0.8.

    Their rows of the second attempt are others.
    """
    for name in preempted:
        now, before = found[name], recorded[name]
        assert now["rows"] != before["rows"]
        recorded[name] = {**before, "rows": now["rows"]}
    assert found == recorded


def test_a_data_directory_of_the_previous_version_gives_the_same_answers(data):
    recorded = fixture("answers")
    with Serving(data, AGAIN) as serving:
        assert not serving.store.stats().damaged_records
        assert_same(answers(serving.target), recorded["before"])
        go_on(serving, recorded["writers"])
        assert_same(answers(serving.target), recorded["after"])
    with Serving(data, AGAIN) as serving:  # a log of both versions
        assert_same(answers(serving.target), recorded["after"])
        serving.sweep()
    with Serving(data, AGAIN) as serving:
        assert serving.core.recovery.records == 0, "all is in the snapshot"
        assert_same(answers(serving.target), recorded["after"])


def test_the_fixture_has_an_answer_of_every_kind():
    """Reasons of deletions, drafts, unknown slots, attempts, incarnations, bound requests."""
    before, after = (fixture("answers")[part] for part in ("before", "after"))
    gone = {answer["gone"] for answer in before.values() if "gone" in answer}
    assert gone == {"", "deleted", "retired", "expired"}
    assert before["a/draft"]["cells"] < after["a/draft"]["cells"]
    assert after["a/hit2"]["missing"], "a slot of external KV"
    assert before["a/waiting"]["incarnations"][2] == 2
    assert before["a/bound"]["missing"], "a slot that a later request wrote"
    assert before["b/half"]["missing"], "one stage of two"
    assert after["b/half"]["cells"] > before["b/half"]["cells"]


def test_messages_of_an_agent_and_a_client_of_the_previous_version_are_answered(tmp_path):
    recorded = fixture("wire")
    with Serving(tmp_path) as serving:
        assert wire.feed(serving.target, recorded["calls"]) == []
        assert_sampled(wire.answers(serving.target), dict(recorded["answers"]), {"w5"})
        [(now, before)] = wire.ask(serving.target, recorded["calls"])
        assert_sampled({"w5": now}, {"w5": before}, {"w5"})


def test_answers_of_a_server_of_the_previous_version_are_read():
    recorded = fixture("wire")
    with wire.Replayer(recorded["calls"]) as replayer, RouteClient(replayer.target) as client:
        # Clients of 0.8 named the provenance SLOT "cached".
        found = json.dumps(wire.read(client)).replace('"slot"', '"cached"')
        assert json.loads(found) == recorded["results"]
