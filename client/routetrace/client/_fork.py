"""What a forked child does with the clients of its parent.

A channel that was used before a fork does not work in the child, and closing it there would say
goodbye on the parent's connection. So the child puts it aside, unclosed, and makes its own at the
first call.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from routetrace.v1.forks import keep_grpc_up


class Forkable(Protocol):
    """Something that must start over in a forked child."""

    def _start_over(self) -> Any:
        """Forgets the parent's channel and locks; returns what must never be collected."""


_all: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def start_over_after_fork(client: Forkable) -> None:
    """Calls `_start_over` in every forked child, for as long as the client lives."""
    _all.add(client)
    keep_grpc_up()


def _after_fork() -> None:
    _inherited.extend([client._start_over() for client in _all])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
