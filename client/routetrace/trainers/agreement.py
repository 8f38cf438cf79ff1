"""Agreement of a trainer's own routers with replayed rows: metrics to log.

    log = AgreementLog(wandb.log)
    for rows in micro_batches:
        with replay(model, rows, compare=True) as r:
            ...
        log.add(r.agreement + compare_logprobs(rollout_logp, logp, mask))
    log.end_step(step)

An `Agreement` holds sums, so that `+` combines micro-batches, layers and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.rows import Rows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.common.values import Values

Ids = npt.NDArray[np.integer[Any]]
Valid = npt.NDArray[np.bool_]


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

    @property
    def choices(self) -> Choices:
        """Sum over all layers."""
        total = Choices()
        for choices in self.by_layer.values():
            total = _sum(total, choices)
        return total

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


def compare(rows: Rows | Trace, trainer_ids: Any) -> Agreement:
    """Compare rows with the choices of the trainer's own routers, as sets per cell.

    Args:
        rows: rows of a plan, or a trace.
        trainer_ids: integers of the shape of `rows.topk_ids`: [layers, tokens, top_k] for the rows
            of a plan, [tokens, layers, top_k] for a trace; an array, or a tensor on any device.
            Ignored where `rows` is not valid.

    Raises:
        InvalidArgument: if the shape or dtype differs, or an id is out of range.
    """
    return of_overlap(rows, overlap(layer_major(rows)[0], trainer_choices(rows, trainer_ids)))


def overlap(a: Any, b: Any) -> Any:
    """Return the number of common ids [...] of each top-k in `a` and `b` [..., top_k]."""
    if not isinstance(a, np.ndarray):
        return (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)
    counts = np.zeros(a.shape[:-1], np.int64)
    for i in np.ndindex(a.shape[:-2]):
        # Contiguous planes per rank, one layer at a time: twenty times as fast.
        ours, theirs = np.ascontiguousarray(a[i].T), np.ascontiguousarray(b[i].T)
        for plane in ours:
            found = np.zeros(len(plane), np.bool_)
            for other in theirs:
                found |= plane == other
            counts[i] += found
    return counts


def of_overlap(rows: Rows | Trace, matched: npt.NDArray[np.integer[Any]]) -> Agreement:
    """Return the agreement from the number of common ids `matched` [layers, tokens]."""
    _, valid = layer_major(rows)
    versions = np.zeros(valid.shape[1], np.int64)
    if isinstance(rows, Trace):
        placed = planned = np.ones(valid.shape[1], np.bool_)
        known = bool(rows.weight_versions)
        for start, stop, version in rows.weight_versions:
            versions[start - rows.token_start : stop - rows.token_start] = version
        top_k = rows.top_k
    else:
        placed, planned = rows.plan.sample_of >= 0, rows.plan.planned
        known = any(read.weight_versions for read in rows.reads)
        if known:
            versions = rows.weight_versions
        top_k = rows.plan.layout.top_k
    agreement = tally(matched, valid, rows.layer_ids, top_k, versions if known else None)
    return agreement + Agreement(
        planned_cells=len(valid) * int(planned.sum()),
        present_cells=int(valid[:, planned].sum()),
        placed_tokens=int(placed.sum()),
        fallback_tokens=int((placed & ~valid.all(axis=0)).sum()),
    )


def tally(
    matched: npt.NDArray[np.integer[Any]],
    valid: Valid,
    layer_ids: Sequence[int],
    top_k: int,
    versions: npt.NDArray[np.int64] | None = None,
) -> Agreement:
    """Count cells [layers, tokens] by their number of common ids.

    Args:
        matched: common ids; ignored where not `valid`.
        valid: bool, the cells that count.
        layer_ids: absolute layer ids of the first axis.
        top_k: ids per cell.
        versions: weight versions of the rows [tokens]; None if unknown.
    """
    differs = (matched < top_k) & valid

    def choices(cells: Any) -> Choices:
        count = int(valid[cells].sum())
        both = int(matched[cells].sum(where=valid[cells]))
        return Choices(count, int(differs[cells].sum()), both, count * top_k)

    by_version = {}
    if versions is not None:
        present = valid.any(axis=0)
        for version in np.unique(versions[present]).tolist():
            by_version[version] = choices((slice(None), versions == version))
    return Agreement(
        by_layer={layer: choices(column) for column, layer in enumerate(layer_ids)},
        by_version=by_version,
        tokens=int(valid.any(axis=0).sum()),
        differing_tokens=int(differs.any(axis=0).sum()),
    )


def compare_logprobs(rollout: Any, trainer: Any, mask: Any = None) -> Agreement:
    """Compare log-probabilities of the sampled tokens in rollout and trainer.

    KL(rollout || trainer) is estimated from the tokens that the rollout sampled, with d = rollout -
    trainer: k1 is the mean of d, unbiased but noisy; k3 that of exp(-d) - 1 + d, never negative
    (Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        rollout: natural logarithms, an array or a tensor of any shape.
        trainer: the same from the trainer, with or without replay.
        mask: tokens that count, bool or 0 and 1 of the same shape; None for all.

    Raises:
        InvalidArgument: if the shapes differ.
    """
    a, b = _floats(rollout), _floats(trainer)
    chosen = np.ones(a.shape, np.bool_) if mask is None else to_numpy(mask).astype(np.bool_)
    for name, other in (("trainer", b), ("mask", chosen)):
        if other.shape != a.shape:
            raise InvalidArgument(
                field=name, value=other.shape, expected=f"{a.shape}, as in rollout"
            )
    with np.errstate(over="ignore", invalid="ignore"):
        d = a[chosen] - b[chosen]
        size = np.abs(d)
        sums = LogprobSums(
            d.size,
            float(d.sum()),
            float((np.expm1(-d) + d).sum()),
            float(size.sum()),
            float(np.exp(size).sum()),
            int((size > log(2)).sum()),
            int((size > log(5)).sum()),
        )
    return Agreement(logprobs=sums)


class AgreementLog:
    """Sum of agreements, passed to a logger.

    Args:
        log: called with (metrics, step): `wandb.log`, `mlflow.log_metrics`, `accelerator.log`, a
            Lightning logger's `log_metrics`.
        every: number of steps per log call; each covers all additions since the last.
        prefix: prefix of every name.

    Raises:
        InvalidArgument: if `every` is less than 1.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], Any],
        *,
        every: int = 1,
        prefix: str = "routing/",
    ) -> None:
        self.total = Agreement()
        """Sum since the last log call."""
        self._log = log
        self._every = check.whole("every", every, 1)
        self._prefix = prefix
        self._steps = 0

    def add(self, agreement: Agreement) -> None:
        """Add the agreement of a micro-batch."""
        self.total += agreement

    def end_step(self, step: int, *, weight_version: int | None = None) -> None:
        """Log the metrics if due; see `Agreement.metrics`."""
        self._steps += 1
        if self._steps % self._every == 0:
            total, self.total = self.total, Agreement()
            self._log(total.metrics(self._prefix, weight_version=weight_version), step)


def layer_major(rows: Rows | Trace) -> tuple[Ids, Valid]:
    """Return ids [layers, tokens, top_k] and valid [layers, tokens]."""
    if isinstance(rows, Rows):
        return rows.topk_ids, rows.valid
    return rows.topk_ids.transpose(1, 0, 2), rows.valid.T


def trainer_choices(rows: Rows | Trace, trainer_ids: Any) -> Ids:
    """Check ids of a trainer as in `compare`; return [layers, tokens, top_k]."""
    ids: Ids = to_numpy(trainer_ids)
    if ids.shape != rows.topk_ids.shape or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            field="trainer_ids",
            value=f"{ids.dtype} {ids.shape}",
            expected=f"integers {rows.topk_ids.shape}, as topk_ids of the rows",
        )
    if isinstance(rows, Rows):
        layout = rows.plan.layout
    else:
        layout, ids = rows.layout, ids.transpose(1, 0, 2)
    for layer, own, valid in zip(rows.layer_ids, ids, layer_major(rows)[1], strict=True):
        cells = own[valid]
        if cells.size and not 0 <= int(cells.min()) <= int(cells.max()) < layout.num_experts:
            raise InvalidArgument(
                field="trainer_ids",
                value=f"ids in [{cells.min()}, {cells.max()}] at layer {layer}",
                expected=f"logical ids in [0, {layout.num_experts}) where rows are valid",
            )
    return ids


def to_numpy(values: Any) -> npt.NDArray[Any]:
    """Convert an array, or a tensor on any device, to numpy."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _floats(values: Any) -> npt.NDArray[np.float64]:
    # numpy has no bfloat16.
    return to_numpy(values.double() if hasattr(values, "detach") else values).astype(np.float64)
