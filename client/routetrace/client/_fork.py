"""What a forked child does with the clients of its parent.

A channel that was used before a fork does not work in the child, and closing it there would say
goodbye on the parent's connection. So the child puts it aside, unclosed, and makes its own at the
first call.

gRPC shuts itself down when its last channel goes, in a thread of its own, and a child that is
forked meanwhile hangs in its first call. So a process that had a client keeps a channel that nobody
uses.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

import grpc


class Forkable(Protocol):
    """Something that must start over in a forked child."""

    def _start_over(self) -> Any:
        """Forgets the parent's channel and locks; returns what must never be collected."""


_all: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []
_kept: list[grpc.Channel] = []


def start_over_after_fork(client: Forkable) -> None:
    """Calls `_start_over` in every forked child, for as long as the client lives."""
    _all.add(client)
    if not _kept:
        _kept.append(grpc.insecure_channel("localhost"))  # which connects at the first call


def _after_fork() -> None:
    _inherited.extend([client._start_over() for client in _all])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
