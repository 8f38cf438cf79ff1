"""Why cells are missing: notes that overlap, against a dict of positions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from routetrace.server.rows.gaps import Note, _reasons, _resolve
from routetrace.server.rows.view import layer_groups

notes = st.lists(
    st.builds(
        lambda start, length, reason: Note(start, start + length, reason),
        st.integers(0, 30),
        st.integers(0, 12),
        st.integers(1, 3),
    ),
    max_size=8,
)


@given(notes, st.integers(0, 40), st.integers(1, 20))
def test_each_position_has_the_reason_that_came_first(notes, start, length):
    stop = start + length
    found = list(_reasons((start, stop), _resolve(notes), 9))
    assert [a for a, _, _ in found] == [start, *(b for _, b, _ in found[:-1])]
    assert found[-1][1] == stop
    assert all(a < b for a, b, _ in found)
    assert all(one[2] != two[2] for one, two in pairwise(found)), "joined"
    seen = {p: reason for a, b, reason in found for p in range(a, b)}
    for position in range(start, stop):
        first = next((n.reason for n in notes if n.start <= position < n.stop), 9)
        assert seen[position] == first


columns = st.lists(st.frozensets(st.integers(0, 7)), max_size=3)


@given(columns, st.frozensets(st.integers(0, 7)).map(sorted))
def test_layers_of_a_group_are_in_the_same_columns(columns, layers):
    groups = layer_groups(columns, layers)
    assert sorted(layer for group in groups for layer in group) == layers
    assert groups == sorted(groups)
    kinds = [{tuple(layer in column for column in columns) for layer in group} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    assert len(set().union(*kinds)) == len(groups)
