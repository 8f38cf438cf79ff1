"""States of an agent's stream: every transition, allowed or not, and their effect on idle time."""

from itertools import product

import pytest

from routetrace.common.layout import ModelLayout
from routetrace.server.index.agents import Agents
from routetrace.server.index.session import TRANSITIONS, Session, SessionState
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.index.writer import Writer
from routetrace.v1 import routetrace_pb2 as pb

#: A stream is silent until its first heartbeat, then held and released, and ends once.
ALLOWED = {
    ("silent", "beating"),
    ("silent", "closed"),
    ("beating", "held"),
    ("beating", "closed"),
    ("held", "beating"),
    ("held", "closed"),
}

WRITER = Writer(
    WriterKey("run", "engine", ""), 1, "boot", 1, ModelLayout((0,), 8, 2, 1), SlotMap(0, 0)
)


class FakeClock:
    """Time that passes only when a test says so."""

    time = 100.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize(("old", "new"), [*product(SessionState, SessionState)])
def test_every_transition(old, new):
    session = Session(WRITER)
    session.state = old
    entered = session.enter(new)
    assert entered == ((old.value, new.value) in ALLOWED)
    assert session.state is (new if entered else old)


def test_table_names_every_state():
    assert set(TRANSITIONS) == set(SessionState)


@pytest.mark.parametrize("state", SessionState)
def test_hold_and_release_return_to_the_same_state(state):
    session = Session(WRITER)
    session.state = state
    session.hold()
    held = session.state
    session.release()
    assert (held is SessionState.HELD) == (state in (SessionState.BEATING, SessionState.HELD))
    assert session.state is (SessionState.BEATING if state is SessionState.HELD else state)


def test_only_a_beating_or_closed_stream_is_idle():
    state, clock = State(60.0), FakeClock()
    state.writers[WRITER.key] = WRITER
    agents = Agents(state, clock, timeout=5.0)
    session = Session(WRITER)
    idle = {}

    def note() -> None:
        agents.seen(session)
        clock.time += 7.0
        idle[session.state] = agents.idle_seconds(WRITER.key)

    agents.opened(session)
    note()
    agents.heartbeat(session, pb.Heartbeat())
    note()
    session.hold()
    note()
    agents.closed(session)
    note()
    assert {state.value: seconds for state, seconds in idle.items()} == {
        "silent": 0.0,
        "beating": 7.0,
        "held": 0.0,
        "closed": 7.0,
    }


def test_a_new_stream_closes_the_previous_one():
    state, clock = State(60.0), FakeClock()
    agents = Agents(state, clock, timeout=5.0)
    first, second = Session(WRITER), Session(WRITER)
    agents.opened(first)
    agents.opened(second)
    assert first.closed
    assert not second.closed
    agents.closed(first)
    assert agents.connected == [WRITER.key]
