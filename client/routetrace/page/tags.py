"""Entity tags: an answer that the browser has already is not sent again."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response


def tag_of(content: bytes) -> str:
    """Return the tag of an answer by its content, or by all that it follows from."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def has(request: Request, tag: str) -> bool:
    """Return whether the browser has the answer."""
    # An intermediary that compresses may have weakened it.
    tags = request.headers.get("if-none-match", "").split(",")
    return tag in (one.strip().removeprefix("W/") for one in tags)


def unchanged(tag: str) -> Response:
    """Return the answer that stands for the one that the browser has."""
    return Response(status_code=304, headers={"ETag": tag})
