"""The oracle itself: it replays, it does all that it should, and it says what it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest

from oracle.cluster import COUNTS, Cluster, Stores
from oracle.engine import Chances, Engine
from oracle.listener import Heard, Listener
from oracle.truth import (
    DIGEST_EVERY,
    NOBODY,
    Attempt,
    Bound,
    Policy,
    Record,
    RowStore,
    digest_positions,
    end_positions,
    expected,
    those_that_sampled,
)
from oracle.world import EngineSpec, Shard
from routetrace.codec import records
from routetrace.common.layout import ModelLayout
from support.seeds import seeds

pytestmark = pytest.mark.long

LAYOUT = ModelLayout((0, 2, 3), 4, 64, 2)
WHOLE = (Shard("", LAYOUT.layer_ids),)
POLICIES: tuple[Policy, ...] = ("as_sampled", "latest")


class Listening:
    """A world that only listens, and looks at the engines after each step."""

    stand_ins = True

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.listeners: dict[tuple[str, str], dict[str, Listener]] = {}
        self.boots: dict[str, str] = {}
        self.binds = 0

    def connect(self, spec: EngineSpec, shard: Shard, boot_id: str) -> Listener:
        self.log.append((spec, shard, boot_id))
        listener = Listener(spec, self.log)
        assert shard.name not in self.listeners.setdefault((spec.engine_id, boot_id), {})
        self.listeners[spec.engine_id, boot_id][shard.name] = listener
        self.boots[spec.engine_id] = boot_id
        return listener

    def crash(self, engine_id: str) -> None:
        self.log.append(("crash", engine_id))

    def barrier(self) -> None:
        self.log.append("barrier")
        for engine in self.cluster.engines:
            lines = self.listeners[engine.spec.engine_id, engine.boot_id]
            check_slots(self.cluster, engine, lines)
            check_drafts(self.cluster, engine, lines)

    def bind(
        self,
        engine_id: str,
        request_id: str,
        trace_id: str,
        block_ids: list[int],
        num_tokens: int,
        num_computed_tokens: int,
        step: int,
        token_ids: list[int] | None,
    ) -> None:
        self.log.append(
            ("bind", engine_id, request_id, trace_id, block_ids, num_tokens, step, token_ids)
        )
        self.binds += 1
        bound = self.cluster.bound[trace_id][-1]
        assert 0 < num_computed_tokens < num_tokens
        for name, listener in self.listeners[engine_id, self.boots[engine_id]].items():
            assert step <= listener.steps
            size = listener.spec.block_size
            columns = _columns(listener.spec, name)
            for p in range(num_computed_tokens):
                row = listener.slots.get(block_ids[p // size] * size + p % size)
                assert row == _row(self.cluster, bound.rows[p], columns)


def _columns(spec: EngineSpec, shard: str) -> list[int]:
    layer_ids = next(s.layer_ids for s in spec.shards if s.name == shard)
    return LAYOUT.columns(list(layer_ids))


def _row(cluster: Cluster, number: int, columns: list[int]) -> bytes | None:
    if number == NOBODY:
        return None
    return cluster.store.rows(np.array([number]))[0, columns].tobytes()


def play(seed: int, num_requests: int = 25, **options: Any) -> tuple[Cluster, Listening]:
    world = Listening()
    world.cluster = cluster = Cluster(LAYOUT, seed, world, **options)
    cluster.submit_workload(num_requests)
    while cluster.step():
        for engine in cluster.engines:
            check_pool(engine)
            for request in engine.running:  # rejected drafts are nowhere
                assert (request.attempt.rows[request.ahead_computed :] == NOBODY).all()
    return cluster, world


def check_pool(engine: Engine) -> None:
    """No block belongs to nobody, or to more than those who share its tokens."""
    pool = engine.pool
    held = Counter(block for request in engine.running for block in request.blocks)
    assert [held[b] for b in range(len(pool.refs))] == pool.refs
    assert set(pool.free) == {b for b, n in enumerate(pool.refs) if not n}
    assert pool.cached == {node: block for block, node in pool.node_of.items()}
    if not engine.counts["resets"]:
        assert all(n == 1 or block in pool.node_of for block, n in held.items())


def check_told(cluster: Cluster, world: Listening) -> int:
    """Compare the listeners' state with the records; return the number of rows compared."""
    compared = 0
    for engine in cluster.engines:
        lines = world.listeners[engine.spec.engine_id, engine.boot_id]
        records = [r for rr in cluster.records.values() for r in rr if r.boot_id == engine.boot_id]
        for name, listener in lines.items():
            assert sorted(h.name for h in listener.requests) == sorted(
                r.request_id for r in records
            )
            compared += len(listener.requests) and _compare(cluster, engine, name, listener)
        heard = [listener.requests for listener in lines.values()]
        for record, *shards in zip(_in_order(records, heard[0]), *heard, strict=True):
            stop = record.num_tokens - 1
            for i, attempt in enumerate(record.attempts):
                there = attempt.rows[:stop] != NOBODY
                told = [{p: r for p, r in h.attempts[i].items() if p < stop} for h in shards]
                assert {p for rows in told for p, r in rows.items() if r} == _places(there)
                unknown = {p for rows in told for p in rows} - _places(there)
                assert unknown == _places(attempt.unknown[:stop] & ~there)
                lost = {p for h in shards for p in h.lost[i] if p < stop} - _places(there)
                assert lost == _places(attempt.lost[:stop])
                assert {h.had[i] for h in shards} == {attempt.had}
        check_slots(cluster, engine, lines)
    return compared


def _places(mask: np.ndarray) -> set[int]:
    return {*np.flatnonzero(mask).tolist()}


def check_slots(cluster: Cluster, engine: Engine, lines: dict[str, Listener]) -> None:
    """Every slot names the row that the listeners believe it to name, whatever is in flight.

    Of slots that context-parallel ranks share, one of them names the row.
    """
    untold = [run for run in engine.flying.runs if not run.told] if engine.flying else []
    written = {slot for run in untold for slot in run.slots.tolist()}
    numbers = engine.named_slots().tolist()
    for layers in {shard.layer_ids for shard in engine.spec.shards}:
        ranks = [lines[s.name] for s in engine.spec.shards if s.layer_ids == layers]
        columns = LAYOUT.columns(list(layers))
        for slot, number in enumerate(numbers):
            if slot not in written:
                row = _row(cluster, number, columns)
                assert {rank.slots.get(slot) for rank in ranks} - {None} == {row} - {None}


def check_drafts(cluster: Cluster, engine: Engine, lines: dict[str, Listener]) -> None:
    """The listeners' drafts are the engine's, and those that a crash may leave."""
    heard = {name: {h.name: h for h in one.taking_rows()} for name, one in lines.items()}
    for request in engine.running:
        record = request.record
        assert record is not None
        for shard in engine.spec.shards:
            drafts = heard[shard.name][request.request_id].drafts
            columns = LAYOUT.columns(list(shard.layer_ids))
            told = [(p, n) for p, n, rank in request.drafts if rank == shard.rank]
            assert drafts.items() <= {(p, _row(cluster, n, columns)) for p, n in told}
            assert {p for p, n in told if request.attempt.rows[p] == n} <= {*drafts}
            assert not engine.alone or {*drafts} <= {*range(*record.tentative)}


def _in_order(records: list[Record], heard: list[Heard]) -> list[Record]:
    """Records in the order in which their engine began them."""
    by_name: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.serial):
        by_name.setdefault(record.request_id, []).append(record)
    return [by_name[h.name].pop(0) for h in heard]


def _compare(cluster: Cluster, engine: Engine, shard: str, listener: Listener) -> int:
    columns, compared = _columns(engine.spec, shard), 0
    records = [r for rr in cluster.records.values() for r in rr if r.boot_id == engine.boot_id]
    for record, heard in zip(_in_order(records, listener.requests), listener.requests, strict=True):
        assert heard.num_tokens == record.num_tokens
        assert len(heard.attempts) == len(record.attempts)
        for told, attempt in zip(heard.attempts, record.attempts, strict=True):
            for p, row in told.items():
                if p < record.num_tokens - 1 and row:
                    assert row == _row(cluster, attempt.rows[p], columns)
                    compared += 1
    return compared


# ---------------------------------------------------------------------------- engines


def test_a_seed_replays_exactly():
    logs = [play(seed)[1].log for seed in (3, 3, 4)]
    assert logs[0] == logs[1] != logs[2]


def test_everything_happens():
    total = Counter[str]()
    for seed, stores in product(range(8), get_args(Stores)):
        total.update(play(seed, chances=Chances(branch=0.5), stores=stores)[0].counts)
    assert set(total) == set(COUNTS)
    assert not [name for name in COUNTS if total[name] <= 0]


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_what_is_told_is_what_is_true(seed):
    cluster, world = play(seed, 30)
    assert world.binds == cluster.counts["binds"]
    assert check_told(cluster, world) or cluster.counts["crashes"]


@pytest.mark.parametrize("seed", range(5))
def test_slots_that_are_loaded_while_a_pass_is_in_flight(seed):
    spec = EngineSpec(
        *("e", 4, 100, WHOLE, 16, 6),
        draft_tokens=2,
        asynchronous=True,
        offload=True,
        slot_only_twin=True,
    )
    cluster, world = play(seed, 60, specs=[spec], chances=Chances(crash=0, reset=0))
    assert cluster.counts["binds"] > 20
    assert check_told(cluster, world)


@pytest.mark.parametrize("seed", seeds(4, 9))
def test_a_host_tier_over_updates_of_the_weights(seed):
    """Blocks come back from it, the same ones in other places, and its blocks are used again."""
    ranks = tuple(Shard(f"cp{rank}", LAYOUT.layer_ids, rank, 2) for rank in range(2))
    spec = EngineSpec(
        *("e", 4, 60, ranks if seed % 3 == 2 else WHOLE, 16, 6),
        draft_tokens=seed % 3,
        asynchronous=seed % 2 > 0,
        host_blocks=25,
    )
    chances = Chances(crash=0, update=0.05, reset=0.03, redo=0)
    cluster, world = play(seed, 90, specs=[spec], chances=chances)
    assert cluster.counts["host_loads"] > 5
    assert cluster.counts["host_writes"] > 60
    assert check_told(cluster, world)
    assert lawful(cluster)["slot"] > 50


@pytest.mark.parametrize("seed", seeds(5, 15))
def test_a_pass_that_is_not_told_yet_changes_nothing_that_is_inherited(seed):
    """It may compute tokens again, in a block whose rows another request inherits meanwhile."""
    spec = EngineSpec("e", 4, 120, WHOLE, 16, 6, draft_tokens=3, asynchronous=True)
    chances = Chances(branch=0.8, redo=0.1, abort=0, crash=0)
    cluster, world = play(seed, 60, specs=[spec], chances=chances)
    assert cluster.counts["draft_branches"]
    assert cluster.counts["redone"]
    assert check_told(cluster, world)


@pytest.mark.parametrize("seed", range(3))
def test_the_rules_name_rows_of_passes_behind_the_kv_alone(seed):
    rng = np.random.default_rng(seed)
    specs = [
        EngineSpec(role + str(i), 4, 60, WHOLE, 16, 4, role=role, offload=bool(rng.integers(2)))
        for role in ("prefill", "decode", "both")
        for i in range(2)
    ]
    compared = lawful(play(seed, 60, specs=specs)[0])
    assert min(compared[name] for name in ("forward", "slot", "handoff")) > 50


@pytest.mark.parametrize("seed", range(3))
def test_the_rules_name_rows_of_aborted_requests_up_to_where_their_callers_cut_them(seed):
    specs = [EngineSpec(name, 4, 60, WHOLE, 16, 4) for name in ("e", "f")]
    cluster, _ = play(seed, 60, specs=specs, chances=Chances(abort=0.08, mark=0))
    assert cluster.counts["cut_short"]
    assert lawful(cluster)["forward"] > 50


def test_requests_that_are_preempted_all_the_time():
    """Sometimes the number that a resume gives decides which attempts count."""
    decided = 0
    for seed in (0, 2, 3, 4):
        spec = EngineSpec("e", 4, 100, WHOLE, 4, 4, draft_tokens=3, asynchronous=True)
        chances = Chances(preempt=0.15, abort=0.03, redo=0, crash=0)
        cluster, world = play(seed, 25, specs=[spec], chances=chances)
        assert check_told(cluster, world)
        assert lawful(cluster, ("as_sampled",))
        for record in (r for rr in cluster.records.values() for r in rr):
            count = those_that_sampled(record)
            for attempt in record.attempts:
                attempt.had = 0
            decided += those_that_sampled(record) != count
    assert decided


def lawful(cluster: Cluster, policies: Sequence[Policy] = POLICIES) -> Counter[str]:
    """Compares rows that the rules name with the passes behind the KV; how many, by provenance."""
    compared = Counter[str]()
    for trace_id in cluster.records:
        for e in (e for policy in policies for e in cluster.expected(trace_id, policy)):
            for p in (p for p in range(e.num_rows) if e.known[p].any() and e.makers(p)):
                rows = cluster.store.rows(np.array(e.makers(p)))
                assert (rows == e.ids[p]).all(axis=(1, 2)).any()
                compared[e.sources[p]] += 1
    return compared


def test_digests_are_where_the_contract_says():
    assert DIGEST_EVERY == records.DIGEST_EVERY
    for n in (1, 63, 64, 65, 300):
        told = records.token_digests(np.zeros(n, np.uint32))["position"].tolist()
        assert set(told) == digest_positions(n)


def test_every_trace_that_nobody_crashed_is_certain():
    cluster, _ = play(5, 40, chances=Chances(crash=0.0))
    for trace_id in cluster.traces():
        for policy in POLICIES:
            whole = cluster.expected(trace_id, policy)
            assert [e.number for e in whole] == list(range(1, len(whole) + 1))
            assert any(e.counted for e in whole)
            for e in whole:
                assert not e.uncertain
                assert e.ids.shape == (e.num_rows, 3, 2)
                assert e.known.shape == e.versions.shape == e.reasons.shape == (e.num_rows, 3)
                assert all(e.reasons[~e.known])


def test_an_engine_that_loads_nothing_and_forgets_nothing_knows_every_row():
    spec = EngineSpec("e", 4, 160, WHOLE, draft_tokens=3, asynchronous=True)
    quiet = Chances(abort=0, reset=0, crash=0, update=0.05)
    cluster, _ = play(6, 60, specs=[spec], chances=quiet)
    assert cluster.counts["cached_rows"] > 0
    for trace_id in cluster.traces():
        for e in cluster.expected(trace_id, "latest"):
            assert e.known.all() or cluster.counts["resets"]


# ---------------------------------------------------------------------------- expected()

STORE = RowStore(LAYOUT, 0)
STORE.draw(1000, 0)
STORE.versions[:] = np.arange(len(STORE.versions)) // 100


def request(
    tokens: list[int],
    prompt_len: int,
    *attempts: dict[int, int | None],
    reason: str = "stop",
    told: bool = True,
    slots: int = 0,
    external: int = 0,
    **facts: Any,
) -> Record:
    """A request whose attempts are given as position -> row, or None where that is unknown.

    Each takes the first `slots` positions from slots, and the KV of `external` more from elsewhere.
    """
    record = Record("e", "boot", "r", "t", prompt_len, [0, 1, 2], tokens, reason=reason, **facts)
    for given in attempts:
        attempt = Attempt(len(tokens) + 8, slots, slots + external)
        for position, number in given.items():
            attempt.rows[position] = NOBODY if number is None else number
            attempt.unknown[position] = number is None
            attempt.stop = max(attempt.stop, position + 1)
        record.attempts.append(attempt)
    if told:
        record.told_at = digest_positions(prompt_len)
        if reason:
            ends = end_positions(prompt_len, len(tokens), reason)
            record.told_at |= digest_positions(len(tokens)) | ends
    record.begin_settled = record.settled = True
    return record


def run(first: int, start: int, stop: int) -> dict[int, int | None]:
    """Rows first, first + 1, ... at the positions [start, stop)."""
    return dict(zip(range(start, stop), range(first, first + stop - start), strict=True))


def origins(*requests: Record, policy: Any = "as_sampled") -> list[list[str]]:
    """Of each incarnation, the provenance of the row at each position."""
    return [e.sources for e in expected(list(requests), STORE, policy, None)]


def reasons(*requests: Record) -> list[set[str]]:
    """Of the last incarnation, why rows at each position may be missing."""
    return [set(r) for r in expected(list(requests), STORE, "as_sampled", None)[-1].reasons[:, 0]]


def served(
    *requests: Record, policy: Any = "as_sampled", weight_version: int | None = None
) -> list[list[int | None]]:
    """Of each incarnation, the number of the row at each position."""
    found = []
    for e in expected(list(requests), STORE, policy, weight_version):
        numbers: list[int | None] = []
        for p in range(e.num_rows):
            same = (STORE.rows(np.arange(1000)) == e.ids[p]).all(axis=(1, 2))
            numbers.append(int(same.argmax()) if e.known[p].all() else None)
        found.append(numbers)
    return found


def counted(*requests: Record) -> list[bool]:
    return [e.counted for e in expected(list(requests), STORE, "as_sampled", None)]


def test_n_tokens_have_n_minus_one_rows():
    one = request([1, 2, 3, 4], 2, run(0, 0, 6))
    assert served(one) == [[0, 1, 2]]
    (e,) = expected([one], STORE, "as_sampled", None)
    assert (e.num_tokens, e.num_rows, e.number, e.counted) == (4, 3, 1, True)


def test_attempts_by_policy_and_weight_version():
    one = request([1, 2, 3, 4], 2, run(0, 0, 2), run(100, 0, 3))
    assert served(one) == [[0, 1, 102]]
    assert served(one, policy="latest") == [[100, 101, 102]]
    assert served(one, weight_version=1) == [[None, None, 102]]
    assert served(one, weight_version=0) == [[0, 1, None]]
    (e,) = expected([one], STORE, "as_sampled", 0)
    assert e.reasons[2, 0] == {"other_version"}


def test_a_lost_row_is_taken_from_no_attempt_behind_its_own():
    one = request([1, 2, 3, 4], 2, run(0, 0, 2), run(100, 0, 3))
    one.attempts[0].lost[0], one.attempts[0].rows[0] = True, NOBODY
    assert served(one) == [[None, 1, 102]]
    assert served(one, policy="latest") == [[100, 101, 102]]
    one.attempts[0].lost[1], one.attempts[0].rows[1] = True, NOBODY  # this attempt sampled
    assert served(one) == [[None, None, 102]]
    one.attempts[1].rows[0] = NOBODY
    for policy in ("as_sampled", "latest"):
        (e,) = expected([one], STORE, policy, None)
        assert e.reasons[0, 0] == {"not_captured"}
    one.attempts[0].lost[1], one.attempts[0].stop = False, 1  # it did not sample
    assert served(one) == [[None, 101, 102]]


def test_a_row_that_was_lost_before_it_was_handed_over_is_missing():
    first = request([1, 2, 3, 4, 5], 4, run(0, 0, 4), reason="handoff", gave="x")
    first.attempts[0].lost[1], first.attempts[0].rows[1] = True, NOBODY
    loads = request([1, 2, 3, 4, 5, 6], 4, run(103, 3, 4), external=3, took="x")
    loads.attempts += request([1] * 6, 4, run(200, 0, 5)).attempts
    assert served(first, loads)[1] == [0, None, 2, 103, 204]
    _, e = expected([first, loads], STORE, "as_sampled", None)
    assert e.reasons[1, 0] == {"kv_unknown"}
    loads.attempts[1].lost[0], loads.attempts[1].rows[0] = True, NOBODY  # in a later attempt
    assert served(first, loads)[1] == [0, None, 2, 103, 204]
    loads.attempts[0].unknown[1:] = False  # from here on it was computed
    assert served(first, loads)[1] == [0, 201, 202, 103, 204]


def test_an_attempt_that_did_not_sample_again_supplies_no_row():
    first = run(0, 0, 4) | {0: None}
    one = request([1, 2, 3, 4, 5, 6], 2, first, run(100, 0, 4), run(200, 0, 5))
    assert served(one) == [[200, 1, 2, 3, 204]]
    one.attempts.pop()
    assert served(one) == [[None, 1, 2, 3, None]]
    assert reasons(one)[0] == {"kv_unknown"}
    assert served(one, policy="latest") == [[100, 101, 102, 103, None]]
    one.attempts[1].lost[4] = True  # of a pass that sampled
    assert served(one) == [[100, 1, 2, 3, None]]
    one.attempts[1].stop, one.attempts[1].lost[4] = 5, False  # it was preempted behind it
    assert served(one) == [[100, 1, 2, 3, None]]
    one.tokens.pop()  # the row at position 4 sampled nothing that stands
    one.attempts[1].stop, one.attempts[1].rows[4] = 0, 104
    assert served(one) == [[None, 1, 2, 3]]


def test_an_attempt_that_did_not_compute_the_last_token_it_had_supplies_no_row():
    first = run(0, 0, 3) | {0: None}  # a draft at position 3 was accepted, and sampled a token
    ends, goes_on = (request([1, 2, 3, 4, 5, 6][:n], 2, first, run(100, 0, 5)) for n in (5, 6))
    for one in (ends, goes_on):
        one.attempts[1].stop, one.attempts[1].had = 0, 5
    assert served(ends) == [[None, 1, 2, None]]
    assert reasons(ends)[0] == {"kv_unknown"}
    assert served(ends, policy="latest") == [[100, 101, 102, 103]]
    assert served(goes_on) == [[100, 1, 2, 103, 104]]
    for one in (ends, goes_on):
        one.attempts[1].had = 0  # no number was given
    assert served(ends) == [[100, 1, 2, 103]]
    assert served(goes_on) == [[100, 1, 2, 103, 104]]


def test_a_lost_row_of_the_last_token_that_it_had_was_computed():
    one = request([1, 2, 3, 4, 5, 6], 2, run(0, 0, 3) | {0: None}, run(100, 0, 4))
    one.attempts[1].stop, one.attempts[1].had = 0, 5
    assert served(one) == [[None, 1, 2, None, None]]
    one.attempts[1].lost[4] = True
    assert served(one) == [[100, 1, 2, 103, None]]
    one.attempts[1].had = 4  # it has no row behind position 3, which is the last token's
    one.attempts[1].lost[4] = False
    assert served(one) == [[100, 1, 2, 103, None]]


@pytest.mark.parametrize(
    ("stop", "had", "rows"),
    [
        (4, 5, [200, 1, 2, 203]),  # the last one is compared with those that sampled
        (5, 5, [100, 1, 2, 103]),
        (4, 0, [100, 1, 2, 103]),
        (3, 3, [100, 1, 2, 203]),  # though it has none behind the first one
        (3, 0, [200, 1, 2, 203]),
    ],
)
def test_of_a_preempted_attempt_it_counts_where_it_stopped(
    stop: int, had: int, rows: list[int | None]
):
    first, second = run(0, 0, 3) | {0: None}, run(100, 0, stop)
    one = request([1, 2, 3, 4, 5], 2, first, second, run(200, 0, 4))
    one.attempts[1].had, one.attempts[2].stop = had, 0
    assert served(one) == [rows]


def test_a_turn_goes_on_from_the_turn_before_and_adds_its_last_row():
    turn = request([1, 2, 3, 4], 2, run(0, 0, 3))
    following = request([1, 2, 3, 4, 5, 6, 7], 5, {0: 0, 1: 1} | run(100, 2, 6))
    following.told_at.add(4)  # its agent knew where the turn before ended
    assert served(turn, following) == [[0, 1, 2], [0, 1, 2, 101, 102, 103]]
    assert served(turn, following, policy="latest")[1] == [0, 1, 100, 101, 102, 103]
    assert counted(turn, following) == [False, True]
    following.told_at.remove(4)  # nothing before position 5 can be compared
    assert counted(turn, following) == [True, True]
    assert served(turn, following)[1] == [0, 1, 100, 101, 102, 103]


def test_requests_that_told_no_tokens_are_never_joined():
    turn = request([1, 2, 3, 4], 2, run(0, 0, 3), told=False)
    following = request([1, 2, 3, 4, 5], 4, {0: None} | run(100, 1, 4), told=False)
    assert served(turn, following) == [[0, 1, 2], [None, 100, 101, 102]]
    assert counted(turn, following) == [True, True]


def test_a_retry_is_an_incarnation_of_its_own_and_lends_nothing():
    first = request([1, 2, 3, 4], 3, run(0, 0, 3))
    retry = request([1, 2, 3, 5], 3, {0: None, 1: None} | run(100, 2, 3))
    assert served(first, retry) == [[0, 1, 2], [None, None, 100]]
    assert reasons(first, retry)[0] == {"kv_unknown"}
    assert counted(first, retry) == [True, True]


def test_no_request_goes_on_from_one_that_sampled_nothing():
    first = request([1, 2, 3], 3, run(0, 0, 2), reason="abort")
    retry = request([1, 2, 3, 5], 3, run(100, 0, 3))
    assert served(first, retry)[1] == [100, 101, 102]
    assert counted(first, retry) == [True, True]
    assert counted(first, request([1, 2, 3], 3, run(100, 0, 2), reason="abort")) == [True, True]


def siblings(slots: int, inherited: dict[int, int | None]) -> list[Record]:
    """A turn that was sampled twice, with the same tokens, and a request that goes on from one."""
    first = request([1, 2, 3, 4], 2, run(0, 0, 3))
    second = request([1, 2, 3, 4], 2, {0: 0} | run(100, 1, 3), slots=1)
    last = request([1, 2, 3, 4, 5, 6], 5, inherited | run(200, slots, 5), slots=slots)
    last.told_at.add(4)  # its agent knew where the turns before ended
    return [first, second, last]


def test_of_siblings_the_one_whose_row_was_taken_from_a_slot_goes_on():
    last = siblings(3, {0: 0, 1: 100, 2: 101})
    assert served(*last)[2] == [0, 100, 101, 200, 201]
    assert origins(*last)[2] == ["slot", *["forward"] * 4]
    assert served(*last, policy="latest")[2] == [0, 100, 101, 200, 201]
    assert origins(*last, policy="latest")[2] == ["slot"] * 3 + ["forward"] * 2
    assert served(*siblings(3, run(0, 0, 3)))[2] == [0, 1, 2, 200, 201]
    assert counted(*last) == [False, False, True]


def test_of_siblings_that_nothing_tells_apart_none_goes_on():
    for third in (siblings(0, {}), siblings(1, {0: 50}), siblings(2, {0: 50, 1: 100})):
        assert served(*third)[2][:3] == [None] * 3
        assert reasons(*third)[:3] == [{"ambiguous"}] * 3
        assert None not in served(*third)[2][3:]
        assert None not in served(*third, policy="latest")[2]


def test_the_greatest_proven_prefix_goes_on_and_a_handover_does_not():
    short = request([1, 2, 3], 2, run(0, 0, 2))
    long = request([1, 2, 3, 4], 2, run(100, 0, 3), reason="abort")
    last = request([1, 2, 3, 4, 5, 6], 5, run(200, 0, 5))
    last.told_at |= {3, 4}
    assert served(short, long, last)[2] == [100, 101, 102, 203, 204]
    long.reason = "handoff"  # it may have sampled the tokens as well
    assert served(short, long, last)[2] == [None, None, 202, 203, 204]
    assert reasons(short, long, last)[:2] == [{"ambiguous"}] * 2
    long.gave = last.took = "x"  # its tokens they are
    assert served(short, long, last)[2] == [200, 201, 202, 203, 204]
    short.took, last.took = "x", ""  # the first one took them up
    assert served(short, long, last)[2] == [0, 1, 202, 203, 204]


def test_of_a_handover_and_a_turn_the_one_whose_row_was_taken_from_a_slot_goes_on():
    turn = request([1, 2, 3, 4], 2, run(0, 0, 3))
    prefill = request([1, 2, 3, 4], 2, run(100, 0, 3), reason="handoff")
    for first, served_rows in ((0, [0, 1, 2, 203, 204]), (100, [100, 101, 102, 203, 204])):
        last = request([1, 2, 3, 4, 5, 6], 5, run(first, 0, 3) | run(203, 3, 5), slots=3)
        last.told_at.add(4)
        assert served(turn, prefill, last)[2] == served_rows
        assert origins(turn, prefill, last)[2][2] == ("slot" if first else "forward")


def test_a_request_that_may_have_sampled_the_tokens_too_makes_them_ambiguous():
    """The digests of the other one are at places where those of the prompt are not."""
    turn = request([1, 2, 3, 4], 2, run(0, 0, 3), reason="length")
    other = request([1, 2, 3, 4, 5, 6, 7], 2, run(100, 0, 6), reason="length")
    last = request([1, 2, 3, 4, 5, 8], 5, run(200, 0, 5))
    last.told_at.add(4)
    assert served(turn, other, last)[2] == [None, None, None, 203, 204]
    assert reasons(turn, other, last)[:3] == [{"ambiguous"}] * 3
    assert None not in served(turn, other, last, policy="latest")[2]
    turn.reason = "stop"  # the token that ended it stands in the prompt
    assert served(turn, other, last)[2] == [0, 1, 2, 203, 204]
    turn.reason, other.reason = "length", "handoff"
    assert served(turn, other, last)[2] == [0, 1, 2, 203, 204]
    other.reason, other.prompt_len = "length", 1  # the turn goes on from it
    assert served(turn, other, last)[2] == [100, 1, 2, 203, 204]
    other.prompt_len = 2
    other.told_at.add(5)  # it is proven to share more tokens
    assert served(turn, other, last)[2] == [100, 101, 102, 103, 204]
    other.tokens[3] = 9  # and here, to have sampled others
    assert served(turn, other, last)[2] == [0, 1, 2, 203, 204]


def test_an_aborted_request_owns_all_that_its_caller_got():
    """The engine had sampled one token more: tokens are known at each position of its tail."""
    aborted = request([1, 2, 3, 4, 5], 2, run(0, 0, 4), reason="abort")
    following = request([1, 2, 3, 4, 6, 7], 4, run(100, 0, 5))
    assert served(aborted, following)[1] == [0, 1, 2, 103, 104]
    turn = request([1, 2, 3, 4, 6, 7], 5, run(100, 0, 5))
    assert served(aborted, turn)[1] == [100, 101, 102, 103, 104]
    turn.told_at.add(4)  # its agent knew where the request before may have ended
    assert served(aborted, turn)[1] == [0, 1, 2, 103, 104]
    # The law says so whatever is known of the tokens.
    aborted.told_at, following.continued = digest_positions(5), aborted
    for one in (aborted, following):
        one.attempts[0].read(one.attempts[0].rows[:5], samples=True)
    assert served(aborted, following)[1] == [100, 101, 102, 103, 104]
    _, e = expected([aborted, following], STORE, "as_sampled", None)
    assert [e.makers(p) for p in range(5)] == [[100], [1], [2], [103], [104]]


def test_branches_share_what_they_go_on_from():
    turn = request([1, 2, 3, 4], 2, run(0, 0, 3))
    left = request([1, 2, 3, 4, 1], 4, run(100, 0, 4))
    right = request([1, 2, 3, 4, 2], 4, run(200, 0, 4))
    assert served(turn, left, right) == [[0, 1, 2], [0, 1, 2, 103], [0, 1, 2, 203]]
    assert counted(turn, left, right) == [False, True, True]


def pair(sampled: int = 9, **facts: Any) -> list[Record]:
    """A request that hands over the KV of three tokens, and one that takes that of two."""
    prefill = request([1, 2, 3, 9], 3, run(0, 0, 3), reason="handoff", gave="x")
    rows = dict.fromkeys(range(2)) | run(100, 2, 4)
    return [prefill, request([1, 2, 3, sampled, 7], 3, rows, external=2, took="x", **facts)]


def test_a_handoff_is_absorbed_and_has_no_end_of_its_own():
    prefill, decode = pair(8)  # the decode engine sampled 8 itself, the prefill engine 9
    (alone,) = expected([prefill], STORE, "as_sampled", None)
    assert (alone.num_tokens, alone.num_rows, alone.counted) == (0, 3, True)
    for policy in ("as_sampled", "latest"):
        assert served(prefill, decode, policy=policy) == [[0, 1, 2], [0, 1, 100, 101]]
    assert origins(prefill, decode)[1] == ["handoff", "handoff", "forward", "forward"]
    assert counted(prefill, decode) == [False, True]
    assert counted(prefill, prefill_again := pair()[0]) == [True, True]
    assert counted(prefill, prefill_again, decode) == [False, False, True]
    prefill.reason = "length"
    assert served(prefill, decode)[1] == [0, 1, 100, 101]
    assert counted(prefill, decode) == [True, True]


def test_only_a_handover_with_an_id_of_its_own_proves_something():
    prefill, decode = pair()
    decode.took = ""
    assert served(prefill, decode)[1] == [None, None, 100, 101]
    assert reasons(prefill, decode)[0] == {"kv_unknown"}
    prefill, decode = pair()
    assert served(prefill, pair()[0], decode)[2] == [None, None, 100, 101]
    assert served(decode, prefill)[0] == [0, 1, 100, 101]
    (stalled, _), (prefill, decode) = pair(), pair()
    stalled.gave, stalled.attempts[0].rows[:3] = "y", [50, 51, 52]
    for order in ([stalled, prefill, decode], [decode, prefill, stalled]):
        answers = served(*order)
        assert [0, 1, 100, 101] in answers
        assert [50, 51, 52] in answers


def test_a_handover_that_digests_disprove():
    tokens = [1, 2, 3] * 60
    prefill = request([*tokens, 4], 180, run(0, 0, 180), reason="handoff", gave="x")
    other = [*tokens[:100], 9, *tokens[101:], 4, 5]
    rows = dict.fromkeys(range(179)) | run(300, 179, 181)
    decode = request(other, 180, rows, external=179, took="x")
    assert served(prefill, decode)[1] == [*range(64), *[None] * 115, 300, 301]
    decode.told_at.discard(128), decode.told_at.discard(180)
    assert served(prefill, decode)[1] == [*range(179), 300, 301]


def test_a_position_that_was_computed_or_lost_is_not_handed_over():
    prefill, decode = pair()
    first = decode.attempts[0]
    first.rows[1] = 50
    first.start_again(1)
    assert served(prefill, decode)[1] == [0, 50, 100, 101]
    assert origins(prefill, decode)[1] == ["handoff", *["forward"] * 3]
    first.rows[1], first.lost[1] = NOBODY, True
    assert served(prefill, decode)[1] == [0, None, 100, 101]
    assert reasons(prefill, decode)[1] == {"not_captured"}


def test_a_handover_comes_before_later_attempts():
    prefill, decode = pair()
    decode.attempts[0].rows[3], decode.attempts[0].stop = NOBODY, 3
    decode.attempts.append(request([1, 2, 3, 9, 7], 3, run(200, 0, 4)).attempts[0])
    assert served(prefill, decode)[1] == [0, 1, 100, 203]
    assert served(prefill, decode, policy="latest")[1] == [200, 201, 202, 203]
    decode.took = "y"
    assert served(prefill, decode)[1] == [200, 201, 100, 203]


def test_what_is_handed_over_is_of_the_last_attempt_or_was_handed_over_itself():
    prefill, decode = pair()
    prefill.attempts.append(request([1, 2, 3, 9], 3, {1: 31, 2: 32}).attempts[0])
    assert served(prefill, decode)[1] == [None, 31, 100, 101]
    first, (second, decode) = pair()[0], pair()
    second.took, first.gave = "y", "y"
    second.attempts = [request([1, 2, 3, 9], 3, {0: None, 1: 51, 2: 52}, external=1).attempts[0]]
    assert served(first, second, decode)[2] == [0, 51, 100, 101]
    assert origins(first, second, decode)[2] == ["handoff", "handoff", "forward", "forward"]
    second.attempts.append(request([1, 2, 3, 9], 3, {1: 61, 2: 62}).attempts[0])
    assert served(first, second, decode)[2] == [None, 61, 100, 101]


def test_handovers_in_a_circle_give_nothing():
    one, other = pair()[1], pair()[1]
    one.took, one.gave, other.took, other.gave = "x", "y", "y", "x"
    assert served(one, other) == [[None, None, 100, 101]] * 2


def test_histories_that_were_edited_share_what_digests_prove():
    tokens = [1, 2, 3] * 60
    turn = request(tokens, 70, run(0, 0, 179))
    edited = request([*tokens[:150], 9, 9, 9], 152, run(300, 0, 152))
    # Equal up to 150; both have a digest at 128.
    assert served(turn, edited)[1] == [*range(127), *range(427, 452)]
    assert counted(turn, edited) == [True, True]


def test_what_one_request_knows_of_a_prefix_others_know_too():
    tokens = [1, 2, 3, 4, 5, 6]
    first = request(tokens[:3], 2, run(0, 0, 2))
    second = request(tokens[:5], 4, run(100, 0, 4))
    third = request(tokens, 5, run(200, 0, 5))
    second.told_at.add(3)
    # The third proves the second's five tokens, and through it the first's three.
    assert served(first, second, third)[2] == [0, 1, 102, 103, 204]
    assert counted(first, second, third) == [False, False, True]


def test_reasons():
    aborted = request([1, 2, 3, 4], 4, {0: None, 1: 7}, reason="abort")
    (e,) = expected([aborted], STORE, "as_sampled", None)
    assert [set(r) for r in e.reasons[:, 0]] == [{"kv_unknown"}, {"aborted"}, {"aborted"}]
    stages = request([1, 2, 3], 2, run(0, 0, 2))
    stages.columns = [0, 2]
    (e,) = expected([stages], STORE, "as_sampled", None)
    assert e.known.tolist() == [[True, False, True]] * 2
    assert e.reasons[0, 1] == {"not_captured"}


def test_what_died_may_be_served_up_to_its_drafts():
    died = request([1, 2], 2, run(0, 0, 6), reason="")
    died.settled, died.tentative, died.discarded = False, (4, 6), [(1, 50)]
    retry = request([1, 2, 8, 9], 2, run(100, 0, 3))
    lost, e = expected([died, retry], STORE, "as_sampled", None)
    assert lost.uncertain
    assert e.uncertain
    assert (lost.num_tokens, lost.num_rows, lost.number) == (0, 4, 1)
    assert e.num_tokens == 4
    ids = [[c[0].tolist() for c in e.candidates(p, 1)] for p in range(4)]
    rows = STORE.rows(np.arange(200))[:, 1].tolist()
    assert ids == [[rows[100]], [rows[101]], [rows[102]], []]
    ids = [[c[0].tolist() for c in lost.candidates(p, 1)] for p in range(5)]
    assert ids == [[rows[0]], [rows[1], rows[50]], [rows[2]], [rows[3]], []]
    died.begin_settled = False
    assert [x.number for x in expected([died, retry], STORE, "latest", None)] == [0, 0]


def test_bound_requests_are_their_slots():
    bound = Bound(5, 3, np.array([7, NOBODY, 8]), [0, 1, 2])
    e = bound.expected(2, STORE, None)
    assert (e.number, e.num_tokens, e.num_rows) == (2, 5, 4)
    assert e.known[:, 0].tolist() == [True, False, True, False]
    assert e.reasons[1, 0] == {"kv_unknown"}
    assert e.reasons[3, 0] == {"not_captured"}
    assert (e.ids[2] == STORE.rows(np.array([8]))[0]).all()
