"""Steady steps: those whose requests each continue where the step before ended.

The engine's end recognizes such a step by one comparison with its prediction, and writes its rows
alone. `intake` is the other end, which enters such steps many at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from routetrace.capture_agent.step_path.checks import Ints, Rows
from routetrace.common.limits import MAX_POSITION

_INT64 = np.dtype(np.int64)
_ARRAY: Any = np.ndarray  # a buffer, as type checkers of Python 3.10 do not know
_NONE = np.empty((0, 0, 3), np.int64)

#: Most steps that are predicted at a time, and bytes of all of them. Predicting one at a time would
#: cost as much as the rest of a step; but where batches last a few steps only, so would many.
_PREDICTED, _PREDICTED_BYTES = 16, 1 << 16


class Steady:
    """A step that was written, and the prediction of the next one.

    A step that equals the prediction needs no other check.

    Args:
        rows: of the step.
        spans: of the step, [3, m].
        narrow: whether the rows have the layout's dtype.
        number: number of its record.
    """

    __slots__ = (
        "_at",
        "_dtype",
        "_end",
        "_expected",
        "_known",
        "_left",
        "_num_spans",
        "_predicted",
        "_shape",
        "_size",
        "_spans",
        "narrow",
        "num_rows",
        "number",
    )  # fmt: skip

    def __init__(self, rows: Rows, spans: Ints, narrow: bool, number: int) -> None:
        self.num_rows, self.narrow, self.number = len(rows), narrow, number
        self._shape, self._dtype = rows.shape, rows.dtype
        self._spans, self._num_spans, self._size = spans, spans.shape[1], spans.nbytes
        # Spans of the next steps, filled in on the first question: the same memory as bytes and as
        # numbers [steps, m, 3]; offset of the next step and of the end of those that are known;
        # their number, and steps until one may exceed the last position.
        self._expected, self._predicted = bytearray(), _NONE
        self._at = self._end = self._known = self._left = 0

    def matches(self, rows: Any, spans: Any) -> bool:
        """Whether a step equals the prediction; call once for each step."""
        if (
            type(rows) is not _ARRAY
            or type(spans) is not _ARRAY
            or rows.shape != self._shape
            or rows.dtype is not self._dtype
            or spans.dtype is not _INT64
            or spans.nbytes != self._size
            or len(spans) != self._num_spans
        ):
            return False
        at = self._at
        if at == self._end:
            if not self._predict():
                return False
            at = self._at
        self._at = at + self._size
        try:  # unlike other comparisons of bytes this copies nothing
            return self._expected.startswith(spans, at)
        except (ValueError, BufferError):  # they are not contiguous
            return False

    def _predict(self) -> bool:
        """Predict up to as many steps more; return False if one may exceed the last position."""
        _, positions, counts = self._spans
        known, more = self._known, max(1, self._known)
        if not known:
            # No position grows by more than there are rows.
            last: int = positions.item(positions.argmax())
            self._left = (MAX_POSITION - last) // self._shape[0] - 1
            most = min(_PREDICTED, 1 << (_PREDICTED_BYTES // self._size).bit_length() >> 1) or 1
            self._expected = bytearray(most * self._size)
            self._predicted = _ARRAY((most, self._num_spans, 3), _INT64, self._expected)
            self._predicted[0] = self._spans.T
            self._predicted[0, :, 1] += counts
            self._known = 1
        elif known < len(self._predicted):
            new = self._predicted[known : known + more]
            new[...] = self._predicted[:known]
            new[:, :, 1] += counts * known
            self._known += more
        else:
            self._predicted[:, :, 1] += counts * known
            self._at = 0
        self._end = self._known * self._size
        self._left -= more
        return self._left >= 0
