"""Comparison of a trace with another side, and names of sides."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from routetrace.client import Trace
from routetrace.client.stat import TraceFacts
from routetrace.common.errors import InvalidArgument, quoted
from routetrace.page.segments import exact
from routetrace.page.tiles import Levels, differing
from routetrace.trainers.comparison import MAX_WORST, Comparison, compare_traces

_SIDE = re.compile(r"#(?P<number>[1-9]\d{0,8})|(?P<latest>latest)|report:(?P<reporter>.+)", re.S)


class SideName(NamedTuple):
    """Name of a side: exactly one field is set."""

    number: int | None
    """Of an incarnation."""
    latest: bool
    """Whether it is the last attempt."""
    reporter: str | None
    """Of a report."""

    @classmethod
    def of(cls, text: str, field: str = "against") -> SideName:
        """Return the name in a text: "report:NAME", "#N" or "latest".

        Raises:
            InvalidArgument: if it is none; names the field.
        """
        found = _SIDE.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                field=field,
                value=quoted(text) if text else "not given",
                expected="report:NAME, #N for an incarnation, or latest",
            )
        number = int(found["number"]) if found["number"] else None
        return cls(number, bool(found["latest"]), found["reporter"])


class Compared(NamedTuple):
    """Result of a comparison."""

    body: bytes
    """JSON."""
    levels: Levels
    """Share of the experts of the first side that the other one did not choose."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.body) + self.levels.nbytes


def report_of(stat: TraceFacts, reporter: str) -> dict[str, Any]:
    """Return the facts about a report as JSON."""
    return {
        "reporter": reporter,
        "step": stat.labels.get("step"),
        "weight_version": exact(stat.max_weight_version),
        "reported_at": stat.updated_at.timestamp(),
    }


def compared(trace: Trace, other: Trace) -> Compared:
    """Compare two sides up to the position where digests prove different tokens.

    Raises:
        InvalidArgument: if they have nothing in common.
    """
    found = compare_traces(trace, other, worst=MAX_WORST)
    if found.other_tokens_from is not None:
        other = other.tokens(other.token_start, max(other.token_start, found.other_tokens_from))
    body = json.dumps(_json(found), separators=(",", ":")).encode()
    return Compared(body, differing(trace, other))


def _json(found: Comparison) -> dict[str, Any]:
    return {
        "start": found.start,
        "stop": found.stop,
        "cells": found.cells,
        "differing": found.differing,
        "tokens": found.tokens,
        "differing_tokens": found.differing_tokens,
        "overlap": found.overlap,
        "missing": found.missing,
        "other_tokens_from": found.other_tokens_from,
        "diagnosis": found.diagnosis,
        "cause": found.cause,
        "by_layer": [
            {"layer": layer, "cells": of.cells, "differing": of.differing}
            for layer, of in found.by_layer.items()
        ],
        "by_version": [
            {"version": str(version), "cells": of.cells, "differing": of.differing}
            for version, of in sorted(found.by_version.items())
        ],
        "worst": [
            {
                "position": one.position,
                "differing": one.differing,
                "layers": one.layers,
                "overlap": one.overlap,
                "weight_version": exact(one.weight_version),
            }
            for one in found.worst
        ],
    }
