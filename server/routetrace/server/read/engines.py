"""Engines that are forgotten on request."""

from __future__ import annotations

from routetrace.common.errors import InvalidArgument, NotFound
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import encode_forget


async def forget_engine(agents: Agents, journal: Journal, run: str, engine_id: str) -> int:
    """Forget the writers of an engine; return their number.

    Raises:
        InvalidArgument: if one of its agents is connected.
        NotFound: if the run has no such engine.
    """
    engine = run, engine_id
    if any((key.run, key.engine_id) == engine for key in agents.connected):
        raise InvalidArgument(
            field="engine_id", value=engine_id, expected="an engine whose agents are disconnected"
        )
    writers = journal.state.writers
    if not any((key.run, key.engine_id) == engine for key in writers):
        raise NotFound(field="engine_id", value=engine_id, expected=f"an engine of run {run!r}")
    forgotten = await journal.append(encode_forget(journal.clock.now(), *engine))
    for key in forgotten:
        if key not in writers:  # it may have come back
            agents.forget(key)
    return len(forgotten)
