"""One agent for each writer: the errors of streams whose writer is another one's, or gone."""

from __future__ import annotations

from routetrace.common.errors import Fenced, Unavailable
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.ingest.intake import IngestSession


def check_current(session: IngestSession, state: State) -> None:
    """Check that a stream is still the one of its writer.

    Raises:
        Fenced: if another stream has taken over.
        Unavailable: if the writer was deleted as the stream opened; the agent connects again.
    """
    writer = session.writer
    current = state.writers.get(writer.key)
    if current is None and not session.closed:
        run, engine_id, _ = writer.key
        expected = "to connect again"
        raise Unavailable(
            f"engine {engine_id!r} of run {run!r} was forgotten: expected {expected}",
            field="engine_id",
            value=engine_id,
            expected=expected,
        )
    if session.closed or current is not writer:
        raise fenced(writer.key, writer.epoch, state.epochs[writer.key])


def fenced(key: WriterKey, epoch: int, newest: int) -> Fenced:
    """Return the error for an agent whose writer an agent of a newer epoch has taken over."""
    shard = f", shard {key.shard!r}," if key.shard else ""
    expected = "one agent at a time; give each engine an engine_id of its own"
    return Fenced(
        f"another agent of engine {key.engine_id!r}{shard} of run {key.run!r} connected later "
        f"(epoch {newest}): expected {expected}",
        field="epoch",
        value=epoch,
        expected=expected,
    )
