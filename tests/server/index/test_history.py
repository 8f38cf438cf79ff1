"""History of the last minutes: every count is in the step of its moment, and nothing else is."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import RouteClient, RunHistory
from routetrace.server.access.partition import Partition
from routetrace.server.index.history import STEPS, History, summed
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.testing import free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

STEP_S = 2.0


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.time = 1e9

    def now(self) -> float:
        return self.time


class Expected:
    """What was noted, in full: the history of a run since the beginning of time."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
        self.agents: dict[WriterKey, dict[str, Counter[int]]] = {}
        self.totals: dict[WriterKey, int] = {}

    def agent(self, key: WriterKey) -> dict[str, Counter[int]]:
        return self.agents.setdefault(key, {"rows": Counter(), "dropped_rows": Counter()})


def check(found: pb.GetHistoryResponse, expected: Expected, run: str, now: float, after: int):
    last = int(now / STEP_S) - 1
    assert (found.last_step, found.step_ms) == (last, 2000)
    steps = range(max(after + 1, last - STEPS + 1), last + 1)
    for name in ("rows", "stored_bytes", "reads"):
        counts = expected.runs[run][name]
        assert list(getattr(found, name)) == [counts[step] for step in steps], name
    told = {(a.engine_id, a.shard): a for a in found.agents}
    for key, counts in expected.agents.items():
        if key.run != run:
            continue
        agent = told.pop((key.engine_id, key.shard), pb.AgentHistory())
        for name, numbers in counts.items():
            there = list(getattr(agent, name)) or [0] * len(steps)  # forgotten, as it is all 0
            assert there == [numbers[step] for step in steps], (key, name)
    assert not told


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_in_their_steps(seed: int):
    rng = random.Random(seed)
    clock, expected = Clock(), Expected()
    jumped = clock.time
    history = History(clock)  # type: ignore[arg-type]
    keys = [WriterKey(run, f"e{i}", shard) for run in "ab" for i in range(2) for shard in ("", "x")]
    for _ in range(3000):
        step = int(clock.time / STEP_S)
        key = rng.choice(keys)
        match rng.randrange(8):
            case 0 | 1 | 2:
                rows, nbytes = rng.randrange(5), rng.randrange(1, 100)
                history.stored(key, rows, nbytes, rng.random())
                expected.runs[key.run]["rows"][step] += rows
                expected.runs[key.run]["stored_bytes"][step] += nbytes
                expected.agent(key)["rows"][step] += rows
            case 3:
                history.read(key.run)
                expected.runs[key.run]["reads"][step] += 1
            case 4:
                before = expected.totals.get(key)
                total = rng.choice(
                    (before or 0, (before or 0) + rng.randrange(9), rng.randrange(4))
                )
                history.heard(key, total)
                if before is not None:
                    more = total - before if total >= before else total
                    expected.agent(key)["dropped_rows"][step] += more
                expected.agent(key)
                expected.totals[key] = total
            case 5:
                clock.time += rng.random() * 3
            case 6 if clock.time - jumped > 200:
                # Not so far that an agent would be forgotten.
                clock.time += rng.choice((50, 390))
                jumped = clock.time
            case _:
                after = rng.choice((0, int(clock.time / STEP_S) - rng.randrange(400)))
                run = rng.choice("abc")
                check(history.of(run, after), expected, run, clock.time, after)


@pytest.mark.parametrize("after", [0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1])
def test_steps_that_are_not_yet_are_none(after: int):
    clock = Clock()
    history = History(clock)  # type: ignore[arg-type]
    key = WriterKey("r", "e", "")
    history.stored(key, 5, 9, 0.1)
    clock.time += STEP_S
    last = history.of("r").last_step
    for later in (last + after, max(after, last)):
        if later < 2**64:
            answer = history.of("r", later)
            assert answer.last_step == last
            assert [*answer.rows, *answer.stored_bytes, *answer.reads] == []
            assert [len(agent.rows) for agent in answer.agents] == [0]
            assert sum(answer.commit_counts) == 1


def test_a_writer_that_is_first_heard_of_has_dropped_nothing_in_this_step():
    clock = Clock()
    history = History(clock)  # type: ignore[arg-type]
    history.heard(WriterKey("r", "e", ""), 7)
    clock.time += STEP_S
    history.heard(WriterKey("r", "e", ""), 9)
    clock.time += STEP_S
    assert list(history.of("r").agents[0].dropped_rows)[-2:] == [0, 2]


def test_what_is_long_past_takes_no_memory():
    clock = Clock()
    history = History(clock)  # type: ignore[arg-type]
    for number in range(50):
        history.stored(WriterKey(f"r{number}", f"e{number}", ""), 1, 1, 0.1)
    clock.time += (STEPS + STEPS) * STEP_S
    history.read("now")
    assert list(history._runs) == ["now"]


@given(st.lists(st.floats(1e-5, 100), min_size=1, max_size=50), st.floats(0.01, 1))
def test_commit_times_are_at_most_a_half_power_of_two_too_long(times: list[float], share: float):
    clock = Clock()
    history = History(clock)  # type: ignore[arg-type]
    for seconds in times:
        history.stored(WriterKey("r", "e", ""), 1, 1, seconds)
    clock.time += STEP_S
    found = RunHistory.from_proto(history.of("r"))
    assert sum(found.commit_counts) == len(times)
    exact = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]
    told = found.commit_seconds(share)
    assert told is not None
    assert exact <= told * 1.001
    assert told <= max(0.0005, 1.42 * exact)
    clock.time += 31 * STEP_S
    assert RunHistory.from_proto(history.of("r")).commit_seconds(0.5) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_workers_whose_clocks_differ(seed: int):
    rng = random.Random(seed)
    workers, expected = [], Counter[int]()
    clocks = [Clock() for _ in range(3)]
    for worker, clock in enumerate(clocks):
        clock.time += rng.choice((0.0, STEP_S))
        workers.append(History(clock))  # type: ignore[arg-type]
        for _ in range(40):
            rows = rng.randrange(9)
            workers[-1].stored(WriterKey("r", f"e{worker}", ""), rows, 1, 0.1)
            expected[int(clock.time / STEP_S)] += rows
            clock.time += rng.choice((0.0, 0.0, STEP_S))
    latest = max(clock.time for clock in clocks)
    for clock in clocks:
        clock.time = latest + rng.choice((STEP_S, 2 * STEP_S))
    total = summed([history.of("r", 0) for history in workers])
    last = int(min(clock.time for clock in clocks) / STEP_S) - 1
    assert total.last_step == last
    steps = range(last - len(total.rows) + 1, last + 1)
    assert list(total.rows) == [expected[step] for step in steps]
    assert sum(expected.values()) == sum(total.rows) == sum(sum(a.rows) for a in total.agents)
    assert {len(a.rows) for a in total.agents} == {len(total.rows)}
    assert sum(total.commit_counts) == 120


@pytest.mark.parametrize("workers", [1, 3])
def test_the_history_of_a_real_server(workers: int):
    settings: dict[str, Any] = {}
    if workers > 1:
        settings = {"port": free_ports(workers), "workers": workers, "spread_runs": '["*"]'}
    with run_server(**settings) as server, RouteClient(server.target) as client:
        host, _, port = server.target.rpartition(":")
        places = [Partition(0, workers, spread=("*",)).of("default", f"e{i}") for i in range(4)]
        assert workers == 1 or len({*places}) > 1
        feeders = [
            Feeder(f"{host}:{int(port) + place}", LAYOUT, engine_id=f"e{i}")
            for i, place in enumerate(places)
        ]
        for number, feeder in enumerate(feeders):
            handle = feeder.begin(f"t{number}", prompt_len=1)
            feeder.step(rows_of(LAYOUT, number + 1), [(handle, 0, number + 1)])
            feeder.finish(handle, number + 2)
            feeder.flush()
        for _ in range(3):
            client.get("t2")
        rows = 0
        after = reads = 0

        def counted() -> bool:
            nonlocal after, rows, reads
            found = client.history(after=after)
            after = found.last_step
            rows += sum(found.rows)
            reads += sum(found.reads)
            assert len(found.rows) == len(found.reads) == len(found.stored_bytes)
            return (rows, reads) == (10, 3)

        wait_for(counted)
        found = client.history()
        assert {a.engine_id: sum(a.rows) for a in found.agents} == {
            f"e{i}": i + 1 for i in range(4)
        }
        assert sum(found.commit_counts) == 4
        told = found.commit_seconds(0.5)
        assert told is not None
        assert 0 < told < 60
        with RouteClient(server.target, run="other") as other:
            assert not sum(other.history().rows)
        for feeder in feeders:
            feeder.close()
