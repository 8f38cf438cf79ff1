"""Arguments of CaptureAgent, checked and brought into form."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.config import AgentConfig
from routetrace.v1.errors import InvalidArgument

MAX_POSITION = 1 << 31
MAX_LABELS = 64
MAX_LABEL_LENGTH = 1024

Rows = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]


def wrong(name: str, value: Any, expected: str) -> InvalidArgument:
    """The error to raise."""
    return InvalidArgument(field=name, value=value, expected=expected)


def number(name: str, value: int, limit: int = MAX_POSITION) -> int:
    """A number in [0, limit)."""
    if not 0 <= value < limit:
        raise wrong(name, value, f"a number in [0, {limit})")
    return int(value)


def rows_of(rows: Any, columns: tuple[int, int]) -> Rows:
    """Rows [n, *columns] of an integer dtype."""
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


def runs_of(runs: npt.ArrayLike, num_rows: int | None = None) -> Ints:
    """Runs [m, 3] of (handle, position, count) that cover the rows, as columns [3, m]."""
    table = np.asarray(runs)
    if table.ndim != 2 or table.shape[1] != 3 or len(table) == 0 or table.dtype.kind not in "iu":
        raise wrong("runs", f"{table.dtype} {table.shape}", "integers of shape (m, 3), m >= 1")
    columns = np.array(table.T, np.int64, order="C")
    handles, positions, counts = columns
    # What a call costs is what counts here: reductions cost several times as much as these. As
    # unsigned numbers negative ones are huge.
    unsigned = columns.view(np.uint64)
    lowest: int = handles.item(handles.argmin())
    last: int = positions.item(unsigned[1].argmax())
    fewest: int = counts.item(counts.argmin())
    most: int = counts.item(unsigned[2].argmax())
    if lowest < 0 or not 0 <= last < MAX_POSITION or fewest < 1 or most >= MAX_POSITION:
        bad = (handles < 0) | (positions < 0) | (positions >= MAX_POSITION)
        bad |= (counts < 1) | (counts >= MAX_POSITION)
        raise wrong(
            "runs",
            table[bad][0].tolist(),
            f"(handle, position in [0, {MAX_POSITION}), count >= 1)",
        )
    total = len(counts) if most == 1 else int(np.add.reduce(counts))
    if num_rows is not None and total != num_rows:
        raise wrong("runs", f"{total} rows", f"{num_rows}, as many as in rows")
    return columns


def slots_of(slots: npt.ArrayLike, num_rows: int, num_slots: int) -> npt.NDArray[np.uint64]:
    """Slots [n] below num_slots."""
    column = np.asarray(slots)
    if column.shape != (num_rows,) or column.dtype.kind not in "iu":
        raise wrong("slots", f"{column.dtype} {column.shape}", f"integers of shape ({num_rows},)")
    unsigned = np.ascontiguousarray(column, np.int64).view(np.uint64)
    if len(unsigned) and int(unsigned.max()) >= num_slots:
        raise wrong("slots", int(column[unsigned.argmax()]), f"slots in [0, {num_slots})")
    return unsigned


def blocks_of(block_ids: Iterable[int], config: AgentConfig) -> bytes:
    """Block ids below num_blocks, as uint32."""
    try:
        blocks = array("I", block_ids)
    except (TypeError, OverflowError) as error:
        raise wrong("block_ids", block_ids, f"ids in [0, {config.num_blocks})") from error
    if blocks and max(blocks) >= config.num_blocks:
        raise wrong("block_ids", max(blocks), f"ids in [0, {config.num_blocks})")
    return blocks.tobytes()


def computed_of(num_computed_tokens: int, blocks: bytes, config: AgentConfig) -> int:
    """Tokens that `blocks` hold already."""
    number("num_computed_tokens", num_computed_tokens)
    if config.block_size and num_computed_tokens > len(blocks) // 4 * config.block_size:
        raise wrong(
            "num_computed_tokens",
            num_computed_tokens,
            f"at most the {len(blocks) // 4 * config.block_size} tokens of the blocks",
        )
    return int(num_computed_tokens)


def external_of(num_external_tokens: int, num_computed_tokens: int) -> int:
    """Computed tokens whose KV came from elsewhere."""
    number("num_external_tokens", num_external_tokens)
    if num_external_tokens > num_computed_tokens:
        raise wrong(
            "num_external_tokens",
            num_external_tokens,
            f"at most num_computed_tokens = {num_computed_tokens}",
        )
    return int(num_external_tokens)


def tokens_of(name: str, token_ids: npt.ArrayLike | None, length: int) -> bytes | None:
    """Token ids [length], as uint32."""
    if token_ids is None:
        return None
    tokens = np.asarray(token_ids)
    if tokens.shape != (length,) or (length and tokens.dtype.kind not in "iu"):
        raise wrong(name, f"{tokens.dtype} {tokens.shape}", f"integers of shape ({length},)")
    if length and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
        raise wrong(name, [int(tokens.min()), int(tokens.max())], "ids in [0, 2**32)")
    return tokens.astype("<u4").tobytes()


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels that the server takes."""
    if len(labels) > MAX_LABELS:
        raise wrong("labels", f"{len(labels)} labels", f"at most {MAX_LABELS}")
    for key, text in labels.items():
        if not (isinstance(key, str) and isinstance(text, str) and key):
            raise wrong("labels", {key: text}, "strings, with names that are not empty")
        if len(key) + len(text) > MAX_LABEL_LENGTH:
            raise wrong("labels", {key: text}, f"at most {MAX_LABEL_LENGTH} characters each")
    return dict(labels)
