"""Clients in a forked child.

A channel that was used before a fork does not work in the child, and closing it there would end
the parent's connection. So the child keeps it unclosed, and opens its own at the first call.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from routetrace.common.forks import keep_grpc_up


class Forkable(Protocol):
    """Object that must start over in a forked child."""

    def _start_over(self) -> Any:
        """Replace the parent's channel and locks; return objects that must stay alive."""


_all: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def start_over_after_fork(client: Forkable) -> None:
    """Call `_start_over` in every forked child, for the lifetime of the client."""
    _all.add(client)
    keep_grpc_up()


def _after_fork() -> None:
    _inherited.extend([client._start_over() for client in _all])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
