"""Limits as an owner sees them: its part, the parts of all, and how much it may hold."""

from __future__ import annotations

from routetrace.server.access.admission import Admission
from routetrace.server.index.state import State
from routetrace.server.retention.room import Room
from routetrace.server.settings.config import ServerConfig
from routetrace.v1 import routetrace_pb2 as pb


class Limits:
    """Reports limits and quotas. All calls belong to the event loop's thread."""

    def __init__(
        self, *, admission: Admission, config: ServerConfig, room: Room, state: State
    ) -> None:
        self._admission = admission
        self._config = config
        self._room = room
        self._state = state

    def of(self, owner: str, run: str) -> list[pb.Limit]:
        """Return the limits of an owner, in one of its runs, and the quotas that are set."""
        limits = [
            pb.Limit(
                name=budget.name,
                limit=budget.limit,
                used=budget.used,
                held=budget.held[owner],
                share=budget.share(owner),
            )
            for budget in (*self._admission.budgets, self._room.writers(), self._room.slots())
        ]
        config, bytes_of = self._config, self._state.owner_bytes
        limits.append(
            pb.Limit(
                name="store_capacity",
                limit=config.store_capacity,
                used=sum(bytes_of.values()),
                held=bytes_of[owner],
                share=self._room.stored_share(owner),
            )
        )
        quotas = [("run_quota", config.quota_of(run), self._state.run_bytes[run])]
        if owner.startswith("token "):
            quotas.append(("token_quota", config.token_quota, bytes_of[owner]))
        limits += (
            pb.Limit(name=name, limit=quota, used=held, held=held, share=quota)
            for name, quota, held in quotas
            if quota
        )
        return limits
