"""A micro-batch as a trainer lays it out: samples, where their rows come from, padding, packing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client import layouts
from routetrace.client.layouts import PaddingSide
from routetrace.client.segments import Segment, check_segments
from routetrace.common.errors import InvalidArgument, quoted, typed
from routetrace.common.values import Values


@dataclass(frozen=True, eq=False)
class Sample(Values):
    """One sequence of tokens that is trained on, and whose rows its positions take.

    `of` and `turns` make the usual ones.
    """

    num_tokens: int
    """Tokens that the trainer has of it, padding not counted."""
    segments: tuple[Segment, ...] = ()
    """Where the rows come from, ascending and disjoint in the sample; other positions have none."""
    padded_len: int | None = None
    """Tokens that it takes in a packed batch; None: `num_tokens`, rounded up to the batch's
    `align`."""
    token_ids: npt.NDArray[np.integer[Any]] | None = None
    """[num_tokens]; compared with the token digests that the agent reported, if any."""
    find: bool = False
    """Whether its rows are those of a request that has these token ids, whichever that is; it has
    no segments then."""

    def __post_init__(self) -> None:
        check.whole("num_tokens", self.num_tokens)
        segments = check_segments("segments", self.segments, self.num_tokens)
        object.__setattr__(self, "segments", segments)
        if check.flag("find", self.find) and self.segments:
            shown = f"True, with {len(segments)} segments"
            raise InvalidArgument(field="find", value=shown, expected="True without segments")
        if self.find and self.token_ids is None:
            raise InvalidArgument(field="token_ids", value=None, expected=_TO_FIND)
        if self.token_ids is not None:
            ids = check.tokens("token_ids", self.token_ids, self.num_tokens)
            object.__setattr__(self, "token_ids", ids)
        if self.padded_len is not None:
            check.whole("padded_len", self.padded_len, self.num_tokens)

    @classmethod
    def of(
        cls,
        trace_id: str | None = None,
        num_tokens: int | None = None,
        *,
        token_ids: npt.ArrayLike | None = None,
        padded_len: int | None = None,
        incarnation: int | None = None,
        nonce: int | None = None,
    ) -> Sample:
        """One whole request: N tokens, N - 1 rows.

        Args:
            trace_id: the trace's id; None for the request that has these token ids.
            num_tokens: its tokens, prompt and output; how many `token_ids` are, if None.
            token_ids: [num_tokens] integers. With them the rows are proven to be of these tokens,
                where the agent knew its tokens, and a sample may be cut short. Of several
                incarnations they choose one.
            padded_len: see `Sample`.
            incarnation: as in `RouteClient.get`.
            nonce: as in `RouteClient.get`.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        if trace_id is None:
            return cls._found(num_tokens, token_ids, padded_len, incarnation, nonce)
        sample = cls.turns(
            [(trace_id, _count(num_tokens, token_ids))],
            token_ids=token_ids,
            padded_len=padded_len,
            incarnation=incarnation,
        )
        if nonce is None:
            return sample
        named = tuple(replace(segment, nonce=nonce) for segment in sample.segments)
        return replace(sample, segments=named)

    @classmethod
    def _found(
        cls,
        num_tokens: int | None,
        token_ids: npt.ArrayLike | None,
        padded_len: int | None,
        incarnation: int | None,
        nonce: int | None,
    ) -> Sample:
        for name, value in (("incarnation", incarnation), ("nonce", nonce)):
            if value is not None:
                expected = "None, as there is no trace_id"
                raise InvalidArgument(field=name, value=quoted(value), expected=expected)
        if token_ids is None:
            raise InvalidArgument(field="token_ids", value=None, expected=_TO_FIND)
        ids = check.tokens("token_ids", token_ids, num_tokens)
        return cls(ids.size, (), padded_len, ids, find=True)

    @classmethod
    def turns(
        cls,
        traces: Sequence[tuple[str, int]],
        *,
        token_ids: npt.ArrayLike | None = None,
        padded_len: int | None = None,
        incarnation: int | None = None,
    ) -> Sample:
        """Turns of a conversation with a request of its own each, whose prompt holds those before.

        A turn gives the rows from the last token of the turn before on: that one was sampled then,
        and forwarded only now. (Turns that share one trace id are one request: use `of`.)

        Args:
            traces: (trace id, tokens at its end), in order, with growing numbers of tokens.
            token_ids: as in `of`, of the last turn.
            padded_len: see `Sample`.
            incarnation: as in `RouteClient.get`, of each.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        segments = []
        first, num_tokens = 0, 0
        pair = "a tuple of trace id and number of tokens"
        for number, turn in enumerate(check.items("traces", traces, "a sequence of tuples")):
            if not (isinstance(turn, tuple) and len(turn) == 2):
                name = f"traces[{number}]"
                raise InvalidArgument(field=name, value=typed(turn), expected=pair)
            trace_id, count = turn
            check.identifier("trace_id", trace_id)
            num_tokens = check.whole(f"traces[{number}].num_tokens", count, num_tokens + 1)
            if first < num_tokens - 1:
                segments.append(
                    Segment(
                        trace_id,
                        first,
                        num_tokens - 1,
                        incarnation=incarnation,
                        num_tokens=num_tokens,
                    )
                )
            first = num_tokens - 1
        ids = None if token_ids is None else check.tokens("token_ids", token_ids, num_tokens)
        return cls(num_tokens, tuple(segments), padded_len, ids)

    @classmethod
    def padding(cls, length: int) -> Sample:
        """Tokens without rows: filler that makes a packed batch longer."""
        return cls(0, padded_len=length)


_TO_FIND = "the token ids, as there is no trace_id"


def _count(num_tokens: int | None, token_ids: npt.ArrayLike | None) -> int:
    if num_tokens is not None:
        return num_tokens
    if token_ids is None:
        raise InvalidArgument(field="num_tokens", value=None, expected="a number, or token_ids")
    return check.tokens("token_ids", token_ids).size


def _samples(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    remedy = "use [sample]" if isinstance(samples, Sample) else ""
    listed = check.several("samples", samples, "Sample", remedy)
    return tuple(
        check.instance(
            f"samples[{i}]",
            s,
            Sample,
            f"use Sample.of({quoted(s)}, num_tokens)" if isinstance(s, str) else "",
        )
        for i, s in enumerate(listed)
    )


class Unit(NamedTuple):
    """A stretch of a lane that context parallelism splits by itself."""

    start: int
    length: int
    sample: int
    offset: int  # of the sample's first token


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples as a trainer lays them out before it splits them.

    `packed` and `padded` make it of samples, `from_mask`, `from_position_ids` and `from_cu_seqlens`
    of the tensors that the model gets.
    """

    samples: tuple[Sample, ...]
    lanes: tuple[tuple[Unit, ...], ...]
    """The rows of the array [lanes, lane_len] of tokens; one, if packed."""
    lane_len: int

    @classmethod
    def packed(
        cls, samples: Iterable[Sample], *, align: int = 1, total_len: int | None = None
    ) -> MicroBatch:
        """One after the other, without a batch dimension (Megatron's thd, FlashAttention varlen).

        Args:
            samples: in order.
            align: each takes a multiple of so many tokens. Megatron with context parallelism needs
                2 cp_size, times the tensor parallel size with sequence parallelism.
            total_len: tokens of the batch; those behind the samples are one sequence of padding.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        samples = _samples(samples)
        check.whole("align", align, 1)
        units = []
        start = 0
        for number, sample in enumerate(samples):
            length = sample.padded_len
            if length is None:
                length = -(-sample.num_tokens // align) * align
            if length:
                units.append(Unit(start, length, number, 0))
            start += length
        if total_len is not None:
            check.whole("total_len", total_len, start)
            if total_len > start:
                units.append(Unit(start, total_len - start, -1, 0))
            start = total_len
        return cls(samples, (tuple(units),), start)

    @classmethod
    def padded(
        cls,
        samples: Iterable[Sample],
        seq_len: int,
        *,
        padding_side: PaddingSide | None = None,
        starts: npt.ArrayLike | None = None,
    ) -> MicroBatch:
        """An array [samples, seq_len].

        Args:
            samples: one for each row of it.
            seq_len: its columns.
            padding_side: where the padding is; needed where a sample is shorter than seq_len.
            starts: [samples] integers, in place of `padding_side` where both sides may be padded
                (prompts on the left, completions on the right): the column of each first token.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        samples = _samples(samples)
        check.whole("seq_len", seq_len)
        lengths = [sample.num_tokens for sample in samples]
        for number, length in enumerate(lengths):
            if length > seq_len:
                raise InvalidArgument(
                    field=f"samples[{number}].num_tokens",
                    value=length,
                    expected=f"at most seq_len = {seq_len}",
                )
        if starts is None:
            layouts.check_padding_side("samples", padding_side, lengths, seq_len)
            left = padding_side == "left"
            offsets = [seq_len - length if left else 0 for length in lengths]
        elif padding_side is not None:
            expected = "None beside starts"
            shown = quoted(padding_side)
            raise InvalidArgument(field="padding_side", value=shown, expected=expected)
        else:
            offsets = layouts.check_starts(starts, lengths, seq_len)
        lanes = [
            (Unit(0, seq_len, number, offset),) if seq_len else ()
            for number, offset in enumerate(offsets)
        ]
        return cls(samples, tuple(lanes), seq_len)

    @classmethod
    def from_mask(cls, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike) -> MicroBatch:
        """An array [batch, seq], and the mask of its padding.

        Samples have the token ids of their rows, and are found by them.

        Args:
            input_ids: [batch, seq] integers: an array, a list, or a tensor on any device.
            attention_mask: [batch, seq] of 0 and 1, or bool: the tokens of each row are one
                stretch; a row of zeros is a sample without tokens.

        Raises:
            InvalidArgument: naming the wrong argument, and the row.
        """
        ids, starts, stops = layouts.by_mask(input_ids, attention_mask)
        samples = [
            Sample.of(token_ids=row[start:stop])
            for row, start, stop in zip(ids, starts, stops, strict=True)
        ]
        return cls.padded(samples, ids.shape[1], starts=starts)

    @classmethod
    def from_position_ids(
        cls,
        input_ids: npt.ArrayLike,
        position_ids: npt.ArrayLike,
        *,
        num_tokens: int | None = None,
    ) -> MicroBatch:
        """Sequences one after the other, without padding between them: one begins at each 0.

        Samples have the token ids of their sequences, and are found by them. That is what
        `DataCollatorWithFlattening` of transformers, `padding_free` of TRL and `use_remove_padding`
        of verl make.

        Args:
            input_ids: [1, total] or [total] integers: an array, a list, or a tensor on any device.
            position_ids: as `input_ids`, or [n, 1, total] of a multimodal RoPE, where a sequence
                begins if all n are 0. Where n is 3, images repeat positions; otherwise the first
                axis must count the tokens of each sequence.
            num_tokens: tokens in front of the padding at the end, where its positions count from 0
                as those of a sequence (Ulysses in verl). Otherwise sequences of one token at the
                end, which have no rows, are padding.

        Raises:
            InvalidArgument: naming the wrong argument, and the first wrong position.
        """
        return cls._stream(*layouts.by_position_ids(input_ids, position_ids, num_tokens))

    @classmethod
    def from_cu_seqlens(cls, input_ids: npt.ArrayLike, cu_seqlens: npt.ArrayLike) -> MicroBatch:
        """Sequences one after the other, without padding between them, and their bounds.

        Samples have the token ids of their sequences, and are found by them.

        Args:
            input_ids: [1, total] or [total] integers: an array, a list, or a tensor on any device.
            cu_seqlens: [sequences + 1] integers: 0, then the end of each sequence. Tokens behind
                the last end are padding.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        return cls._stream(*layouts.by_cu_seqlens(input_ids, cu_seqlens))

    @classmethod
    def _stream(cls, ids: layouts.Integers, bounds: list[int]) -> MicroBatch:
        samples = [Sample.of(token_ids=ids[start:stop]) for start, stop in pairwise(bounds)]
        return cls.packed(samples, total_len=len(ids))
