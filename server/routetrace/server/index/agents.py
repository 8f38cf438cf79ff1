"""Presence of agents: decides whether a request that has not ended may still grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

from routetrace.common.drops import DROP_REASONS, OTHER_REASON
from routetrace.server.index.journal import Clock
from routetrace.server.index.session import Session, SessionState
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.writer import Writer
from routetrace.v1 import routetrace_pb2 as pb

_MAX_ROWS = (1 << 64) - 1

#: Maximum attributes of an agent that are kept, and characters of a name or text; the rest is cut.
MAX_ATTRIBUTES = 16
MAX_ATTRIBUTE_LENGTH = 128


class Agents:
    """Open streams, and the time of each writer's last message."""

    def __init__(self, state: State, clock: Clock, timeout: float) -> None:
        self._state = state
        self._clock = clock
        self.timeout = timeout
        self._reachable_since = clock.now()
        self._sessions: dict[WriterKey, Session] = {}
        self._opening: Counter[WriterKey] = Counter()
        self._opened: dict[WriterKey, float] = {}
        self._attributes: dict[WriterKey, dict[str, str]] = {}
        self._seen: dict[WriterKey, float] = {}
        self._reports: dict[WriterKey, bytes] = {}  # parsed, one takes 1.3 kB
        self._lost: set[WriterKey] = set()

    @property
    def connected(self) -> list[WriterKey]:
        """Writers whose stream is open, and whose agent was not closed."""
        return [key for key in self._sessions if self._is_connected(key)]

    def _is_connected(self, key: WriterKey) -> bool:
        writer = self._state.writers.get(key)
        return key in self._sessions and not (writer and writer.closed)

    def reports(self) -> dict[WriterKey, bytes]:
        """Return the last heartbeat of each agent, serialized, disconnected ones included."""
        return self._reports.copy()

    def reachable(self) -> None:
        """Count the silence of agents from now on: until now, none could reach this server."""
        self._reachable_since = self._clock.now()

    @contextmanager
    def opening(self, key: WriterKey) -> Iterator[None]:
        """Count a writer as present while its stream opens: it may exist before its session."""
        self._opening[key] += 1
        try:
            yield
        finally:
            self._opening[key] -= 1
            if not self._opening[key]:
                del self._opening[key]

    def opened(self, session: Session, attributes: Mapping[str, str] | None = None) -> None:
        """Register an open stream; close the writer's previous one."""
        key = session.writer.key
        previous = self._sessions.get(key)
        if previous:
            previous.enter(SessionState.CLOSED)
        self._sessions[key] = session
        self._opened[key] = self._clock.now()
        self._attributes[key] = {
            _same(name[:MAX_ATTRIBUTE_LENGTH]): text[:MAX_ATTRIBUTE_LENGTH]
            for name, text in islice(sorted((attributes or {}).items()), MAX_ATTRIBUTES)
        }
        session.host = self.host(key)
        self.seen(session)

    def host(self, key: WriterKey) -> str:
        """Return the host that a writer's newest agent reported; "" if that is not known."""
        return self._attributes.get(key, {}).get("host", "")

    def seen(self, session: Session) -> None:
        """Note the time of a message of a stream."""
        self._seen[session.writer.key] = self._clock.now()

    def heartbeat(self, session: Session, report: pb.Heartbeat) -> None:
        """Note a heartbeat and the row counts in it; unknown drop reasons count as one."""
        session.enter(SessionState.BEATING)
        dropped = report.dropped_rows
        unknown = sum(rows for reason, rows in dropped.items() if reason not in DROP_REASONS)
        kept = {reason: dropped[reason] for reason in DROP_REASONS if reason in dropped}
        dropped.clear()
        dropped.update({**kept, OTHER_REASON: min(unknown, _MAX_ROWS)} if unknown else kept)
        self._reports[session.writer.key] = report.SerializeToString()

    def closed(self, session: Session) -> None:
        """Close a stream."""
        session.enter(SessionState.CLOSED)
        if self._sessions.get(session.writer.key) is session:
            del self._sessions[session.writer.key]
            self.seen(session)

    def idle_seconds(self, key: WriterKey) -> float:
        """Return the seconds since a writer's last message.

        0 while its stream opens, is open without heartbeats, or is held by the server.
        """
        if key in self._opening:
            return 0.0
        session = self._sessions.get(key)
        if session and session.state in (SessionState.SILENT, SessionState.HELD):
            return 0.0
        return self._clock.now() - self._seen.get(key, self._reachable_since)

    def running(self, source: Source) -> bool:
        """Whether a source may still grow: not ended, not replaced, its agent present."""
        if source.running is not None:
            return source.running
        writer = self._state.writers.get(source.writer)
        if source.ended or writer is None or writer.epoch != source.epoch:
            return False
        live = writer.live.get(source.request_id)
        return (
            live is not None
            and live[1] is source
            and self.idle_seconds(source.writer) <= self.timeout
        )

    def count_lost(self) -> int:
        """Return how many writers with running requests were lost since the last call."""
        lost = {
            key
            for key, writer in self._state.writers.items()
            if writer.live and self.idle_seconds(key) > self.timeout
        }
        new, self._lost = lost - self._lost, lost
        return len(new)

    def forget(self, key: WriterKey) -> None:
        """Delete all records of a writer."""
        self._opened.pop(key, None)
        self._attributes.pop(key, None)
        self._seen.pop(key, None)
        self._reports.pop(key, None)

    # ------------------------------------------------------------------ descriptions

    def weight_versions(self) -> dict[WriterKey, int]:
        """Return the weight version of the last rows of each connected agent that has any."""
        writers = ((key, self._state.writers.get(key)) for key in self.connected)
        return {key: w.weight_version for key, w in writers if w and w.weight_version is not None}

    def newest_weight_version(self, run: str) -> int | None:
        """Return the highest weight version of the run's connected agents."""
        versions = self.weight_versions().items()
        return max((version for key, version in versions if key.run == run), default=None)

    def describe(self, writer: Writer, newest: int | None) -> pb.AgentInfo:
        """Return the AgentInfo of a writer; `newest` is the run's newest weight version."""
        key, version = writer.key, writer.weight_version
        report = self._reports.get(key)
        lag = 0 if version is None or newest is None else max(0, newest - version)
        return pb.AgentInfo(
            engine_id=key.engine_id,
            shard=key.shard,
            connected=self._is_connected(key),
            epoch=writer.epoch,
            connected_ms=int(self._opened.get(key, 0) * 1000),
            seen_ms=int(self._seen.get(key, 0) * 1000),
            attributes=self._attributes.get(key, {}),
            report=None if report is None else pb.Heartbeat.FromString(report),
            running_requests=len(writer.live),
            weight_version=version,
            weight_version_lag=lag,
            closed=writer.closed,
        )


@lru_cache(maxsize=256)
def _same(name: str) -> str:
    """Return one object for the name of an attribute that many agents have."""
    return name
