"""Time of the event loop, shared between the owners of calls.

A call costs the loop up to some milliseconds a step: to begin, and to hand each message over to
gRPC, which encrypts and writes it at once. The loop runs what is ready in order of arrival, so
hundreds of calls of one owner would delay each step of another's by a second. Here, an owner that
has used its share waits instead, for as long as others are active; one alone never waits.

On a server without tokens, the run of a call is not known until its message is parsed. Until then
the work belongs to `UNKNOWN_OWNER`, which takes its share as any other, but leaves a run alone: it
may be that run's own work.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, thread_time
from typing import Any
from weakref import WeakValueDictionary

from routetrace.server.common.slices import Turns

#: Owner of calls whose run is not known yet, on a server without tokens.
UNKNOWN_OWNER = "callers"

#: Seconds without a step after which an owner does not count as active.
ACTIVE_SECONDS = 1.0

#: Part of the loop's time that all active owners get together; the rest is for what is not counted:
#: agents, and the server's own work.
_STEPS_SHARE = 0.8

#: Seconds over which the use of an owner is averaged.
_USE_SECONDS = 0.25

#: Multiple of its use that is reserved for each other owner; an owner may use the rest. One that
#: waits for each answer uses less the slower it becomes; it must be able to use more.
_RESERVED = 2.0

#: Maximum seconds until the wait of an owner is reckoned again: others may use less by then.
_LOOK_AGAIN_SECONDS = _USE_SECONDS

#: Seconds that an owner may use at once, after a pause.
_BURST_SECONDS = 0.005

#: Processor seconds of gRPC itself, beside the steps: for a call, and for a byte of its messages
#: (TLS and HTTP/2). Measured over loopback.
CALL_SECONDS = 0.25e-3
SECONDS_PER_BYTE = 2e-9

#: Processor seconds of a step beyond which it counts twice: it delays each step of the others.
LONG_STEP_SECONDS = 0.002

#: Maximum seconds that an owner owes while others are active, and that one which was alone owes
#: once another becomes active.
LONGEST_DEBT_SECONDS = 0.1
ALONE_DEBT_SECONDS = 0.02


@dataclass(slots=True)
class _Account:
    """Loop time of one owner."""

    owner: str
    at: float
    """Time up to which the credit is reckoned."""
    seen: float
    """Time of the last step, or attempt."""
    turns: Turns
    """Slices of its long work."""
    credit: float = _BURST_SECONDS
    """Seconds that the owner may use; below zero, its steps wait."""
    used: float = 0.0
    """Seconds used in about the last `_USE_SECONDS`."""
    stepping: set[asyncio.Task[Any] | None] = field(default_factory=set)
    """Tasks that step in this round of the loop, and are not counted yet."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Steps that wait; an owner that has any is active."""
    timer: asyncio.TimerHandle | None = None
    """Timer of the first of them."""


class Pace:
    """Steps of calls by owner. All calls belong to one event loop.

    Args:
        now: clock in seconds.
        spent: processor seconds of the loop's thread: on a busy machine it may be off the processor
            in the middle of a step.
    """

    def __init__(
        self, now: Callable[[], float] = monotonic, spent: Callable[[], float] = thread_time
    ) -> None:
        self._now = now
        self._spent = spent
        #: Accounts of active owners, the least recently seen one first.
        self._accounts: dict[str, _Account] = {}
        #: Seconds that all of them used in about the last `_USE_SECONDS`, as of `_used_at`.
        self._used = 0.0
        self._used_at = 0.0
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()
        self._stepped: list[_Account] = []
        #: Time, and processor time, at which the steps of this round began.
        self._began_at = 0.0
        self._began = 0.0

    @property
    def waiting(self) -> dict[str, int]:
        """Steps that wait, by owner."""
        return {owner: len(a.waiting) for owner, a in self._accounts.items() if a.waiting}

    async def step(self, owner: str) -> None:
        """Wait until the owner may use the loop; count its time until the caller's next wait.

        The steps of one owner go on in order of arrival. Those of a task that does not wait between
        them are one, for as long as the loop's round takes no longer than `LONG_STEP_SECONDS`.
        """
        now, task = self._now(), asyncio.current_task()
        account = self._account(owner, now)
        if task in account.stepping and now - self._began_at < LONG_STEP_SECONDS:
            return
        if not self._alone():
            self._refill(account, now)
            if account.waiting or account.stepping or account.credit < 0:
                await self._turn(account)
        self._count(account, task)

    def turns(self, owner: str) -> Turns:
        """Return the slices of an owner's long work, each of which is a step."""
        return self._account(owner, self._now()).turns

    def _turns_of(self, owner: str) -> Turns:
        """Return the one Turns of an owner: calls may hold it for longer than its account lasts."""
        turns = self._turns.get(owner)
        if turns is None:
            turns = Turns(partial(self.step, owner), self._alone)
            self._turns[owner] = turns
        return turns

    def _alone(self) -> bool:
        """Whether at most one known owner is active."""
        return len(self._accounts) - (UNKNOWN_OWNER in self._accounts) < 2

    def charge(self, owner: str, seconds: float) -> None:
        """Count time that an owner has used, beside its steps: its next steps wait for it."""
        now = self._now()
        account = self._account(owner, now)
        self._refill(account, now)
        self._owe(account, seconds)

    def _owe(self, account: _Account, seconds: float) -> None:
        most = ALONE_DEBT_SECONDS if self._alone() else LONGEST_DEBT_SECONDS
        account.credit = max(min(-most, account.credit), account.credit - seconds)
        account.used += seconds
        self._used += seconds

    def _account(self, owner: str, now: float) -> _Account:
        """Return the account of an active owner, after those that are not active any more."""
        account = self._accounts.pop(owner, None)
        while self._accounts:
            first = next(iter(self._accounts.values()))
            if now - first.seen < ACTIVE_SECONDS:
                break
            del self._accounts[first.owner]
            if first.waiting:
                first.seen = now
                self._accounts[first.owner] = first
        if account is None:
            account = _Account(owner, now, now, self._turns_of(owner))
        if not self._accounts:  # nothing stays of the use of others, or of rounding
            self._used, self._used_at = account.used, account.at
        account.seen = now
        self._accounts[owner] = account
        return account

    def _refill(self, account: _Account, now: float) -> None:
        seconds = now - account.at
        account.used *= math.exp(-seconds / _USE_SECONDS)
        self._used *= math.exp(-(now - self._used_at) / _USE_SECONDS)
        account.at = self._used_at = now
        account.credit = min(_BURST_SECONDS, account.credit + seconds * self._rate(account))

    def _rate(self, account: _Account) -> float:
        """Return the seconds of credit that an owner gets in a second: at least an equal part.

        The account must be reckoned up to now.
        """
        equal = _STEPS_SHARE / max(1, len(self._accounts))
        others = max(0.0, self._used - account.used)
        return max(equal, _STEPS_SHARE - _RESERVED * others / _USE_SECONDS)

    async def _turn(self, account: _Account) -> None:
        """Wait for the credit that earlier steps of the owner leave."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account.waiting.append(waiter)
        self._wake_later(account)
        try:
            await waiter
        except BaseException:
            if waiter in account.waiting:
                account.waiting.remove(waiter)
                if account.timer is not None and not account.waiting:
                    account.timer.cancel()
                    account.timer = None
            else:
                self._wake_later(account)  # cancelled just after it got its turn
            raise

    def _wake_later(self, account: _Account) -> None:
        """Wake the next step of an owner once it has credit."""
        if account.timer is not None or account.stepping or not account.waiting:
            return
        self._refill(account, self._now())
        seconds = 0.0 if self._alone() else max(0.0, -account.credit / self._rate(account))
        then = self._wake
        if seconds > _LOOK_AGAIN_SECONDS:
            seconds, then = _LOOK_AGAIN_SECONDS, self._look_again
        account.timer = asyncio.get_running_loop().call_later(seconds, then, account)

    def _look_again(self, account: _Account) -> None:
        """Reckon again when an owner has credit, without those that are not active any more."""
        account.timer = None
        self._account(account.owner, self._now())
        self._wake_later(account)

    def _wake(self, account: _Account) -> None:
        account.timer = None
        now = self._now()
        self._account(account.owner, now)
        self._refill(account, now)
        while account.waiting:
            waiter = account.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _count(self, account: _Account, task: asyncio.Task[Any] | None) -> None:
        """Count the time until the loop's next round as that of the steps in this one."""
        if not self._stepped:
            self._began_at, self._began = self._now(), self._spent()
            asyncio.get_running_loop().call_soon(self._counted)
        account.stepping.add(task)
        self._stepped.append(account)

    def _counted(self) -> None:
        now, took = self._now(), self._spent() - self._began
        stepped, self._stepped = self._stepped, []
        part = took / len(stepped)
        for account in stepped:
            self._refill(account, now)
            account.stepping.clear()
            self._owe(account, part + max(0.0, part - LONG_STEP_SECONDS))
        for account in stepped:
            self._wake_later(account)
