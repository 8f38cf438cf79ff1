"""Checks of arguments, before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.checks import (
    UnknownKeyword,
    choice,
    flag,
    instance,
    items,
    seconds,
    several,
    unknown_keyword,
    whole,
)
from routetrace.common.errors import InvalidArgument, kind_of, quoted, typed
from routetrace.common.limits import MAX_NONCE, check_id, check_labels

__all__ = [
    "UnknownKeyword",
    "array",
    "choice",
    "flag",
    "identifier",
    "identifiers",
    "instance",
    "integers",
    "items",
    "labels",
    "layers",
    "seconds",
    "several",
    "stop",
    "tokens",
    "unknown_keyword",
    "weight_version",
    "whole",
    "wholes",
    "wrong_shape",
]


def identifier(field: str, value: Any, *, required: bool = True) -> str:
    """Return an id, which may be empty only if it is not required."""
    check_id(field, value, required=required)
    return str(value)


def identifiers(field: str, values: Any) -> list[str]:
    """Return ids that are not empty."""
    return [
        identifier(f"{field}[{i}]", value) for i, value in enumerate(several(field, values, "str"))
    ]


def labels(value: Any) -> dict[str, str]:
    """Return labels as a dict; None gives none."""
    if value is None:
        return {}
    check_labels("labels", value)
    return dict(value)


def wholes(field: str, values: Any, remedy: str = "") -> list[int]:
    """Return integers in [0, 2**32); `remedy` is for a value that is no sequence."""
    number = isinstance(values, int) and not isinstance(values, bool)
    uses = [*([f"[{quoted(values)}]"] if number else []), *([remedy] if remedy else [])]
    use = f"use {', or '.join(uses)}" if uses else ""
    listed = items(field, values, "a sequence of int", use)
    return [whole(f"{field}[{i}]", value) for i, value in enumerate(listed)]


def weight_version(value: Any, field: str = "weight_version") -> int:
    """Return a weight version: an int64 above UNKNOWN_VERSION."""
    return whole(field, value, UNKNOWN_VERSION + 1, 2**63 - 1)


def nonce(value: Any, field: str = "nonce") -> int:
    """Return the nonce of a request."""
    return whole(field, value, 1, MAX_NONCE - 1)


def array(field: str, values: npt.ArrayLike, expected: str) -> npt.NDArray[Any]:
    """Return an array of a list, an array, or a tensor on any device."""
    if values is None or isinstance(values, (str, bytes)):
        raise InvalidArgument(field=field, value=typed(values), expected=expected)
    try:
        # Tensors on a device have to come back first.
        return np.asarray(getattr(values, "cpu", lambda: values)())
    except ValueError:  # lists of several lengths
        raise InvalidArgument(field=field, value="ragged", expected=expected) from None
    except (RuntimeError, TypeError) as error:  # a tensor with gradients, or of bfloat16
        raise InvalidArgument(field=field, value=kind_of(values), expected=expected) from error


def integers(field: str, values: npt.ArrayLike, expected: str) -> npt.NDArray[np.integer[Any]]:
    """Return an array of integers in [0, 2**32), of any shape."""
    found = array(field, values, expected)
    if not found.size:
        return found
    if found.dtype.kind not in "iu":
        raise wrong_shape(field, found, expected)
    if not 0 <= int(found.min()) <= int(found.max()) < 2**32:
        shown = f"in [{found.min()}, {found.max()}]"
        raise InvalidArgument(field=field, value=shown, expected=expected)
    return found


def wrong_shape(
    field: str, found: npt.NDArray[Any], expected: str, remedy: str = ""
) -> InvalidArgument:
    """Return the error for an array of a wrong shape or dtype."""
    shown = f"of {found.dtype} and shape {found.shape}"
    return InvalidArgument(field=field, value=shown, expected=expected, remedy=remedy)


def tokens(
    field: str, values: npt.ArrayLike, count: int | None = None
) -> npt.NDArray[np.integer[Any]]:
    """Return token ids, `count` of them if given."""
    many = "one dimension of integers" if count is None else f"{count} integers"
    expected = f"{many} in [0, 2**32)"
    ids = integers(field, values, expected)
    if ids.ndim != 1 or count not in (None, ids.size):
        raise wrong_shape(field, ids, expected)
    return ids


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
