"""Arguments of CaptureAgent: checks and conversions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.config import AgentConfig
from routetrace.common.checks import whole
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_POSITION, check_labels

Rows = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]


def wrong(name: str, value: Any, expected: str) -> InvalidArgument:
    """Return the error to raise."""
    return InvalidArgument(field=name, value=value, expected=expected)


def number(name: str, value: int, limit: int = MAX_POSITION) -> int:
    """Return an integer in [0, limit)."""
    return whole(name, value, 0, limit - 1)


def version_of(version: int) -> int:
    """Return a weight version, a signed 64-bit integer."""
    return whole("version", version, -(1 << 63), (1 << 63) - 1)


def rows_of(rows: Any, columns: tuple[int, int]) -> Rows:
    """Return rows [n, *columns] of an integer dtype."""
    checked: Rows = np.asarray(rows)
    if checked.ndim != 3 or checked.shape[1:] != columns:
        raise wrong(
            "rows", f"of shape {checked.shape}", f"of shape (n, {columns[0]}, {columns[1]})"
        )
    if checked.dtype.kind not in "iu":
        raise wrong("rows", f"of {checked.dtype}", "of an integer dtype")
    if not checked.dtype.isnative:
        checked = checked.astype(checked.dtype.newbyteorder("="))
    return checked


def spans_of(spans: npt.ArrayLike, num_rows: int | None = None) -> Ints:
    """Return spans [m, 3] of (handle, position, count) that cover the rows, as columns [3, m]."""
    table = _array(spans)
    if table.ndim != 2 or table.shape[1] != 3 or len(table) == 0 or table.dtype.kind not in "iu":
        raise wrong("spans", f"{table.dtype} {table.shape}", "integers of shape (m, 3), m >= 1")
    columns = np.array(table.T, np.int64, order="C")
    handles, positions, counts = columns
    # The cost per call counts: reductions cost several times as much as these. As unsigned numbers
    # negative ones are huge.
    unsigned = columns.view(np.uint64)
    lowest: int = handles.item(handles.argmin())
    last: int = positions.item(unsigned[1].argmax())
    fewest: int = counts.item(counts.argmin())
    most: int = counts.item(unsigned[2].argmax())
    if lowest < 0 or not 0 <= last < MAX_POSITION or fewest < 1 or most >= MAX_POSITION:
        bad = (handles < 0) | (positions < 0) | (positions >= MAX_POSITION)
        bad |= (counts < 1) | (counts >= MAX_POSITION)
        raise wrong(
            "spans",
            table[bad][0].tolist(),
            f"(handle, position in [0, {MAX_POSITION}), count >= 1)",
        )
    total = len(counts) if most == 1 else int(np.add.reduce(counts))
    if num_rows is not None and total != num_rows:
        raise wrong("spans", f"{total} rows", f"{num_rows}, as many as in rows")
    return columns


def _array(values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        return np.asarray("ragged")


def slots_of(slots: npt.ArrayLike, num_rows: int, num_slots: int) -> npt.NDArray[np.uint64]:
    """Return slots [n] below num_slots."""
    column = np.asarray(slots)
    if column.shape != (num_rows,) or column.dtype.kind not in "iu":
        raise wrong("slots", f"{column.dtype} {column.shape}", f"integers of shape ({num_rows},)")
    unsigned = np.ascontiguousarray(column, np.int64).view(np.uint64)
    if len(unsigned) and int(unsigned.max()) >= num_slots:
        raise wrong("slots", int(column[unsigned.argmax()]), f"slots in [0, {num_slots})")
    return unsigned


def blocks_of(block_ids: Iterable[int], config: AgentConfig) -> bytes:
    """Return block ids below num_blocks, as uint32."""
    try:
        blocks = array("I", block_ids)
    except (TypeError, OverflowError) as error:
        raise wrong("block_ids", block_ids, f"ids in [0, {config.num_blocks})") from error
    if blocks and max(blocks) >= config.num_blocks:
        raise wrong("block_ids", max(blocks), f"ids in [0, {config.num_blocks})")
    return blocks.tobytes()


def pairs_of(
    handles: npt.ArrayLike, block_ids: npt.ArrayLike, config: AgentConfig
) -> tuple[Ints, Ints]:
    """Return handles and as many block ids below num_blocks."""
    owners, blocks = _array(handles), _array(block_ids)
    for name, column in (("handles", owners), ("block_ids", blocks)):
        if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
            raise wrong(name, f"{column.dtype} {column.shape}", "integers of shape (n,)")
    if len(owners) != len(blocks):
        raise wrong("block_ids", f"{len(blocks)} ids", f"{len(owners)}, one a handle")
    owners, blocks = owners.astype(np.int64, copy=False), blocks.astype(np.int64, copy=False)
    # As unsigned numbers negative ones are huge.
    if len(blocks) and int(np.maximum.reduce(blocks.view(np.uint64))) >= config.num_blocks:
        bad = blocks[(blocks < 0) | (blocks >= config.num_blocks)]
        raise wrong("block_ids", int(bad[0]), f"ids in [0, {config.num_blocks})")
    return owners, blocks


def computed_of(num_computed_tokens: int, blocks: bytes, config: AgentConfig) -> int:
    """Return the number of tokens whose KV `blocks` hold."""
    number("num_computed_tokens", num_computed_tokens)
    if config.block_size and num_computed_tokens > len(blocks) // 4 * config.block_size:
        raise wrong(
            "num_computed_tokens",
            num_computed_tokens,
            f"at most the {len(blocks) // 4 * config.block_size} tokens of the blocks",
        )
    return int(num_computed_tokens)


def external_of(num_external_tokens: int, num_computed_tokens: int) -> int:
    """Return the number of computed tokens whose KV was loaded from elsewhere."""
    number("num_external_tokens", num_external_tokens)
    if num_external_tokens > num_computed_tokens:
        raise wrong(
            "num_external_tokens",
            num_external_tokens,
            f"at most num_computed_tokens = {num_computed_tokens}",
        )
    return int(num_external_tokens)


def tokens_of(name: str, token_ids: npt.ArrayLike | None, length: int | None) -> bytes | None:
    """Return token ids [length], as uint32; of any length if None."""
    if token_ids is None:
        return None
    tokens = _array(token_ids)
    length = len(tokens) if length is None and tokens.ndim == 1 else length
    if tokens.shape != (length,) or (length and tokens.dtype.kind not in "iu"):
        many = "n" if length is None else length
        raise wrong(name, f"{tokens.dtype} {tokens.shape}", f"integers of shape ({many},)")
    if length and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
        raise wrong(name, [int(tokens.min()), int(tokens.max())], "ids in [0, 2**32)")
    return tokens.astype("<u4").tobytes()


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels within the server's limits."""
    check_labels("labels", labels)
    return dict(labels)
