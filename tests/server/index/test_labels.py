"""Labels belong to an incarnation: `get`, `stat`, `find` and lists agree on them."""

from __future__ import annotations

import pytest

from routetrace.client import RouteClient
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.snapshot import HEAD, to_bytes
from routetrace.server.index.state import State
from routetrace.server.index.traces.lineage import MAX_TRACE_LABELS
from routetrace.server.testing import run_server
from routetrace.stored import format5_pb2 as stored
from support.agents.feeder import Feeder
from support.agents.recorder import Recorder
from support.servers.client_server import LAYOUT, rows_of

OLD = {"job": "old", "group": "g0", "note": "first"}
NEW = {"job": "new", "group": "g1"}


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


@pytest.fixture
def client(server):
    with RouteClient(server.target) as client:
        yield client


def request(feeder, trace_id, name, labels, tokens=None, *, prompt_len=3, num_tokens=6, end=True):
    """Report a request with all rows but the cached ones; return its handle."""
    given = tokens and tokens[:prompt_len]
    handle = feeder.begin(
        name, trace_id=trace_id, prompt_len=prompt_len, labels=labels, prompt_token_ids=given
    )
    feeder.step(rows_of(LAYOUT, num_tokens - 1), [(handle, 0, num_tokens - 1)])
    if end:
        feeder.finish(handle, num_tokens, token_ids=tokens and tokens[:num_tokens])
    feeder.flush()
    return handle


def found(client, **labels):
    return [(stat.trace_id, stat.labels) for stat in client.find(labels=labels)]


@pytest.fixture
def feeder(server):
    feeder = Feeder(server.target, LAYOUT)
    yield feeder
    feeder.close()


def test_a_retry_does_not_take_over_labels(feeder, client):
    request(feeder, "retry", "job-1", OLD)
    handle = request(feeder, "retry", "job-2", NEW, end=False)
    # Reads return the first incarnation until the second one is complete.
    assert client.get("retry").labels == client.stat("retry").labels == OLD
    assert found(client, job="old") == [("retry", OLD)]
    assert found(client, job="new") == []
    feeder.finish(handle, 6)
    feeder.flush()
    assert client.get("retry").labels == client.stat("retry").labels == NEW
    assert found(client, job="new") == [("retry", NEW)]
    assert found(client, job="old") == found(client, note="first") == []
    assert found(client, job="new", group="g0") == [], "labels of two incarnations do not mix"
    for number, labels in ((1, OLD), (2, NEW)):
        assert client.get("retry", incarnation=number).labels == labels
        assert client.stat("retry", incarnation=number).labels == labels


def test_a_retry_with_the_same_prompt_does_not_either(feeder, client):
    """Rows of the first request stand in for the prompt of the second; its labels do not."""
    tokens = [*range(200)]
    request(feeder, "alike", "job-1", OLD, tokens, prompt_len=130, num_tokens=140)
    other = [*tokens[:130], *[7] * 10]
    request(feeder, "alike", "job-2", NEW, other, prompt_len=130, num_tokens=140)
    assert client.stat("alike").num_incarnations == 2
    assert client.stat("alike").labels == NEW
    assert client.stat("alike", incarnation=1).labels == OLD


def test_turns_of_a_session_share_labels_and_the_last_turn_counts(feeder, client):
    tokens = [*range(300)]
    request(feeder, "chat", "turn-1", OLD, tokens, prompt_len=64, num_tokens=128)
    request(feeder, "chat", "turn-2", NEW, tokens, prompt_len=192, num_tokens=256)
    assert client.stat("chat").num_incarnations == 1
    assert client.stat("chat").labels == {**OLD, **NEW}
    assert found(client, note="first", job="new") == [("chat", {**OLD, **NEW})]
    assert found(client, job="old") == []


def test_the_last_turn_keeps_its_labels_at_the_limit(feeder, client):
    tokens = [*range(300)]
    many = {f"a{i}": "x" for i in range(MAX_TRACE_LABELS)}
    request(feeder, "many", "turn-1", many, tokens, prompt_len=64, num_tokens=128)
    request(feeder, "many", "turn-2", NEW, tokens, prompt_len=192, num_tokens=256)
    labels = client.stat("many").labels
    assert len(labels) == MAX_TRACE_LABELS
    assert NEW.items() <= labels.items() <= {**many, **NEW}.items()


def test_shards_of_a_request_share_labels(server, client):
    for shard in ("pp0", "pp1"):
        feeder = Feeder(server.target, LAYOUT, engine_id="sharded", shard=shard)
        request(feeder, "sharded", "r", {"shard": shard, shard: "1"})
        feeder.close()
    assert client.stat("sharded").labels == {"shard": "pp1", "pp0": "1", "pp1": "1"}


def test_a_restart_keeps_the_labels_of_each(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        feeder = Feeder(server.target, LAYOUT)
        request(feeder, "t", "job-1", OLD)
        request(feeder, "t", "job-2", NEW)
        feeder.close()
        assert server.stop() == 0
    with run_server(data_dir=tmp_path) as server, RouteClient(server.target) as client:
        assert client.stat("t").labels == NEW
        assert client.stat("t", incarnation=1).labels == OLD


def test_a_snapshot_keeps_them_and_an_older_one_gives_its_own_to_all():
    recorder = Recorder()
    for name, labels in (("r", OLD), ("s", NEW)):
        recorder.finish(recorder.begin(name, trace_id="t", labels=labels), 1)
        recorder.flush()
    state = State(100)
    for number, record in enumerate(recorder.records, 1):
        apply_record(state, number, record)
    pieces = [*state.dump()]
    state.load(pieces)
    join = state.traces.traces["run", "t"].join
    assert [join.incarnation(number).labels for number in (1, 2)] == [OLD, NEW]

    message = stored.Piece()
    for piece in pieces:
        message.MergeFromString(piece[len(HEAD) :])
    (trace,) = message.traces
    for source in trace.sources:
        source.labels.clear()
    trace.labels.update({**OLD, **NEW})  # as servers wrote them that did not tell requests apart
    state.load([HEAD + to_bytes(message)])
    join = state.traces.traces["run", "t"].join
    assert [join.incarnation(number).labels for number in (1, 2)] == [{**OLD, **NEW}] * 2
