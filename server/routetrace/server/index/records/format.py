"""Format of stored data: a number in front of each record, and of each piece of a snapshot.

This server writes one format, and reads the one before by `previous.py`, which holds all that is
left of it. A new format moves there what it replaces.
"""

from __future__ import annotations

from routetrace.common.errors import Unavailable

#: Format that is written; that of `routetrace.stored`.
FORMAT = 5

#: The one before. It has no number in front: its data begins with other bytes.
PREVIOUS = 4

_MARK = bytes(3)
#: In front of all data of this format.
HEAD = _MARK + bytes([FORMAT])


class UnsupportedFormat(Unavailable):
    """Stored data has a format that this server cannot read."""


def is_current(data: bytes, what: str) -> bool:
    """Return whether stored data has the present format: False if it has the previous one.

    Raises:
        UnsupportedFormat: if it has a newer one.
    """
    if data[:4] == HEAD:
        return True
    if data[:3] == _MARK and len(data) > 3 and data[3] > FORMAT:
        raise UnsupportedFormat(
            f"{what} has format {data[3]}, this server reads formats {PREVIOUS} and {FORMAT}; "
            "start the version of routetrace-server that wrote it, or a newer one"
        )
    return False


def too_old(what: str, number: object) -> UnsupportedFormat:
    """Return the error for data from before the previous format."""
    return UnsupportedFormat(
        f"{what} has format {number!r}, this server reads formats {PREVIOUS} and {FORMAT}; start "
        f"a version of routetrace-server that writes format {PREVIOUS} with this data_dir first, "
        "or use another data_dir"
    )
