"""What simulated engines are, and what a harness gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Role = Literal["both", "prefill", "decode"]
Empties = Literal["declared", "told", "untold"]

MODEL = "0123456789abcdef"


class Sink(Protocol):
    """What an engine tells: the methods of a capture agent."""

    def begin(
        self,
        request_id: str,
        *,
        trace_id: str | None = None,
        prompt_len: int = 0,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: int = 0,
        num_computed_tokens: int = 0,
        num_external_tokens: int = 0,
        block_ids: Iterable[int] = (),
        prompt_token_ids: npt.ArrayLike | None = None,
        transfer_id: str | None = None,
    ) -> int: ...

    def add_blocks(self, handle: int, block_ids: Iterable[int]) -> None: ...

    def rewind(self, handle: int, position: int, *, step: int = 0) -> None: ...

    def preempt(self, handle: int, num_computed_tokens: int) -> None: ...

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        *,
        block_ids: Iterable[int] = (),
        num_external_tokens: int = 0,
        num_tokens: int | None = None,
    ) -> None: ...

    def finish(
        self,
        handle: int,
        num_tokens: int,
        *,
        reason: str = "stop",
        token_ids: npt.ArrayLike | None = None,
        transfer_id: str | None = None,
    ) -> None: ...

    def mark_external(self, block_ids: Iterable[int]) -> None: ...

    def copy_blocks(self, sources: Iterable[int], targets: Iterable[int]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def reset_external_kv(self) -> None: ...

    def set_weight_version(self, version: int | None) -> None: ...

    def step(self, rows: np.ndarray, runs: npt.ArrayLike) -> int: ...

    def skip(self, runs: npt.ArrayLike) -> int: ...

    def step_slots(self, rows: np.ndarray, slots: npt.ArrayLike) -> int: ...


@dataclass(frozen=True)
class Shard:
    """One part of an engine that has an agent of its own."""

    name: str
    layer_ids: tuple[int, ...]
    rank: int = 0
    """Among context-parallel ranks: positions are dealt to them."""
    size: int = 1


@dataclass(frozen=True)
class EngineSpec:
    """One engine: the owner of one KV cache."""

    engine_id: str
    block_size: int
    num_blocks: int
    shards: tuple[Shard, ...]
    """One Shard("", all layers) if it is not parallel."""
    chunk_tokens: int = 64
    """Most tokens of one forward pass."""
    max_running: int = 4
    draft_tokens: int = 0
    """Most draft tokens of speculative decoding."""
    asynchronous: bool = False
    """Whether the next step is scheduled before the outcome of this one is known."""
    tells_tokens: bool = True
    tells_versions: bool = True
    role: Role = "both"
    slot_only_twin: bool = False
    """Whether a second agent, of `engine_id` + "-slots", is told slots alone."""
    offload: bool = False
    """Whether evicted blocks may be loaded again from the CPU."""
    empties: Empties = "untold"
    """How agents learn that KV outside of its blocks is gone, where all of it is."""
    model: str = MODEL
    """Hash of the model; "" if its agents do not know it."""
    host_blocks: int = 0
    """Blocks of a host tier, of whose copies the agents are told; 0 beside a slot-only twin."""
    tells_had: bool = True
    """Whether a resume tells how many tokens the request has."""


class World(Protocol):
    """What engines need of their surroundings."""

    def connect(self, spec: EngineSpec, shard: Shard, boot_id: str) -> Sink:
        """A capture agent for one shard of one boot; an agent of an earlier boot is gone."""

    def crash(self, engine_id: str) -> None:
        """All agents of the engine are gone, without a goodbye.

        Data that was not acknowledged may or may not have reached the server.
        """

    def barrier(self) -> None:
        """Everything that was told so far is at the server once this returns."""

    def bind(
        self,
        engine_id: str,
        request_id: str,
        trace_id: str,
        block_ids: list[int],
        num_tokens: int,
        num_computed_tokens: int,
        step: int,
        token_ids: list[int] | None,
    ) -> None:
        """Names the request behind blocks that a slot-only agent filled.

        Args:
            engine_id: of the slot-only agent.
            request_id: the engine's name for it.
            trace_id: the trace that it becomes.
            block_ids: its blocks now, in order.
            num_tokens: tokens of the request.
            num_computed_tokens: leading tokens that a forward pass has computed.
            step: number of the last step_slots() that the request was in.
            token_ids: all its tokens, [num_tokens]; None where the engine tells none.
        """
