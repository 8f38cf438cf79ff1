"""Index of the log in memory: where each payload is, and which objects still count.

No I/O and no lock: the store guards it.
"""

from __future__ import annotations

from collections.abc import Sequence

from routetrace.server.store.interface import Record
from routetrace.server.store.object import format as fmt
from routetrace.server.store.object.format import Compaction, Held, Where
from routetrace.server.store.object.log import Damaged, Opened, log

# Numbers that a damaged object may have used.
_SKIPPED = 1 << 20


class Index:
    """Places of the payloads, objects of the log, and the last compaction.

    Attributes:
        headers: of the records that no snapshot covers, until the first append.
        orphans: keys that the next compaction deletes.
        base: last compaction; base_index: its index in the log, 0 if there is none.
    """

    def __init__(self) -> None:
        self.payloads: dict[int, Where] = {}
        self.payload_bytes = 0
        self.objects: dict[int, Held] = {}
        self.used = 0
        self.durable = 0
        self.base = Compaction(0, "", 0, 0, {}, {})
        self.base_index = 0
        self.headers: list[tuple[int, bytes | None]] = []
        self.orphans: list[str] = []

    def load(self, opened: Opened) -> int:
        """Take the state of the log at its end; return the number of damaged objects."""
        base, damaged = opened.base or self.base, 0
        self.base, self.base_index = base, opened.base_index
        self.objects = dict(base.objects)
        for number, where in base.payloads.items():
            self._hold(number, where)
        last = max(base.last, base.snapshot)
        for found in opened.heads:
            if isinstance(found, Damaged):
                log.error("%s; its records are lost", found.reason)
                damaged += 1
                self.headers.append((last, None))
                last += _SKIPPED
                continue
            fixed, entries = found
            for number, header, where in entries:
                if number > base.snapshot:
                    self.headers.append((number, header))
                if fixed.index > opened.base_index and where.size:
                    self._hold(number, where)
                last = max(last, number)
            self.objects[fixed.index] = Held(opened.objects[fixed.index], last)
        self.used = sum(held.size for held in self.objects.values())
        self.orphans = [
            fmt.key(index)
            for index, size in opened.objects.items()
            if index < opened.base_index and index not in self.objects and size > fmt.FIXED_BYTES
        ]
        self.durable = last
        return damaged

    def add(self, index: int, head_bytes: int, records: Sequence[Record], sums: list[bytes]) -> int:
        """Add the records of a commit; return the bytes of its object."""
        end = fmt.FIXED_BYTES + head_bytes
        for record, checks in zip(records, sums, strict=True):
            size = len(record.payload)
            if size:
                self._hold(record.number, Where(index, end, size, checks))
            end += size
        self.objects[index] = Held(end, records[-1].number)
        self.used += end
        self.durable = records[-1].number
        return end

    def _hold(self, number: int, where: Where) -> None:
        self.payloads[number] = where
        self.payload_bytes += where.size

    # ------------------------------------------------------------------ compaction

    def compacted(self, number: int, directory: str, parts: int, dropped: set[int]) -> Compaction:
        """Return a compaction of the index as it is now, without the dropped payloads."""
        payloads = {n: where for n, where in self.payloads.items() if n not in dropped}
        alive = {where.object for where in payloads.values()}
        objects = {
            index: held
            for index, held in self.objects.items()
            if index in alive or held.last > number
        }
        return Compaction(number, directory, parts, self.durable, payloads, objects)

    def take(self, base: Compaction, index: int, dropped: set[int]) -> list[str]:
        """Make a compaction the base once it is in the log; return the keys that may go."""
        dead = [*self.orphans, *(fmt.key(i) for i in self.objects if i not in base.objects)]
        if self.base_index:
            dead.append(fmt.key(self.base_index))
        self.objects, self.base, self.base_index = dict(base.objects), base, index
        self.used = sum(held.size for held in base.objects.values())
        for number in dropped:
            self.payload_bytes -= self.payloads.pop(number).size
        self.orphans = dead
        return dead

    def uncovered(self) -> list[int]:
        """Return the objects with headers that no snapshot covers, ascending."""
        covered = self.base.snapshot
        return sorted(index for index, held in self.objects.items() if held.last > covered)
