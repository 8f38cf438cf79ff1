"""Messages about settings that are wrong."""

from __future__ import annotations

from typing import Any


def describe_mistake(error: Any) -> str:
    """Return one line for an error of pydantic: setting, value and expectation."""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"].startswith("byte_size"):
        message = "expected a size such as 16GiB"
        if error["loc"][:1] in (("memory_limit",), ("run_quota",)):
            message += ", or 0"
    if not error["loc"]:
        return str(message)
    colon = ";" if message.startswith("expected") else ":"
    return f"{error['loc'][0]} is {str(error['input'])[:200]!r}{colon} {message}"
