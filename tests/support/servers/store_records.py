"""Records of which the content follows from the number."""

from __future__ import annotations

import random

from routetrace.server.store.interface import Record


def content(number: int) -> bytes:
    """A payload that only this record has."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice((10, 500, 3000, 9000, 40_000)))


def record(number: int) -> Record:
    return Record(number, content(number)[:1500], content(number))
