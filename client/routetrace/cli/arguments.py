"""What words on the command line mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer


def labels_of(words: Sequence[str]) -> dict[str, str]:
    """Labels from words "key=value"."""
    labels = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{word!r}: expected key=value")
        labels[key] = value
    return labels


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """Layer ids from "12-23,30"; None for all."""
    if text is None:
        return None
    ids: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        # A layer id has at most four digits; a longer range would only fill memory.
        if last < first or last - first > 10_000:
            raise typer.BadParameter(f"{text!r}: expected layer ids and ranges, such as 12-23,30")
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def tokens_of(text: str | None) -> tuple[int, int | None]:
    """First position and one past the last from "a:b", where either may be left out."""
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text or ":")
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected positions start:stop, such as 100:200")
    return int(match[1] or 0), int(match[2]) if match[2] else None
