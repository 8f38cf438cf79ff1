"""Traces without a reported end, aborted ones, other incarnations, and traces that are gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from routetrace.cli.facts import totals
from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import Corrupt, NotFound, Unavailable
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.commands import commands
from support.servers.client_server import LAYOUT, rows_of
from support.terminal import screen
from support.waiting import wait_for

CELLS = len(LAYOUT.layer_ids)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "lost": an agent vanished while "dying", "holes" and "nothing" ran."""
    with run_server(agent_timeout_seconds=0) as server:
        feeder = Feeder(server.target, LAYOUT, run="lost")
        feeder.set_weight_version(7)

        def begin(name: str, spans: list[tuple[int, int]]) -> int:
            handle = feeder.begin(name, prompt_len=5)
            for start, stop in spans:
                feeder.step(rows_of(LAYOUT, stop - start), [[handle, start, stop - start]])
            return handle

        feeder.finish(begin("whole", [(0, 30)]), 31)
        feeder.finish(begin("aborted", [(0, 30)]), 31, reason="abort")
        begin("dying", [(0, 30)])
        begin("holes", [(0, 10), (20, 40)])
        begin("nothing", [])
        feeder.close()
        with RouteClient(server.target, run="lost") as client:
            wait_for(lambda: len([*client.find(states=["incomplete"])]) == 3)
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    return commands(monkeypatch, server.target, "lost")


def test_list_claims_no_coverage_of_a_trace_without_an_end(cli):
    done = cli("list")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    for name, tokens in (("dying", 30), ("holes", 40), ("nothing", 0)):
        assert re.search(rf" incomplete +unknown +{tokens}\+ +unknown ", rows[name])
    assert re.search(r" complete +abort +31 +100 % ", rows["aborted"])
    assert re.search(r" complete +stop +31 +100 % ", rows["whole"])
    assert done.stderr == (
        "5 traces: 3 incomplete, 2 complete; coverage 92.31% of the known rows, 3 traces\n"
        "with an unknown end\n"
        f"missing cells: {10 * CELLS} agent_lost\n"
    )


def test_list_still_fits_80_columns(server):
    shown = screen("list", "--target", server.target, "--run", "lost")
    assert max(map(len, shown)) <= 80, shown
    assert len(shown) == 9, shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dying", "30+ rows, end unknown"),
        ("holes", "40+ rows, end unknown; 75.00% of the known rows"),
        ("nothing", "0+ rows, end unknown"),
        ("whole", "100 %"),
    ],
)
def test_stat_says_what_is_known(cli, name, text):
    assert re.search(rf"^coverage +{re.escape(text)} *$", cli("stat", name).stdout, re.M)


def test_totals_of_nothing_known(server):
    with RouteClient(server.target, run="lost") as client:
        [nothing] = [one for one in client.find() if one.trace_id == "nothing"]
    assert nothing.state is TraceState.INCOMPLETE
    assert totals([nothing]) == [
        "1 trace: 1 incomplete; coverage unknown, 1 trace with an unknown end"
    ]


def test_stat_names_the_lag_of_the_weights_and_the_incarnation(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="lag")
    for version in (3, 5):
        feeder.set_weight_version(version)
        label = {"step": f"{version}"}
        handle = feeder.begin(f"r{version}", trace_id="again", labels=label)
        feeder.step(rows_of(LAYOUT, 10), [[handle, 0, 10]])
        feeder.finish(handle, 11)
    feeder.flush()

    def lines(*words: str) -> str:
        return cli("stat", "again", *words, "--run", "lag").stdout

    assert re.search(r"^weights +5 *$", lines(), re.M)
    assert re.search(r"^incarnation +2 \(one of 2\) *$", lines(), re.M)
    old = lines("--incarnation", "1")
    assert re.search(r"^weights +3 \(2 behind 5, the newest of the agents\) *$", old, re.M)
    assert re.search(r"^incarnation +1 \(the only one\)", cli("stat", "whole").stdout, re.M)
    # A label of the older incarnation alone.
    said = cli("list", "--label", "step=3", "--run", "lag").stderr
    assert "the labels of its newest complete incarnation" in said
    said = cli("get", "--label", "step=3", "--run", "lag", "-o", "x.npz", code=1).stderr
    assert "the labels of its newest complete incarnation" in said
    feeder.close()


def test_renew_and_verify_say_why_a_trace_is_gone(server, cli):
    feeder = Feeder(server.target, LAYOUT, run="gone")
    for name, ttl in (("deleted", 0), ("retired", 0), ("expired", 1), ("kept", 0)):
        feeder.set_weight_version(9 if name == "kept" else 1)
        handle = feeder.begin(name, prompt_len=5, ttl_seconds=ttl)
        feeder.step(rows_of(LAYOUT, 10), [[handle, 0, 10]])
        feeder.finish(handle, 11)
    feeder.close()
    run = ("--run", "gone")
    cli("delete", "deleted", *run)
    with RouteClient(server.target, run="gone") as client:
        wait_for(lambda: not [one for one in client.find() if one.trace_id == "expired"])
    cli("retire", "--through", "1", *run)
    names = ("deleted", "retired", "expired", "kept", "never")
    done = cli("renew", *names, *run, code=1)
    assert done.stdout == "1 of 5 traces renewed\n"
    verbs = ("was deleted", "was retired", "has expired", "is not in run")
    said = done.stderr.splitlines()
    assert len(said) == 4
    for name, verb, line in zip((*names[:3], "never"), verbs, said, strict=True):
        assert line.startswith(f"routetrace: {name}: trace '{name}' ")
        assert verb in line
    done = cli("renew", *names, "--json", *run, code=1)
    assert json.loads(done.stdout) == {"num_requested": 5, "num_renewed": 1}
    assert [json.loads(line)["trace_id"] for line in done.stderr.splitlines()] == [
        *names[:3], "never",
    ]  # fmt: skip

    done = cli("verify", *names, *run, code=1)
    for name, word in (*zip(names[:3], names[:3], strict=True), ("never", "not found")):
        assert re.search(rf"^{name} +{word} ", done.stdout, re.M)
    assert done.stderr.startswith("traces 1, incarnations 1,")
    assert done.stderr.endswith("defective traces: 0, not there: 4\n")


def test_renew_asks_for_absent_traces_alone_and_reports_every_error_in_a_line(
    server, cli, monkeypatch
):
    """The renewals were made: an error in the search for reasons does not hide their number."""
    feeder = Feeder(server.target, LAYOUT, run="renewed")
    feeder.begin("kept")
    feeder.close()
    asked = []

    def renew(*names, errors):
        def stat(client, name):
            asked.append(name)
            raise errors.get(name, NotFound)("so")

        asked.clear()
        monkeypatch.setattr(RouteClient, "stat", stat)
        done = cli("renew", *names, "--run", "renewed", code=1)
        assert done.stdout == f"1 of {len(names)} traces renewed\n"
        assert done.stderr.splitlines() == [f"routetrace: {name}: so" for name in asked]
        return asked

    assert renew("never", "kept", errors={}) == ["never"]
    assert renew("x", "y", "kept", errors={"x": Corrupt}) == ["x", "y", "kept"]
    assert renew("x", "y", "kept", errors={"x": Unavailable}) == ["x"]


def test_a_run_without_agents_says_so(cli, monkeypatch):
    monkeypatch.setattr(RouteClient, "agents", lambda client: [])
    assert cli("agents").stderr == "run 'lost' has no agents\n"
