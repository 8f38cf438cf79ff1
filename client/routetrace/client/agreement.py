"""Sums that measure the agreement of rows with the choices of a trainer's own routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb


class Choices(NamedTuple):
    """Choices of routers in some cells (token, layer)."""

    cells: int = 0
    """Compared cells."""
    differing: int = 0
    """Cells where the two sets of experts differ."""
    matched: int = 0
    """Experts chosen by both sides."""
    chosen: int = 0
    """Experts chosen by each side."""


class LogprobSums(NamedTuple):
    """Sums over tokens, with d = rollout log-probability - trainer log-probability."""

    tokens: int = 0
    k1: float = 0.0
    """d."""
    k3: float = 0.0
    """exp(-d) - 1 + d."""
    absolute: float = 0.0
    """|d|."""
    ratio: float = 0.0
    """exp(|d|)."""
    over_2x: int = 0
    """|d| > log 2."""
    over_5x: int = 0
    """|d| > log 5."""


# Fields of an agreement that are plain numbers, here and in the message.
_COUNTS = (
    "tokens",
    "differing_tokens",
    "planned_cells",
    "present_cells",
    "placed_tokens",
    "fallback_tokens",
)


@dataclass(frozen=True)
class Agreement(Values):
    """Sums that measure the agreement of rows with a trainer's own choices.

    Pipeline stages add up too, but a token that differs on two stages counts twice.
    """

    by_layer: Mapping[int, Choices] = field(default_factory=dict)
    """By absolute layer id."""
    by_version: Mapping[int, Choices] = field(default_factory=dict)
    """By the weight version that computed the row, where known."""
    tokens: int = 0
    """Tokens with a row at some layer."""
    differing_tokens: int = 0
    """Tokens where the sets differ at some layer."""
    planned_cells: int = 0
    """Cells planned to have a row."""
    present_cells: int = 0
    """Planned cells with a row."""
    placed_tokens: int = 0
    """Tokens other than padding."""
    fallback_tokens: int = 0
    """Tokens routed live at some layer: last tokens of samples, and missing rows."""
    logprobs: LogprobSums = field(default_factory=LogprobSums)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            **{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        )

    def __radd__(self, other: int) -> Agreement:
        """Support `sum(agreements)`."""
        return self if other == 0 else NotImplemented

    @classmethod
    def from_proto(cls, report: pb.AgreementReport) -> Agreement:
        """Convert a message."""
        of = report.logprobs
        return cls(
            by_layer={each.layer_id: _choices(each.choices) for each in report.by_layer},
            by_version={each.weight_version: _choices(each.choices) for each in report.by_version},
            logprobs=LogprobSums(*(getattr(of, name) for name in LogprobSums._fields)),
            **{name: getattr(report, name) for name in _COUNTS},
        )

    def to_proto(self) -> pb.AgreementReport:
        """Return the sums as a message, without a step and a reporter."""
        return pb.AgreementReport(
            by_layer=[
                pb.LayerAgreement(layer_id=layer, choices=pb.Choices(**choices._asdict()))
                for layer, choices in sorted(self.by_layer.items())
            ],
            by_version=[
                pb.VersionAgreement(weight_version=version, choices=pb.Choices(**of._asdict()))
                for version, of in sorted(self.by_version.items())
            ],
            logprobs=pb.LogprobSums(**self.logprobs._asdict()) if self.logprobs.tokens else None,
            **{name: getattr(self, name) for name in _COUNTS},
        )

    @property
    def choices(self) -> Choices:
        """Sum over all layers."""
        layers = self.by_layer.values()
        return Choices(*map(sum, zip(*layers, strict=True))) if layers else Choices()

    @property
    def disagreement(self) -> float | None:
        """Share of cells where the sets differ; None if none were compared."""
        cells, differing, _, _ = self.choices
        return differing / cells if cells else None

    def metrics(
        self, prefix: str = "routing/", *, weight_version: int | None = None
    ) -> dict[str, float]:
        """Return the metrics under stable names; docs/trainers.md defines them.

        Unknown values are left out: shares of no cells, coverage of ids without a plan.

        Args:
            prefix: prefix of every name.
            weight_version: version of the trainer, from which the age of rows counts; None for the
                newest version of the rows.
        """
        cells, differing, matched, chosen = self.choices
        shares: dict[str, tuple[float, float]] = {
            "disagreement": (differing, cells),
            "token_disagreement": (self.differing_tokens, self.tokens),
            "overlap": (matched, chosen),
        }
        for layer, choices in self.by_layer.items():
            shares[f"overlap/layer_{layer}"] = (choices.matched, choices.chosen)
        if self.by_version:
            newest = max(self.by_version) if weight_version is None else weight_version
            ages = {newest - version: choices for version, choices in self.by_version.items()}
            shares["age"] = (
                sum(age * choices.cells for age, choices in ages.items()),
                sum(choices.cells for choices in ages.values()),
            )
            for age, choices in sorted(ages.items()):
                shares[f"disagreement/age_{age}"] = (choices.differing, choices.cells)
        shares["coverage"] = (self.present_cells, self.planned_cells)
        shares["fallback"] = (self.fallback_tokens, self.placed_tokens)
        of = self.logprobs
        shares["logp/kl_k1"] = (of.k1, of.tokens)
        shares["logp/kl_k3"] = (of.k3, of.tokens)
        shares["logp/abs_diff"] = (of.absolute, of.tokens)
        shares["logp/mult_prob_error"] = (of.ratio, of.tokens)
        shares["logp/over_2x"] = (of.over_2x, of.tokens)
        shares["logp/over_5x"] = (of.over_5x, of.tokens)
        return {prefix + name: part / of for name, (part, of) in shares.items() if of}


def _sum(a: Any, b: Any) -> Any:
    """Return the sum of two numbers, tuples of numbers, or mappings of tuples."""
    if isinstance(a, tuple):
        return type(a)(*(x + y for x, y in zip(a, b, strict=True)))
    if isinstance(a, Mapping):
        both = {key: _sum(a[key], b[key]) for key in a.keys() & b.keys()}
        return dict(sorted({**a, **b, **both}.items()))
    return a + b


def _choices(message: pb.Choices) -> Choices:
    return Choices(message.cells, message.differing, message.matched, message.chosen)
