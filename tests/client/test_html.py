"""A trace as HTML: parsed again, it says what the trace says, and nothing in it is markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import MissingRange, MissingReason, Trace
from routetrace.common.layout import ModelLayout
from support.ranks.rank_rows import trace_of

LAYOUT = ModelLayout(tuple(range(3, 97)), 98, 128, 8)
TAGS = {"div", "svg", "title", "rect", "table", "thead", "tbody", "tr", "th", "td", "span"}
ODD = '<img src=x onerror="alert(1)">\u202e</script>&amp;\x00'


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def holes(self) -> list[tuple[float, float, float, float]]:
        """Of the strip, as shares of its width and height: left, right, upper, lower."""
        found = [dict(attrs) for tag, attrs in self.tags if tag == "rect"][1:]
        numbers = [[float(one[n] or 0) for n in ("x", "width", "y", "height")] for one in found]
        return [(x / 1000, (x + w) / 1000, y / 64, (y + h) / 64) for x, w, y, h in numbers]


def holed(count: int, missing: list[MissingRange], **facts) -> Trace:
    ids = np.zeros((count, len(LAYOUT.layer_ids), 8), np.uint8)
    valid = np.ones(ids.shape[:2], bool)
    for one in missing:
        columns = [layer - 3 for layer in one.layer_ids]
        valid[one.start : one.stop, columns] = False
    trace = trace_of(LAYOUT, ids, valid)
    return replace(trace, missing=tuple(missing), num_rows=count, **facts)


def parsed(trace: Trace) -> Parsed:
    html = trace._repr_html_()
    assert len(html.encode()) < 20_000
    found = Parsed(html)
    assert not found.open
    assert {tag for tag, _ in found.tags} <= TAGS
    assert not {name for _, attrs in found.tags for name in attrs if name.startswith(("on", "hr"))}
    assert "url(" not in html
    assert "http" not in html
    return found


def test_a_whole_trace_has_no_hole_and_no_table():
    found = parsed(holed(50, []))
    assert "coverage 100 %" in " ".join(found.texts)
    assert found.holes == []
    assert "table" not in {tag for tag, _ in found.tags}


def test_a_hole_of_one_cell_in_many_is_seen_and_never_rounded_away():
    hole = MissingRange(70_000, 70_001, (40,), MissingReason.QUEUE_FULL)
    found = parsed(holed(100_000, [hole]))
    ((left, right, upper, lower),) = found.holes
    assert right - left >= 0.0019
    assert left == pytest.approx(0.7, abs=1e-3)
    assert upper <= (40 - 3) / 94 <= lower
    text = " ".join(found.texts)
    assert "100 %" not in text
    assert "99.999 %" in text
    for value in ("[70000, 70001)", "40", "1", "queue full"):
        assert value in found.texts + [t.strip() for t in found.texts]


def test_odd_names_are_text():
    found = parsed(holed(5, [], trace_id=ODD, labels={ODD: ODD}, engine_ids=(ODD,), run=ODD))
    assert ODD.replace("\u202e", "\\u202e").replace("\x00", "\\u0000") in found.texts


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_missing_cell_is_under_a_hole_and_the_table_counts_it(data):
    count = data.draw(st.integers(1, 3000))
    cells = st.tuples(
        st.integers(0, count - 1), st.integers(1, 40), st.integers(3, 96), st.integers(1, 94),
        st.sampled_from([*MissingReason]),
    )  # fmt: skip
    missing = []
    for start, length, layer, layers, reason in data.draw(st.lists(cells, max_size=300)):
        ids = tuple(range(layer, min(97, layer + layers), data.draw(st.integers(1, 3))))
        missing.append(MissingRange(start, min(count, start + length), ids, reason))
    found = parsed(holed(count, missing))
    for one in missing:
        for position in (one.start, one.stop - 1):
            x = (position + 0.5) / count
            for layer in (one.layer_ids[0], one.layer_ids[-1]):
                y = (layer - 3 + 0.5) / 94
                assert any(
                    a - 1e-3 <= x <= b + 1e-3 and c - 0.01 <= y <= d + 0.01
                    for a, b, c, d in found.holes
                )
    assert all(0 <= a < b <= 1.001 and 0 <= c < d <= 1.001 for a, b, c, d in found.holes)
    rows = [tag for tag, _ in found.tags if tag == "tr"]
    assert len(rows) == (1 + min(12, len(missing)) if missing else 0)
    more = f"and {len(missing) - 12:,} more ranges: trace.missing has all"
    assert (more in found.texts) == (len(missing) > 12)


def test_a_part_says_so():
    trace = holed(100, [MissingRange(20, 60, (5, 6), MissingReason.ABORTED)])
    part = trace.tokens(50, 70).layers((5, 9))
    found = parsed(part)
    assert "rows [50, 70) of 100, 2 layers" in " ".join(found.texts)
    ((left, right, upper, lower),) = found.holes
    assert (left, right) == (0, pytest.approx(0.5))
    assert (upper, lower) == (0, pytest.approx(0.5))
    assert parsed(trace.tokens(10, 10)).holes == []


def test_layers_that_are_there_are_not_covered():
    trace = holed(100, [MissingRange(0, 50, (5, 9), MissingReason.NOT_CAPTURED)])
    holes = sorted(parsed(trace.layers((5, 7, 9))).holes, key=lambda hole: hole[2])
    assert [hole[2:] for hole in holes] == [
        (0, pytest.approx(1 / 3, abs=1e-3)), (pytest.approx(2 / 3, abs=1e-3), pytest.approx(1)),
    ]  # fmt: skip


def test_the_longest_names_stay_below_20_kb():
    many = {f"{i}" + "\u202e" * 500: "<" * 400 for i in range(64)}
    missing = [
        MissingRange(i, i + 1, tuple(range(3 + i % 2, 97, 2)), MissingReason.INVALID_IDS)
        for i in range(0, 900, 2)
    ]
    found = parsed(
        holed(1000, missing, trace_id="\u202e" * 512, labels=many, engine_ids=("&" * 512,) * 9)
    )
    assert found.holes
