"""Requests of the pipeline and memory pressure: every transition, allowed or not."""

from itertools import product

import pytest

from routetrace.capture_agent.pipeline.pressure import SHARES, Pressure, PressureGauge
from routetrace.capture_agent.pipeline.request import (
    PHASES,
    RECORDINGS,
    Phase,
    Recording,
    Request,
)

#: From docs/ARCHITECTURE.md. A request that starts inherits before anything else becomes of it.
PHASE_CHANGES = {
    *product(["starting"], ["starting", "running"]),
    *product(["running", "preempted"], ["starting", "running", "preempted", "finished"]),
}
#: Rows that were dropped once stay dropped; a name may follow.
RECORDING_CHANGES = {("kept", "dropped"), ("dropped", "named"), ("unnamed", "named")}


@pytest.mark.parametrize(("old", "new"), [*product(Phase, Phase)])
@pytest.mark.parametrize("recording", Recording)
def test_every_change_of_phase(old, new, recording):
    request = Request("r", 0, phase=old, recording=recording)
    entered = request.enter(new)
    assert entered == ((old.value, new.value) in PHASE_CHANGES)
    assert request.phase is (new if entered else old)
    assert request.recording is recording


@pytest.mark.parametrize(("old", "new"), [*product(Recording, Recording)])
@pytest.mark.parametrize("phase", Phase)
def test_every_change_of_recording(old, new, phase):
    request = Request("r", 0, phase=phase, recording=old)
    entered = request.record(new)
    assert entered == ((old.value, new.value) in RECORDING_CHANGES)
    assert request.recording is (new if entered else old)
    assert request.phase is phase


def test_tables_name_every_state():
    assert set(PHASES) == set(Phase)
    assert set(RECORDINGS) == set(Recording)


@pytest.mark.parametrize(("phase", "recording"), [*product(Phase, Recording)])
def test_rows_are_taken_in_one_state_only(phase, recording):
    request = Request("r", 0, phase=phase, recording=recording)
    assert request.takes_rows == ((phase.value, recording.value) == ("running", "kept"))


#: Bytes held at each level, in shares: at its limit, and at the next one.
HELD = {"NORMAL": (0, 15), "FULL": (15.01, 16), "EXHAUSTED": (16.01, 100)}


@pytest.mark.parametrize(("old", "new"), [*product(Pressure, Pressure)])
def test_every_change_of_pressure(old, new):
    for before, after in product(HELD[old.name], HELD[new.name]):
        gauge = PressureGauge(share := 100)
        gauge.measure(int(before * share))
        assert gauge.level is old
        assert gauge.alarmed == (old is Pressure.EXHAUSTED)
        alarm = gauge.measure(int(after * share))
        assert gauge.level is new
        assert alarm == (new is Pressure.EXHAUSTED is not old)


def test_an_alarm_ends_at_half_of_the_memory():
    gauge = PressureGauge(share := 100)
    held = [SHARES + 1, SHARES - 1, SHARES + 1, SHARES // 2, SHARES + 1]
    assert [gauge.measure(shares * share) for shares in held] == [True, False, False, False, True]
