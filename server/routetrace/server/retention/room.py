"""Room for what agents send: stored bytes, memory, writers and slots, and each owner's share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from routetrace.common.errors import Overloaded
from routetrace.server.access.budget import Budget
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.owners import owner_of
from routetrace.server.index.state import State
from routetrace.server.index.writer import Writer
from routetrace.server.settings.config import ServerConfig

#: Watermarks: above the first share of a limit, finished traces are evicted down to the second.
HIGH, LOW = 0.9, 0.75

#: Seconds after which a refused chunk may be resent.
RETRY_SECONDS = 1.0


class Room:
    """Limits of what is kept. All calls belong to the event loop's thread.

    Args:
        config: settings.
        state: state whose parts count.
        metrics: counters of refusals.
        memory_bytes: returns the memory of the process.
        short: called when a limit is near.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: State,
        metrics: Metrics,
        memory_bytes: Callable[[], int],
        short: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._refused = metrics.overloaded
        self._memory_bytes = memory_bytes
        self._short = short

    def check_chunk(self, writer: Writer) -> None:
        """Check that a chunk of a writer may be stored; the store checks its capacity itself.

        Raises:
            Overloaded: if its run or token is at its quota, its owner holds more than its share of
                a store that is nearly full, or the process is at its memory limit.
        """
        config, run, owner = self._config, writer.key.run, owner_of(writer.token, writer.key.run)
        held = self._state.run_bytes[run]
        self._check("run_quota", held, config.quota_of(run), f"stored bytes of run {run!r}")
        held = self._state.owner_bytes[owner]
        if writer.token:
            self._check("token_quota", held, config.token_quota, f"stored bytes of {owner}")
        share = self.stored_share(owner)
        if len(self._state.owner_bytes) > 1 and held > share:
            self._check("store_capacity", held, share, f"stored bytes, the share of {owner}")
        self.check_memory()

    def stored_share(self, owner: str) -> int:
        """Return the maximum of stored bytes of an owner, as long as all others keep theirs.

        It is what they leave of nine tenths of the capacity, and at least an equal part.
        """
        held, capacity = self._state.owner_bytes, self._config.store_capacity
        others = [part for name, part in held.items() if name != owner]
        if not others:
            return capacity
        return max(capacity // (len(others) + 1), int(HIGH * capacity) - sum(others))

    def check_memory(self) -> None:
        """Raise Overloaded if the process is at its memory limit."""
        limit = self._config.memory_limit
        if limit:
            what = "bytes of the server's process"
            self._check("memory_limit", self._memory_bytes(), limit, what)

    def _check(self, field: str, value: int, most: int, what: str) -> None:
        if most and value > HIGH * most:
            self._short()
        if most and value >= most:
            self._refused.labels(field).inc()
            raise Overloaded(
                field=field,
                value=value,
                expected=f"less than {most} {what}",
                retry_after=RETRY_SECONDS,
            )

    def check_writer(self, owner: str, replaced: Writer | None, num_slots: int) -> None:
        """Check that an owner may open a writer, or replace one, with this many slots.

        Raises:
            Overloaded: if it has its share of max_writers, or of max_slots.
        """
        writers, slots = self.writers(), self.slots()
        if replaced is None:
            writers.check(owner)
        else:
            slots.release(owner_of(replaced.token, replaced.key.run), replaced.slots.num_slots)
        slots.check(owner, num_slots)

    def budgets(self) -> list[Budget]:
        """Return the budgets of what is kept."""
        stored = Budget("store_capacity", self._config.store_capacity, held=self._state.owner_bytes)
        return [self.writers(), self.slots(), stored]

    def writers(self) -> Budget:
        """Return the budget of writers, connected or not."""
        held = Counter(owner_of(w.token, w.key.run) for w in self._state.writers.values())
        remedy = "engines that are gone: routetrace forget-engine"
        return Budget("max_writers", self._config.max_writers, self._refused, held, remedy)

    def slots(self) -> Budget:
        """Return the budget of slots."""
        held: Counter[str] = Counter()
        for writer in self._state.writers.values():
            held[owner_of(writer.token, writer.key.run)] += writer.slots.num_slots
        remedy = "engines that are gone: routetrace forget-engine"
        return Budget("max_slots", self._config.max_slots, self._refused, held, remedy)
