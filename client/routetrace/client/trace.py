"""Trace: the rows of one trace, with the validity of each cell."""

# Over 400 lines: one public class, half of it docstrings.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._html import Part, html_of
from routetrace.client._memory import check_device, read_only, require_torch, to_tensor
from routetrace.client._ranges import clip_ranges, column_index
from routetrace.client.alignment import compare_tokens
from routetrace.client.explanation import pointer
from routetrace.client.stat import (
    FinishReason,
    PrefixSpan,
    ProvenanceSpan,
    ReadFacts,
    TraceState,
    VersionSpan,
)
from routetrace.codec.frame import invalid_rows
from routetrace.common.errors import Corrupt, Incomplete, InvalidArgument, typed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Trace(ReadFacts):
    """Routing of positions [token_start, token_stop) of one request at the layers `layer_ids`.

    All rows are of one incarnation: of tokens that are proven to be the same, whichever engine
    requests computed them.

    Row i is position token_start + i, column j is layer layer_ids[j]. Ids are logical and in the
    router's order. Where `valid` is False the ids mean nothing.

    Stored layer by layer, so that the rows of one layer, `topk_ids[:, j]`, are contiguous.
    Immutable; slices share memory with the whole.
    """

    layer_ids: tuple[int, ...]
    """Absolute decoder layer ids of the columns, ascending."""
    token_start: int
    """Position of the first row."""
    token_stop: int
    """One past the position of the last row."""
    _NOT_IN_DICT = frozenset({"_ids", "_valid"})
    _ids: npt.NDArray[np.unsignedinteger[Any]] = field()
    """[layers, tokens, top_k]; the rows of a layer are C-contiguous."""
    _valid: npt.NDArray[np.bool_] = field()
    """[layers, tokens]."""

    @property
    def topk_ids(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Expert ids [tokens, layers, top_k], uint8 up to 256 experts, uint16 above.

        A read-only, transposed view of layer-major memory; meaningless where not `valid`.
        """
        return read_only(self._ids.transpose(1, 0, 2))

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Validity of cells: bool [tokens, layers], a read-only, transposed view."""
        return read_only(self._valid.T)

    def __len__(self) -> int:
        return self.token_stop - self.token_start

    def __array__(self, *_: object, **__: object) -> NoReturn:
        # numpy would make an object array of shape () in silence.
        remedy = "use topk_ids and valid"
        raise InvalidArgument(
            f"an array of a trace would be ids without validity; {remedy}", remedy=remedy
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("Trace is not indexable; use topk_ids[i] or tokens(i, i + 1)")

    __iter__ = None  # Python would iterate by indices

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return self.layout.top_k

    @property
    def complete(self) -> bool:
        """Whether the request has ended, its end is known, and every cell here is valid."""
        ended = self.state is not TraceState.RUNNING and self.num_tokens is not None
        return ended and bool(self._valid.all())

    @property
    def coverage(self) -> float:
        """Valid cells / cells; 1.0 if there are none."""
        return float(self._valid.mean()) if self._valid.size else 1.0

    @property
    def proven(self) -> int:
        """Rows of the pass itself: all cells here are valid, and no row stands in at the position.

        A row that stands in counts for all layers that were read, not only for those of `layers`.
        """
        own: npt.NDArray[np.bool_] = np.all(self._valid, axis=0)
        for start, stop, _ in self.prefix_sources:
            own[start - self.token_start : stop - self.token_start] = False
        return int(own.sum())

    def __repr__(self) -> str:
        of = f" of {self.num_rows}" if self.num_rows != len(self) else ""
        return (
            f"<Trace {self.trace_id!r} {self.state.value}: "
            f"rows [{self.token_start}, {self.token_stop}){of}, {len(self.layer_ids)} layers, "
            f"top-{self.top_k} of {self.layout.num_experts}, coverage {self.coverage:.4g}>"
        )

    def _repr_html_(self) -> str:
        """Return facts, a strip of rows and layers, and missing ranges, for notebooks."""
        part = Part(self.layer_ids, self.token_start, self.token_stop, self.coverage)
        return html_of(self, part)

    def tokens(self, start: int, stop: int | None = None) -> Trace:
        """Return the rows of positions [start, stop); to the end if `stop` is None.

        Raises:
            InvalidArgument: if they are not all within [token_start, token_stop).
        """
        start = check.whole("start", start)
        stop = self.token_stop if stop is None else check.whole("stop", stop)
        if not self.token_start <= start <= stop <= self.token_stop:
            raise InvalidArgument(
                field="start, stop",
                value=f"{start}, {stop}",
                expected=f"{self.token_start} <= start <= stop <= {self.token_stop}",
            )
        rows = slice(start - self.token_start, stop - self.token_start)
        return replace(
            self,
            token_start=start,
            token_stop=stop,
            missing=tuple(
                replace(m, start=a, stop=b)
                for m in self.missing
                for a, b in [(max(m.start, start), min(m.stop, stop))]
                if a < b
            ),
            weight_versions=clip_ranges(self.weight_versions, start, stop, VersionSpan),
            provenance=clip_ranges(self.provenance, start, stop, ProvenanceSpan),
            prefix_sources=clip_ranges(self.prefix_sources, start, stop, PrefixSpan),
            _ids=self._ids[:, rows],
            _valid=self._valid[:, rows],
        )

    def layers(self, layer_ids: Sequence[int]) -> Trace:
        """Return the columns of the given layers; neighbours share memory, others are copied.

        Args:
            layer_ids: absolute layer ids, strictly ascending.

        Raises:
            InvalidArgument: if they are not ascending, or one of them is not here.
        """
        kept = self.layout.select(tuple(check.wholes("layer_ids", layer_ids))).layer_ids
        strange = sorted(set(kept) - set(self.layer_ids))
        if strange:
            raise InvalidArgument(
                field="layer_ids", value=strange, expected=f"ids among {list(self.layer_ids)}"
            )
        columns = column_index([self.layer_ids.index(i) for i in kept])
        left = ((m, tuple(i for i in m.layer_ids if i in kept)) for m in self.missing)
        return replace(
            self,
            layer_ids=kept,
            missing=tuple(replace(m, layer_ids=ids) for m, ids in left if ids),
            _ids=self._ids[columns],
            _valid=self._valid[columns],
        )

    def split(
        self, prompt_len: int | None = None, num_output_tokens: int | None = None
    ) -> tuple[Trace, Trace]:
        """Return the rows of the prompt, and of the generated tokens; either part may be empty.

        The last sampled token has no row, unless a later turn forwarded it.

        Args:
            prompt_len: prompt tokens; the number reported by the agent if None.
            num_output_tokens: cuts the generated part to as many rows, where speculative decoding
                captured more tokens than came out; no cut if None. 0 leaves none of them (vLLM's
                `split_routed_experts` does not cut at 0).

        Raises:
            InvalidArgument: if a number is negative or not whole, or the prompt's length is
                unknown.
        """
        if prompt_len is None and not self.prompt_len:
            raise InvalidArgument(
                field="prompt_len",
                value=None,
                expected="the number of prompt tokens, which the agent did not report",
            )
        prompt_len = self.prompt_len if prompt_len is None else prompt_len
        prompt_len = check.whole("prompt_len", prompt_len)
        stop = self.token_stop
        if num_output_tokens is not None:
            stop = min(stop, prompt_len + check.whole("num_output_tokens", num_output_tokens))
        middle = min(max(prompt_len, self.token_start), self.token_stop)
        return self.tokens(self.token_start, middle), self.tokens(middle, max(middle, stop))

    def to_torch(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The expert ids as a tensor [tokens, layers, top_k], transposed from layer-major memory.

        Ids travel to the device as narrow as they are and are widened there, in the order of its
        current stream. Nothing waits for it if the trace's memory is page-locked (`pin_memory=True`
        in `get`), and the trace may be dropped at once. Without a device and a wider dtype the
        tensor shares memory with the trace: do not write to it.

        Args:
            device: where to; stays on the CPU if None.
            dtype: an integer dtype that holds num_experts - 1; if None, uint8 up to 256 experts
                and int32 above, as torch computes little on uint16.

        Raises:
            InvalidArgument: if `dtype` is too narrow, or not of integers, or torch is not installed
                or has no such device.
        """
        return ids_to_torch(self._ids, self.layout.num_experts, device, dtype).transpose(0, 1)

    def routed_experts(self, *, fill: int | None = None) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the rows in the layout of vLLM's `routed_experts`.

        Args:
            fill: value of missing MoE cells; None: they are an error.

        Returns:
            A new array [tokens, num_hidden_layers, top_k], uint8 up to 256 experts, uint16 above;
            dense layers hold zeros.

        Raises:
            Incomplete: if a MoE cell is missing and `fill` is None.
            InvalidArgument: if `fill` does not fit the dtype, or MoE layers were not asked for and
                `fill` is None.
        """
        limit = int(np.iinfo(self._ids.dtype).max)
        fill = None if fill is None else check.whole("fill", fill, 0, limit)
        if fill is None:
            self.require_valid()
            if self.layer_ids != self.layout.moe_layer_ids:
                raise InvalidArgument(
                    field="layer_ids",
                    value=self.layer_ids,
                    expected=f"all MoE layers {self.layout.moe_layer_ids}, or a fill",
                )
        rows = np.zeros(
            (len(self), self.layout.num_hidden_layers, self.top_k), dtype=self._ids.dtype
        )
        if fill:
            rows[:, list(self.layout.moe_layer_ids)] = fill
        for layer, ids, valid in zip(self.layer_ids, self._ids, self._valid, strict=True):
            np.copyto(rows[:, layer], ids, where=valid[:, None])
        return rows

    def equals(self, other: Trace) -> bool:
        """Return whether another trace has the same positions, layers and rows.

        Ids are compared where cells are valid; facts such as ids, labels and times are not.

        Raises:
            InvalidArgument: if `other` is no trace.
        """
        check.instance("other", other, Trace)
        mine = (self.token_start, self.token_stop, self.layer_ids, self.top_k)
        if mine != (other.token_start, other.token_stop, other.layer_ids, other.top_k):
            return False
        valid = self._valid
        return bool(
            np.array_equal(valid, other._valid)
            and np.array_equal(self._ids[valid], other._ids[valid])
        )

    def require_valid(self) -> None:
        """Raise Incomplete unless every cell here is valid.

        Raises:
            Incomplete: if not; names the ranges and why they are missing.
        """
        if not self._valid.all():
            raise incomplete(self)

    def verify_tokens(self, token_ids: npt.ArrayLike) -> int:
        """Check that this is the routing of these tokens.

        Args:
            token_ids: token ids from position 0 on: prompt and output.

        Returns:
            How many of the trace's digests confirmed them; 0 proves nothing.

        Raises:
            InvalidArgument: if they differ; names the first position whose digest says so.
        """
        ids = check.tokens("token_ids", token_ids)
        confirmed, agreed, differs = compare_tokens(ids, self)
        if differs is not None:
            raise InvalidArgument(
                field="token_ids",
                value=f"{ids.size} tokens that differ from the trace's before {differs}",
                expected=f"the trace's tokens; they agree before position {agreed}",
            )
        return confirmed

    def validate(self) -> None:
        """Check that a router can choose every valid cell.

        Raises:
            Corrupt: if an id is not below num_experts, or is twice in one top-k.
        """
        cells = self._ids.reshape(-1, 1, self.top_k)
        bad = invalid_rows(cells, self.layout.num_experts).reshape(self._valid.shape) & self._valid
        if bad.any():
            layer, row = (int(i) for i in np.argwhere(bad)[0])
            raise Corrupt(
                field=f"topk_ids of position {self.token_start + row}, "
                f"layer {self.layer_ids[layer]}",
                value=self._ids[layer, row].tolist(),
                expected=f"{self.top_k} different ids below {self.layout.num_experts}",
            )


def ids_to_torch(
    ids: npt.NDArray[np.unsignedinteger[Any]],
    num_experts: int,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Expert ids as a tensor of the same shape; see `Trace.to_torch`."""
    require_torch("to_torch")
    import torch

    narrow = ids.dtype.itemsize == 1
    if dtype is None:
        dtype = torch.uint8 if narrow else torch.int32
    if not isinstance(dtype, torch.dtype):
        known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        raise InvalidArgument(
            field="dtype",
            value=typed(dtype),
            expected="torch.dtype",
            remedy=f"use torch.{dtype}" if known else "for example torch.int64",
        )
    if (
        dtype is torch.bool
        or dtype.is_floating_point
        or dtype.is_complex
        or torch.iinfo(dtype).max < num_experts - 1
    ):
        raise InvalidArgument(
            field="dtype",
            value=str(dtype),
            expected=f"an integer dtype that holds {num_experts - 1}",
        )
    check_device(device)
    tensor = to_tensor(ids, device)
    if not narrow:
        tensor = tensor.to(torch.int32).bitwise_and_(0xFFFF)
    return tensor.to(dtype)


def incomplete(
    read: ReadFacts, unknown_from: int | None = None, weight_version: int | None = None
) -> Incomplete:
    """Return the error that lists the missing cells of a trace.

    Args:
        read: facts of the read.
        unknown_from: first position that may or may not exist.
        weight_version: the version that was asked for.
    """
    name = f"trace {read.trace_id!r}" if read.trace_id else "rows of KV blocks"
    parts = [str(m) for m in read.missing[:4]]
    if len(read.missing) > len(parts):
        parts.append(f"{len(read.missing) - len(parts)} more ranges")
    missing, remedy, low = "; ".join(parts), "", read.min_weight_version
    if unknown_from is not None:
        end, remedy = "has no reported end", 'use missing="mask"'
        if read.state is TraceState.RUNNING:
            end, remedy = "has not ended", 'use wait_for="end" or missing="mask"'
        elif read.finish_reason is FinishReason.CLOSED:
            end += ", as its agent was closed and finish() was never called for it"
            remedy = f"call finish() for each request before close(), or {remedy}"
        text = f"{name} {end}: rows from {unknown_from} on are unknown; {remedy}"
        text += f"; missing {missing}" if missing else ""
    elif [m.reason for m in read.missing] == ["other_version"] and (
        low == read.max_weight_version and not (low is not None and read.unknown_weight_versions)
    ):
        [other] = read.missing
        found = "an unknown version" if low is None else f"version {low}"
        rows = f"rows [{other.start}, {other.stop}) of {name}"
        text = f"{rows} were computed by {found}, not {weight_version}"
    else:
        text = f"{name} is {read.state.value}; missing {missing}"
    return Incomplete(
        text + pointer(read),
        trace_id=read.trace_id,
        state=read.state,
        missing=read.missing,
        unknown_from=unknown_from,
        remedy=remedy,
    )
