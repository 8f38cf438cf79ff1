"""A micro-batch as a trainer lays it out: samples, where their rows come from, padding, packing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.common.errors import InvalidArgument, quoted, typed
from routetrace.common.values import Values

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True)
class Segment(Values):
    """Rows [start, stop) of a request, for the positions of a sample from `at` on."""

    trace_id: str
    """The trace's id."""
    start: int
    """First position in the request."""
    stop: int
    """One past the last; the request must have these rows."""
    at: int | None = None
    """Position in the sample of the first row; `start` if None."""
    incarnation: int | None = None
    """As in `RouteClient.get`."""
    num_tokens: int | None = None
    """Tokens that the request must have, or more if the sample's token ids are proven to be its
    start; None: any number."""
    nonce: int | None = None
    """As in `RouteClient.get`."""

    def __post_init__(self) -> None:
        check.identifier("trace_id", self.trace_id)
        check.whole("start", self.start)
        check.whole("stop", self.stop, self.start + 1)
        if self.at is None:
            object.__setattr__(self, "at", self.start)
        check.whole("at", self.at)
        if self.num_tokens is not None:
            check.whole("num_tokens", self.num_tokens, self.stop + 1)
        if self.incarnation is not None:
            check.whole("incarnation", self.incarnation, 1)
        if self.nonce is not None:
            check.nonce(self.nonce)

    @property
    def shift(self) -> int:
        """Position in the request - position in the sample."""
        assert self.at is not None
        return self.start - self.at


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

    def __post_init__(self) -> None:
        check.whole("num_tokens", self.num_tokens)
        segments = check.several("segments", self.segments, "Segment")
        segments = tuple(
            check.instance(f"segments[{i}]", s, Segment) for i, s in enumerate(segments)
        )
        object.__setattr__(self, "segments", segments)
        if self.token_ids is not None:
            ids = check.tokens("token_ids", self.token_ids, self.num_tokens)
            object.__setattr__(self, "token_ids", ids)
        if self.padded_len is not None:
            check.whole("padded_len", self.padded_len, self.num_tokens)
        end = 0
        for number, segment in enumerate(self.segments):
            at, stop = segment.start - segment.shift, segment.stop - segment.shift
            if not end <= at < stop <= self.num_tokens:
                raise InvalidArgument(
                    field=f"segments[{number}]",
                    value=f"positions [{at}, {stop})",
                    expected=f"positions in [{end}, {self.num_tokens}), ascending and disjoint",
                )
            end = stop

    @classmethod
    def of(
        cls,
        trace_id: str,
        num_tokens: int | None = None,
        *,
        token_ids: npt.ArrayLike | None = None,
        padded_len: int | None = None,
        incarnation: int | None = None,
        nonce: int | None = None,
    ) -> Sample:
        """One whole request: N tokens, N - 1 rows.

        Args:
            trace_id: the trace's id.
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


def check_padding_side(
    name: str, given: PaddingSide | None, lengths: Sequence[int], seq_len: int
) -> None:
    """Check the side of the padding of sequences.

    There is no default: with a wrong one each row would be replayed at another token.

    Args:
        name: of the sequences, for the message.
        given: "left", "right", or None where no sequence is padded.
        lengths: tokens of each sequence.
        seq_len: tokens with padding.

    Raises:
        InvalidArgument: if it is another value, or None and a sequence is padded.
    """
    if given is not None:
        check.choice("padding_side", given, ("left", "right"))
        return
    for number, length in enumerate(lengths):
        if 0 < length < seq_len:
            raise InvalidArgument(
                field="padding_side",
                value=None,
                expected=f'"left" or "right", as {name}[{number}] has {length} tokens of {seq_len}',
                remedy="generate() of transformers pads left, most trainers right",
            )


class Unit(NamedTuple):
    """A stretch of a lane that context parallelism splits by itself."""

    start: int
    length: int
    sample: int
    offset: int  # of the sample's first token


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples as a trainer lays them out before it splits them: made by `packed` or `padded`."""

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
        cls, samples: Iterable[Sample], seq_len: int, *, padding_side: PaddingSide | None = None
    ) -> MicroBatch:
        """An array [samples, seq_len].

        Args:
            samples: one for each row of it.
            seq_len: its columns.
            padding_side: where the padding is; needed where a sample is shorter than seq_len.

        Raises:
            InvalidArgument: naming the wrong argument.
        """
        samples = _samples(samples)
        check.whole("seq_len", seq_len)
        lengths = [sample.num_tokens for sample in samples]
        check_padding_side("samples", padding_side, lengths, seq_len)
        lanes = []
        for number, sample in enumerate(samples):
            if sample.num_tokens > seq_len:
                raise InvalidArgument(
                    field=f"samples[{number}].num_tokens",
                    value=sample.num_tokens,
                    expected=f"at most seq_len = {seq_len}",
                )
            offset = seq_len - sample.num_tokens if padding_side == "left" else 0
            lanes.append((Unit(0, seq_len, number, offset),) if seq_len else ())
        return cls(samples, tuple(lanes), seq_len)
