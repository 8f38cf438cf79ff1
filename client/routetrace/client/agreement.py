"""How far a trainer's own routers agree with the rows that it replays: numbers to log.

    log = AgreementLog(wandb.log)
    for rows in micro_batches:
        with replay(model, rows, compare=True) as r:
            ...
        log.add(r.agreement + compare_logprobs(rollout_logp, logp, mask))
    log.end_step(step)

An `Agreement` holds sums, so that those of micro-batches, layers and ranks add up with `+`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.rows import RankRows
from routetrace.client.trace import RoutingTrace
from routetrace.v1.errors import InvalidArgument

Ids = npt.NDArray[np.integer[Any]]
Valid = npt.NDArray[np.bool_]


class Choices(NamedTuple):
    """What routers chose in some cells (token, layer)."""

    cells: int = 0
    """Cells that were compared."""
    differing: int = 0
    """Those where the two sets of experts differ."""
    matched: int = 0
    """Experts that both sides chose."""
    chosen: int = 0
    """Experts that each side chose."""


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
class Agreement:
    """Sums that say how far rows and a trainer's own choices agree; `Agreement()` is none.

    Pipeline stages add up, too; but a token that differs on two of them counts twice.
    """

    by_layer: Mapping[int, Choices] = field(default_factory=dict)
    """By absolute layer id."""
    by_version: Mapping[int, Choices] = field(default_factory=dict)
    """By the weight version that computed the row, where that is known."""
    tokens: int = 0
    """Tokens with a row at some layer."""
    differing_tokens: int = 0
    """Those of them where the sets differ at some layer."""
    planned_cells: int = 0
    """Cells that were to have a row."""
    present_cells: int = 0
    """Those that had one."""
    placed_tokens: int = 0
    """Tokens that are no padding."""
    fallback_tokens: int = 0
    """Those whose live router decides at some layer: last tokens of samples, and missing rows."""
    logprobs: LogprobSums = field(default_factory=LogprobSums)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            **{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        )

    def __radd__(self, other: int) -> Agreement:
        """So that `sum(agreements)` works."""
        return self if other == 0 else NotImplemented

    @property
    def choices(self) -> Choices:
        """Of all layers."""
        total = Choices()
        for choices in self.by_layer.values():
            total = _sum(total, choices)
        return total

    @property
    def disagreement(self) -> float | None:
        """Share of the cells where the sets differ; None if none were compared."""
        cells, differing, _, _ = self.choices
        return differing / cells if cells else None

    def metrics(
        self, prefix: str = "routing/", *, weight_version: int | None = None
    ) -> dict[str, float]:
        """The numbers under stable names; docs/trainers.md says what each means.

        What is not known is left out: shares of no cells, coverage of ids without a plan.

        Args:
            prefix: of every name.
            weight_version: the trainer's, from which the age of rows counts; the newest of the rows
                if None.
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
    """Numbers, tuples of them and dicts of those, added up."""
    if isinstance(a, tuple):
        return type(a)(*(x + y for x, y in zip(a, b, strict=True)))
    if isinstance(a, Mapping):
        both = {key: _sum(a[key], b[key]) for key in a.keys() & b.keys()}
        return dict(sorted({**a, **b, **both}.items()))
    return a + b


def compare(rows: RankRows | RoutingTrace, trainer_ids: Any) -> Agreement:
    """Compares rows with what the trainer's own routers chose for the same cells, as sets.

    Args:
        rows: rows of a plan, or a trace.
        trainer_ids: integers of the shape of `rows.topk_ids`: [layers, tokens, top_k] for the rows
            of a plan, [tokens, layers, top_k] for a trace; an array, or a tensor on any device.
            Means nothing where `rows` is not valid.

    Raises:
        InvalidArgument: if the shape or dtype is another, or an id is out of range.
    """
    return of_overlap(rows, overlap(layer_major(rows)[0], trainer_choices(rows, trainer_ids)))


def overlap(a: Any, b: Any) -> Any:
    """How many ids of each top-k of `a` are in that of `b`: [...] for arrays [..., top_k]."""
    if not isinstance(a, np.ndarray):
        return (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)
    counts = np.zeros(a.shape[:-1], np.int64)
    for i in np.ndindex(a.shape[:-2]):
        # A contiguous plane per rank, and one layer at a time: twenty times as fast.
        ours, theirs = np.ascontiguousarray(a[i].T), np.ascontiguousarray(b[i].T)
        for plane in ours:
            found = np.zeros(len(plane), np.bool_)
            for other in theirs:
                found |= plane == other
            counts[i] += found
    return counts


def of_overlap(rows: RankRows | RoutingTrace, matched: npt.NDArray[np.integer[Any]]) -> Agreement:
    """The agreement of rows with choices that have `matched` [layers, tokens] ids in common."""
    _, valid = layer_major(rows)
    versions = np.zeros(valid.shape[1], np.int64)
    if isinstance(rows, RoutingTrace):
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
    """Counts cells [layers, tokens] where `matched` ids are in common.

    Args:
        matched: means nothing where not `valid`.
        valid: bool, which cells count.
        layer_ids: absolute layer ids of the first axis.
        top_k: ids of a cell.
        versions: [tokens], weight versions of the rows; None if they are not known.
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
    """Compares the log-probabilities that rollout and trainer gave to the sampled tokens.

    KL(rollout || trainer) is estimated from the tokens that the rollout sampled, with d = rollout -
    trainer: k1 is the mean of d, unbiased but noisy; k3 that of exp(-d) - 1 + d, never negative
    (Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        rollout: natural logarithms, an array or a tensor of any shape.
        trainer: the same, with replay or without it.
        mask: bool or 0 and 1, of the same shape: what counts. None: all.

    Raises:
        InvalidArgument: if the shapes differ.
    """
    a, b = _floats(rollout), _floats(trainer)
    chosen = np.ones(a.shape, np.bool_) if mask is None else to_numpy(mask).astype(np.bool_)
    for name, other in (("trainer", b), ("mask", chosen)):
        if other.shape != a.shape:
            raise InvalidArgument(
                field=name, value=other.shape, expected=f"{a.shape}, as the rollout's"
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
    """Adds agreements up, and hands their metrics to a logger.

    Args:
        log: called with (metrics, step): `wandb.log`, `mlflow.log_metrics`, `accelerator.log`, a
            Lightning logger's `log_metrics`.
        every: logs at every so many ends of steps, over all that was added since then.
        prefix: of every name.

    Raises:
        InvalidArgument: if `every` is not 1 or more.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], Any],
        *,
        every: int = 1,
        prefix: str = "routing/",
    ) -> None:
        self.total = Agreement()
        """What was added since it was logged."""
        self._log = log
        self._every = check.whole("every", every, 1)
        self._prefix = prefix
        self._steps = 0

    def add(self, agreement: Agreement) -> None:
        """Adds that of a micro-batch."""
        self.total += agreement

    def end_step(self, step: int, *, weight_version: int | None = None) -> None:
        """Logs, if it is time to; see `Agreement.metrics`."""
        self._steps += 1
        if self._steps % self._every == 0:
            total, self.total = self.total, Agreement()
            self._log(total.metrics(self._prefix, weight_version=weight_version), step)


def layer_major(rows: RankRows | RoutingTrace) -> tuple[Ids, Valid]:
    """The ids [layers, tokens, top_k] and what is valid [layers, tokens]."""
    if isinstance(rows, RankRows):
        return rows.topk_ids, rows.valid
    return rows.topk_ids.transpose(1, 0, 2), rows.valid.T


def trainer_choices(rows: RankRows | RoutingTrace, trainer_ids: Any) -> Ids:
    """A trainer's ids, checked, as [layers, tokens, top_k]; see `compare`."""
    ids: Ids = to_numpy(trainer_ids)
    if ids.shape != rows.topk_ids.shape or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            field="trainer_ids",
            value=f"{ids.dtype} {ids.shape}",
            expected=f"integers {rows.topk_ids.shape}, as the rows' topk_ids",
        )
    if isinstance(rows, RankRows):
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
    """An array of an array or of a tensor, wherever that is."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _floats(values: Any) -> npt.NDArray[np.float64]:
    # numpy knows no bfloat16.
    return to_numpy(values.double() if hasattr(values, "detach") else values).astype(np.float64)
