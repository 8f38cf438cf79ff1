"""Where the sequences of a micro-batch are, read off the tensors that a trainer has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.common.errors import InvalidArgument

PaddingSide = Literal["left", "right"]
Integers: TypeAlias = npt.NDArray[np.integer[Any]]


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
                remedy="generate() of transformers pads left, most trainers right; "
                "where both sides are padded, give starts",
            )


def check_starts(starts: npt.ArrayLike, lengths: Sequence[int], seq_len: int) -> list[int]:
    """Return the column of the first token of each sequence.

    Args:
        starts: [sequences] integers.
        lengths: tokens of each sequence.
        seq_len: columns.

    Raises:
        InvalidArgument: if there is not one for each, or a sequence ends behind the last column.
    """
    columns: list[int] = check.tokens("starts", starts, len(lengths)).tolist()
    for number, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        if column + length > seq_len:
            raise InvalidArgument(
                field=f"starts[{number}]",
                value=column,
                expected=f"at most {seq_len - length}: seq_len {seq_len} - {length} tokens",
            )
    return columns


def by_mask(
    input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike
) -> tuple[Integers, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the token ids [batch, seq], and the columns [start, stop) of each row's tokens.

    Args:
        input_ids: [batch, seq] integers.
        attention_mask: [batch, seq] of 0 and 1, or bool.

    Raises:
        InvalidArgument: if a shape is wrong, or the ones of a row are not one stretch.
    """
    expected = "[batch, seq] integers in [0, 2**32)"
    ids = check.integers("input_ids", input_ids, expected)
    if ids.ndim != 2:
        packed = "use from_position_ids or from_cu_seqlens" if ids.ndim == 1 else ""
        raise check.wrong_shape("input_ids", ids, expected, packed)
    batch, seq_len = ids.shape
    expected = f"[{batch}, {seq_len}] of 0 and 1, or bool, as input_ids"
    given = check.array("attention_mask", attention_mask, expected)
    mask = given.astype(np.bool_) if given.dtype.kind in "biu" else None
    if mask is None or mask.shape != ids.shape:
        raise check.wrong_shape("attention_mask", given, expected)
    if (mask != given).any():
        packed = "use from_position_ids for sequences that are packed into rows"
        value = f"in [{given.min()}, {given.max()}]"
        raise InvalidArgument(field="attention_mask", value=value, expected=expected, remedy=packed)
    edges = np.diff(mask, axis=1, prepend=False, append=False)
    stretches = edges.sum(1) // 2
    if (stretches > 1).any():
        row = int(stretches.argmax())
        raise InvalidArgument(
            field=f"attention_mask[{row}]",
            value=f"ones in {stretches[row]} stretches",
            expected="one stretch of ones",
            remedy="give the mask of padding, not that of the tokens in the loss",
        )
    if not seq_len:
        return ids, np.zeros(batch, np.intp), np.zeros(batch, np.intp)
    starts = mask.argmax(1)
    return ids, starts, starts + mask.sum(1)


def by_position_ids(
    input_ids: npt.ArrayLike, position_ids: npt.ArrayLike, num_tokens: int | None
) -> tuple[Integers, list[int]]:
    """Return the token ids [total], and where sequences begin, with the end of the last.

    Args:
        input_ids: [total] or [1, total] integers.
        position_ids: [total], [1, total] or [n, 1, total] integers.
        num_tokens: tokens in front of the padding; None: the last sequences of one token are it.

    Raises:
        InvalidArgument: if a shape is wrong, or positions are not those of whole sequences.
    """
    ids = _stream(input_ids)
    total = len(ids)
    expected = f"[{total}], [1, {total}] or [n, 1, {total}] integers, as input_ids"
    given = check.integers("position_ids", position_ids, expected)
    if given.shape == (total,):
        axes = given[None]
    elif given.shape == (1, total):
        axes = given
    elif given.ndim == 3 and given.size and given.shape[1:] == (1, total):
        axes = given[:, 0]
    else:
        raise check.wrong_shape("position_ids", given, expected)
    if num_tokens is not None:
        axes = axes[:, : check.whole("num_tokens", num_tokens, 0, total)]
    positions = axes[0]
    # Of three axes the first stands still over an image, which may be first in its sequence.
    begins = np.flatnonzero((axes == 0).all(axis=0))
    counted = np.arange(len(positions))
    if len(begins) and not begins[0]:
        counted -= np.repeat(begins, np.diff(begins, append=len(positions)))
        wrong = positions != counted
        wrong &= len(axes) != 3
    else:
        wrong = counted == 0
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidArgument(
            field=f"position_ids[{at}]",
            value=axes[:, at].tolist() if len(axes) > 1 else int(positions[at]),
            expected=f"{counted[at]}{', or 0 where a sequence begins' if at else ''}",
            remedy="give whole sequences, as they are before context parallelism splits them",
        )
    bounds = [*begins.tolist(), len(positions)]
    if num_tokens is None:
        last = np.flatnonzero(np.diff(bounds) > 1)
        bounds = bounds[: int(last[-1]) + 2 if len(last) else 1]
    return ids, bounds


def by_cu_seqlens(
    input_ids: npt.ArrayLike, cu_seqlens: npt.ArrayLike
) -> tuple[Integers, list[int]]:
    """Return the token ids [total], and where sequences begin, with the end of the last.

    Args:
        input_ids: [total] or [1, total] integers.
        cu_seqlens: [sequences + 1] integers, ascending from 0.

    Raises:
        InvalidArgument: if a shape is wrong, or the sequences do not fit.
    """
    ids = _stream(input_ids)
    bounds = check.tokens("cu_seqlens", cu_seqlens)
    steps = np.diff(bounds, prepend=0)
    if not len(bounds) or bounds[0] or (steps < 0).any() or bounds[-1] > len(ids):
        shown = f"from {bounds[0]} to {bounds[-1]}" if len(bounds) else "empty"
        raise InvalidArgument(
            field="cu_seqlens",
            value=f"{shown}{', with a descent' if (steps < 0).any() else ''}",
            expected=f"0, then the end of each sequence, up to the {len(ids)} tokens of input_ids",
        )
    found: list[int] = bounds.tolist()
    return ids, found


def _stream(input_ids: npt.ArrayLike) -> Integers:
    expected = "[total] or [1, total] integers in [0, 2**32)"
    ids = check.integers("input_ids", input_ids, expected)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        padded = "use from_mask for an array [batch, seq]" if ids.ndim == 2 else ""
        raise check.wrong_shape("input_ids", ids, expected, padded)
    return ids
