"""Messages about settings that are wrong."""

from __future__ import annotations

from typing import Any


def describe_mistake(error: Any) -> str:
    """Return one line for an error of pydantic: setting, value and expectation."""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"].startswith("byte_size"):
        message = "expected a size, such as 64GiB or 1048576"
    if not error["loc"]:
        return str(message)
    return f"{error['loc'][0]} is {str(error['input'])[:200]!r}: {message}"
