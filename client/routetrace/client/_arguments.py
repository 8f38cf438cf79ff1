"""Checks of arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from operator import index
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_id, check_labels

_T = TypeVar("_T")

_YEAR = 365 * 24 * 3600


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


def identifier(field: str, value: Any, *, required: bool = True) -> str:
    """Return an id, which may be empty only if it is not required."""
    check_id(field, value, required=required)
    return str(value)


def identifiers(field: str, values: Any) -> list[str]:
    """Return ids that are not empty."""
    return [identifier(field, value) for value in several(field, values, "trace ids")]


def several(field: str, values: Any, noun: str) -> Iterable[Any]:
    """Return an iterable that is not a string."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidArgument(field=field, value=values, expected=f"an iterable of {noun}")
    return values


def labels(value: Any) -> dict[str, str]:
    """Return labels as a dict; None gives none."""
    if value is None:
        return {}
    check_labels("labels", value)
    return dict(value)


def instance(field: str, value: Any, kind: type[_T]) -> _T:
    """Return an object of a class."""
    if not isinstance(value, kind):
        expected = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise InvalidArgument(field=field, value=value, expected=expected)
    return value


def whole(field: str, value: Any, low: int = 0, high: int = 2**32 - 1) -> int:
    """Return an integer in [low, high]."""
    try:
        number = low - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise InvalidArgument(
            field=field, value=repr(value), expected=f"an integer in [{low}, {high}]"
        )
    return number


def wholes(field: str, values: Any) -> list[int]:
    """Return integers in [0, 2**32)."""
    return [whole(field, value) for value in several(field, values, "integers in [0, 2**32)")]


def weight_version(value: Any) -> int:
    """Return a weight version: an int64."""
    return whole("weight_version", value, -(2**63), 2**63 - 1)


def tokens(
    field: str, values: npt.ArrayLike, count: int | None = None
) -> npt.NDArray[np.integer[Any]]:
    """Return token ids, `count` of them if given."""
    try:
        # Tensors on a device have to come back first.
        ids = np.asarray(getattr(values, "cpu", lambda: values)())
    except ValueError:  # lists of several lengths
        ids = np.asarray("ragged")
    integers = not ids.size or (
        ids.dtype.kind in "iu" and 0 <= int(ids.min()) <= int(ids.max()) < 2**32
    )
    if ids.ndim != 1 or not integers or count not in (None, ids.size):
        many = "a list of" if count is None else f"{count}"
        raise InvalidArgument(
            field=field,
            value=f"{ids.dtype} {ids.shape}: {ids}",
            expected=f"{many} integers in [0, 2**32)",
        )
    return ids


def seconds(field: str, value: Any) -> float:
    """Return a number of seconds above 0, a year at most: gRPC takes no infinity for a deadline."""
    numeric = isinstance(value, (int, float, np.integer, np.floating)) and value is not True
    if not (numeric and 0 < value <= _YEAR):
        expected = f"a number of seconds above 0, at most {_YEAR}"
        raise InvalidArgument(field=field, value=repr(value), expected=expected)
    return float(value)


def choice(field: str, value: Any, choices: Iterable[str]) -> str:
    """Return one of some words."""
    choices = tuple(choices)
    if value not in choices:
        raise InvalidArgument(field=field, value=value, expected=f"one of {choices}")
    return choices[choices.index(value)]


def layers(layer_ids: Any) -> tuple[int, ...] | None:
    """Return layer ids, strictly ascending; None for all."""
    if layer_ids is None:
        return None
    ids = wholes("layer_ids", layer_ids)
    # The wire says "all" with an empty list: a rank without MoE layers must not get them.
    if not ids or ids != sorted(set(ids)):
        raise InvalidArgument(
            field="layer_ids", value=ids, expected="strictly ascending ids, or None for all"
        )
    return tuple(ids)


def stop(token_start: int, token_stop: int | None) -> int | None:
    """Return one past the last position; None for the end."""
    # The wire says "to the end" with 0.
    if token_stop is None or whole("token_stop", token_stop) > token_start:
        return token_stop
    raise InvalidArgument(
        field="token_stop",
        value=token_stop,
        expected=f"more than token_start = {token_start}, or None for the end",
    )
