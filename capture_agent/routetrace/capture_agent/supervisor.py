"""The supervisor of a background: starts it, and starts another one after it died.

The next background takes over memory and socket, and goes on with the oldest record that was not
consumed. All that the one before held in memory is gone, and counted as `agent_lost`; to the server
it is a new epoch of the same boot.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Protocol

from routetrace.capture_agent import counters
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.worker import Worker
from routetrace.common.errors import counted

#: Seconds before another start: at first, and at most. Each death doubles them.
_DELAYS_S = (1.0, 60.0)

#: Seconds of work after which the first delay applies again.
_WORKED_S = 300.0

#: Time between two looks at whether the agent closes, during a delay.
_LOOK_S = 0.05

_MEMORY = (
    "if memory ran out, as the log of the kernel or of the container says, raise the limit or "
    "lower queue_bytes"
)
_OUTPUT = "look for the cause in the output of the engine's process"

_log = logging.getLogger(__name__)


class Background(Protocol):
    """A background that was started."""

    pid: int
    """Id of the process that it runs in."""

    def run(self) -> tuple[str, str]:
        """Wait for its end; return how it died, and a remedy; ("", "") if it ended in order."""

    def kill(self) -> None:
        """End it at once, where that is possible."""

    def forget_in_child(self) -> None:
        """After a fork, in the child: release the resources of the parent."""


class InProcess:
    """A background in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def run(self) -> tuple[str, str]:
        """Reap the process."""
        code = self._process.wait()
        if code >= 0:
            return (f"exited with status {code}", _OUTPUT) if code else ("", "")
        number = -code
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        remedy = _MEMORY if number == signal.SIGKILL else _OUTPUT
        return f"was killed by signal {name}", remedy

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def forget_in_child(self) -> None:
        """Leave the process to the parent."""


class InThread:
    """A background in the thread that calls `run`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.pid = os.getpid()

    def run(self) -> tuple[str, str]:
        """Work to the end."""
        try:
            self._worker.run()
        except Exception as error:
            _log.debug("routetrace: the background failed", exc_info=True)
            self._worker.sender.disconnect()  # no acknowledgement counts from here on
            return f"failed with {error!r}", "the debug log has a traceback"
        return "", ""

    def kill(self) -> None:
        """Do nothing: no thread can be killed."""

    def forget_in_child(self) -> None:
        """Release the resources of the parent."""
        self._worker.forget_in_child()


class Supervisor:
    """Keeps the background of an agent running, from a thread of the engine's process.

    Args:
        config: of the agent.
        words: counters of the agent.
        ring: the engine's end.
        start: starts a background.
        over: called once no background will run any more.

    Raises:
        OSError: if the first background cannot be started.
    """

    def __init__(
        self,
        config: AgentConfig,
        words: memoryview,
        ring: Ring,
        start: Callable[[], Background],
        over: Callable[[], None],
    ) -> None:
        self._config = config
        self._words = words
        self._ring = ring
        self._start = start
        self._over = over
        self._lock = threading.Lock()
        # Guarded by it.
        self._background, self._started = start(), True
        self._killed = False
        # Not an Event: garbage collection may set it, inside of a call that holds its lock.
        self._closing = False
        #: Whether the last background died, and no other one follows.
        self.gave_up = False
        self._thread = threading.Thread(
            target=self._supervise, name="routetrace-worker", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether a background runs, or another one will be started."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int:
        """Id of the process that the background runs in."""
        return self._background.pid

    def close(self) -> None:
        """Start a background that is due at once, and none after it."""
        self._closing = True

    def join(self, deadline: float) -> None:
        """Wait for the end; kill the background at the deadline (monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.alive:
            with self._lock:
                self._killed = True
                self._background.kill()
            self._thread.join(1)

    def forget_in_child(self) -> None:
        """After a fork, in the child: release the resources of the parent."""
        self._background.forget_in_child()

    # ------------------------------------------------------------------ the thread

    def _supervise(self) -> None:
        delay, last = _DELAYS_S[0], False
        try:
            while True:
                began = time.monotonic()
                how, remedy = self._run()
                if not how:
                    return
                if time.monotonic() - began >= _WORKED_S:
                    delay = _DELAYS_S[0]
                deadline = self._words[Word.DEADLINE] / 1e9
                self.gave_up = last or (deadline > 0 and time.monotonic() >= deadline)
                self._report(how, remedy, delay)
                if self.gave_up:
                    return
                last = self._pause(delay)
                delay = min(2 * delay, _DELAYS_S[1])
        finally:
            self._over()

    def _run(self) -> tuple[str, str]:
        """Run a background to its end; return as `Background.run`, also where none starts."""
        try:
            with self._lock:
                if self._killed:
                    return "", ""
                if not self._started:
                    self._background, self._started = self._start(), True
        except Exception as error:  # at interpreter exit no process can be started, for one
            return f"cannot be started ({error})", _MEMORY
        how, remedy = self._background.run()
        self._started = False
        if self._killed or self._words[Word.ENDED] or (self._closing and not how):
            return "", ""
        lost = counters.bury(self._words, self._ring.consumed)
        rows = (
            f"{counted(lost, 'row')} that it held, and the rest of the requests that it had begun, "
            "are lost"
        )
        return f"{how or 'ended'} ({rows} as agent_lost)", remedy or _OUTPUT

    def _pause(self, seconds: float) -> bool:
        """Wait, at most until the agent closes; return whether it does."""
        until = time.monotonic() + seconds
        while not self._closing and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return self._closing

    def _report(self, how: str, remedy: str, delay: float) -> None:
        then = f"another one starts in {delay:g} s, and captures later requests"
        _log.error(
            "routetrace: engine %r of run %r: the background of the agent %s; %s; %s",
            self._config.engine_id,
            self._config.run,
            how,
            "no other one is started, as the agent closes" if self.gave_up else then,
            remedy,
        )
