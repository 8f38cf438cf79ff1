"""The oracle's world of one run that lies in all workers of a server, each of which restarts alone.

Engines are shared out by the product's placement; the client asks any worker, as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from oracle.harness import RUN, InlineWorld, _Server
from routetrace.common.layout import ModelLayout
from routetrace.server.access.partition import Partition
from routetrace.server.common.slices import at_once
from routetrace.server.core import Core
from routetrace.server.index import journal as journal_module
from routetrace.server.store.memory import MemoryStore

_WORKERS = 3


class _Others:
    """The other workers, called in this thread; messages are serialized on the way."""

    def __init__(self, world: ShardedWorld, own: int) -> None:
        self._world = world
        self.numbers: Sequence[int] = [n for n in range(_WORKERS) if n != own]

    def address(self, _: int) -> str:
        return ""

    async def call(self, worker: int, method: str, request: Any, response: Any) -> Any:
        await self._world.on_call(worker, method)
        handler, kind = self._world.servers[worker].core.parts.methods[method]
        answer = await handler(kind.FromString(request.SerializeToString()))
        return response.FromString(answer.SerializeToString())


class ShardedWorld(InlineWorld):
    """The code of every stop in one thread, with a worker for each partition."""

    name = "inline"
    stand_ins = False

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self._stores = [MemoryStore() for _ in range(_WORKERS)]
        self.servers: list[_Server] = []
        super().__init__(layout, seed)
        self.counts["sent on"] = 0

    async def on_call(self, worker: int, method: str) -> None:
        """Called before one worker asks another; may raise Unavailable."""

    def _start(self) -> None:
        for number in range(_WORKERS):
            self._start_worker(number)
        self.server = self.servers[0]

    def _start_worker(self, number: int) -> None:
        with patch.object(journal_module, "Clock", lambda: self._server_clock):
            core = Core(
                self._stores[number],
                self._config.model_copy(update={"forbid_prefix_rows": ["*"]}),
                Partition(number, _WORKERS, 1, spread=(RUN,)),
                workers=_Others(self, number),
            )
        self.servers[number:] = [_Server(self._loop, core), *self.servers[number + 1 :]]

    def rest(self) -> None:
        for server in self.servers:
            server.run(server.rest())

    def server_of(self, engine_id: str) -> _Server:
        return self.servers[Partition(0, _WORKERS, spread=(RUN,)).of(RUN, engine_id)]

    def asked(self, request: Any, worker: str) -> _Server:
        if worker:
            self.counts["sent on"] += 1
            return self.servers[int(worker[1:]) - 1]
        engine_id = getattr(request, "engine_id", "")
        return self.server_of(engine_id) if engine_id else self.rng.choice(self.servers)

    def disturb(self) -> None:
        self._server_clock.advance(0.001)
        if self.rng.random() < 0.003:
            self.restart(snapshot=self.rng.random() < 0.5)
        elif self.rng.random() < 0.02:
            server = self.rng.choice(self.servers)
            server.run(server.core.sweep())

    def bind(self, *args: Any) -> None:
        self._server_clock.advance(0.001)
        super().bind(*args)

    def barrier(self) -> None:
        super().barrier()
        self._server_clock.advance(0.001)  # what arrives afterwards arrives later

    def restart(self, *, snapshot: bool) -> None:
        """One worker starts over, from what its store holds."""
        number = self.rng.randrange(_WORKERS)
        server = self.servers[number]
        for agent in self.agents.values():
            if agent._link.sender.server is server:
                agent._link.sender.hang_up()
        if snapshot:
            covered, data = at_once(server.core.journal.snapshot())
            self._stores[number].compact((covered, data), ())
            self.counts["snapshots"] += 1
        self._start_worker(number)
        self.counts["server restarts"] += 1
