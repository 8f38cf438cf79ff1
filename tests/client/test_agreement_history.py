"""Changes of the agreement over training steps: series that are made are the truth."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import Agreement, AgreementHistory, StepAgreement
from routetrace.client.agreement import Choices

AT = datetime(2026, 1, 2, tzinfo=timezone.utc)
CELLS = 1000


def step(number: int, *differing: int, version: int | None = None) -> StepAgreement:
    """Step whose layers 0, 1, ... differ in so many of 1,000 cells each."""
    layers = {i: Choices(CELLS, n, 8 * CELLS - n, 8 * CELLS) for i, n in enumerate(differing)}
    return StepAgreement(
        number, AT, ("trainer",), (AT,), version, Agreement(by_layer=layers), "", ()
    )


def history(*steps: StepAgreement) -> AgreementHistory:
    return AgreementHistory(steps)


def test_a_change_names_step_version_shares_and_layers():
    early = [step(100 + i, 10, 12, 14, 12, version=40 + i // 4) for i in range(12)]
    late = [step(112 + i, 10, 300, 280, 12, version=43 + i // 4) for i in range(8)]
    change = history(*early, *late).change()
    assert change is not None
    assert (change.step, change.weight_version, change.layer_ids) == (112, 43, (1, 2))
    assert change.before == pytest.approx(48 / 4000)
    assert change.after == pytest.approx(602 / 4000)
    assert change.words == (
        "Since step 112, the first with weight version 43, 15.0% of cells differ; 1.2% before. "
        "Layers that changed: 1 to 2."
    )


def test_a_change_without_an_update_names_no_version():
    early = [step(i, 10, 10, version=7) for i in range(5)]
    late = [step(9 + i, 100, 100, version=7) for i in range(2)]  # steps that are not reported
    change = history(*early, *late).change()
    assert change is not None
    assert (change.step, change.weight_version, change.layer_ids) == (9, None, ())
    assert change.words == "Since step 9, 10.0% of cells differ; 1.0% before."


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [500] * 20,  # it was never better
        [10, 10, 500, 500],  # too few before
        [10] * 10 + [500],  # one step may be an outlier
        [10] * 10 + [500] * 5 + [10] * 5,  # it is over
        [10] * 10 + [19] * 10,  # less than 0.01 more
        [100] * 10 + [199] * 10,  # less than twice as much
        [10, 0, 19] * 20,
    ],
)
def test_no_change(shares):
    assert history(*(step(i, n) for i, n in enumerate(shares))).change() is None


@given(
    before=st.lists(st.integers(0, 9), min_size=3, max_size=70),
    after=st.lists(st.integers(100, 1000), min_size=2, max_size=30),
    outliers=st.sets(st.integers(0, 29), max_size=3),
)
def test_a_jump_is_found_where_it_is(before, after, outliers):
    """Few steps after it, not the first two, may be as before."""
    quiet = {i for i in outliers if 2 <= i < len(after)}
    if len(quiet) * 10 > len(after):
        quiet = set()
    shares = [*before, *(5 if i in quiet else n for i, n in enumerate(after))]
    change = history(*(step(i, n) for i, n in enumerate(shares))).change()
    assert change is not None
    assert change.step == len(before)


def test_a_step_alone_is_no_change():
    shares = [10] * 5 + [500, 10] + [500] * 20
    change = history(*(step(i, n) for i, n in enumerate(shares))).change()
    assert change is not None
    assert change.step == 7


def test_steps_without_cells_are_left_out():
    empty = StepAgreement(3, AT, (), (), 8, Agreement(), "", ())
    steps = [step(i, 10) for i in range(3)] + [empty] + [step(4 + i, 90) for i in range(3)]
    change = history(*steps).change()
    assert change is not None
    assert change.step == 4


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_steps_of_before_a_resume_are_superseded(first, again, rest):
    """Steps 1 to n, of which the last ones are bad; then the trainer resumes, and goes on well."""
    n = first + again + rest
    minutes = {number: number for number in range(1, n + 1)}
    minutes |= {number: n + number for number in range(first + 1, first + again + 1)}
    steps = [
        reported(step(i, 10 if i <= first else 900), trainer=60 * minutes[i])
        for i in range(1, n + 1)
    ]
    known = history(*steps)
    assert known.superseded == (tuple(steps[first + again :]) if again else ())
    kept = history(*steps[: first + again]) if again else known
    assert known.change() == kept.change()


def test_parts_of_a_trainer_that_report_late_supersede_nothing():
    steps = [reported(step(i, 10), trainer=t) for i, t in enumerate((0, 20, 14))]
    assert history(*steps).superseded == ()
    assert history().superseded == ()


def test_a_step_is_superseded_once_each_of_its_reporters_has_resumed():
    """Rank 1 is late, and another part reports a single old step again."""
    steps = [reported(step(i, 10), rank0=60 * i, rank1=60 * i + 55) for i in range(9)]
    steps[2] = reported(steps[2], rank0=120, rank1=175, eval=10_000)
    assert history(*steps).superseded == ()
    steps[3] = reported(steps[3], rank0=2000, rank1=235)
    assert history(*steps).superseded == ()
    steps[3] = reported(steps[3], rank0=2000, rank1=2055)
    assert history(*steps).superseded == tuple(steps[4:])
    steps[5] = reported(steps[5], rank0=2120, rank1=355)
    assert history(*steps).superseded == tuple(steps[6:])


def reported(one: StepAgreement, **seconds: float) -> StepAgreement:
    """The same step, reported by these parts at so many seconds."""
    times = tuple(AT + timedelta(seconds=t) for t in seconds.values())
    return replace(one, reporters=tuple(seconds), reported=times, reported_at=max(times))
