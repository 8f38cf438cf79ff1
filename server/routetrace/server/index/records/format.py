"""Format of stored data: a number in front of each record, and of each piece of a snapshot."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from routetrace.common.errors import Unavailable

#: Format that is written and read; that of `routetrace.stored`.
FORMAT = 5

_MARK = bytes(3)
#: In front of all data of this format.
HEAD = _MARK + bytes([FORMAT])


class UnsupportedFormat(Unavailable):
    """Stored data has a format that this server cannot read."""


def check_format(data: bytes, what: str) -> None:
    """Check that stored data has the present format.

    Raises:
        UnsupportedFormat: if it has another one.
        DecodeError: if it is empty.
    """
    if data[:4] == HEAD:
        return
    if not data:
        raise DecodeError(f"{what} is empty")
    numbered = data[:3] == _MARK and len(data) > 3
    found = f"format {data[3]}" if numbered else f"a format before {FORMAT}, without a number"
    remedy = (
        "start the version of routetrace-server that wrote it, or a newer one"
        if numbered and data[3] > FORMAT
        else "start routetrace-server 0.8 with this data_dir first, or use another data_dir"
    )
    raise UnsupportedFormat(f"{what} has {found}, this server reads format {FORMAT}; {remedy}")
