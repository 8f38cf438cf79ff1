"""`list` and `agents` at a terminal of 80 columns, with ids as long as real ones."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from routetrace.cli.output import age, short, table_of
from routetrace.cli.rates import Rates
from routetrace.client import RouteClient
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.commands import commands
from support.servers.client_server import LAYOUT, rows_of
from support.terminal import CTRL_C, PROGRAM, screen, typed
from support.waiting import wait_for

ENGINE = "rollout-worker-7f9c4d-node-17.cluster.internal-dp"
TRACE = "chatcmpl-3f2a9be1-77c1-4f6e-9d3e-0a1b2c3d4e5f-sample"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    return commands(monkeypatch, server.target, "tables")


@pytest.fixture(scope="module")
def agents(server):
    """Run "tables": an agent that lags and drops, one that has gone."""
    feeders = []
    for i, weight_version in enumerate((1041, 1038)):
        feeder = Feeder(
            server.target, LAYOUT, run="tables", engine_id=f"{ENGINE}{i}", shard=f"pp{i}"
        )
        feeder.set_weight_version(weight_version)
        handle = feeder.begin(f"r{i}")
        feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
        feeder.flush()
        feeders.append(feeder)
    beat = pb.Heartbeat(
        offered_rows=1_234_567_890, dropped_rows={"queue_full": 12_345_678, "rewound": 5}
    )
    feeders[1].stream._out.put(pb.IngestRequest(heartbeat=beat))
    gone = Feeder(server.target, LAYOUT, run="tables", engine_id="gone")
    gone.close()
    with RouteClient(server.target, run="tables") as client:
        wait_for(lambda: any(agent.offered_rows for agent in client.agents()))
        wait_for(lambda: sum(agent.connected for agent in client.agents()) == 2)
    yield
    for feeder in feeders:
        feeder.close()


def test_agents_fit_80_columns(server, agents):
    shown = screen("agents", "--target", server.target, "--run", "tables")
    assert max(map(len, shown)) <= 80, shown
    header = shown[0].split()
    assert header == [
        "engine", "shard", "since", "seen", "rows", "dropped", "weights", "version", "host"
    ]  # fmt: skip
    text = "\n".join(shown)
    assert "1.23G" in text
    assert "12.3M" in text
    assert "1038 (-3)" in text
    assert [line.split()[:2] for line in shown if line.startswith("gone")] == [["gone", "gone"]]
    assert any(line.split()[-2:] == ["queue_full", "12,345,678"] for line in shown)
    assert shown[-1] == "3 agents, 2 connected; newest weight version 1041"


def test_agents_in_a_pipe_keep_whole_ids(cli, agents):
    done = cli("agents")
    assert f"{ENGINE}0" in done.stdout
    lines = [json.loads(line) for line in cli("agents", "--json").stdout.splitlines()]
    assert [line["engine_id"] for line in lines] == ["gone", f"{ENGINE}0", f"{ENGINE}1"]
    assert lines[2]["dropped_rows"] == {"queue_full": 12_345_678, "rewound": 5}
    assert lines[2]["weight_version_lag"] == 3


def test_agents_of_no_run(cli, agents):
    assert "no run 'typo'; runs: tables" in cli("agents", "--run", "typo", code=1).stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
     (47 * 3600, "47 h"), (48 * 3600, "2 d"), (400 * 86400, "400 d")],
)  # fmt: skip
def test_age(seconds, text):
    assert age(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10k"), (12_345, "12.3k"), (999_499, "999k"),
     (999_600, "1M"), (1_234_567, "1.23M"), (2**64 - 1, "18.4E")],
)  # fmt: skip
def test_short(count, text):
    assert short(count) == text


@pytest.fixture(scope="module")
def traces(server):
    """Run "traces": one retried, one with missing cells that ended first, one that runs."""
    feeder = Feeder(server.target, LAYOUT, run="traces", engine_id=ENGINE)
    labels = {"group": "prompt-000123", "session": "3f2a9be1-77c1-4f6e"}

    def begin(name, trace_id):
        handle = feeder.begin(name, trace_id=trace_id, labels=labels)
        feeder.step(rows_of(LAYOUT, 99), [(handle, 0, 99)])
        return handle

    running = begin("a", f"{TRACE}-0")
    holes = begin("b", f"{TRACE}-1")
    for version in (1041, 1042):
        feeder.set_weight_version(version)
        feeder.finish(begin(f"c{version}", f"{TRACE}-2"), 100)
    feeder.flush()
    flushed = time.time()
    wait_for(lambda: time.time() > flushed + 0.001)  # times of records are in milliseconds
    feeder.finish(holes, 131_072)
    feeder.flush()
    yield running
    feeder.close()


def test_list_fits_80_columns(server, traces):
    shown = screen("list", "--target", server.target, "--run", "traces")
    assert max(map(len, shown)) <= 80, shown
    assert shown[0].split() == [
        "trace", "age", "state", "end", "tokens", "coverage", "inc.", "weights", "labels"
    ]  # fmt: skip
    cells = [line.split() for line in shown if re.search(r"running|complete", line)][:3]
    assert [tuple(row[3:7]) for row in cells] == [
        ("complete", "stop", "100", "100"),
        ("incomplete", "stop", "131072", "0.08%"),
        ("running", "99+", "100", "%"),
    ]
    text = "\n".join(shown)
    assert re.search(r"complete +stop +100 +100 % +2 +1042 ", text), "two incarnations"
    # Ids and labels are broken, and whole.
    width = shown[0].index("age") - 2
    column = "".join(line[:width].strip() for line in shown[1:])
    assert column.startswith(f"{TRACE}-2{TRACE}-1{TRACE}-0"), text
    assert shown[-2:] == [
        "3 traces: 1 complete, 1 incomplete, 1 running; coverage 0.23%",
        "missing cells: 654,860 not_captured",
    ]


def test_list_is_in_the_order_of_its_age_column(server, traces, cli):
    """By the first report, not by the last change: the second trace changed last."""
    lines = cli("list", "--run", "traces", "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["trace_id"] for one in found] == [f"{TRACE}-{i}" for i in (2, 1, 0)]
    created = [one["created_at"] for one in found]
    assert created == sorted(created, reverse=True)
    assert found[1]["updated_at"] > found[0]["updated_at"]
    assert [one["num_incarnations"] for one in found] == [2, 1, 1]


# ---------------------------------------------------------------------------- agents, repeated


@pytest.fixture(scope="module")
def engines(server):
    """Run "engines": ids and weights of a common length, no shards."""
    feeders = []
    for i, version in enumerate((41, 39)):
        feeder = Feeder(server.target, LAYOUT, run="engines", engine_id=f"rollout-{i}")
        feeder.set_weight_version(version)
        handle = feeder.begin(f"r{i}")
        feeder.step(rows_of(LAYOUT, 4), [(handle, 0, 4)])
        feeder.flush()
        feeders.append(feeder)
    yield feeders
    for feeder in feeders:
        feeder.close()


def test_agents_at_60_columns_break_no_word(server, engines):
    shown = screen("agents", "--target", server.target, "--run", "engines", columns=60)
    assert max(map(len, shown)) <= 60, shown
    header, *rows, _ = shown
    assert header.split() == ["engine", "since", "seen", "rows", "dropped", "weights", "host"]
    assert [row.split()[0] for row in rows] == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("columns", [20, 38, 44])
def test_agents_at_a_narrow_terminal_are_whole(server, engines, columns):
    """Lines longer than the terminal, in place of numbers and headers that are cut."""
    words = ("agents", "--target", server.target, "--run", "engines")
    shown = screen(*words, columns=columns)
    header, *rows, _ = shown
    assert header.split() == ["engine", "since", "seen", "rows", "dropped", "weights"]
    text = "".join(row.split()[0] for row in rows if not row.startswith(" "))
    assert text == "rollout-0rollout-1"


def test_columns_are_left_out_for_room_alone():
    def columns(width: int, cell: str = "x" * 50) -> list[str]:
        table = table_of(
            ("engine", "shard", "rows ", "host"),
            [(cell, "s", "1234", "y" * 10)],
            ("engine", "host"),
            ("shard", "host"),
            width,
        )
        return [str(column.header) for column in table.columns]

    assert columns(35) == ["engine", "shard", "rows", "host"]
    assert columns(34) == ["engine", "rows", "host"]
    assert columns(27) == ["engine", "rows"]
    assert columns(1) == ["engine", "rows"]


@pytest.mark.parametrize(
    ("points", "rates"),
    [
        # The first change may be of an idle time before.
        ([(0, 0), (2, 0), (10, 50), (12, 50), (20, 150), (22, 150)], [None] * 4 + [10, 10]),
        # Idle: two reports without a change.
        ([(0, 0), (10, 100), (20, 200), (39, 200), (41, 200)], [None, None, 10, 10, 0]),
        # Begins again: the change may be of a shorter time than the idle one.
        (
            [(0, 0), (10, 100), (20, 200), (90, 200), (100, 250), (110, 350)],
            [None, None, 10, 0, 0, 10],
        ),
        ([(0, 7), (30, 7)], [None, 0]),
        ([(0, 100), (10, 200), (20, 300), (30, 5)], [None, None, 10, None]),  # a new boot
        ([(10, 100), (20, 200), (30, 300), (29, 400)], [None, None, 10, None]),  # clock set back
    ],
)
def test_a_rate_is_of_two_reports(points, rates):
    counts = Rates()
    assert [counts.add("a", value, at) for at, value in points] == rates


def watch(server, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            PROGRAM,
            "agents",
            "--watch",
            "0.1",
            "--run",
            "engines",
            "--target",
            server.target,
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def offer(feeder: Feeder, rows: int) -> None:
    feeder.stream._out.put(pb.IngestRequest(heartbeat=pb.Heartbeat(offered_rows=rows)))


def test_watched_agents_as_json(server, engines):
    child = watch(server, "--json")
    try:
        rows, rate = 0, None
        while not rate:
            rows += 100
            offer(engines[0], rows)
            one, two = (json.loads(child.stdout.readline()) for _ in range(2))
            rate = one["rows_per_second"]
            assert (one["engine_id"], two["engine_id"]) == ("rollout-0", "rollout-1")
            assert one["now"] == two["now"]
        assert rate > 0
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20)[1] == ""
        assert child.returncode == 130
    finally:
        child.kill()
        child.wait()


def test_watched_agents_in_a_pipe_are_tables(server, engines):
    child = watch(server)
    try:
        rounds = [[child.stdout.readline() for _ in range(4)] for _ in range(2)]
        for header, first, second, blank in rounds:
            assert header.split()[4:6] == ["rows", "rows/s"]
            assert first.startswith("rollout-0 ")
            assert second.startswith("rollout-1 ")
            assert blank == "\n"
        child.send_signal(signal.SIGINT)
        assert "2 agents, 2 connected" in child.communicate(timeout=20)[1]
        assert child.returncode == 130
    finally:
        child.kill()
        child.wait()


def test_watched_agents_at_a_terminal_are_shown_in_place(server, engines):
    seen, code = typed(
        ["agents", "--watch", "0.1", "--run", "engines", "--target", server.target],
        [(b"newest weight version 41", b""), (b"newest weight version 41", CTRL_C)],
    )
    assert code == 130
    assert b"\x1b[1A" in seen  # up, over the table before
    assert seen.endswith(b"\x1b[?25h")  # the cursor is back


def test_watched_agents_begin_with_their_total(server, engines):
    """Rows beyond the height of a terminal are hidden."""
    total = b"2 agents, 2 connected; newest weight version 41"
    words = ["agents", "--watch", "0.1", "--run", "engines", "--target", server.target]
    seen, code = typed(words, [(total, b""), (total, CTRL_C)], lines=3)
    assert code == 130
    assert seen.index(total) < seen.index(b"engine")


def test_watched_agents_at_a_narrow_terminal_follow_one_another(server, engines):
    words = ["agents", "--watch", "0.1", "--run", "engines", "--target", server.target]
    seen, code = typed(words, [(b"rows/s", b""), (b"rows/s", b""), (b"rows/s", CTRL_C)], columns=44)
    assert code == 130
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r", "")
    headers = [line.split() for line in text.splitlines() if "rows/s" in line]
    assert len(headers) >= 3
    assert headers[0] == ["engine", "since", "seen", "rows", "rows/s", "dropped", "weights"]
    assert text.count("rollou ") >= 2 * (len(headers) - 1)
    assert b"\x1b[1A" not in seen  # nothing is replaced
