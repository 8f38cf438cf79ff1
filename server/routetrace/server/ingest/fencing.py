"""One agent for each writer: the errors of streams whose writer is another one's, or gone."""

from __future__ import annotations

import logging

from routetrace.common.errors import Fenced, Unavailable, quoted
from routetrace.common.limited import LimitedLog
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.agents import Agents
from routetrace.server.index.session import Session
from routetrace.server.index.state import State
from routetrace.server.index.traces.sources import WriterKey
from routetrace.v1 import routetrace_pb2 as pb

_log = logging.getLogger(__name__)


class Fencing:
    """Refuses the agents of older epochs, and reports each.

    An agent is reported when it has sent a message after a later one connected, not when the later
    one connects: a restart whose older process is gone is not reported.
    """

    def __init__(self, state: State, agents: Agents, metrics: Metrics) -> None:
        self._state = state
        self._agents = agents
        self._fenced = metrics.fenced
        self._warnings = LimitedLog(_log, "fenced agents")

    def check_hello(self, key: WriterKey, hello: pb.Hello) -> None:
        """Check that a Hello does not continue an older epoch, nor follows one of an older boot.

        Raises:
            Fenced: if it does.
        """
        current, newest = self._state.writers.get(key), self._state.epochs.get(key, 0)
        epoch = hello.epoch
        if not epoch and current and current.boot_id != hello.boot_id:
            epoch = hello.former_epoch
        if epoch and current and epoch < newest:
            self._report(key, epoch, hello.attributes.get("host", ""))
            raise self._error(key, epoch)

    def check_stream(self, session: Session) -> None:
        """Check that a stream is still the one of its writer.

        Raises:
            Fenced: if another stream has taken over.
            Unavailable: if the writer was deleted as the stream opened; the agent connects again.
        """
        writer = session.writer
        current = self._state.writers.get(writer.key)
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
            raise self.refused(session)

    def refused(self, session: Session) -> Fenced:
        """Return the error for a stream that another one has replaced."""
        writer = session.writer
        if writer.epoch == self._state.epochs[writer.key]:  # the same agent has connected again
            expected = "the newest stream of this epoch"
            return Fenced(field="epoch", value=writer.epoch, expected=expected)
        if not session.reported:
            session.reported = True
            self._report(writer.key, writer.epoch, session.host)
        return self._error(writer.key, writer.epoch)

    def _report(self, key: WriterKey, epoch: int, host: str) -> None:
        self._fenced.labels(key.run).inc()
        self._warnings.warning(
            (key, epoch),
            "%s has two agents: a later one connected (host %s, epoch %d), so the older one (host "
            "%s, epoch %d) is fenced and all its further rows are dropped; give each engine an "
            "engine_id of its own, or end the older process if it was to be replaced",
            key, self._host(key), self._state.epochs[key], _shown(host), epoch,
        )  # fmt: skip

    def _error(self, key: WriterKey, epoch: int) -> Fenced:
        expected = "one agent at a time; give each engine an engine_id of its own"
        return Fenced(
            f"another agent of {key} connected later (host {self._host(key)}, epoch "
            f"{self._state.epochs[key]}): expected {expected}",
            field="epoch",
            value=epoch,
            expected=expected,
        )

    def _host(self, key: WriterKey) -> str:
        """Return the host of the newest agent, for messages."""
        return _shown(self._agents.host(key))


def _shown(host: str) -> str:
    return quoted(host) if host else "unknown"
