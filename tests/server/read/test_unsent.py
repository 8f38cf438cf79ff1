"""A follower gets each row that differs from the last one that it got at that position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routetrace.server.index.traces.spans import Span
from routetrace.server.read.following import unsent
from routetrace.server.rows.view import Segment

#: What a read serves at a moment: source and first row of the rows at positions 0, 4 and 8.
moments = st.lists(
    st.fixed_dictionaries(
        {}, optional={p: st.tuples(st.integers(0, 2), st.just(p)) for p in (0, 4, 8)}
    ),
    max_size=6,
)


@given(moments)
def test_who_follows_ends_with_the_rows_that_are_served(moments):
    """Rows may be replaced by those of another source, or go, and come back."""
    sent: dict[int, list[Segment]] = {}
    last: dict[int, tuple[int, int]] = {}
    for moment in moments:
        now = [Segment(source, 0, Span(p, 4, ref, 1, 1)) for p, (source, ref) in moment.items()]
        for source, _, span, _ in unsent(now, sent):
            last |= {
                p: (source, p - span.position + span.ref) for p in range(span.position, span.stop)
            }
        for source, _, span, _ in now:
            for p in range(span.position, span.stop):
                assert last[p] == (source, p - span.position + span.ref)
