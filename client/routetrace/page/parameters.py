"""Parameters of the query of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from routetrace.common.errors import InvalidArgument, quoted

_MAX_INT = 2**31 - 1


def choice(
    params: Mapping[str, str], name: str, choices: tuple[str, ...], default: str = ""
) -> str:
    """Return a parameter that is one of several words.

    Raises:
        InvalidArgument: if it is not.
    """
    value = params.get(name, default)
    if value not in choices:
        raise InvalidArgument(
            field=name, value=quoted(value) if value else "not given", expected=" or ".join(choices)
        )
    return value


def whole(
    params: Mapping[str, str], name: str, least: Literal[0, 1] = 0, default: int | None = None
) -> int:
    """Return a parameter that is an integer.

    Raises:
        InvalidArgument: if it is not, or less than `least`, or not given without a default.
    """
    value = params.get(name, "")
    if not value and default is not None:
        return default
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 11 else -1
    if not least <= number <= _MAX_INT:
        expected = f"an integer of at least {least}"
        shown = quoted(value) if value else "not given"
        raise InvalidArgument(field=name, value=shown, expected=expected)
    return number
