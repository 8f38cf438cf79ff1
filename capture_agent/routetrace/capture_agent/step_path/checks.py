"""Arguments of CaptureAgent: checks and conversions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.config import AgentConfig
from routetrace.codec.records import U32, UNKNOWN_VERSION
from routetrace.common.checks import items, whole
from routetrace.common.errors import InvalidArgument, kind_of, quoted, typed
from routetrace.common.limits import MAX_POSITION, check_id, check_labels

Rows = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]


def wrong(name: str, value: Any, expected: str, remedy: str = "") -> InvalidArgument:
    """Return the error to raise."""
    return InvalidArgument(field=name, value=value, expected=expected, remedy=remedy)


def number(name: str, value: int, limit: int = MAX_POSITION) -> int:
    """Return an integer in [0, limit)."""
    return whole(name, value, 0, limit - 1)


def version_of(version: int | None) -> int:
    """Return a weight version, a signed 64-bit integer; UNKNOWN_VERSION stands for None."""
    if version is None:
        return UNKNOWN_VERSION
    return whole("version", version, UNKNOWN_VERSION + 1, (1 << 63) - 1)


def rows_of(rows: Any, columns: tuple[int, int]) -> Rows:
    """Return rows [n, *columns] of an integer dtype."""
    shape = f"integers of shape (n, {columns[0]}, {columns[1]})"
    checked: Rows = _array("rows", rows, shape)
    if checked.ndim != 3 or checked.shape[1:] != columns:
        raise wrong("rows", _shown(rows, checked), shape)
    if checked.dtype.kind not in "iu":
        raise wrong("rows", f"of {checked.dtype}", "of an integer dtype")
    if not checked.dtype.isnative:
        checked = checked.astype(checked.dtype.newbyteorder("="))
    return checked


def spans_of(spans: npt.ArrayLike, num_rows: int | None = None) -> Ints | None:
    """Return spans [m, 3] of (handle, position, count) that cover the rows, as columns [3, m].

    Args:
        spans: as given.
        num_rows: rows that they cover; None for any number.

    Returns:
        None if there are neither spans nor rows.
    """
    expected = "integers of shape (m, 3), m >= 1"
    table = _array("spans", spans, expected)
    if table.size == 0 and not num_rows:
        return None
    if table.ndim != 2 or table.shape[1] != 3 or len(table) == 0 or table.dtype.kind not in "iu":
        raise wrong("spans", _shown(spans, table), expected)
    columns = np.array(table.T, np.int64, order="C")
    handles, positions, counts = columns
    # The cost per call counts: reductions cost several times as much as these. As unsigned numbers
    # negative ones are huge.
    unsigned = columns.view(np.uint64)
    lowest: int = handles.item(handles.argmin())
    last: int = positions.item(unsigned[1].argmax())
    fewest: int = counts.item(counts.argmin())
    most: int = counts.item(unsigned[2].argmax())
    if lowest < 0 or last < 0 or fewest < 1 or last + most > MAX_POSITION:
        # Each span on its own: the longest need not be the last.
        bad = (handles < 0) | (positions < 0) | (counts < 1) | (counts > MAX_POSITION - positions)
        if bad.any():
            raise wrong(
                "spans",
                table[bad][0].tolist(),
                f"(handle, position, count) with count >= 1 and positions in [0, {MAX_POSITION})",
            )
    total = len(counts) if most == 1 else int(np.add.reduce(counts))
    if num_rows is not None and total != num_rows:
        raise wrong("spans", f"{total} rows", f"{num_rows}, as many as in rows")
    return columns


def _array(name: str, values: Any, expected: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        raise wrong(name, "ragged", expected) from None
    except (RuntimeError, TypeError) as error:  # a tensor with gradients, or of a device
        raise wrong(name, kind_of(values), expected) from error


def _shown(values: Any, array: npt.NDArray[Any]) -> str:
    return f"of {array.dtype} and shape {array.shape}" if array.ndim else typed(values)


def slots_of(slots: npt.ArrayLike, num_rows: int, num_slots: int) -> npt.NDArray[np.uint64]:
    """Return slots [n] below num_slots."""
    expected = f"integers of shape ({num_rows},)"
    column = _array("slots", slots, expected)
    if column.shape != (num_rows,) or (num_rows and column.dtype.kind not in "iu"):
        raise wrong("slots", _shown(slots, column), expected)
    if num_rows and not num_slots:
        raise _no_slots("slots", _shown(slots, column))
    unsigned = np.ascontiguousarray(column, np.int64).view(np.uint64)
    if len(unsigned) and int(unsigned.max()) >= num_slots:
        raise wrong("slots", int(column[unsigned.argmax()]), f"slots in [0, {num_slots})")
    return unsigned


def blocks_of(
    block_ids: Iterable[int], config: AgentConfig, *, host: bool = False, name: str = "block_ids"
) -> bytes:
    """Return ids of the engine's blocks, with `host` of host blocks too, as uint32."""
    ids = items(name, block_ids, "a sequence of int")
    if ids and not config.num_blocks:
        raise _no_slots(name, quoted(ids))
    blocks: array[int] | None
    try:
        blocks = array("I", ids)
    except (TypeError, OverflowError):
        blocks = None
    limit = config.all_blocks if host else config.num_blocks
    if blocks is None or bool in map(type, ids) or max(blocks, default=-1) >= limit:
        high = config.all_blocks - 1  # each on its own, to name the first that is wrong
        blocks = array("I", [whole(f"{name}[{i}]", b, 0, high) for i, b in enumerate(ids)])
        for i, block in enumerate(blocks):
            if block >= limit:
                remedy = "report copies of host blocks with copy_blocks"
                raise wrong(f"{name}[{i}]", block, f"a block of the engine, below {limit}", remedy)
    if len(blocks) > limit and not host:  # of a request; the server takes no more
        raise _too_many(len(blocks), config)
    return blocks.tobytes()


def distinct(blocks: bytes, config: AgentConfig) -> bytes:
    """Return block ids (uint32) without repeats if they are more than all blocks there are."""
    if len(blocks) // 4 <= config.all_blocks:
        return blocks
    return array("I", dict.fromkeys(array("I", blocks))).tobytes()


def _too_many(count: int, config: AgentConfig) -> InvalidArgument:
    expected = f"at most {config.num_blocks}, the blocks of the engine"
    return wrong("block_ids", f"{count} block ids", expected)


def handles_of(handles: int | npt.ArrayLike) -> Ints | None:
    """Return several handles; None for a single value, which is not checked."""
    expected = "a handle, or integers of shape (n,)"
    column = _array("handles", handles, expected)
    if column.ndim == 0:
        return None
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
        raise wrong("handles", _shown(handles, column), expected)
    return column.astype(np.int64, copy=False)


def blocks_for(block_ids: Iterable[int], count: int, config: AgentConfig) -> Ints:
    """Return so many block ids below num_blocks."""
    expected = f"integers of shape ({count},), one for each handle"
    if not isinstance(block_ids, np.ndarray):
        block_ids = items("block_ids", block_ids, expected)
    column = _array("block_ids", block_ids, expected)
    if column.shape != (count,) or (count and column.dtype.kind not in "iu"):
        raise wrong("block_ids", _shown(block_ids, column), expected)
    blocks: Ints = column.astype(np.int64, copy=False)
    if count and not config.num_blocks:
        raise _no_slots("block_ids", _shown(block_ids, column))
    # As unsigned numbers negative ones are huge.
    if count and int(np.maximum.reduce(blocks.view(np.uint64))) >= config.num_blocks:
        bad = blocks[(blocks < 0) | (blocks >= config.num_blocks)]
        raise wrong("block_ids", int(bad[0]), f"ids in [0, {config.num_blocks})")
    if count > config.num_blocks:
        raise _too_many(count, config)
    return blocks


def check_pairs(sources: bytes, targets: bytes) -> None:
    """Check block ids (uint32) of a copy: as many targets as sources, each named once."""
    written = array("I", targets)
    if len(targets) != len(sources):
        expected = f"{len(sources) // 4} block ids, as many as sources"
        raise wrong("targets", f"{len(written)} block ids", expected)
    if len(set(written)) < len(written):
        twice = next(block for i, block in enumerate(written) if block in written[:i])
        raise wrong("targets", f"{twice} twice", "each block once")


def _no_slots(name: str, shown: str) -> InvalidArgument:
    return wrong(name, shown, "none, as block_size is 0", "set block_size and num_blocks")


def computed_of(num_computed_tokens: int, blocks: bytes, config: AgentConfig) -> int:
    """Return the number of tokens whose KV `blocks` hold."""
    num_computed_tokens = number("num_computed_tokens", num_computed_tokens)
    if config.block_size and num_computed_tokens > len(blocks) // 4 * config.block_size:
        raise wrong(
            "num_computed_tokens",
            num_computed_tokens,
            f"at most the {len(blocks) // 4 * config.block_size} tokens of the blocks",
        )
    return num_computed_tokens


def external_of(num_external_tokens: int, num_computed_tokens: int) -> int:
    """Return the number of computed tokens whose KV was loaded from elsewhere."""
    num_external_tokens = number("num_external_tokens", num_external_tokens)
    if num_external_tokens > num_computed_tokens:
        raise wrong(
            "num_external_tokens",
            num_external_tokens,
            f"at most num_computed_tokens = {num_computed_tokens}",
        )
    if num_external_tokens + num_computed_tokens > MAX_POSITION:  # for the server, as for rows
        raise wrong(
            "num_computed_tokens",
            num_computed_tokens,
            f"at most {MAX_POSITION - num_external_tokens} with num_external_tokens = "
            f"{num_external_tokens}",
        )
    return num_external_tokens


def tokens_of(name: str, token_ids: npt.ArrayLike | None, length: int | None) -> bytes | None:
    """Return token ids [length], as uint32; of any length if None."""
    if token_ids is None:
        return None
    expected = f"integers of shape ({'n' if length is None else length},)"
    tokens = _array(name, token_ids, expected)
    length = len(tokens) if length is None and tokens.ndim == 1 else length
    if tokens.shape != (length,) or (length and tokens.dtype.kind not in "iu"):
        raise wrong(name, _shown(token_ids, tokens), expected)
    if length and tokens.dtype != U32:
        low, high = tokens.item(tokens.argmin()), tokens.item(tokens.argmax())
        if low < 0 or high >= 1 << 32:
            raise wrong(name, [low, high], "ids in [0, 2**32)")
    return tokens.astype(U32, copy=False).tobytes()


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels within the server's limits."""
    check_labels("labels", labels)
    return dict(labels)


def transfer_of(transfer_id: str | None) -> str:
    """Return the id of a hand-over; "" stands for None."""
    if transfer_id is None:
        return ""
    check_id("transfer_id", transfer_id)
    return transfer_id
