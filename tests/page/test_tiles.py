"""Tiles equal means worked out anew from the rows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.page.tiles import ABSENT, COLUMNS, changed, count_levels, differing
from support.ranks.rank_rows import trace_of
from support.servers.client_server import rows_of

LAYOUT = ModelLayout((0, 2, 3), 4, 7, 3)


def means(ids: np.ndarray, valid: np.ndarray, z: int) -> np.ndarray:
    """The bytes [layers, columns] of a level, cell by cell."""
    tokens, layers, top_k = ids.shape
    level = np.full((layers, -(-tokens // 2**z)), ABSENT, np.uint8)
    for layer in range(layers):
        for column in range(level.shape[1]):
            values = [
                top_k - len({*ids[row, layer].tolist()} & {*ids[row - 1, layer].tolist()})
                for row in range(max(1, column << z), min(tokens, (column + 1) << z))
                if valid[row, layer] and valid[row - 1, layer]
            ]
            if values:
                mean = Fraction(sum(values), len(values) * top_k) * 254
                level[layer, column] = int(mean + Fraction(1, 2))
    return level


@given(
    st.integers(1, 1100),
    st.integers(0, 2**32 - 1),
    st.sampled_from((0.0, 0.02, 0.5, 1.0)),
    st.integers(0, 9),
)
def test_tiles_equal_means(tokens: int, seed: int, holes: float, repeats: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rows_of(LAYOUT, tokens, seed % 1000)
    for _ in range(repeats):  # rows that do not change
        at = int(rng.integers(tokens))
        ids[at : at + 40] = ids[at]
    valid = rng.random((tokens, 3)) >= holes
    levels = changed(trace_of(LAYOUT, ids, valid))
    assert len(levels) == count_levels(tokens)
    for z in range(len(levels)):
        expected = means(ids, valid, z)
        tiles = -(-expected.shape[1] // COLUMNS)
        assert z < len(levels) - 1 or tiles == 1
        whole = np.concatenate(
            [np.frombuffer(levels.tile(z, x), np.uint8).reshape(3, COLUMNS) for x in range(tiles)],
            axis=1,
        )
        assert np.array_equal(whole[:, : expected.shape[1]], expected)
        assert (whole[:, expected.shape[1] :] == ABSENT).all()
        with pytest.raises(InvalidArgument, match=f"x is {tiles}"):
            levels.tile(z, tiles)
    with pytest.raises(InvalidArgument, match="z is"):
        levels.tile(len(levels), 0)


def mean_byte(values: list[int], most: int) -> int:
    if not values:
        return ABSENT
    return int(Fraction(sum(values), len(values) * most) * 254 + Fraction(1, 2))


@given(
    st.integers(1, 700),
    st.integers(0, 2**32 - 1),
    st.sampled_from((0.0, 0.1, 1.0)),
    st.sampled_from(((0, 2, 3), (2,), (0, 3))),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_tiles_of_two_sides_equal_means(
    tokens: int, seed: int, holes: float, layers: tuple[int, ...], first: float, last: float
) -> None:
    rng = np.random.default_rng(seed)
    longer = tokens + 9
    ids, theirs = rows_of(LAYOUT, tokens, seed % 1000), rows_of(LAYOUT, longer, seed % 999 + 1)
    same = np.flatnonzero(rng.random(tokens) < 0.6)
    theirs[same] = ids[same][:, :, ::-1]  # the order within a cell does not count
    valid, known = (rng.random((longer, 3)) >= holes * part for part in (1, 0.5))
    start, stop = sorted((int(first * longer), int(last * longer)))
    columns = [LAYOUT.layer_ids.index(layer) for layer in layers]
    other = trace_of(
        LAYOUT.select(layers),
        theirs[start:stop][:, columns],
        known[start:stop][:, columns],
        token_start=start,
    )
    levels = differing(trace_of(LAYOUT, ids, valid[:tokens]), other)
    for z in range(len(levels)):
        size = -(-tokens // 2**z)
        whole = np.concatenate(
            [
                np.frombuffer(levels.tile(z, x), np.uint8).reshape(3, COLUMNS)
                for x in range(levels.tiles(z))
            ],
            axis=1,
        )[:, :size]
        for column in range(size):
            rows = range(max(start, column << z), min(stop, tokens, (column + 1) << z))
            for at, layer in enumerate(LAYOUT.layer_ids):
                values = [
                    3 - len({*ids[row, at].tolist()} & {*theirs[row, at].tolist()})
                    for row in rows
                    if layer in layers and valid[row, at] and known[row, at]
                ]
                assert whole[at, column] == mean_byte(values, 3)


def test_all_that_changes_and_nothing() -> None:
    ids = np.zeros((5, 3, 3), np.uint8)
    ids[0], ids[1], ids[2], ids[3], ids[4] = (0, 1, 2), (3, 4, 5), (5, 3, 4), (5, 3, 6), (3, 5, 6)
    tile = np.frombuffer(changed(trace_of(LAYOUT, ids)).tile(0, 0), np.uint8).reshape(3, COLUMNS)
    assert tile[0, :6].tolist() == [ABSENT, 254, 0, 85, 0, ABSENT]


def test_a_trace_without_rows_has_no_tile() -> None:
    levels = changed(trace_of(LAYOUT, np.zeros((0, 3, 3), np.uint8)))
    with pytest.raises(InvalidArgument, match="no rows"):
        levels.tile(0, 0)
