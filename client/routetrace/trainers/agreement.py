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

import logging
from collections.abc import Callable, Sequence
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._memory import to_numpy
from routetrace.client._shells.sync import RouteClient
from routetrace.client.agreement import Agreement, Choices, LogprobSums
from routetrace.client.rows import Rows
from routetrace.client.stat import version_number
from routetrace.client.trace import Trace
from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.errors import InvalidArgument, RouteTraceError

__all__ = [
    "Agreement",
    "AgreementLog",
    "Choices",
    "LogprobSums",
    "compare",
    "compare_logprobs",
]

_log = logging.getLogger(__name__)

#: Seconds for a report to the server: a training step waits for it.
_REPORT_SECONDS = 2.0

Ids = npt.NDArray[np.integer[Any]]
Valid = npt.NDArray[np.bool_]


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
            part = slice(start - rows.token_start, stop - rows.token_start)
            versions[part] = version_number(version)
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
        versions: weight versions of the rows [tokens], of which UNKNOWN_VERSION is not counted;
            None if none is known.
    """
    differs = (matched < top_k) & valid

    def choices(cells: Any) -> Choices:
        count = int(valid[cells].sum())
        both = int(matched[cells].sum(where=valid[cells]))
        return Choices(count, int(differs[cells].sum()), both, count * top_k)

    by_version = {}
    if versions is not None:
        present = valid.any(axis=0)
        for version in sorted({*versions[present].tolist()} - {UNKNOWN_VERSION}):
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
        client: reports each logged sum to its server, too; a report that fails, after 2 s at most,
            is a warning in the log. None: no report.
        reporter: name of this rank, if each one reports; see `RouteClient.report_agreement`.

    Raises:
        InvalidArgument: if `every` is less than 1.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], Any],
        *,
        every: int = 1,
        prefix: str = "routing/",
        client: RouteClient | None = None,
        reporter: str = "trainer",
    ) -> None:
        self.total = Agreement()
        """Sum since the last log call."""
        self._log = log
        self._every = check.whole("every", every, 1)
        self._prefix = prefix
        self._client = client
        self._reporter = reporter
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
            if self._client is not None:
                self._report(self._client, step, total, weight_version)

    def _report(
        self, client: RouteClient, step: int, total: Agreement, weight_version: int | None
    ) -> None:
        try:
            client.report_agreement(
                step,
                total,
                weight_version=weight_version,
                reporter=self._reporter,
                timeout=_REPORT_SECONDS,
            )
        except RouteTraceError as error:
            _log.warning("routetrace: agreement of step %s is not reported: %s", step, error)


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


def _floats(values: Any) -> npt.NDArray[np.float64]:
    # numpy has no bfloat16.
    return to_numpy(values.double() if hasattr(values, "detach") else values).astype(np.float64)
