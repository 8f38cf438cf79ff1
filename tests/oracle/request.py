"""A request as its engine sees it, and what one shard is told of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle.truth import Attempt, Record
from oracle.world import Shard, Sink


@dataclass(eq=False)
class Request:
    """A request as its engine sees it."""

    request_id: str
    trace_id: str
    prompt: list[int]
    max_tokens: int
    given: list[int] = field(default_factory=list)
    """Tokens behind the prompt that another engine sampled."""
    remote: int = 0
    """Leading tokens whose KV another engine computed and hands over."""
    source: Request | None = None
    """The request whose KV that is; None: nobody knows."""
    takes: str | None = None
    """The transfer id that its begin gives."""
    gives: str | None = None
    """The transfer id that it ends with."""
    fails: bool = False
    """Whether some of that KV does not come, and is computed after all."""
    says: list[int] = field(default_factory=list)
    """What it samples; by chance behind that."""
    continues: Request | None = None
    """The request whose sampled tokens are in its prompt, the last of them."""
    end: str = ""
    """Reason of a normal end; "stop" or "length" by chance if empty."""
    outcome: str = field(init=False, default="")
    """"", a finish reason, or "crash"."""
    tokens: list[int] = field(init=False)
    """That the scheduler knows."""
    computed: int = field(init=False, default=0)
    """Leading tokens that are computed, as far as the scheduler knows."""
    ahead: list[int] = field(init=False)
    """Tokens that the device knows: those of a step in flight too."""
    ahead_computed: int = field(init=False, default=0)
    record: Record | None = field(init=False, default=None)
    blocks: list[int] = field(init=False, default_factory=list)
    nodes: list[int] = field(init=False, default_factory=list)
    """Prefix cache nodes of the leading full blocks."""
    drafts: list[tuple[int, int, int]] = field(init=False, default_factory=list)
    """(position, row, rank) that were told, and that nothing confirmed."""
    running: bool = field(init=False, default=False)
    last_twin_step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.given]
        self.ahead = self.tokens

    @property
    def most(self) -> int:
        """Tokens that it stops at."""
        return len(self.prompt) + self.max_tokens

    @property
    def attempt(self) -> Attempt:
        assert self.record is not None
        return self.record.attempts[-1]


class Line:
    """What one shard is told: in its own order, sometimes later than others."""

    def __init__(self, sink: Sink, shard: Shard, columns: list[int]) -> None:
        self.sink = sink
        self.shard = shard
        self.columns = columns
        self._queue: deque[Callable[[], Any]] = deque()
        self._handles: dict[Request, int] = {}
        self.steps: dict[int, int] = {}
        """Number of an engine's step -> what the sink calls it."""

    def deliver(self, most: int | None = None) -> None:
        """Tells what waits."""
        while self._queue and most != 0:
            self._queue.popleft()()
            most = None if most is None else most - 1

    def __len__(self) -> int:
        return len(self._queue)

    def tell(self, method: str, *args: Any) -> None:
        """Something about the engine."""
        self._queue.append(lambda: getattr(self.sink, method)(*args))

    def begin(self, request: Request, **named: Any) -> None:
        def call() -> None:
            self._handles[request] = self.sink.begin(request.request_id, **named)

        self._queue.append(call)

    def about(self, method: str, request: Request, *args: Any, **named: Any) -> None:
        """Something about a request."""
        self._queue.append(
            lambda: getattr(self.sink, method)(self._handles[request], *args, **named)
        )

    def rewind(self, request: Request, position: int, step: int) -> None:
        """Rows of an engine's step were rejected; 0: those of the last one."""

        def call() -> None:
            self.sink.rewind(self._handles[request], position, step=self.steps[step] if step else 0)

        self._queue.append(call)

    def step(self, step: int, rows: np.ndarray, runs: list[tuple[Request, int, int]]) -> None:
        def call() -> None:
            table = [(self._handles[request], start, n) for request, start, n in runs]
            number = self.sink.step(rows, np.array(table, np.int64).reshape(-1, 3))
            if number:
                self.steps[step] = number

        self._queue.append(call)

    def skip(self, step: int, runs: list[tuple[Request, int, int]]) -> None:
        def call() -> None:
            table = [(self._handles[request], start, n) for request, start, n in runs]
            if number := self.sink.skip(np.array(table, np.int64).reshape(-1, 3)):
                self.steps[step] = number

        self._queue.append(call)

    def step_slots(self, step: int, rows: np.ndarray, slots: np.ndarray) -> None:
        def call() -> None:
            self.steps[step] = self.sink.step_slots(rows, slots)

        self._queue.append(call)
