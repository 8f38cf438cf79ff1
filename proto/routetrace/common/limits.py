"""Limits of names and numbers, which agents and clients keep and the server checks."""

from __future__ import annotations

from collections.abc import Mapping

from routetrace.common.errors import InvalidArgument

#: Maximum characters of an id: run, engine, shard, boot, request, trace.
MAX_ID_LENGTH = 512
#: Maximum labels of a request, and characters of a label's name and text together.
MAX_LABELS = 64
MAX_LABEL_LENGTH = 1024
#: Positions and counts of tokens are below it.
MAX_POSITION = 1 << 31
#: Maximum tokens of a KV block, and slots of an engine: block_size * num_blocks. The server takes
#: 24 bytes for a slot.
MAX_BLOCK_SIZE = 1 << 16
MAX_SLOTS = 1 << 25
#: Maximum tokens of a request that is named by its blocks.
MAX_BLOCK_TOKENS = 1 << 22
#: Maximum number of an engine step.
MAX_STEP = 1 << 62


def check_id(field: str, value: object, *, required: bool = True) -> None:
    """Raise InvalidArgument unless `value` is an id of a valid length."""
    if isinstance(value, str):
        if required <= len(value) <= MAX_ID_LENGTH and is_text(value):
            return
        if len(value) > 40:
            value = f"{value[:40]}... ({len(value)} characters)"
    expected = f"a string of {int(required)} to {MAX_ID_LENGTH} Unicode characters"
    raise InvalidArgument(field=field, value=value, expected=expected)


def check_labels(field: str, labels: Mapping[str, str]) -> None:
    """Raise InvalidArgument unless labels are texts with names, not too many and not too long."""
    if not isinstance(labels, Mapping):
        raise InvalidArgument(field=field, value=labels, expected="a mapping of strings to strings")
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(
            field=field, value=f"{len(labels)} labels", expected=f"at most {MAX_LABELS}"
        )
    for key, text in labels.items():
        if not (is_text(key) and is_text(text) and key):
            expected = "strings, such as {'group': 'g0'}, with keys not empty"
            raise InvalidArgument(field=field, value={key: text}, expected=expected)
        if len(key) + len(text) > MAX_LABEL_LENGTH:
            raise InvalidArgument(
                field=field,
                value=f"{key[:40]}={text[:40]}",
                expected=f"at most {MAX_LABEL_LENGTH} characters together",
            )


def is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can carry: no half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
