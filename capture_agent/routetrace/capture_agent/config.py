"""Configuration of an agent, checked when it is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args

from routetrace.codec import native
from routetrace.codec.frame import MAX_FRAME_ROWS
from routetrace.common.checks import choice, flag, instance, real, unknown_keyword, whole
from routetrace.common.errors import InvalidArgument, quoted, typed
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_BLOCK_SIZE, MAX_SLOTS, check_id, is_text
from routetrace.common.model_hash import model_number
from routetrace.common.security import Security
from routetrace.common.target import parse_target
from routetrace.common.values import Values

Background = Literal["process", "thread"]
FrameCodec = Literal["auto", "pack", "zstd"]

_MIB = 1 << 20

#: Variables of the environment by the field that they set; `Security` has its own.
_VARIABLES = {
    "target": "ROUTETRACE_TARGET",
    "run": "ROUTETRACE_RUN",
    "engine_id": "ROUTETRACE_ENGINE_ID",
}


def variable(environ: Mapping[str, str], name: str) -> str:
    """Return the value of a field in an environment; "", or the default run, without one."""
    return environ.get(_VARIABLES[name]) or ("default" if name == "run" else "")


@dataclass(frozen=True)
class AgentConfig(Values):
    """Settings of a `CaptureAgent`.

    Raises:
        InvalidArgument: naming the first field that is out of bounds.
    """

    target: str
    """host:port of the server, or host (port 7411); several with commas between, of which one
    serves; ROUTETRACE_TARGET of the environment if empty."""
    engine_id: str
    """Owner of one KV cache: one data-parallel rank. Unique within the run."""
    layout: ModelLayout
    """Columns of every row."""
    run: str = ""
    """Training job; the environment's ROUTETRACE_RUN if empty, and "default" without that."""
    shard: str = ""
    """Part of the engine that this agent covers ("pp1", "cp0"); "" for the whole engine."""
    boot_id: str = ""
    """Id of one boot of the engine: equal at all its shards, new after a restart. Required with
    `shard`, since the server joins shards by it; else each agent generates one. An agent that takes
    over within a boot needs its `predecessor`, or `index` of each begin()."""
    block_size: int = 0
    """Tokens per KV block of the full-attention group; 0 if slots are not reported."""
    num_blocks: int = 0
    """Blocks in the pool; required with block_size. block_size * num_blocks is at most 2**25."""
    background: Background = "process"
    """Place of framing and sending. "process" keeps it off the engine's interpreter lock; with
    "thread" an os.fork() waits some ms until the connection is closed, since it would not
    survive."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Free text for the server's logs: model name, host, software versions."""
    frame_rows: int = 256
    """Rows of one request per frame. More compress better, fewer arrive sooner."""
    codec: FrameCodec = "auto"
    """Encoding of frames: "pack" takes ceil(log2 num_experts) bits for an id and little CPU, "zstd"
    up to 16 % fewer bytes in frames of 256 rows; "auto" is pack below 256 rows or up to 8 experts,
    else zstd."""
    linger_seconds: float = 30.0
    """Longest time that rows of a running request wait for their frame to fill; includes the wait
    for their chunk if it exceeds flush_interval_seconds. At most 1 s while a reader waits for such
    rows, and for rows that come with slots alone."""
    flush_interval_seconds: float = 1.0
    """Longest time that frames and events wait for their chunk to fill; at most 0.1 s while a
    reader waits for them. A chunk is sent at once when the last running request has ended."""
    security: Security | Mapping[str, Any] | None = None
    """TLS files and a token, also as a mapping of `Security`'s fields; None: from the
    environment."""
    queue_bytes: int = 256 * _MIB
    """Most bytes of memory for rows and ops that are not acknowledged and for the state of live
    requests; above seven eighths of it whole requests are dropped, newest first."""
    spill_dir: str | os.PathLike[str] | None = None
    """Directory on a local disk for chunks beyond half of queue_bytes; None disables spilling. The
    file in it has no name, and vanishes with its process."""
    spill_bytes: int = 4 << 30
    """Most bytes in `spill_dir`."""
    ring_bytes: int = 64 * _MIB
    """Memory between the engine and the background; rows that do not fit are dropped."""
    close_timeout_seconds: float = 10.0
    """Time to send the rest, where close() has no timeout or the engine ends without it; counted
    from when the background works."""
    model: str = ""
    """Hash of the model that the engine runs, from `routetrace.common.model_hash`; "": unknown."""
    external_kv_emptied: bool = False
    """Whether no store of KV outside of engines' blocks holds KV of other weights than a pass that
    may load it: the deployment empties them at each weight update, and engines that share one do
    not run with different weights. Rows can stand in for KV of such a store."""
    num_host_blocks: int = 0
    """Blocks of the engine's own host tier, in which it keeps copies of KV (`copy_blocks`): numbers
    num_blocks and up. Beside num_blocks they count for its limit."""

    def __post_init__(self) -> None:
        for name in ("target", "run"):
            if _unset(getattr(self, name)):
                object.__setattr__(self, name, variable(os.environ, name))
        object.__setattr__(self, "target", parse_target(self.target))
        instance("layout", self.layout, ModelLayout, "use ModelLayout.from_config(config)")
        for name in ("run", "engine_id"):
            check_id(name, getattr(self, name))
        check_id("shard", self.shard, required=False)
        check_id("boot_id", self.boot_id, required=False)
        if self.shard and not self.boot_id:
            expected = f"an id, required with shard={self.shard!r}"
            _refuse("boot_id", "''", expected, "give the same id at all shards")
        model_number("model", self.model)
        flag("external_kv_emptied", self.external_kv_emptied)
        choice("background", self.background, get_args(Background))
        choice("codec", self.codec, get_args(FrameCodec))
        native.require()
        for name, low, high in (
            ("block_size", 0, MAX_BLOCK_SIZE),
            ("num_blocks", 0, (1 << 32) - 1),
            ("num_host_blocks", 0, (1 << 32) - 1),
            ("frame_rows", 1, MAX_FRAME_ROWS),
            ("queue_bytes", _MIB, 1 << 50),
            ("spill_bytes", _MIB, 1 << 50),
            ("ring_bytes", _MIB, 1 << 40),
        ):
            remedy = "sizes as text only on the command line" if name.endswith("_bytes") else ""
            whole(name, getattr(self, name), low, high, remedy=remedy)
        for name, least, most in (
            ("linger_seconds", 0, 3600),
            ("flush_interval_seconds", 0.001, 60),
            ("close_timeout_seconds", 0, 3600),
        ):
            real(name, getattr(self, name), least, most, "seconds")
        if (self.block_size == 0) != (self.num_blocks == 0):
            _refuse(
                "num_blocks",
                self.num_blocks,
                f"0 exactly if block_size is 0; block_size is {self.block_size}",
            )
        if self.num_host_blocks and not self.block_size:
            _refuse("num_host_blocks", self.num_host_blocks, "0, as block_size is 0")
        for name, others in (("num_blocks", 0), ("num_host_blocks", self.num_blocks)):
            count = getattr(self, name)
            if self.block_size * (others + count) > MAX_SLOTS:
                most = MAX_SLOTS // self.block_size - others
                _refuse(name, count, f"at most {most} blocks of {self.block_size} tokens")
        # At least four rows must fit, since one record takes at most half of the ring.
        if self.ring_bytes < 16 * self.layout.row_bytes:
            _refuse("ring_bytes", self.ring_bytes, f"16 rows of {self.layout.row_bytes} bytes")
        object.__setattr__(self, "spill_dir", _directory("spill_dir", self.spill_dir))
        object.__setattr__(self, "security", Security.of(self.security))
        # A plain dict, which can be pickled for another process.
        object.__setattr__(self, "attributes", _texts("attributes", self.attributes))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> AgentConfig:
        """Return the configuration of an environment.

        Args:
            environ: variables: $ROUTETRACE_TARGET, $ROUTETRACE_RUN, $ROUTETRACE_ENGINE_ID and those
                of `Security.from_environment`; the process' environment if None.
            **overrides: fields that win over the environment.

        Raises:
            InvalidArgument: naming a variable that is wrong, or a field that does not exist, is
                missing or wrong.
        """
        return config_of("AgentConfig.from_env", overrides, environ)

    @property
    def num_slots(self) -> int:
        """Slots of the engine's blocks; 0 if they are not reported."""
        return self.block_size * self.num_blocks

    @property
    def all_blocks(self) -> int:
        """Blocks of the engine and of its host tier."""
        return self.num_blocks + self.num_host_blocks


def config_of(
    call: str, given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> AgentConfig:
    """Return the configuration of fields, and of the environment for those that are not set.

    Args:
        call: name of the public call, for errors.
        given: fields.
        environ: variables; the process' environment if None.

    Raises:
        InvalidArgument: as `AgentConfig.from_env`.
    """
    known = [item.name for item in fields(AgentConfig)]
    for name in given:
        if name not in known:
            raise unknown_keyword(call, name, known)
    environ = os.environ if environ is None else environ
    if not isinstance(environ, Mapping):
        _refuse("environ", typed(environ), "a mapping of str to str")
    complete = {**given}
    for name in _VARIABLES:
        if _unset(given.get(name)) and (found := variable(environ, name)):
            complete[name] = found
    # A configuration without them asks the process' environment, which may be another.
    complete["target"] = parse_target(complete.get("target", ""))
    if complete.get("security") is None:
        complete["security"] = Security.from_environment(environ)
    for name, expected, remedy in (
        ("engine_id", "a name", f"pass engine_id= or set {_VARIABLES['engine_id']}"),
        ("layout", "ModelLayout", "use ModelLayout.from_config(config)"),
    ):
        if name not in complete:
            _refuse(name, "not set", expected, remedy)
    return AgentConfig(**complete)


def _unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _directory(name: str, value: Any) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        _refuse(name, typed(value), "str, a path or None")
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        remedy = "" if path else "leave it out, or give None, to keep chunks in memory"
        _refuse(name, quoted(path), "a directory that can be written to", remedy)
    return path


def _texts(name: str, value: Any) -> dict[str, str]:
    texts: dict[str, str] = dict(value) if isinstance(value, Mapping) else {"": ""}
    if "" in texts or not all(map(is_text, (*texts, *texts.values()))):
        _refuse(name, value, "a mapping of strings to strings, with keys that are not empty")
    return texts


def _refuse(name: str, value: object, expected: str, remedy: str = "") -> NoReturn:
    raise InvalidArgument(field=name, value=value, expected=expected, remedy=remedy)
