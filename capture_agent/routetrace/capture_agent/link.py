"""The engine's end of the background: start, shared memory, and a socket to wake it.

A child process gets the memory and its end of the socket by file descriptor, and neither has a
name: whichever side is killed, nothing stays behind in /dev/shm. It is a plain subprocess and not
one of multiprocessing's, so that it does not import the engine's main module again, and so that
daemonic worker processes may start it.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from routetrace.capture_agent import counters
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import COUNTER_BYTES, Ended, Word
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.supervisor import Background, InProcess, InThread, Supervisor
from routetrace.capture_agent.worker import Worker
from routetrace.common.errors import counted
from routetrace.common.version import installed_version

#: Run as a file: with -m, Python would look for the package before it has the engine's `sys.path`.
_BACKGROUND = Path(__file__).with_name("background.py")

#: Bytes of the ring that are paged in at the start: the part that is reused while the background
#: keeps up.
_TOUCHED_BYTES = 4 << 20

#: What helps where rows were in flight at the end, by their drop reason.
_REMEDIES = {
    "unsent": "the background (process {pid}) {state} in time: give close() more time "
    "(close_timeout_seconds is {seconds:g}), look whether the process was stopped, and at the "
    "server with routetrace doctor",
    "agent_lost": "the error before this line says why the background died",
    "fenced": "another agent of this engine connected later; give each engine an engine_id of its "
    "own",
    "rejected": "the server refused chunks; its log says why",
}

#: Seconds between two looks at whether a background has started.
_LOOK_S = 0.01

_log = logging.getLogger(__name__)


class WorkerLink:
    """Starts, wakes and ends the background; used by the engine's side alone.

    Args:
        config: of the agent.
        held: whether nothing is sent before `release`.
    """

    def __init__(self, config: AgentConfig, *, held: bool = False) -> None:
        size = COUNTER_BYTES + config.ring_bytes
        self._owner = os.getpid()
        self._config = config
        # Both ends, and the memory, stay open here for backgrounds that follow a dead one.
        self._sock, self._theirs = socket.socketpair()
        self._fd = _anonymous_file(size) if config.background == "process" else -1
        self._memory = memoryview(mmap.mmap(self._fd, size))
        self.words = self._memory[:COUNTER_BYTES].cast("Q")
        self.words[Word.HELD] = held
        self._sock.setblocking(False)
        self.ring = Ring(self._memory[COUNTER_BYTES:], behind=self.wake)
        self._woken = 0  # bytes that were written when the background was woken last
        try:
            self._supervisor = Supervisor(config, self.words, self.ring, self._start, self._over)
        except BaseException:
            self._sock.close()
            self._over()
            raise
        self.ring.touch(_TOUCHED_BYTES)

    @property
    def alive(self) -> bool:
        """Whether the background is running, or is being started again."""
        return self._supervisor.alive

    @property
    def pid(self) -> int:
        """Id of the process that the background runs in."""
        return self._supervisor.pid

    @property
    def deaths(self) -> int:
        """Number of backgrounds that died."""
        return self.words[Word.DEATHS]

    @property
    def leftover(self) -> str | None:
        """Drop reason of rows in flight once no background runs any more; None before."""
        if self.alive:
            return None
        ended = self.words[Word.ENDED]
        return Ended(ended).name.lower() if ended else "agent_lost"

    def wait_until_up(self, deadline: float) -> None:
        """Wait for a background that is being started, until `deadline`; none follows it."""
        self._supervisor.close()
        while not self.words[Word.UP] and self.alive and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def release(self) -> None:
        """Let the background send."""
        self.words[Word.HELD] = 0
        with suppress(OSError):  # full: it is awake; closed: it has ended
            self._sock.send(b"\0")

    def wake(self) -> None:
        """Wake the background to read the ring."""
        # Until it has read the records it was woken for, it will see later ones as well.
        if self.ring.read < self._woken:
            return
        self._woken = self.ring.written
        with suppress(OSError):  # full: it is awake; closed: it has ended
            self._sock.send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a report of the background, or its end."""
        with suppress(OSError, ValueError):  # another thread read it, or closed the socket
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(max(0.0, seconds * 1000)):
                self._sock.recv(4096)

    def hang_up(self) -> None:
        """Have the background finish, without a deadline."""
        if os.getpid() == self._owner:
            self._supervisor.close()
            with suppress(OSError):  # it has ended
                # Not close() alone: a forked process may hold the socket as well.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def finish(self, deadline: float) -> None:
        """Have the background finish by `deadline` (monotonic), without waiting for it."""
        self.words[Word.DEADLINE] = int(deadline * 1e9)
        self.hang_up()

    def close(self, deadline: float) -> str:
        """As `finish`, but wait, and kill the process at the deadline.

        Returns:
            Drop reason of the rows that are in flight; a warning names them.
        """
        self.finish(deadline)
        self._supervisor.join(deadline)
        ended, reason = self.words[Word.ENDED], "unsent"
        if ended or self._supervisor.gave_up:
            reason = Ended(ended).name.lower() if ended else "agent_lost"
        rows = counters.read(self.words, None).in_flight_rows
        # Without rows there may be calls, such as ends of requests.
        if rows or self.words[Word.QUEUED_BYTES] or self.ring.read < self.ring.written:
            config, up = self._config, self.words[Word.UP]
            _log.warning(
                "routetrace: engine %r of run %r closed with %s that the server did not "
                "acknowledge (%s); they are lost, unless the server stored them without "
                "acknowledging: %s",
                config.engine_id,
                config.run,
                counted(rows, "row") if rows else "calls",
                reason,
                _REMEDIES[reason].format(
                    pid=self.pid,
                    state="did not end" if up else "had not started",
                    seconds=config.close_timeout_seconds,
                ),
            )
        return reason

    def forget_in_child(self) -> None:
        """After a fork, in the child: release the resources of the parent."""
        self._sock.close()
        self._over()
        self._supervisor.forget_in_child()

    def _start(self) -> Background:
        """Start a background, the first one or another one."""
        if self._fd >= 0:
            return InProcess(_spawn(self._config, self._fd, self._theirs))
        return InThread(Worker(self._config, self._memory, self._theirs.dup(), 0))

    def _over(self) -> None:
        """Release what is kept for further backgrounds."""
        self._theirs.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("routetrace")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _spawn(config: AgentConfig, memory_fd: int, sock: socket.socket) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        # Escaped: an argument has no NUL, and not every locale has every character.
        [
            sys.executable,
            str(_BACKGROUND),
            f"engine_id={config.engine_id!a}",
            f"run={config.run!a}",
            f"version={installed_version()}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(memory_fd, sock.fileno()),
        env={
            **os.environ,
            # One thread: the background does no linear algebra.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # The next chunk reuses the memory of the last one, without zeroing by the kernel.
            "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
        },
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(pickle.dumps(sys.path))
        stdin.write(pickle.dumps((config, memory_fd, sock.fileno(), os.getpid())))
    return process
