"""Budgets: limits that owners share.

A budget has a dynamic threshold (Choudhury and Hahne, 1998): an owner may take more while it holds
no more than is free. One owner alone gets half, the next one half of the rest, and n owners whose
parts come and go 1 / (n + 1) each; so the next owner always finds room. An owner is a token, or a
run on a server without tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import Counter as Count

from routetrace.common.errors import Overloaded

#: Seconds after which a refused caller may come again.
RETRY_SECONDS = 0.5


class Budget:
    """One limit, and the parts of it by owner.

    Args:
        name: name of the setting.
        limit: maximum of all owners together.
        refused: counter of refusals, if the budget refuses.
        held: parts by owner, where something else counts them.
        remedy: part of a refusal, if there is one beside patience.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        refused: Count | None = None,
        held: Counter[str] | None = None,
        remedy: str = "",
    ) -> None:
        self.name = name
        self.limit = limit
        self._refused = refused
        self.held: Counter[str] = Counter() if held is None else held
        self._remedy = f" ({remedy})" if remedy else ""

    @property
    def used(self) -> int:
        """Parts of all owners."""
        return sum(self.held.values())

    @property
    def free(self) -> int:
        """Parts that no owner holds."""
        return self.limit - self.used

    def fits(self, owner: str, amount: int = 1) -> bool:
        """Whether an owner may hold this much more."""
        free = self.free
        return amount <= free and self.held[owner] <= free

    def share(self, owner: str) -> int:
        """Return the maximum that an owner may hold, one at a time, if all others keep theirs."""
        held, free = self.held[owner], self.free
        return held + max(0, free - held + 2) // 2 if free > 0 else held

    def check(self, owner: str, amount: int = 1) -> None:
        """Check that an owner may hold this much more.

        Raises:
            Overloaded: naming the limit, the owner and its part.
        """
        if self.fits(owner, amount):
            return
        if self._refused:
            self._refused.labels(self.name.removeprefix("max_")).inc()
        held = self.held[owner]
        raise Overloaded(
            f"the limit {self.name} = {self.limit} is reached: {owner} holds {held}, and may hold "
            f"as many as are free ({self.free}); retry later{self._remedy}",
            field=self.name,
            value=f"{held} of {owner}",
            expected=f"at most as many as are free of {self.limit}",
            retry_after=RETRY_SECONDS,
        )

    def take(self, owner: str, amount: int = 1) -> None:
        """Give a part to an owner."""
        self.held[owner] += amount

    def release(self, owner: str, amount: int = 1) -> None:
        """Take a part back."""
        self.held[owner] -= amount
        if not self.held[owner]:
            del self.held[owner]

    @contextmanager
    def hold(self, owner: str, amount: int = 1) -> Iterator[None]:
        """Hold a part for an owner.

        Raises:
            Overloaded: if it does not fit.
        """
        self.check(owner, amount)
        self.take(owner, amount)
        try:
            yield
        finally:
            self.release(owner, amount)


def over_shares(held: Mapping[str, int], need: int) -> dict[str, int]:
    """Return how much each owner gives back, `need` in all: the largest parts are cut to one level.

    No owner below the level gives anything.
    """
    parts = sorted(held.items(), key=lambda part: -part[1])
    taken = 0
    for count, (_, part) in enumerate(parts, 1):
        taken += part
        following = parts[count][1] if count < len(parts) else 0
        if taken - count * following >= need:
            break
    else:
        return {owner: part for owner, part in parts if part}
    level = (taken - need) // count
    return {owner: part - level for owner, part in parts[:count] if part > level}
