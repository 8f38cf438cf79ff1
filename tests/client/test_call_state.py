"""Life cycle of a call: every pair of states."""

from __future__ import annotations

from itertools import product

import pytest

from routetrace.client._core.retry import TRANSITIONS, Attempts, CallState
from routetrace.common.errors import NotFound, Overloaded, Unavailable

#: Calls that lead to each state.
WAYS = {
    CallState.WAITING: (),
    CallState.UNDER_WAY: (CallState.UNDER_WAY,),
    CallState.HANDED_OUT: (CallState.UNDER_WAY, CallState.HANDED_OUT),
    CallState.FAILED: (CallState.UNDER_WAY, CallState.FAILED),
}
ALLOWED = {
    ("waiting", "under way"),
    ("under way", "waiting"),
    ("under way", "handed out"),
    ("under way", "failed"),
    ("handed out", "handed out"),
    ("handed out", "failed"),
}


def attempts_in(state: CallState, **kwargs: type) -> Attempts:
    attempts = Attempts(600, **kwargs)
    assert all(attempts.enter(step) for step in WAYS[state])
    assert attempts.state is state
    return attempts


@pytest.mark.parametrize(("before", "after"), list(product(CallState, CallState)))
def test_every_pair_of_states(before, after):
    allowed = (before.value, after.value) in ALLOWED
    assert (after in TRANSITIONS[before]) == allowed
    attempts = attempts_in(before)
    assert attempts.enter(after) == allowed
    assert attempts.state is (after if allowed else before)


def test_a_passing_failure_is_repeated_before_a_part_was_handed_out():
    attempts = attempts_in(CallState.UNDER_WAY)
    assert attempts.pause(Unavailable("away", retry_after=0.1)) > 0
    assert attempts.state is CallState.WAITING


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (CallState.UNDER_WAY, NotFound("no such trace")),
        (CallState.UNDER_WAY, Unavailable("for good", retry_after=0)),
        (CallState.HANDED_OUT, Unavailable("away", retry_after=0.1)),
    ],
)
def test_other_failures_are_final(state, error):
    attempts = attempts_in(state)
    with pytest.raises(type(error)):
        attempts.pause(error)
    assert attempts.state is CallState.FAILED


def test_a_call_that_must_not_be_done_twice():
    attempts = attempts_in(CallState.UNDER_WAY, repeatable=Overloaded)
    assert attempts.pause(Overloaded("busy", retry_after=0.1)) > 0
    attempts = attempts_in(CallState.UNDER_WAY, repeatable=Overloaded)
    with pytest.raises(Unavailable):
        attempts.pause(Unavailable("away", retry_after=0.1))
