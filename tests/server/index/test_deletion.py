"""A deleted trace stays deleted: whatever other shards send later, after any restart.

The model knows the rule alone (docs/rows.md, 7): a deletion takes every engine request that some
shard has reported into the trace, at all shards, and nothing else.
"""

from __future__ import annotations

import random
from collections import defaultdict

import grpc
import numpy as np
import pytest

from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.record import encode_delete
from routetrace.server.index.state import State
from routetrace.server.index.traces import tombstones
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.tombstones import Fate, Tombstones
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.agents.sharded_requests import LAYOUT, ROWS, STAGES, Engine
from support.reads import Reads
from support.waiting import wait_for

TTL = 10.0


class Model:
    """Traces as sets of (engine, index); `dead` are those that were deleted.

    `number` is that of the record under way.
    """

    def __init__(self) -> None:
        self.traces: dict[str, dict] = {}
        self.dead: set[tuple[str, int]] = set()
        self.told: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        self.number = 0

    def report(self, name: str, shard: str, kind: str, index: int, trace_id: str, now: float):
        request = name, index
        self.told[request][shard] = 3 if kind == "end" else 0
        if request not in self.dead:
            trace = self.traces.setdefault(trace_id, {"expires": 0, "requests": set()})
            trace["requests"].add(request)
            trace["expires"] = max(trace["expires"], now + TTL)
            trace["changed"] = self.number

    def remove(self, trace_id: str, judged: int) -> None:
        """Delete a trace that was chosen after so many records, if it has not changed since."""
        if trace_id in self.traces and self.traces[trace_id]["changed"] <= judged:
            self.delete(trace_id)

    def delete(self, trace_id: str) -> None:
        self.dead |= self.traces.pop(trace_id, {"requests": set()})["requests"]

    def expire(self, now: float) -> None:
        for trace_id in [*self.traces]:
            if self.traces[trace_id]["expires"] <= now:
                self.delete(trace_id)

    def visible(self) -> dict[str, list]:
        return {
            trace_id: sorted(
                (name, shard, index, rows)
                for name, index in trace["requests"]
                for shard, rows in self.told[name, index].items()
            )
            for trace_id, trace in self.traces.items()
        }


def visible(state: State, now: float) -> dict[str, list]:
    return {
        trace_id: sorted(
            (
                s.writer.engine_id,
                s.writer.shard,
                int(s.occurrence.rpartition("/")[2]),
                s.attempts[-1].end,
            )
            for s in trace.sources
        )
        for (_, trace_id), trace in state.traces.traces.items()
        if trace.expires > now
    }


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_no_order_of_shards_deletions_and_restarts_brings_half_a_trace_back(first):
    hidden = 0
    for seed in range(first, first + 50):
        hidden += run(random.Random(seed))
    assert hidden > 50


def run(rng: random.Random) -> int:
    engines = [
        Engine(rng, "e0", ["pp0", "pp1", "pp2"][: rng.randint(2, 3)]),
        Engine(rng, "e1", [""]),
    ]
    model, state, log, now = Model(), State(TTL), [], 1.0
    snapshot: tuple[int, list[bytes]] | None = None

    def append(record: bytes) -> None:
        log.append(record)
        model.number = len(log)
        apply_record(state, len(log), record)

    for record in (r for engine in engines for r in engine.opens()):
        append(record)
    waiting = [(e, shard) for e in engines for shard in e.queues]
    while any(e.queues[shard] for e, shard in waiting):
        now += rng.random()
        what = rng.random()
        model.expire(now)
        if what < 0.1:
            trace_id = f"t{rng.randrange(3)}"
            reason = rng.choice(["deleted", "retired", "quota"])
            if reason == "deleted":
                append(encode_delete(now, "run", [trace_id], reason))
                model.delete(trace_id)
            else:  # records were under way when the trace was judged
                judged = max(1, len(log) - rng.randrange(4))
                append(encode_delete(now, "run", [trace_id], reason, judged=judged))
                model.remove(trace_id, judged)
        elif what < 0.15:
            now += TTL * rng.random() * 2
            model.expire(now)
        elif what < 0.25:  # a sweep, of which no record tells
            for key in [trace.key for trace in state.traces.oldest_first()]:
                state.trace(key, now)
        elif what < 0.3:
            snapshot = len(log), list(state.dump())
        elif what < 0.4:  # a restart: the newest snapshot, the records after it, a sweep
            state = State(TTL)
            if snapshot:
                state.load(snapshot[1])
            for number in range(state.number, len(log)):
                apply_record(state, number + 1, log[number])
        else:
            engine, shard = rng.choice([(e, s) for e, s in waiting if e.queues[s]])
            kind, index = engine.queues[shard].pop(0)
            append(engine.chunk(shard, kind, index, now))
            trace_id = engine.requests[index][1]
            model.report(engine.name, shard, kind, index, trace_id, now)
        assert visible(state, now) == model.visible()
    return len(model.dead)


def test_an_unseen_request_survives_a_restart_beside_a_new_trace_of_its_id():
    """One shard: the request runs on unseen, and its later rows begin no trace of their own."""
    engine = Engine(random.Random(0), "e0", [""])
    engine.requests = [("r0", "t"), ("r1", "t")]
    state = State(TTL)
    records = [
        *engine.opens(),
        engine.chunk("", "begin", 0, 1),
        encode_delete(1, "run", ["t"], "deleted"),
        engine.chunk("", "begin", 1, 2),
    ]
    for number, record in enumerate(records, 1):
        apply_record(state, number, record)
    again = State(TTL)
    again.load(list(state.dump()))
    apply_record(again, len(records) + 1, engine.chunk("", "end", 0, 3))
    assert visible(again, 3) == {"t": [("e0", "", 1, 0)]}
    assert again.traces.traces["run", "t"].updated == 2  # nor do they keep the new one alive


@pytest.mark.parametrize("swept", [False, True])
def test_deletions_do_not_count_what_has_expired(swept):
    engine = Engine(random.Random(0), "e0", [""])
    engine.requests = [("r0", "old"), ("r1", "new")]
    state = State(TTL)
    begins = [engine.chunk("", "begin", 0, 1), engine.chunk("", "begin", 1, 1 + TTL)]
    for number, record in enumerate([*engine.opens(), *begins], 1):
        apply_record(state, number, record)
    if swept:
        assert state.trace(("run", "old"), 1 + TTL) is None
    assert apply_record(state, 4, encode_delete(1 + TTL, "run", ["old", "new"], "deleted")) == 1
    assert not state.traces.traces


def test_what_is_left_of_an_unseen_request_after_damage_is_no_trace():
    engine = Engine(random.Random(0), "e0", [""])
    engine.requests = [("r0", "t")]
    state = State(TTL)
    begin, damaged, last = (engine.chunk("", kind, 0, 1) for kind in ("begin", "begin", "end"))
    deleted = encode_delete(1, "run", ["t"], "deleted")
    for number, record in enumerate([*engine.opens(), begin, deleted], 1):
        apply_record(state, number, record)
    (writer,) = state.writers.values()
    writer.torn = bool(damaged)  # it never came
    assert apply_record(state, 9, last)
    assert not state.traces.traces


def source(index: int, boot: str = "b") -> Source:
    return Source(WriterKey("run", "e", "pp0"), 1, f"r{index}", f"{boot}/{index}", LAYOUT)


@pytest.mark.parametrize("seed", range(20))
def test_tombstones_are_a_set(seed):
    rng, stones, expected = random.Random(seed), Tombstones(), set()
    for _ in range(60):
        index = rng.randrange(40)
        stones.add(("run", "t"), [source(index)], Fate("deleted"))
        expected.add(index)
        assert {i for i in range(41) if stones.hold(source(i))} == expected
        stones, parts = Tombstones(), stones.dump()
        for part in parts:
            stones.load(part)


def test_tombstones_are_bounded(monkeypatch):
    monkeypatch.setattr(tombstones, "MAX_INTERVALS", 10)
    monkeypatch.setattr(tombstones, "MAX_BOOTS", 2)
    monkeypatch.setattr(tombstones, "MAX_FATES", 3)
    stones = Tombstones()
    for index in range(0, 200, 2):  # every other one runs on
        stones.add(("run", f"t{index}"), [source(index)], Fate("deleted"))
    parts = [*stones.dump()]
    (boot,) = (boot for part in parts for boot in part.boots)
    assert len(np.frombuffer(boot.edges, "<i8")) == 20
    assert all(stones.hold(source(i)) for i in range(0, 200, 2))
    assert not any(stones.hold(source(i)) for i in range(185, 200, 2))
    assert sum(len(part.deleted) for part in parts) == 3
    for boot in "cde":
        stones.add(("run", "t"), [source(0, boot)], Fate("deleted"))
    stones.prune([tombstones.Boot("run", "e", "b")])
    assert [stones.hold(source(0, boot)) for boot in "bcde"] == [True, False, False, True]


@pytest.mark.parametrize("reason", ["deleted", "retired", "expired"])
def test_a_late_shard_finds_the_trace_gone(tmp_path, reason):
    """Through the daemon, with a restart between the deletion and the late chunk."""
    options = {"data_dir": str(tmp_path), "sweep_interval_seconds": 0.05}
    options["agent_timeout_seconds"] = 0.5
    feeders = []

    def connect(target: str, i: int) -> Feeder:
        feeders.append(Feeder(target, STAGES[i], run="r", shard=f"pp{i}"))
        return feeders[-1]

    def report(feeder: Feeder, trace_id: str) -> None:
        handle = feeder.begin(f"{trace_id} {len(feeder.names)}", trace_id=trace_id, ttl_seconds=ttl)
        feeder.step(ROWS, [(handle, 0, 3)])
        feeder.finish(handle, 4)
        feeder.flush()

    ttl = 1 if reason == "expired" else 1000
    with run_server(**options) as server:
        report(connect(server.target, 0), "t")
        reads = Reads(server.target)
        if reason == "deleted":
            reads.stub.DeleteTrace(pb.DeleteTraceRequest(run="r", trace_id="t"))
        elif reason == "retired":
            # The second shard was never heard of, so that the trace is given up.
            request = pb.RetireTracesRequest(run="r")
            wait_for(lambda: reads.stub.RetireTraces(request).num_retired)

        def gone() -> bool:
            try:
                reads.get("t", "r")
            except grpc.RpcError as error:
                return (error.code(), reason in str(error.details())) == (
                    grpc.StatusCode.NOT_FOUND,
                    True,
                )
            return False

        wait_for(gone)
        reads.close()
    ttl = 1000
    with run_server(**options) as server:
        report(connect(server.target, 1), "t")
        reads = Reads(server.target)
        wait_for(gone)
        listed = reads.stub.ListTraces(pb.ListTracesRequest(run="r")).traces
        assert not listed
        # A request that begins later is a new trace.
        report(feeders[1], "t")
        cells, _, _ = reads.get("t", "r")
        assert {layer for _, layer in cells} == {2}
        reads.close()
