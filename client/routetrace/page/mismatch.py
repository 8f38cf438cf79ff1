"""Agreement of trainer and rollout by training step: what is known of it, and as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from routetrace.client import AgreementHistory, StepAgreement
from routetrace.client.agreement import Choices
from routetrace.page.segments import exact
from routetrace.trainers.causes import likely_cause

#: Most steps of one answer, and those of one that names no number.
MAX_STEPS = 2000
DEFAULT_STEPS = 500

#: Runs whose steps are kept, by token.
_MAX_KEPT = 4
#: Steps before the newest one that are asked for again, as ranks report at different times, and
#: seconds after which all are: a trainer that resumes from a checkpoint replaces earlier ones.
_AGAIN = 20
_ALL_S = 60.0

#: Answers that are kept of a run.
_MAX_ANSWERS = 4

#: Steps since a change whose course over the layers is judged, the last ones.
_JUDGED = 50

_DIGITS = 6


@dataclass
class Known:
    """Steps of a run that were read."""

    steps: dict[int, StepAgreement] = field(default_factory=dict)
    read_at: float = 0.0
    """When all were read, of the monotonic clock."""
    asked_at: float = 0.0
    """When they were last asked for."""
    answers: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """Answers from these steps, by first step, end and number of steps."""

    def start(self) -> int:
        """Return the first step to ask for."""
        if not self.steps or time.monotonic() - self.read_at > _ALL_S:
            return 0
        return max(0, max(self.steps) - _AGAIN)

    def add(self, start: int, history: AgreementHistory) -> None:
        """Add what was read from a step on."""
        self.asked_at = time.monotonic()
        if start == 0:
            self.read_at = self.asked_at
        steps = {n: step for n, step in self.steps.items() if n < start}
        steps.update((step.step, step) for step in history.steps)
        if steps != self.steps:
            self.steps = steps
            self.answers.clear()

    async def answer(self, start: int, stop: int, most: int) -> bytes:
        """Return the last `most` steps of [start, stop) as JSON."""
        asked, steps = (start, stop, most), self.steps
        if asked in self.answers:
            return self.answers[asked]
        known = [step for _, step in sorted(steps.items())]
        found = await asyncio.get_running_loop().run_in_executor(
            None, _json, known, start, stop, most
        )
        if self.steps is steps:  # none was added meanwhile
            if len(self.answers) >= _MAX_ANSWERS:
                self.answers.clear()
            self.answers[asked] = found
        return found


class Kept:
    """Steps of runs by key, those used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Known] = OrderedDict()

    def of(self, key: Hashable) -> Known:
        """Return what is known of a run."""
        known = self._known.setdefault(key, Known())
        self._known.move_to_end(key)
        while len(self._known) > _MAX_KEPT:
            self._known.popitem(last=False)
        return known


def mismatch(known: Sequence[StepAgreement], start: int, stop: int, most: int) -> dict[str, Any]:
    """Return the last `most` steps of [start, stop) as columns, and the change in all known steps.

    Args:
        known: all steps, ascending.
        start: first step.
        stop: one past the last.
        most: maximum number of them.
    """
    history = AgreementHistory(tuple(known))
    change = history.change()
    current = known[: len(known) - len(history.superseded)]
    steps = [step for step in known if start <= step.step < stop]
    shown = steps[-most:]
    layers = sorted({layer for step in shown for layer in step.agreement.by_layer})
    choices = [step.agreement.choices for step in shown]
    return {
        "total": len(steps),
        "superseded": sum(start <= step.step < stop for step in history.superseded),
        "step": [exact(step.step) for step in shown],
        "reported_at": [step.reported_at.timestamp() for step in shown],
        "weight_version": [_text(step.weight_version) for step in shown],
        "reporters": [len(step.reporters) for step in shown],
        "cells": [each.cells for each in choices],
        "differing": [each.differing for each in choices],
        "overlap": [_share(each.matched, each.chosen) for each in choices],
        "tokens": [step.agreement.tokens for step in shown],
        "differing_tokens": [step.agreement.differing_tokens for step in shown],
        "diagnosis": [step.diagnosis for step in shown],
        "trace_ids": [list(step.trace_ids) for step in shown],
        "layer_ids": layers,
        "by_layer": [[_differing(step, layer) for layer in layers] for step in shown],
        "by_version": [
            [
                {"version": str(version), "cells": of.cells, "differing": of.differing}
                for version, of in sorted(step.agreement.by_version.items())
            ]
            for step in shown
        ],
        "since": None
        if change is None
        else {
            "step": exact(change.step),
            "weight_version": _text(change.weight_version),
            "before": change.before,
            "after": change.after,
            "layer_ids": list(change.layer_ids),
            "words": change.words,
            "cause": _cause(current, change.step),
        },
    }


def _cause(steps: Sequence[StepAgreement], since: int) -> str | None:
    """Return the likely cause of what the last steps since a change have in common."""
    worse = [step.agreement for step in steps if step.step >= since][-_JUDGED:]
    return likely_cause(sum(worse[1:], worse[0]).by_layer) if worse else None


def _json(known: Sequence[StepAgreement], start: int, stop: int, most: int) -> bytes:
    return json.dumps(mismatch(known, start, stop, most), separators=(",", ":")).encode()


def _differing(step: StepAgreement, layer: int) -> float | None:
    of = step.agreement.by_layer.get(layer, Choices())
    return _share(of.differing, of.cells)


def _share(part: int, of: int) -> float | None:
    return round(part / of, _DIGITS) if of else None


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)
