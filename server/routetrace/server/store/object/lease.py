"""The lease: which server owns the log, by a chain of objects that only put-if-absent extends.

lease/<n> is the n-th sign of life. The owner adds the next one several times within the lease's
time. Another server takes the lease by adding the next one, once it has seen the same end of the
chain for that time, or at once where the end says that it is free. The owner's time begins before
it sends a request, the other's after it has seen the result, so the two do not overlap.

An owner may free the lease for another server, its heir: others then wait as they do for an owner.

Of one object replaced by its ETag, two servers can be the owner: some stores race there. An owner
that is late finds its next object taken, as objects that begin an ownership are never deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from routetrace.common.errors import Closed, RouteTraceError, Unavailable
from routetrace.server.store.interface import NO_OWNER, Owner
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.clock import clock
from routetrace.server.store.object.format import index_of
from routetrace.server.store.object.seats import Seats

log = logging.getLogger("routetrace.server.store")

_CHAIN = "lease/"

#: Own signs of life that are kept.
_KEPT = 4

#: Share of the lease that its owner uses; the rest covers clocks of different speed.
_OWN_SHARE = 0.9
#: Requests within the time of a lease.
_BEATS = 4


@dataclass(frozen=True)
class Sign:
    """Content of one object of the chain."""

    name: str
    nonce: str
    seconds: float
    address: str = ""
    """host:port at which the owner serves; "" where no other server leads callers there."""
    free: bool = False
    heir: str = ""
    """Address of the server for which it was freed; others wait as for an owner."""

    def pack(self) -> bytes:
        """Serialize it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, found: bytes | None) -> Sign | None:
        """Return the content of an object; None if there is none, or it is damaged."""
        try:
            return cls(**json.loads(found)) if found else None
        except (ValueError, TypeError):
            return None


def key(number: int) -> str:
    """Return the key of an object of the chain."""
    return f"{_CHAIN}{number:016d}"


def end_of_chain(bucket: Bucket, prefix: str = "") -> tuple[int, Sign | None]:
    """Return the number and the content of the last object; (0, None) for an empty chain.

    Args:
        bucket: where the chain is.
        prefix: of the chain there.

    Raises:
        Unavailable: if the object store does not answer.
    """
    keys = (found.key for found in bucket.list(prefix + _CHAIN))
    end = max(map(index_of, keys), default=0)
    return end, Sign.parse(bucket.get(prefix + key(end))) if end > 0 else None


class Lease:
    """Lease of one server.

    Args:
        bucket: where the chain is; its requests should end within a half of `seconds`, and need
            no repetition.
        name: of this server, for the log lines of others.
        seconds: after which another server may take the lease.
        now: clock.
        address: at which this server serves, for the callers of others; "" if there are none.
        seats: of the servers that share the partitions; None: the lease stays where it is.
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        seconds: float,
        now: Callable[[], float] = clock,
        *,
        address: str = "",
        seats: Seats | None = None,
    ) -> None:
        self._bucket = bucket
        self._now = now
        self._seconds = seconds
        self._sign = Sign(name, os.urandom(8).hex(), seconds, address)
        self._seats = seats
        self._heir = ""
        self._changed = threading.Condition()
        self._end = 0  # number of the own last object; 0: none yet
        self._seen = (-1, 0.0)  # number of the last object of another owner, and its first sight
        self._reported: Owner | None = None
        self._unavailable = False
        self._first_sent = (0, 0.0)  # number of the next object, and time of its first attempt
        self._until = 0.0
        self._mine: deque[int] = deque()  # signs of life that may be deleted
        self._ended = False
        self._threads: list[threading.Thread] = []
        self.on_heir: Callable[[], object] = lambda: None
        """Called once, in some thread, where this server should leave the lease to its heir."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called once, in some thread, after another server has taken the lease."""
        self.lost = False
        """Whether another server has taken the lease, or the log is fenced."""

    @property
    def held(self) -> bool:
        """Whether this server may serve: the lease is its own, and not over."""
        return not self.lost and self._end > 0 and self._now() < self._until

    # ------------------------------------------------------------------ taking

    def acquire(self, waiting: Callable[[Owner], None]) -> None:
        """Wait until this server owns the lease, then keep it until `release` or its loss.

        Args:
            waiting: called with each other owner when this server starts to wait for it, and with
                NO_OWNER once that one has left or its lease is over.

        Raises:
            Closed: if `release` was called meanwhile.
            InvalidArgument: if the credentials are refused.
        """
        while not self._end:
            if self._ended:
                raise Closed("the server stops; it never owned the store")
            self.stand_by(waiting)
            if not self._end:
                self._pause()
        for target in (self._renew, self._tend):
            thread = threading.Thread(target=target, name="routetrace-lease", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stand_by(self, waiting: Callable[[Owner], None]) -> None:
        """Look at the end of the chain once, and take the lease if it is free or over."""

        def report(owner: Owner) -> None:
            if owner != self._reported:
                waiting(owner)
                self._reported = owner

        try:
            if self._seats:
                self._seats.announce()
            begun = self._now()
            end, sign = end_of_chain(self._bucket)
            now = self._now()
            # Where this server may become the owner, it names no other one: those that name
            # each other would send callers in a circle.
            if end == 0 or (sign and self._is_free(sign)):
                report(NO_OWNER)
                self._take(end + 1)
            elif sign and sign.nonce == self._sign.nonce:
                self._took(end, self._first_sent[1])  # its answer was lost
            else:
                lasts = sign.seconds if sign else self._seconds
                if end != self._seen[0] or now - begun > lasts / _BEATS:
                    # Where requests are slow, the owner may be alive and slow as well.
                    self._seen = (end, now)
                    report(self._owner(sign))
                elif now - self._seen[1] >= lasts:
                    name = self._owner(sign).name or "the server for which it was freed"
                    log.warning("the lease of %s is over", name)
                    report(NO_OWNER)
                    self._take(end + 1)
            self._unavailable = False
        except Unavailable as error:
            self._seen = (-1, 0.0)
            if not self._unavailable:
                log.warning("%s; retrying", error)
                self._unavailable = True

    def _is_free(self, sign: Sign) -> bool:
        """Whether this server may take the lease at once."""
        return sign.free and sign.heir in ("", self._seats.server if self._seats else "")

    def _owner(self, sign: Sign | None) -> Owner:
        """Return the owner that the end of the chain names."""
        if sign is None:
            return Owner("an owner that cannot be read")
        if sign.free:
            return NO_OWNER
        # At the own address, the owner is an earlier life of this server.
        return Owner(sign.name, "" if sign.address == self._sign.address else sign.address)

    def _take(self, number: int) -> None:
        if self._first_sent[0] != number:
            self._first_sent = (number, self._now())
        if not self._bucket.create(key(number), self._sign.pack()):
            return
        # In a hole, where the owner has deleted an old sign of life, nothing was taken.
        if end_of_chain(self._bucket)[0] == number:
            self._took(number, self._first_sent[1])

    def _took(self, number: int, sent_at: float) -> None:
        self._end, self._until = number, sent_at + _OWN_SHARE * self._seconds

    # ------------------------------------------------------------------ keeping

    def _renew(self) -> None:
        late = False
        while True:
            # Of an attempt with an unknown outcome, the time may be over before the next sign.
            self._pause(0.1 if not late and not self.held else 1.0)
            if self._ended or self.lost:
                return
            try:
                self.beat()
            except RouteTraceError as error:
                if not late:
                    log.warning("the lease cannot be renewed: %s; retrying", error)
                late = True
                continue
            if late and not self.lost:
                log.warning("the lease is renewed again")
                late = False

    def beat(self, sign: Sign | None = None) -> None:
        """Add the next object of the chain."""
        number, now = self._end + 1, self._now()
        if self._first_sent[0] != number:
            self._first_sent = (number, now)
        sign = sign or self._sign
        if self._bucket.create(key(number), sign.pack()):
            self._took(number, now)
        else:
            owner = Sign.parse(self._bucket.get(key(number)))
            if owner is None or owner.nonce != sign.nonce:
                self.lose(owner.name if owner else "one that cannot be read")
                return
            self._took(number, self._first_sent[1])
        self._mine.append(number)

    def _tend(self) -> None:
        while True:
            self._pause()
            if self._ended or self.lost:
                return
            with contextlib.suppress(RouteTraceError):  # the next round tries again
                self.tend()

    def tend(self) -> None:
        """Do what no sign of life may wait for: delete old ones, and look for an heir."""
        while len(self._mine) > _KEPT:
            self._bucket.delete([key(self._mine[0])])
            self._mine.popleft()
        if self._seats and not self._heir:
            self._heir = self._seats.heir()
            if self._heir:
                log.info("handing over to %s, which has fewer partitions", self._heir)
                self.on_heir()

    def _pause(self, share: float = 1.0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.lost, share * self._seconds / _BEATS)

    def lose(self, name: str) -> None:
        """Note that this server does not own the log any more."""
        with self._changed:
            if self.lost or self._ended:
                return
            self.lost = True
            self._changed.notify_all()
        log.error("another server owns the store now: %s; this one stops serving", name)
        self.on_lost()

    def release(self) -> None:
        """Give the lease back, or stop waiting for it; idempotent."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if not self._end or self.lost:
            return
        try:
            self.beat(replace(self._sign, free=True, heir=self._heir))
        except RouteTraceError as error:
            seconds = self._seconds
            log.warning("the lease cannot be released and ends in %g s: %s", seconds, error)
