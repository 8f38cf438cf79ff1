"""What an agent has to know, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.frame import MAX_FRAME_ROWS
from routetrace.v1.layout import RoutingLayout

Mode = Literal["process", "thread"]

MAX_ID_LENGTH = 512

_MIB = 1 << 20


@dataclass(frozen=True)
class AgentConfig:
    """Settings of a `CaptureAgent`.

    Raises:
        InvalidArgument: naming the first field that is out of bounds.
    """

    target: str
    """host:port of the server; the environment's ROUTETRACE_TARGET if empty."""
    engine_id: str
    """Owner of one KV cache: one data-parallel rank. Unique within the run."""
    layout: RoutingLayout
    """Columns of every row."""
    run: str = ""
    """Training job; the environment's ROUTETRACE_RUN if empty, and "default" without that."""
    shard: str = ""
    """Part of the engine that this agent sees ("pp1", "cp0"); "" if it sees all of it."""
    boot_id: str = ""
    """Names one boot of the engine: the same at all its shards, another one after a restart. Needed
    where shard is given, since the server joins shards by it; else each agent makes one up."""
    block_size: int = 0
    """Tokens per KV block of the full-attention group; 0: this engine does not tell its slots."""
    num_blocks: int = 0
    """Blocks in the pool; needed if block_size is given."""
    mode: Mode = "process"
    """Where the background work runs. "process" keeps it off the engine's interpreter lock."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Free text for the server's logs: model name, host, software versions."""
    frame_rows: int = 256
    """Rows of one request that make a frame. More compress better, fewer arrive sooner."""
    linger_s: float = 1.0
    """Longest time that rows wait for their frame to fill up."""
    flush_interval_s: float = 0.1
    """Longest time that frames and events wait for their chunk to fill up."""
    queue_bytes: int = 256 * _MIB
    """Most bytes to hold that the server has not acknowledged; beyond it whole requests are
    dropped, newest first."""
    ring_bytes: int = 64 * _MIB
    """Memory between the engine and the background; what does not fit into it is dropped."""
    close_timeout_s: float = 10.0
    """Time to send what is left, where close() is not given one or the engine just ends."""

    def __post_init__(self) -> None:
        for name, variable, default in (
            ("target", "ROUTETRACE_TARGET", ""),
            ("run", "ROUTETRACE_RUN", "default"),
        ):
            object.__setattr__(
                self, name, getattr(self, name) or os.environ.get(variable) or default
            )
        if not self.target:
            _refuse("target", self.target, "host:port, here or in ROUTETRACE_TARGET")
        for name in ("run", "engine_id"):
            check_id(name, getattr(self, name))
        check_id("shard", self.shard, required=False)
        check_id("boot_id", self.boot_id, required=bool(self.shard))
        if self.mode not in get_args(Mode):
            _refuse("mode", self.mode, " or ".join(map(repr, get_args(Mode))))
        for name, low, high in (
            ("block_size", 0, 1 << 20),
            ("num_blocks", 0, (1 << 32) - 1),
            ("frame_rows", 1, MAX_FRAME_ROWS),
            ("linger_s", 0, 3600),
            ("flush_interval_s", 0.001, 60),
            ("queue_bytes", _MIB, 1 << 50),
            ("ring_bytes", _MIB, 1 << 40),
            ("close_timeout_s", 0, 3600),
        ):
            if not low <= getattr(self, name) <= high:
                _refuse(name, getattr(self, name), f"a number in [{low}, {high}]")
        if (self.block_size == 0) != (self.num_blocks == 0):
            _refuse(
                "num_blocks",
                self.num_blocks,
                f"0 exactly if block_size is 0; block_size is {self.block_size}",
            )
        # Four rows at least must fit, since one record takes half of the ring at most.
        if self.ring_bytes < 16 * self.layout.row_bytes:
            _refuse("ring_bytes", self.ring_bytes, f"16 rows of {self.layout.row_bytes} bytes")
        # A plain dict, so that the configuration can be handed to another process.
        object.__setattr__(self, "attributes", dict(self.attributes))

    @property
    def num_slots(self) -> int:
        """Slots of the engine; 0 if it does not tell them."""
        return self.block_size * self.num_blocks


def check_id(name: str, value: str, *, required: bool = True) -> None:
    """Raises InvalidArgument unless `value` is an id that the server takes."""
    if not isinstance(value, str) or len(value) > MAX_ID_LENGTH or (required and not value):
        _refuse(name, value, f"a string of {int(required)} to {MAX_ID_LENGTH} characters")


def _refuse(name: str, value: object, expected: str) -> None:
    raise InvalidArgument(field=name, value=value, expected=expected)
