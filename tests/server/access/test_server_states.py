"""The server's states: every transition, allowed or not."""

from itertools import product

import pytest

from routetrace.common.errors import Moved, Unavailable
from routetrace.server.access.lifecycle import TRANSITIONS, Lifecycle, ServerState
from routetrace.server.store.interface import NO_OWNER, Owner

#: From docs/ARCHITECTURE.md: a server starts, may stand by, serves, may fail, and drains; nothing
#: leads back to an earlier state but the start of a standby that has taken over.
ALLOWED = {
    ("starting", "standby"),
    ("standby", "starting"),
    ("standby", "draining"),
    ("starting", "ready"),
    ("starting", "draining"),
    ("ready", "failed"),
    ("ready", "draining"),
    ("failed", "draining"),
    ("draining", "draining"),
}


@pytest.mark.parametrize(("old", "new"), [*product(ServerState, ServerState)])
def test_every_transition(old, new):
    lifecycle = Lifecycle()
    lifecycle.state = old
    entered = lifecycle.enter(new)
    assert entered == ((old.value, new.value) in ALLOWED)
    assert lifecycle.state is (new if entered else old)


def test_table_names_every_state():
    assert set(TRANSITIONS) == set(ServerState)


@pytest.mark.parametrize("state", ServerState)
def test_calls_are_served_in_one_state_only(state):
    lifecycle = Lifecycle()
    lifecycle.state = state
    if state is ServerState.READY:
        lifecycle.check_ready()
    else:
        with pytest.raises(Unavailable, match=state.value) as caught:
            lifecycle.check_ready()
        assert caught.value.retry_after > 0


def test_a_server_without_its_lease_serves_nothing():
    lifecycle = Lifecycle()
    lifecycle.enter(ServerState.READY)
    lifecycle.owns = lambda: False
    assert not lifecycle.ready
    with pytest.raises(Unavailable, match="lease") as caught:
        lifecycle.check_ready()
    assert caught.value.retry_after > 0
    lifecycle.owns = lambda: True
    lifecycle.check_ready()


def test_a_standby_names_the_owner_while_there_is_one():
    lifecycle, changes = Lifecycle(), []
    lifecycle.on_change = lambda: changes.append(lifecycle.directs)
    lifecycle.stand_by(Owner("another", "b:7412"))
    with pytest.raises(Moved, match="b:7412") as caught:
        lifecycle.check_ready()
    assert caught.value.target == "b:7412"
    for owner in (NO_OWNER, Owner("one without an address")):
        lifecycle.stand_by(owner)
        with pytest.raises(Unavailable, match="standby"):
            lifecycle.check_ready()
    lifecycle.stand_by(Owner("another", "b:7412"))
    lifecycle.enter(ServerState.STARTING)
    with pytest.raises(Unavailable, match="starting"):
        lifecycle.check_ready()
    assert changes == [True, False, False, True, False]
