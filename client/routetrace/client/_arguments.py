"""Checks of what callers pass, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.v1.errors import InvalidArgument


def text(field: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field=field, value=value, expected="a string that is not empty")
    return value


def whole(field: str, value: Any, low: int = 0, high: int = 2**32 - 1) -> int:
    """An integer in [low, high]."""
    try:
        number = index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise InvalidArgument(field=field, value=value, expected=f"an integer in [{low}, {high}]")
    return number


def wholes(field: str, values: Iterable[Any]) -> list[int]:
    """Integers in [0, 2**32)."""
    return [whole(field, value) for value in values]


def weight_version(value: Any) -> int:
    """A weight version: an int64."""
    return whole("weight_version", value, -(2**63), 2**63 - 1)


def tokens(
    field: str, values: npt.ArrayLike, count: int | None = None
) -> npt.NDArray[np.integer[Any]]:
    """Token ids, `count` of them if that is given."""
    # Tensors on a device have to come back first.
    ids = np.asarray(getattr(values, "cpu", lambda: values)())
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


def positive(field: str, value: Any) -> Any:
    """A number above 0."""
    if not value > 0:
        raise InvalidArgument(field=field, value=value, expected="a number above 0")
    return value


def seconds(field: str, value: float) -> float:
    """A number of seconds."""
    if not value >= 0:
        raise InvalidArgument(field=field, value=value, expected="seconds, 0 or more")
    return value


def choice(field: str, value: Any, choices: Iterable[str]) -> str:
    """One of some words."""
    choices = tuple(choices)
    if value not in choices:
        raise InvalidArgument(field=field, value=value, expected=f"one of {choices}")
    return choices[choices.index(value)]


def layers(layer_ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Layer ids, strictly ascending; None for all."""
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
    """One past the last position; None for the end."""
    # The wire says "to the end" with 0.
    if token_stop is None or whole("token_stop", token_stop) > token_start:
        return token_stop
    raise InvalidArgument(
        field="token_stop",
        value=token_stop,
        expected=f"more than token_start = {token_start}, or None for the end",
    )
