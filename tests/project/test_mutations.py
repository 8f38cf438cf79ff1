"""Mutations are of the code as it is: each replaces what stands in its file once."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def mutations() -> list[Any]:
    """All of the suites, once each."""
    modules = [
        import_module(f"{suite}.mutations")
        for suite in ("oracle", "second_model", "faults", "regressions", "isolation")
    ]
    named = [value for module in modules for value in vars(module).values()]
    lists = [value for value in named if isinstance(value, (list, tuple))]
    found = [each for values in lists for each in values if type(each).__name__ == "Mutation"]
    return list({(each.name, each.path, each.old): each for each in found}.values())


def test_all_are_found() -> None:
    assert len(mutations()) >= 135


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_applies(mutation: Any) -> None:
    text = (ROOT / mutation.path).read_text("utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
