"""Sign-in: sessions in memory, their cookies, and the bound of wrong attempts."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from routetrace.common.errors import InvalidArgument, Unauthenticated
from routetrace.page.errors import TooManySignIns

#: Seconds that a session lasts.
LIFETIME_S = 43_200
_COOKIE_BYTES = 32
_MAX_SESSIONS = 1_000
_MAX_ADDRESSES = 1_000

#: Wrong sign-ins of an address, and seconds in which they count.
_MAX_WRONG = 5
_WRONG_S = 10.0


@dataclass(frozen=True)
class Caller:
    """Who a call is made for."""

    token: str = field(default="", repr=False)
    """Bearer token of each gRPC call; "" for callers without a session."""
    user: str = ""
    """Name of the token at the server."""
    run: str = ""
    """Run that the sign-in named, to ask the server with; "" if it named none."""
    expires: float | None = None
    """Unix time at which the session ends."""

    @property
    def digest(self) -> str:
        """Key of what only this token may see; "" without a token."""
        return hashlib.sha256(self.token.encode()).hexdigest() if self.token else ""


ANYBODY = Caller()


class Sessions:
    """Sessions by the digest of their cookie; a token is held here alone.

    Args:
        clock: Unix time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()

    def open(self, caller: Caller) -> str:
        """Begin a session of a caller; return the value of its cookie."""
        now = self._clock()
        for key in [key for key, one in self._callers.items() if (one.expires or 0) <= now]:
            del self._callers[key]
        while len(self._callers) >= _MAX_SESSIONS:
            self._callers.popitem(last=False)
        cookie = secrets.token_urlsafe(_COOKIE_BYTES)
        self._callers[_key(cookie)] = replace(caller, expires=now + LIFETIME_S)
        return cookie

    def find(self, cookie: str) -> Caller | None:
        """Return the caller of a cookie; None if its session has ended, or never was."""
        caller = self._callers.get(_key(cookie))
        if caller is None or (caller.expires or 0) <= self._clock():
            return None
        return caller

    def close(self, cookie: str) -> None:
        """End the session of a cookie."""
        self._callers.pop(_key(cookie), None)

    def end_all(self, token: str) -> None:
        """End the sessions of a token that is not valid any more."""
        for key in [key for key, one in self._callers.items() if one.token == token]:
            del self._callers[key]


class SignIns:
    """Bound of wrong sign-ins: 5 in 10 seconds from an address.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    @contextmanager
    def attempt(self, address: str) -> Iterator[None]:
        """Make one attempt in the block; it counts as wrong while it is not known to be right.

        Raises:
            TooManySignIns: if there were too many wrong ones.
        """
        now = self._clock()
        times = self._wrong.setdefault(address, deque())
        self._wrong.move_to_end(address)
        while times and times[0] <= now - _WRONG_S:
            times.popleft()
        if len(times) >= _MAX_WRONG:
            raise TooManySignIns(times[0] + _WRONG_S - now)
        times.append(now)
        while len(self._wrong) > _MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        try:
            yield
        except (Unauthenticated, InvalidArgument):
            raise
        except BaseException:  # the server is away, for example: nothing was guessed
            _forget(times, now)
            raise
        _forget(times, now)


def _forget(times: deque[float], at: float) -> None:
    with suppress(ValueError):  # it is too old to count
        times.remove(at)


def cookie_name(port: int, *, tls: bool) -> str:
    """Return the name of the cookie; two pages of one host do not end each other's sessions."""
    return f"{'__Host-' if tls else ''}routetrace-{port}"


def _key(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
