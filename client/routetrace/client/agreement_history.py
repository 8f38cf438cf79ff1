"""Agreement of trainer and rollout over training steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from statistics import median

from routetrace.client.agreement import Agreement
from routetrace.client.stat import moment
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb

#: A change for the worse: the share of differing cells is above this multiple of the one before,
#: and above it by this much.
_FACTOR = 2.0
_MORE = 0.01

#: Least steps before a change, steps that the share before is the median of, and the share of
#: later steps that have to be above it.
_BEFORE = 3
_WINDOW = 50
_LASTING = 0.9

#: Maximum delay of a report behind one of a later step; a resume from a checkpoint takes longer.
_OUT_OF_ORDER = timedelta(seconds=10)


@dataclass(frozen=True)
class StepAgreement(Values):
    """Agreement of trainer and rollout in one training step."""

    step: int
    reported_at: datetime
    """Time of the last report, UTC."""
    reporters: tuple[str, ...]
    """Parts of the trainer that reported."""
    reported: tuple[datetime, ...]
    """Time of the report of each, UTC."""
    weight_version: int | None
    """Weight version of the trainer; None if unknown."""
    agreement: Agreement
    """Sum over the reporters."""
    diagnosis: str
    """Likely cause in words that a reporter gave; "" if none did."""
    trace_ids: tuple[str, ...]
    """Traces to look at, worst first."""

    @classmethod
    def from_proto(cls, reports: Sequence[pb.AgreementReport]) -> StepAgreement:
        """Convert the messages of one step, of which there is at least one."""
        versions = [each.weight_version for each in reports if each.HasField("weight_version")]
        return cls(
            step=reports[0].step,
            reported_at=moment(max(each.reported_ms for each in reports)),
            reporters=tuple(each.reporter for each in reports),
            reported=tuple(moment(each.reported_ms) for each in reports),
            weight_version=max(versions, default=None),
            agreement=sum(map(Agreement.from_proto, reports), Agreement()),
            diagnosis=next((each.diagnosis for each in reports if each.diagnosis), ""),
            trace_ids=tuple(dict.fromkeys(i for each in reports for i in each.trace_ids)),
        )


@dataclass(frozen=True)
class AgreementChange(Values):
    """Step from which on trainer and rollout disagree more than before."""

    step: int
    weight_version: int | None
    """Weight version of the trainer that this step was the first with; None if it was not."""
    before: float
    """Share of cells that differed before it, median over up to 50 steps."""
    after: float
    """Share of cells that differ since, over all steps."""
    layer_ids: tuple[int, ...]
    """Layers that changed in the same way; empty if all did."""
    words: str
    """The same in words."""


@dataclass(frozen=True)
class AgreementHistory(Values):
    """Agreement of trainer and rollout over training steps."""

    steps: tuple[StepAgreement, ...]
    """Reported steps, ascending; others are left out."""

    @classmethod
    def from_proto(cls, reports: Iterable[pb.AgreementReport]) -> AgreementHistory:
        """Convert messages, ordered by step."""
        steps = groupby(reports, lambda report: report.step)
        return cls(tuple(StepAgreement.from_proto([*same]) for _, same in steps))

    @property
    def superseded(self) -> tuple[StepAgreement, ...]:
        """Last steps, of which each reporter has reported an earlier step since.

        The trainer resumed from a checkpoint before them, and has not reported them again.
        """
        latest: dict[str, datetime] = {}
        count = 0
        for step in self.steps:
            pairs = [*zip(step.reporters, step.reported, strict=True)]
            old = bool(pairs) and all(latest.get(who, at) > at + _OUT_OF_ORDER for who, at in pairs)
            count = count + 1 if old else 0
            for who, at in pairs:
                latest[who] = max(at, latest.get(who, at))
        return self.steps[len(self.steps) - count :]

    def change(self) -> AgreementChange | None:
        """Return the first step from which on trainer and rollout disagree more, up to the end.

        The share of differing cells is more than twice the median of up to 50 steps before, and
        above it by more than 0.01, at that step and the next one and in 9 of 10 of all later steps.
        Steps without a compared cell, and superseded ones, are left out.

        Returns:
            The change; None without one, and with fewer than 3 steps before it.
        """
        current = self.steps[: len(self.steps) - len(self.superseded)]
        compared = [step for step in current if step.agreement.choices.cells]
        shares = [_share([step]) for step in compared]
        for at in range(_BEFORE, len(shares) - 1):
            before = median(shares[max(0, at - _WINDOW) : at])
            limit = _worse(before)
            if min(shares[at : at + 2]) > limit:
                later = shares[at:]
                if sum(share > limit for share in later) >= _LASTING * len(later):
                    return _change(compared, at, before)
        return None


def _worse(before: float) -> float:
    """Return the share above which one is worse than before."""
    return max(_FACTOR * before, before + _MORE)


def _share(steps: Sequence[StepAgreement], layer: int | None = None) -> float:
    """Return the share of cells that differ, in a layer or in all; 0 without cells."""
    found = [
        step.agreement.choices if layer is None else step.agreement.by_layer[layer]
        for step in steps
        if layer is None or layer in step.agreement.by_layer
    ]
    cells = sum(choices.cells for choices in found)
    return sum(choices.differing for choices in found) / cells if cells else 0.0


def _change(steps: Sequence[StepAgreement], at: int, before: float) -> AgreementChange:
    early, late = steps[max(0, at - _WINDOW) : at], steps[at:]
    layers = sorted({layer for step in late for layer in step.agreement.by_layer})
    worse = tuple(i for i in layers if _share(late, i) > _worse(_share(early, i)))
    version = late[0].weight_version
    if version is None or version == early[-1].weight_version:
        version = None
    after = _share(late)
    words = f"Since step {late[0].step}"
    if version is not None:
        words += f", the first with weight version {version}"
    words += f", {after:.1%} of cells differ; {before:.1%} before"
    if len(worse) == len(layers):
        worse = ()
    if worse:
        words += f". Layers that changed: {_ranges(worse)}"
    return AgreementChange(late[0].step, version, before, after, worse, words + ".")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "0 to 3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts)
