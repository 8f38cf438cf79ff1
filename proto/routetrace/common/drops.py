"""Reasons for which an agent drops rows: the values of a metric's label."""

from __future__ import annotations

DROP_REASONS = (
    "queue_full",
    "invalid_ids",
    "rewound",
    "late",
    "rejected",
    "corrupt",
    "fenced",
    "agent_lost",
    "unsent",
)

#: Stands for all reasons that this version does not know.
OTHER_REASON = "other"
