"""The parts of the contract that no descriptor holds: packed columns and their numbers."""

from __future__ import annotations

from typing import Any

from routetrace.codec import records
from routetrace.codec.frame_header import MAGIC


def columns() -> dict[str, Any]:
    """Return fields and numbers as JSON holds them."""
    return {
        "frame": MAGIC.decode(),
        "DIGEST_EVERY": records.DIGEST_EVERY,
        "NO_REQUEST": records.NO_REQUEST,
        **{name: getattr(records, name).descr for name in ("OP", "SPAN", "DIGEST")},
        **{
            kind.__name__: {member.name: int(member) for member in kind}
            for kind in (records.OpKind, records.FinishReason, records.Provenance)
        },
    }
