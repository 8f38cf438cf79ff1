"""Data as values of JSON, and enums of text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar

import numpy as np


class TextEnum(str, Enum):
    """Enum whose members are, and print as, their text."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


class Values:
    """Mixin of dataclasses: their fields as values of JSON."""

    _NOT_IN_DICT: ClassVar[frozenset[str]] = frozenset()
    """Fields to leave out: secrets, and rows."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON.

        Arrays and tuples become lists, datetimes text of ISO 8601, and nested objects dicts.
        """
        return {
            one.name: json_value(getattr(self, one.name))
            for one in fields(self)  # type: ignore[arg-type]
            if one.name not in self._NOT_IN_DICT
        }


def json_value(value: Any) -> Any:
    """Return a value of JSON for a value of a field."""
    match value:
        case Values():
            return value.to_dict()
        case Enum():
            return value.value
        case datetime():
            return value.isoformat(timespec="milliseconds")
        case np.ndarray() if value.dtype.names:
            return [dict(zip(value.dtype.names, row, strict=True)) for row in value.tolist()]
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {str(key): json_value(one) for key, one in value.items()}
        case tuple() if hasattr(value, "_asdict"):
            return json_value(value._asdict())
        case tuple() | list():
            return [json_value(one) for one in value]
    return value
