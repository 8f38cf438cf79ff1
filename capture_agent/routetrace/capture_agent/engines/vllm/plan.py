"""Messages from the scheduler's half to the worker's half: the plan of a step and its events.

Plans are pickled with vLLM's SchedulerOutput where workers are separate processes. Bulk data
(blocks, tokens, spans) travels as bytes, which pickle fastest. Messages are not changed once made;
they are not frozen, since a frozen one takes six times as long to make, on the engine's thread.

A lane is a small number that stands for a request between the two halves. It is given to another
request only after the `Finish` of the first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt


class _Message:
    """Data that crosses processes: pickled as its class and values, the cheapest way."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), _VALUES[type(self)](self)


@dataclass(slots=True)
class Begin(_Message):
    """A captured request starts."""

    lane: int
    request_id: str
    trace_id: str
    prompt_len: int
    labels: Mapping[str, str]
    ttl_seconds: int
    num_computed_tokens: int
    num_external_tokens: int
    blocks: bytes
    """uint32, all its blocks."""
    prompt: bytes | None
    """uint32, for digests; None if token ids do not identify the model's input."""
    transfer_id: str | None = None
    """Hand-over that its external tokens came by; None: not known."""
    nonce: int | None = None
    """Names this request in handles; the same at all shards."""
    index: int | None = None
    """Captured requests before it. Workers do not count: one that starts over has missed some."""


@dataclass(slots=True)
class Ignore(_Message):
    """A request starts that is not captured: the contents of its blocks are not followed."""

    lane: int
    request_id: str
    num_computed_tokens: int
    """Leading tokens in the local cache, whose blocks stay known."""
    blocks: bytes


@dataclass(slots=True)
class AddBlocks(_Message):
    """Running requests get blocks: block i goes to lane i."""

    lanes: bytes
    """int32."""
    blocks: bytes
    """uint32."""


@dataclass(slots=True)
class Preempt(_Message):
    """A request loses its blocks; rows at or after `num_computed_tokens` do not count."""

    lane: int
    num_computed_tokens: int


@dataclass(slots=True)
class Resume(_Message):
    """A preempted request starts over."""

    lane: int
    num_computed_tokens: int
    blocks: bytes
    num_external_tokens: int
    num_tokens: int
    """Tokens that it has, prompt and answer; 0: not known."""


@dataclass(slots=True)
class Finish(_Message):
    """A request ends; its lane is free."""

    lane: int
    num_tokens: int
    reason: str
    tokens: bytes | None
    """uint32, prompt and output, for digests; None if unknown."""
    transfer_id: str | None = None
    """Hand-over by which another request takes its KV; None: none, or not known."""


@dataclass(slots=True)
class External(_Message):
    """Blocks are filled by something that is not followed."""

    blocks: bytes
    num_computed_tokens: int = 0
    """Leading tokens whose blocks stay known."""


@dataclass(slots=True)
class Reset:
    """The prefix cache was emptied."""

    external: bool
    """Whether every store of KV outside of the engine's blocks was, too."""


@dataclass(slots=True)
class StartOver:
    """The scheduler's half failed: requests that have begun are not captured any more."""


Event = Begin | Ignore | AddBlocks | Preempt | Resume | Finish | External | Reset | StartOver


@dataclass(slots=True)
class StepPlan(_Message):
    """One step, as the worker needs to know it."""

    events: list[Event] = field(default_factory=list)
    """Events before the step, in order."""
    spans: bytes = b""
    """int32 [3, m]: lane, first position and number of rows of every request of the step. The
    position is an upper bound where drafts of an earlier step were not judged yet."""
    num_tokens: int = 0
    """Rows of the step."""

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The spans, [m, 3]."""
        return np.frombuffer(self.spans, np.int32).reshape(3, -1).T


class Columns:
    """Lanes and counts of the requests of a step, which are the same in most steps."""

    __slots__ = ("count_bytes", "counts", "lane_bytes", "lanes", "num_tokens", "pack")

    def __init__(self, lanes: list[int], counts: list[int]) -> None:
        self.lanes, self.counts = np.array(lanes, np.int32), np.array(counts, np.int32)
        self.lane_bytes, self.count_bytes = self.lanes.tobytes(), self.counts.tobytes()
        self.num_tokens = sum(counts)
        #: Makes a column of positions; a third of the time that an array takes.
        self.pack = Struct(f"={len(lanes)}i").pack


_VALUES: dict[type[_Message], attrgetter[Any]] = {
    kind: attrgetter(*kind.__slots__)
    for kind in (Begin, Ignore, AddBlocks, Preempt, Resume, Finish, External, StepPlan)
}


def pack_blocks(block_ids: Iterable[int]) -> bytes:
    """Pack block ids for an event."""
    return array("I", block_ids).tobytes()


def unpack_blocks(blocks: bytes) -> list[int]:
    """Return the block ids of an event."""
    return array("I", blocks).tolist()


def unpack_tokens(tokens: bytes | None) -> npt.NDArray[np.uint32] | None:
    """Return the token ids of an event."""
    return None if tokens is None else np.frombuffer(tokens, np.uint32)
