"""Limits of names and numbers, which agents and clients keep and the server checks."""

from __future__ import annotations

from collections.abc import Mapping

from routetrace.common.errors import InvalidArgument, kind_of, quoted, typed

#: Maximum characters of an id: run, engine, shard, boot, request, trace, transfer.
MAX_ID_LENGTH = 512
#: Nonces of requests are below it, so that JSON carries them everywhere.
MAX_NONCE = 1 << 53
#: Maximum labels of a request, and characters of a label's name and text together.
MAX_LABELS = 64
MAX_LABEL_LENGTH = 1024
#: Maxima of a model: decoder layers, experts of a layer, experts chosen for a token.
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_TOP_K = 1024
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

# Characters of an id or label that an error shows.
_SHOWN = 40


def check_id(field: str, value: object, *, required: bool = True) -> None:
    """Raise InvalidArgument unless `value` is an id of a valid length."""
    if not isinstance(value, str):
        raise InvalidArgument(field=field, value=typed(value), expected="str")
    if required <= len(value) <= MAX_ID_LENGTH and is_text(value):
        return
    shown = quoted(value)
    if len(value) > _SHOWN:
        shown = f"{quoted(value[:_SHOWN])}... ({len(value)} characters)"
    expected = f"{int(required)} to {MAX_ID_LENGTH} characters"
    if not is_text(value):
        expected += " of Unicode text"
    raise InvalidArgument(field=field, value=shown, expected=expected)


def check_slots(block_size: int, num_blocks: int) -> None:
    """Raise InvalidArgument unless an engine may have as many slots."""
    if block_size > MAX_BLOCK_SIZE:
        raise InvalidArgument(
            field="block_size", value=block_size, expected=f"at most {MAX_BLOCK_SIZE}"
        )
    if block_size * num_blocks > MAX_SLOTS:
        raise InvalidArgument(
            field="num_blocks", value=num_blocks, expected=f"at most {MAX_SLOTS} slots"
        )


def check_labels(field: str, labels: Mapping[str, str]) -> None:
    """Raise InvalidArgument unless labels are texts with names, not too many and not too long."""
    if not isinstance(labels, Mapping):
        expected = "a mapping of str to str"
        remedy = "for example {'group': 'g0'}"
        raise InvalidArgument(field=field, value=kind_of(labels), expected=expected, remedy=remedy)
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(
            field=field, value=f"{len(labels)} labels", expected=f"at most {MAX_LABELS}"
        )
    for key, text in labels.items():
        if not (is_text(key) and key):
            shown = quoted(key) if isinstance(key, str) else typed(key)
            raise InvalidArgument(
                field=field,
                value=f"a mapping with the name {shown}",
                expected="names that are str, not empty",
            )
        if not is_text(text):
            shown = quoted(text) if isinstance(text, str) else typed(text)
            expected = "Unicode text" if isinstance(text, str) else "str"
            raise InvalidArgument(
                field=f"{field}[{quoted(key[:_SHOWN])}]", value=shown, expected=expected
            )
        if len(key) + len(text) > MAX_LABEL_LENGTH:
            raise InvalidArgument(
                field=field,
                value=f"{key[:_SHOWN]}={text[:_SHOWN]}",
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
