"""Seeds of tests that play random cases."""

from __future__ import annotations

import pytest


def seeds(often: int, total: int) -> list[object]:
    """Return seeds below `total`: the first ones of every run, the others of `make test-long`."""
    others = (pytest.param(seed, marks=pytest.mark.long) for seed in range(often, total))
    return [*range(often), *others]
