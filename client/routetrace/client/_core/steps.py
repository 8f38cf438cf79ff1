"""Steps of read plans.

A plan is a generator that yields steps and is sent their outcomes; a shell (`_shells`) carries them
out. A step that fails with a grpc.RpcError gets it thrown in.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from routetrace.common.errors import RouteTraceError

T = TypeVar("T")


@dataclass(frozen=True)
class Unary:
    """Call a method; its outcome is the response."""

    method: str
    request: Any
    timeout: float


@dataclass(frozen=True)
class Open:
    """Start a streaming call; its outcome is the call. A plan has one open at a time."""

    method: str
    request: Any
    timeout: float | None
    worker: str = ""
    """":port" or host:port of the worker to ask; "": any."""


@dataclass(frozen=True)
class Receive:
    """Take the next message of a call; its outcome is the message, or END."""

    call: Any


@dataclass(frozen=True)
class Sleep:
    """Wait before another attempt."""

    seconds: float
    failure: RouteTraceError
    """Reason of the attempt."""
    left: float
    """Seconds until the call gives up."""


@dataclass(frozen=True)
class Emit(Generic[T]):
    """Hand a value to the caller."""

    value: T


END: Any = object()

Step = Unary | Open | Receive | Sleep | Emit[T]
Plan = Generator[Step[T], Any, None]
Part = Generator[Step[Any], Any, T]
