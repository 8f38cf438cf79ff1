"""Seats: the servers that stand by for a partition, and whether one of them is to have it.

seat/<address> holds a number that its server counts up while it stands by. The owner reads all of
them; by their changes on its own clock it sees who lives, as clocks are never compared. A server
that has stood by for long is steady; others, which may come and go, get nothing.

Partitions move from the server with the most to the steady one with the fewest, until these differ
by one at most; no fewer moves lead there. All owners compute the next move from the ends of the
same lease chains, and begin none while a partition is free, so there is one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.clock import clock

#: Leases without a change after which a seat counts as empty.
_GONE_LEASES = 3
#: Leases for which a server has to stand by before a partition is handed over to it.
STEADY_LEASES = 6
#: Leases after which the seat of a server that is gone is deleted.
_FORGOTTEN_LEASES = 60


class Move(NamedTuple):
    """A hand-over that evens the shares out."""

    partition: int
    heir: str


def next_move(owners: Sequence[str], steady: Collection[str]) -> Move | None:
    """Return the hand-over that is due; None if shares are even.

    Args:
        owners: server that owns each partition.
        steady: servers that can get one.
    """
    shares = Counter(owners)
    most = min(shares, key=lambda server: (-shares[server], server))
    fewest = min(steady, key=lambda server: (shares[server], server), default=most)
    if shares[most] - shares[fewest] < 2:
        return None
    return Move(max(n for n, owner in enumerate(owners) if owner == most), fewest)


@dataclass
class _Seat:
    content: bytes
    changed: float
    since: float | None = None
    """Time of the first change after which none was late; None before it."""


class _Due(NamedTuple):
    """A hand-over that this server is to begin, if the heir lives."""

    owners: Sequence[str]
    heir: str
    content: bytes
    """The heir's seat before the owners were read."""


class Seats:
    """Seats of one partition, as one server sees them. Each method is called by one thread.

    Args:
        bucket: of the partition; one attempt for each request is enough.
        partition: number of it.
        server: address of this server, the same for all its partitions.
        seconds: of the lease.
        owners: returns the server that owns each partition, "" where one is free.
        now: clock.
    """

    def __init__(
        self,
        bucket: Bucket,
        partition: int,
        server: str,
        seconds: float,
        owners: Callable[[], Sequence[str]],
        now: Callable[[], float] = clock,
    ) -> None:
        self._bucket = bucket
        self._partition = partition
        self.server = server
        self._seconds = seconds
        self._owners = owners
        self._now = now
        self._count = 0
        self._next = self._next_look = self._next_read = 0.0
        self._seats: dict[str, _Seat] = {}
        self._even: set[str] = set()  # the steady ones with whom shares were even
        self._due: _Due | None = None  # as of the last look

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
        steady = self._steady()
        if not steady or (steady == self._even and now < self._next_read):
            return ""
        due, self._even, self._due = self._due, set(), None
        owners = self._owners()
        # While one partition is on its way, or may have moved since it was read, none follows.
        if "" in owners or self._now() - now > self._seconds:
            return ""
        move = next_move(owners, steady)
        if move is None:
            # Most changes show in who is steady. For others, an owner reads less than one chain in
            # the time of a lease.
            leases = STEADY_LEASES + len(owners)
            self._even, self._next_read = steady, now + leases * self._seconds
            return ""
        if (move.partition, owners[move.partition]) != (self._partition, self.server):
            return ""
        # One that died has few partitions as soon as others have taken its own, and looks steady
        # for longer: it has to change its seat after these owners were read.
        self._due = _Due(owners, move.heir, self._seats[move.heir].content)
        if due is None or (due.owners, due.heir) != (owners, move.heir):
            return ""
        if due.content == self._due.content:
            return ""
        return move.heir

    def _steady(self) -> set[str]:
        now = self._now()
        return {
            server
            for server, seat in self._seats.items()
            if seat.since is not None
            and now - seat.changed <= _GONE_LEASES * self._seconds
            and seat.changed - seat.since >= STEADY_LEASES * self._seconds
        }

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
