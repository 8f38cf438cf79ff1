"""The campaign's share of `make test`; `python -m faults` (in tests/) has the rest, see faults/."""

from __future__ import annotations

import pytest

from faults.check import Known, Violation, compare
from faults.scenarios import background, cut, kill, lost_agent, order, power, server_power
from faults.scenarios.order import Inline, Model, carry_out, draw
from faults.script import Script

SEED = 20


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_chunks_that_come_twice_too_early_or_damaged_leave_the_models_state(seed):
    model = carry_out(seed, draw(seed, 40), Inline)
    assert model.steps > 100
    assert model.counts["rows"] > 100


def test_the_same_over_sockets_with_a_server_that_is_killed():
    figures = order.run(SEED, runs=0, real_runs=1, real_actions=10)
    assert figures["answers_over_sockets"] > 20


@pytest.mark.long
def test_what_was_acknowledged_survives_kill_9_under_load():
    acked = 0
    for seed in range(SEED, SEED + 5):  # a kill before the first acknowledgement shows nothing
        if not acked:
            figures = kill.run(seed, seeds=1, memory_seeds=0)
            assert figures["lost"] == 0
            acked = figures["acked_at_kill"]
    assert acked


def test_what_was_acknowledged_survives_lost_power():
    assert power.run(SEED, images=30)["images"] >= 30


@pytest.mark.long
def test_what_servers_acknowledged_survives_lost_power():
    figures = server_power.run(SEED, images=20, worlds=1, lives=2)
    assert figures["images"] == 20
    assert figures["images opened by servers"] == 1
    assert figures["rows"] > 0


@pytest.mark.long
def test_resets_and_lost_replies_leave_each_chunk_stored_once():
    figures = cut.run(SEED, count=10, rounds=1, seconds=0)
    assert figures["resends"] == figures["counted_duplicates"] > 0


@pytest.mark.long
def test_a_trace_whose_agent_was_killed_ends_with_that_reason():
    figures = lost_agent.once(SEED, "killed")
    assert figures["lost_after_killed_s"] < 3


@pytest.mark.long
def test_a_killed_background_costs_what_ran_and_nothing_else():
    figures = background.run(SEED, kills=2)
    assert figures["complete"] > 0
    assert figures["agent_lost_rows"] > 0


def _served(stored: int) -> tuple[Inline, Model, Script]:
    target = Inline()
    model = Model(SEED, target)
    model._say([(n, "good") for n in range(1, stored + 1)])
    return target, model, model._script


@pytest.mark.parametrize(("acked", "sent"), [(21, 30), (0, 19)])
def test_the_comparison_sees_a_lost_chunk_and_one_that_nobody_sent(acked, sent):
    target, _, script = _served(20)
    try:
        compare(target.client, script, Known(20, 20), prefetch=0)
        with pytest.raises(Violation):
            compare(target.client, script, Known(acked, sent), prefetch=0)
    finally:
        target.close()


def test_the_comparison_sees_rows_of_another_seed():
    target, _, script = _served(20)
    other = Script(SEED, "e0", boot=1)
    other._key += 1
    try:
        with pytest.raises(Violation, match="is another"):
            compare(target.client, other, Known(0, 20), prefetch=0)
    finally:
        target.close()
