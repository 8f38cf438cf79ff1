"""Runs: the list of traces and the overview, against what the client says of the same server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from page.conftest import Guarded
from routetrace.client import AgentStat, RouteClient, TraceState
from routetrace.page import mirrors, overview
from routetrace.page.minutes import EngineMinutes, Minutes
from routetrace.server.testing import ServerProcess, free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.pages import Answer, Browser, running_page
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

LAYERS = len(LAYOUT.layer_ids)


def ask(browser: Browser, run: str, what: str, **params: Any) -> Answer:
    query = urlencode(params, doseq=True)
    return browser.call(f"/api/v1/runs/{quote(run, safe='')}/{what}?{query}")


def ids(answer: Answer) -> list[str]:
    return [trace["trace_id"] for trace in answer.json["traces"]]


def add(
    feeder: Feeder, name: str, tokens: int, *, version: int = 1, lost: int = 0, ends: bool = True
) -> None:
    """A trace whose last `lost` rows are not reported."""
    feeder.set_weight_version(version)
    handle = feeder.begin(name, prompt_len=1, labels={"task": "math", "name": name})
    rows = tokens - 1 - lost
    feeder.step(rows_of(LAYOUT, rows), [(handle, 0, rows)])
    if ends:
        feeder.finish(handle, tokens)
    feeder.flush()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServerProcess, Feeder, str]]:
    """A server with a run of known traces, its feeder, and a page."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="run", engine_id="e0")
        for number in range(30):
            add(feeder, f"t{number:02}", 10 + number, version=number // 10, lost=5 * (number % 3))
        other = Feeder(server.target, LAYOUT, run="run", engine_id="e1")
        add(other, "of-e1", 99, version=2**60)
        add(other, "running", 50, ends=False)
        with running_page(server.target) as address:
            yield server, feeder, address
        feeder.close()
        other.close()


@pytest.fixture
def browser(served: tuple[ServerProcess, Feeder, str]) -> Browser:
    return Browser(served[2])


def test_every_trace_is_listed_as_the_client_lists_it(
    served: tuple[ServerProcess, Feeder, str], browser: Browser
):
    with RouteClient(served[0].target, run="run") as client:
        expected = {stat.trace_id: stat for stat in client.find()}
    answer = ask(browser, "run", "traces", sort="id", order="asc", limit=500)
    assert answer.status == 200
    assert ids(answer) == sorted(expected)
    assert answer.json["total"] == answer.json["matching"] == len(expected)
    assert answer.json["whole"]
    for shown in answer.json["traces"]:
        stat = expected[shown["trace_id"]]
        running = stat.state is TraceState.RUNNING
        assert shown["state"] == stat.state.value
        assert shown["num_tokens"] == stat.num_tokens
        assert shown["num_rows"] == stat.num_rows
        assert shown["engines"] == list(stat.engine_ids)
        assert shown["labels"] == stat.labels
        assert shown["updated"] == stat.updated_at.timestamp()
        versions = [stat.min_weight_version, stat.max_weight_version]
        assert list(map(int, shown["weights"])) == versions
        assert (shown["coverage"] == 1) == (stat.coverage == 1 and not running)
        if not running:
            assert shown["coverage"] == pytest.approx(stat.coverage)
            assert shown["missing_cells"] == sum(stat.missing_cells.values())
            assert shown["reason"] == (next(iter(stat.missing_cells), None))
    assert {t["trace_id"]: t for t in answer.json["traces"]}["of-e1"]["weights"] == [str(2**60)] * 2


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"state": "running"}, {"running"}),
        ({"state": "complete", "engine": "e1"}, {"of-e1"}),
        ({"reason": "not_captured", "version": "0"}, {f"t{n:02}" for n in range(10) if n % 3}),
        ({"version": "1..1"}, {f"t{n:02}" for n in range(10, 20)} | {"running"}),
        ({"version": f"..{2**59}", "engine": "e1"}, {"running"}),
        ({"label": ["task=math", "name=t07"]}, {"t07"}),
        ({"label": "name=unknown"}, set()),
        ({"q": "t0"}, {f"t{n:02}" for n in range(10)}),
        ({"below": "0.5"}, {"t02", "t05", "t08"}),
        ({"below": "1", "q": "t1"}, {f"t1{n}" for n in range(10) if (10 + n) % 3}),
    ],
)
def test_filters(browser: Browser, params: dict[str, Any], expected: set[str]):
    answer = ask(browser, "run", "traces", **params)
    assert set(ids(answer)) == expected
    assert answer.json["matching"] == len(expected)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"state": "lost"}, "state"), ({"reason": "bad"}, "reason"), ({"version": "a"}, "version"),
        ({"version": "2..1"}, "version"), ({"version": str(2**63)}, "version"),
        ({"below": "2"}, "below"), ({"below": "nan"}, "below"), ({"label": "x"}, "label"),
        ({"label": ["a=b"] * 17}, "label"), ({"sort": "size"}, "sort"), ({"order": "up"}, "order"),
        ({"limit": "0"}, "limit"), ({"limit": "-1"}, "limit"), ({"offset": "x"}, "offset"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(browser: Browser, params: dict[str, Any], field: str):
    answer = ask(browser, "run", "traces", **params)
    assert (answer.status, answer.error["field"]) == (400, field)


def test_a_view_stays_while_its_traces_change(
    served: tuple[ServerProcess, Feeder, str], browser: Browser
):
    server, feeder, _ = served
    for number in range(6):
        add(feeder, f"view{number}", 5)
    wait_for(lambda: ask(browser, "run", "traces", q="view").json["matching"] == 6)
    first = ask(browser, "run", "traces", q="view", sort="created", order="asc", limit=3)
    view = first.json["view"]
    assert first.json["newer"] == 0
    add(feeder, "view9", 5)
    with RouteClient(server.target, run="run") as client:
        client.delete("view4")

    def newer() -> bool:
        return ask(browser, "run", "traces", view=view).json["newer"] == 1

    wait_for(newer)
    wait_for(lambda: ask(browser, "run", "traces", q="view4").json["matching"] == 0)
    rest = ask(browser, "run", "traces", view=view, offset=3, limit=500)
    assert sorted(ids(first) + ids(rest)) == [f"view{n}" for n in range(6)]
    states = {t["trace_id"]: t["state"] for t in rest.json["traces"] + first.json["traces"]}
    assert states["view4"] == "gone"
    gone = ask(browser, "run", "traces", view="other")
    assert (gone.status, gone.error["kind"]) == (409, "view_gone")


def test_an_empty_run(browser: Browser):
    answer = ask(browser, "unknown", "traces")
    assert (answer.status, answer.json["total"], answer.json["whole"]) == (200, 0, True)
    overview = ask(browser, "unknown", "overview").json
    assert overview["traces"]["total"] == 0
    assert overview["engines"] == []
    assert overview["coverage"] == 1


def test_the_overview(served: tuple[ServerProcess, Feeder, str], browser: Browser):
    server, feeder, _ = served
    beat = pb.Heartbeat(offered_rows=5000, acknowledged_rows=3000, in_flight_rows=500, lag_ms=8000)
    beat.dropped_rows["queue_full"] = 1500
    beat.dropped_rows["rewound"] = 70  # drafts: no loss
    feeder.stream._out.put(pb.IngestRequest(heartbeat=pb.Heartbeat()))
    feeder.stream._out.put(pb.IngestRequest(heartbeat=beat))
    with RouteClient(server.target, run="run") as client:

        def dropping() -> bool:
            engines = ask(browser, "run", "overview").json["engines"]
            return engines[0]["state"] == "dropping"

        wait_for(dropping)
        found = ask(browser, "run", "overview").json
        stats = list(client.find())
        agents = {agent.engine_id: agent for agent in client.agents()}
    ended = [stat for stat in stats if stat.state is not TraceState.RUNNING]
    cells = sum(stat.num_rows * LAYERS for stat in ended)
    missing = sum(sum(stat.missing_cells.values()) for stat in ended)
    assert found["traces"]["total"] == len(stats)
    assert found["traces"]["running"] == 1
    assert found["cells"] == {"total": cells, "missing": {"not_captured": missing}}
    assert found["coverage"] == pytest.approx(1 - missing / cells)
    assert [engine["engine"] for engine in found["engines"]] == ["e0", "e1"]
    first, second = found["engines"]
    assert second["state"] == "live"
    assert first["lag"] == agents["e0"].lag_seconds == 8
    assert first["dropped"] == {"queue_full": 1500, "rewound": 70}
    assert (first["dropped_recently"], first["in_flight"]) == (1500, 500)
    assert first["weight_version_lag"] == agents["e0"].weight_version_lag
    assert second["weight_version"] == agents["e1"].weight_version == 1
    for name in ("at", "rows", "dropped", "reads"):
        assert len(found["throughput"][name]) == 300
    assert sum(found["throughput"]["dropped"]) == 1500
    rows = sum(stat.num_rows - sum(stat.missing_cells.values()) // LAYERS for stat in stats)
    assert sum(found["throughput"]["rows"]) >= rows, "those of deleted traces too"
    assert len(first["series"]) == 60
    assert 0 < found["latency"]["commit_p50"] <= found["latency"]["commit_p99"]
    assert found["store"]["used"] > 0


@pytest.mark.parametrize("dropping", [False, True])
def test_shards_that_are_gone_are_named_beside_those_that_are_there(dropping: bool):
    agents = []
    for shard, connected in (("pp-2", True), ("pp-1", False), ("pp-0", True)):
        info = pb.AgentInfo(engine_id="e", shard=shard, connected=connected)
        agents.append(AgentStat.from_proto(info))
    minutes = Minutes()
    if dropping:
        minutes.engines["e"] = EngineMinutes()
        minutes.engines["e"].dropped.append(5)
    (engine,) = overview.engines(agents, minutes, time.time())
    assert engine["shards"] == ["pp-0", "pp-2"]
    assert engine["shards_gone"] == ["pp-1"]
    assert engine["state"] == ("dropping" if dropping else "gone")


@pytest.mark.parametrize(
    ("closed", "gone", "state"),
    [("01", "", "closed"), ("0", "", "live"), ("0", "1", "gone"), ("", "01", "gone")],
)
def test_an_engine_whose_agents_were_closed_is_not_gone(closed: str, gone: str, state: str):
    agents = []
    for shard in "01":
        info = pb.AgentInfo(
            engine_id="e",
            shard=shard,
            connected=shard not in closed + gone,
            closed=shard in closed,
            report=pb.Heartbeat(lag_ms=9000 if shard in closed else 0),
        )
        agents.append(AgentStat.from_proto(info))
    (engine,) = overview.engines(agents, Minutes(), time.time())
    assert (engine["state"], engine["lag"]) == (state, 0)
    assert (engine["shards_closed"], engine["shards_gone"]) == ([*closed], [*gone])


def test_each_token_sees_its_run_alone(guarded: Guarded):
    with running_page(guarded.target) as address:
        answers = {}
        for token, run in (("rt_a", "a"), ("rt_b", "b")):
            browser = Browser(address)
            assert browser.sign_in(token, run=run).status == 204
            answers[run] = ids(ask(browser, run, "traces"))
            for what in ("traces", "overview"):
                refused = ask(browser, "ab".replace(run, ""), what)
                assert refused.status == 403
        assert answers == {"a": ["one"], "b": ["two"]}
        signed_out = Browser(address)
        assert ask(signed_out, "a", "traces").status == 401


def test_a_revoked_token_signs_out(guarded: Guarded):
    before = guarded.tokens.read_text()
    with running_page(guarded.target) as address:
        browser = Browser(address)
        assert browser.sign_in("rt_a", run="a").status == 204
        assert ask(browser, "a", "traces").status == 200
        try:
            guarded.tokens.write_text(before.partition('[[token]]\nname = "of-a"')[0])
            wait_for(lambda: ask(browser, "a", "traces").status == 401)
        finally:
            guarded.tokens.write_text(before)


def test_what_is_there_stays_while_the_server_is_away(tmp_path):
    port = free_ports(1)
    with run_server(data_dir=tmp_path, port=port) as server:
        feeder = Feeder(server.target, LAYOUT, run="run")
        add(feeder, "one", 5)
        feeder.close()
        with running_page(server.target) as address:
            browser = Browser(address)
            assert ids(ask(browser, "run", "traces")) == ["one"]
            server.kill()
            wait_for(lambda: ask(browser, "run", "traces").json["stale_since"])
            assert ids(ask(browser, "run", "traces")) == ["one"]
            with run_server(data_dir=tmp_path, port=port) as again:
                with RouteClient(again.target, run="run") as client:
                    client.delete("one")
                feeder = Feeder(again.target, LAYOUT, run="run")
                add(feeder, "two", 5)
                wait_for(lambda: ids(ask(browser, "run", "traces")) == ["two"])
                assert ask(browser, "run", "traces").json["stale_since"] is None
                feeder.close()
        with running_page("127.0.0.1:1") as address:
            assert ask(Browser(address), "run", "traces").status == 503


def test_a_mirror_that_nobody_asks_for_ends(
    served: tuple[ServerProcess, Feeder, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "_UNUSED_S", 0.0)
    monkeypatch.setattr(mirrors, "_MAX_MIRRORS", 1)
    with running_page(served[0].target) as address:
        browser = Browser(address)
        for run in ("run", "other", "run"):
            assert ask(browser, run, "traces").status == 200


def test_mirrors_are_bounded(
    served: tuple[ServerProcess, Feeder, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "_MAX_MIRRORS", 2)
    with running_page(served[0].target) as address:
        browser = Browser(address)
        assert [ask(browser, f"r{n}", "traces").status for n in range(3)] == [200, 200, 503]


def test_security_of_the_endpoints_is_that_of_the_page(browser: Browser):
    path = "/api/v1/runs/run/traces"
    assert browser.call(path, headers={"Host": "evil.example"}).status == 421
    assert browser.call(path, headers={"Sec-Fetch-Site": "same-site"}).status == 403
