"""Seats: the servers that stand by for a partition, and the one to which it belongs.

seat/<address> holds a number that its server counts up while it stands by. The owner reads all of
them; by their changes on its own clock it sees who lives, as clocks are never compared. Partition
i belongs to server i, modulo their number, of those that live, in the order of their addresses: so
each serves as many as the others. An owner leaves a partition that belongs to another server once
that one has stood by for long, so that one that comes and goes takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.clock import clock

#: Leases without a change after which a seat counts as empty.
_GONE_LEASES = 3
#: Leases for which a server has to stand by before a partition is handed over to it.
STEADY_LEASES = 6
#: Leases after which the seat of a server that is gone is deleted.
_FORGOTTEN_LEASES = 60


def home(partition: int, servers: Iterable[str]) -> str:
    """Return the server to which a partition belongs."""
    ordered = sorted(servers)
    return ordered[partition % len(ordered)]


@dataclass
class _Seat:
    content: bytes
    changed: float
    since: float | None = None
    """Time of the first change after which none was late; None before it."""


class Seats:
    """Seats of one partition, as one server sees them. Each method is called by one thread.

    Args:
        bucket: of the partition; one attempt for each request is enough.
        partition: number of it.
        server: address of this server, the same for all its partitions.
        seconds: of the lease.
        now: clock.
    """

    def __init__(
        self,
        bucket: Bucket,
        partition: int,
        server: str,
        seconds: float,
        now: Callable[[], float] = clock,
    ) -> None:
        self._bucket = bucket
        self._partition = partition
        self.server = server
        self._seconds = seconds
        self._now = now
        self._count = 0
        self._next = self._next_look = 0.0
        self._seats: dict[str, _Seat] = {}

    def announce(self) -> None:
        """Say that this server stands by, once in the time of a lease.

        Raises:
            Unavailable: if the object store does not take it.
        """
        if self._now() < self._next:
            return
        self._next = self._now() + self._seconds
        self._count += 1
        self._bucket.put(_key(self.server), b"%d" % self._count)

    def heir(self) -> str:
        """Return the server to hand the partition over to; "" if it stays here.

        Looks once in the time of a lease.

        Raises:
            Unavailable: if the object store does not answer.
        """
        now = self._now()
        if now < self._next_look:
            return ""
        self._next_look = now + self._seconds
        self._look()
        now = self._now()
        steady = [
            server
            for server, seat in self._seats.items()
            if seat.since is not None
            and now - seat.changed <= _GONE_LEASES * self._seconds
            and seat.changed - seat.since >= STEADY_LEASES * self._seconds
        ]
        chosen = home(self._partition, [self.server, *steady])
        return "" if chosen == self.server else chosen

    def _look(self) -> None:
        for found in self._bucket.list("seat/"):
            server = _server_of(found.key)
            content = self._bucket.get(found.key)
            if server in ("", self.server) or content is None:
                continue
            now = self._now()
            seat = self._seats.get(server)
            if seat is None:  # it may be that of a server that is gone
                self._seats[server] = _Seat(content, now)
            elif content != seat.content:
                late = now - seat.changed > _GONE_LEASES * self._seconds
                seat.content, seat.changed = content, now
                seat.since = now if late or seat.since is None else seat.since
            elif now - seat.changed > _FORGOTTEN_LEASES * self._seconds:
                self._bucket.delete([found.key])
                del self._seats[server]


def _key(server: str) -> str:
    return f"seat/{server.encode().hex()}"


def _server_of(path: str) -> str:
    """Return the server of a key; "" if it is no key of these."""
    try:
        return bytes.fromhex(path.rpartition("/")[2]).decode()
    except ValueError:
        return ""
