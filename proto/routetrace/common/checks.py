"""Checks of arguments by type, then by range; their errors name field, value and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from operator import index
from typing import Any, TypeVar

import numpy as np

from routetrace.common.errors import InvalidArgument, kind_of, quoted, typed

_T = TypeVar("_T")

#: Longest time that an argument may give, in seconds: gRPC takes no infinity for a deadline.
MAX_SECONDS = 365 * 24 * 3600


class UnknownKeyword(InvalidArgument, TypeError):
    """A call has no such keyword argument."""


def unknown_keyword(call: str, name: str, known: Sequence[str]) -> UnknownKeyword:
    """Return the error for a keyword argument that a call does not have."""
    close = get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    expected = ", ".join(known)
    return UnknownKeyword(
        f"{call}() got an unexpected keyword argument {name!r}; {hint}expected one of {expected}",
        field=name,
        value=name,
        expected=expected,
    )


def whole(field: str, value: Any, low: int = 0, high: int = 2**32 - 1, *, remedy: str = "") -> int:
    """Return an integer in [low, high]; a bool is none. `remedy` is for a wrong type."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        expected = f"int{_above(low)}"
        raise InvalidArgument(field=field, value=typed(value), expected=expected, remedy=remedy)
    if not low <= number <= high:
        expected = f"an integer in [{low}, {high}]"
        raise InvalidArgument(field=field, value=quoted(value), expected=expected)
    return number


def _above(low: int) -> str:
    return {0: " from 0 on", 1: " above 0"}.get(low, "")


def real(field: str, value: Any, low: float, high: float, unit: str = "") -> float:
    """Return a finite number in [low, high]; a bool is none.

    Args:
        field: name of the argument.
        value: its value.
        low: least number.
        high: greatest number.
        unit: unit of the number, for the error.
    """
    noun = f"number of {unit}" if unit else "number"
    number = _number(field, value, f"a {noun}")
    if not low <= number <= high:
        expected = f"a finite {noun} in [{low:g}, {high:.17g}]"
        raise InvalidArgument(field=field, value=quoted(value), expected=expected)
    return float(number)


def seconds(field: str, value: Any) -> float:
    """Return a number of seconds above 0, a year at most."""
    number = _number(field, value, "a number of seconds above 0")
    if not 0 < number <= MAX_SECONDS:
        expected = f"a finite number of seconds above 0, up to {MAX_SECONDS}"
        raise InvalidArgument(field=field, value=quoted(value), expected=expected)
    return float(number)


def _number(field: str, value: Any, expected: str) -> int | float:
    """Return a real number, maybe inf or NaN; a bool is none."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise InvalidArgument(field=field, value=typed(value), expected=expected)
    return value  # type: ignore[return-value]


def flag(field: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(field=field, value=typed(value), expected="bool")
    return bool(value)


def choice(field: str, value: Any, choices: Iterable[str], *, or_none: bool = False) -> str:
    """Return one of some words."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        words = [*map(repr, choices), *(["None"] if or_none else [])]
        expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        shown = quoted(value) if isinstance(value, str) else typed(value)
        raise InvalidArgument(field=field, value=shown, expected=expected)
    return choices[choices.index(value)]


def instance(field: str, value: Any, kind: type[_T], remedy: str = "") -> _T:
    """Return an object of a class."""
    if not isinstance(value, kind):
        raise InvalidArgument(
            field=field, value=kind_of(value), expected=kind.__name__, remedy=remedy
        )
    return value


def items(field: str, values: Any, expected: str, remedy: str = "") -> list[Any]:
    """Return the items of a sequence that is not text."""
    if not isinstance(values, (str, bytes)):
        try:
            return list(values)
        except TypeError:  # not iterable, or a class
            pass
    shown = kind_of(values) if isinstance(values, (str, bytes)) else typed(values)
    raise InvalidArgument(field=field, value=shown, expected=expected, remedy=remedy)


def _iterates(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:  # arrays of no dimension have an __iter__, too
        return False
    return True


def several(field: str, values: Any, noun: str, remedy: str = "") -> Iterable[Any]:
    """Return an iterable that is not a string.

    Args:
        field: name of the argument.
        values: its value.
        noun: its items, for the error.
        remedy: action that helps; by default a list of the one value.
    """
    if isinstance(values, (str, bytes)) or not _iterates(values):
        if isinstance(values, str) and not remedy:
            remedy = f"use [{quoted(values)}]"
        raise InvalidArgument(
            field=field,
            value=kind_of(values) if isinstance(values, (str, bytes)) else typed(values),
            expected=f"an iterable of {noun}",
            remedy=remedy,
        )
    iterable: Iterable[Any] = values
    return iterable
