"""What an agent has to know, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.frame import MAX_FRAME_ROWS
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.security import Security

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
    """Where the background work runs. "process" keeps it off the engine's interpreter lock; with
    "thread" an os.fork() waits some ms for the connection to be closed, as it would not survive."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Free text for the server's logs: model name, host, software versions."""
    frame_rows: int = 256
    """Rows of one request that make a frame. More compress better, fewer arrive sooner."""
    linger_s: float = 1.0
    """Longest time that rows wait for their frame to fill up; where it is longer than
    flush_interval_s, that for its chunk is a part of it."""
    flush_interval_s: float = 0.1
    """Longest time that frames and events wait for their chunk to fill up."""
    security: Security | Mapping[str, Any] | None = None
    """TLS files and a token, also as a mapping of `Security`'s fields; None: what the environment
    says."""
    queue_bytes: int = 256 * _MIB
    """Most bytes of memory for what the server has not acknowledged, and for what is known of
    running requests; above seven eighths of it whole requests are dropped, newest first."""
    spill_dir: str = ""
    """Directory on a local disk for what exceeds half of queue_bytes; "": nothing goes to disk.
    The file in it has no name, and is gone with the process that holds it."""
    spill_bytes: int = 4 << 30
    """Most bytes in it."""
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
            ("spill_bytes", _MIB, 1 << 50),
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
        if self.spill_dir and not (
            os.path.isdir(self.spill_dir) and os.access(self.spill_dir, os.W_OK | os.X_OK)
        ):
            _refuse("spill_dir", self.spill_dir, "a directory that can be written to")
        object.__setattr__(self, "security", security_of(self.security))
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


def security_of(given: object) -> Security:
    """What a configuration says of security.

    Raises:
        InvalidArgument: naming the field that is wrong, never its value.
    """
    if given is None:
        return Security.from_environment()
    if isinstance(given, Security):
        return given
    types = {f.name: bool if isinstance(f.default, bool) else str for f in fields(Security)}
    names = ", ".join(types)
    if not isinstance(given, Mapping):
        _refuse("security", type(given).__name__, f"an object of {names}")
    for name, value in given.items():
        if name not in types:
            _refuse("security", f"with {name!r}", f"an object of {names}")
        if not isinstance(value, types[name]):
            _refuse(f"security.{name}", type(value).__name__, types[name].__name__)
    return Security(**given)


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise InvalidArgument(field=name, value=value, expected=expected)
