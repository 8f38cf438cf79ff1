"""Rows: the result of a plan, ready to replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._memory import to_tensor
from routetrace.client._ranges import column_index
from routetrace.client.plan import FetchPlan
from routetrace.client.samples import SampleRows, all_layers
from routetrace.client.stat import ReadFacts, version_number
from routetrace.client.trace import ids_to_torch
from routetrace.common.errors import InvalidArgument
from routetrace.common.missing import MissingRange
from routetrace.common.values import Values

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FetchStats(Values):
    """Cost of fetches; add them with `+`."""

    bytes_fetched: int = 0
    """Compressed bytes of rows that crossed the wire."""
    bytes_avoided: int = 0
    """Compressed bytes of the other layers and tokens of the same requests, which did not."""
    rows: int = 0
    """Rows fetched: (request, position) with any layer."""
    cells: int = 0
    """Cells (token, layer) that were planned."""
    valid_cells: int = 0
    """Planned cells that are valid."""
    wait_seconds: float = 0.0
    """Seconds that the caller waited for them."""
    samples_found: int = 0
    """Samples that were found by their tokens."""
    samples_not_found: int = 0
    """Samples whose tokens no request was found to have."""
    samples_ambiguous: int = 0
    """Samples whose tokens several requests have, or may have."""
    samples_of_several: int = 0
    """Samples that were found, where one of several equal requests was chosen."""

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*(getattr(self, n) + getattr(other, n) for n in self.__annotations__))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Rows:
    """The rows of a rank's layers and tokens of one micro-batch.

    Where `valid` is False the ids mean nothing: padding, the last token of a sample, and rows that
    are missing. The live router decides there.
    """

    plan: FetchPlan
    """The plan; with the requests of samples that were found by their tokens."""
    topk_ids: npt.NDArray[np.unsignedinteger[Any]]
    """[layers, local tokens, top_k] of uint8 up to 256 experts, uint16 above, C-contiguous: logical
    expert ids in the router's order."""
    valid: npt.NDArray[np.bool_]
    """[layers, local tokens]."""
    layer_ids: tuple[int, ...]
    """Absolute decoder layer ids of the first axis, ascending."""
    reads: tuple[ReadFacts, ...] = ()
    """Facts about the trace of each of `plan.reads`."""
    verified: tuple[int, ...] = ()
    """For each of `plan.reads`, how many token digests confirmed its sample's token ids; 0 proves
    nothing: no token ids were given, the agent reported no digests, or none behind the prompt lies
    within the sample."""
    stats: FetchStats = field(default_factory=FetchStats)

    def __repr__(self) -> str:
        layers, tokens, top_k = self.topk_ids.shape
        return (
            f"<Rows {layers} layers x {tokens} tokens, top-{top_k} of "
            f"{self.plan.layout.num_experts}, coverage {self.coverage:.4g}>"
        )

    @property
    def coverage(self) -> float:
        """Valid cells / planned cells; 1.0 if none were planned."""
        cells = len(self.layer_ids) * self.plan.num_rows
        return float(self.valid.sum()) / cells if cells else 1.0

    @property
    def proven(self) -> int:
        """Local tokens with a row of the pass itself, as `Trace.proven`; `reads` tell the others.

        `ReadFacts.provenance` and `prefix_sources` of each of `reads` go by positions of the trace.
        """
        own: npt.NDArray[np.bool_] = np.all(self.valid, axis=0)
        for where, _ in self._spans_of("prefix_sources"):
            own[where] = False
        return int(own.sum())

    @property
    def missing(self) -> tuple[tuple[int, MissingRange], ...]:
        """(sample, missing cells), by positions of the trace, or of a sample without one."""
        found = (
            (planned.sample, missing)
            for planned, read in zip(self.plan.reads, self.reads, strict=False)
            for missing in read.missing
        )
        return (*found, *self.plan.unproven)

    def layers(self, layer_ids: Sequence[int]) -> Rows:
        """Return the rows of some of the layers, as of a virtual pipeline stage.

        Neighbours share memory, others are copied.

        Args:
            layer_ids: absolute layer ids, strictly ascending.

        Raises:
            InvalidArgument: if they are not ascending, or one of them is not here.
        """
        layer_ids = check.wholes("layer_ids", layer_ids)
        if set(layer_ids) - set(self.layer_ids) or layer_ids != sorted(set(layer_ids)):
            raise InvalidArgument(
                field="layer_ids",
                value=layer_ids,
                expected=f"strictly ascending ids among {list(self.layer_ids)}",
            )
        columns = column_index([self.layer_ids.index(i) for i in layer_ids])
        return replace(
            self,
            layer_ids=tuple(layer_ids),
            topk_ids=self.topk_ids[columns],
            valid=self.valid[columns],
        )

    def per_sample(self) -> list[SampleRows]:
        """Return the rows of each sample, of a plan that splits neither layers nor tokens.

        Raises:
            InvalidArgument: if the rank has only part of the layers or tokens.
        """
        plan = self.plan
        all_layers(self.layer_ids, plan.layout)
        there = sum(span.stop - span.start for span in plan.spans)
        if there != (whole := sum(sample.num_tokens for sample in plan.samples)):
            raise InvalidArgument(
                field="rows",
                value=f"{there} of the {whole} tokens of the samples",
                expected="a plan that is not split: cp_size = sp_size = 1",
            )
        found = []
        for number, sample in enumerate(plan.samples):
            if not sample.num_tokens:
                continue  # padding
            tokens = np.flatnonzero(plan.sample_of == number)[:-1]  # ascending without a split
            found.append(
                SampleRows(
                    f"sample {number}",
                    plan.layout,
                    self.topk_ids[:, tokens],
                    self.valid[:, tokens],
                    tuple(missing for owner, missing in self.missing if owner == number),
                )
            )
        return found

    @property
    def weight_versions(self) -> npt.NDArray[np.int64]:
        """The weight version that computed the row of each local token: [tokens].

        UNKNOWN_VERSION where nobody gave it; meaningless where there is no row.
        """
        versions = np.zeros(self.plan.num_tokens, np.int64)
        for where, version in self._spans_of("weight_versions"):
            versions[where] = version_number(version)
        return versions

    def _spans_of(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield (local tokens, value) of the spans (start, stop, value) of each read."""
        for planned, read in zip(self.plan.reads, self.reads, strict=False):
            for piece in planned.pieces:
                for start, stop, value in getattr(read, name):
                    a, b = max(start, piece.start), min(stop, piece.stop)
                    if a < b:
                        yield piece.where(a, b), value

    def to_torch(
        self, device: Any = None, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [layers, tokens, top_k] and validity [layers, tokens] as tensors.

        Ids travel to the device as narrow as they are and are widened there, in the order of its
        current stream. Nothing waits for it if their memory is page-locked: these rows may be
        dropped at once then, but memory of the caller's (`out`) is not to be written to before the
        copy is over. Without a device and a wider dtype the tensors share memory with this object.

        Args:
            device: where to; stays on the CPU if None.
            dtype: an integer dtype that holds num_experts - 1; if None, uint8 up to 256 experts
                and int32 above, as torch computes little on uint16.

        Raises:
            InvalidArgument: if `dtype` is too narrow, or not of integers.
        """
        ids = ids_to_torch(self.topk_ids, self.plan.layout.num_experts, device, dtype)
        return ids, to_tensor(self.valid, device)
