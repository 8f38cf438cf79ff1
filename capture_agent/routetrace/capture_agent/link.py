"""The engine's end of the background: start, shared memory, and a socket to wake it.

A child process gets the memory and its end of the socket by file descriptor, and neither has a
name: whichever side is killed, nothing stays behind in /dev/shm. It is a plain subprocess and not
one of multiprocessing's, so that it does not import the engine's main module again, and so that
daemonic worker processes may start it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import COUNTER_BYTES, Ended, Word
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.worker import Worker
from routetrace.common.version import installed_version

#: Run as a file: with -m, Python would look for the package before it has the engine's `sys.path`.
_BACKGROUND = Path(__file__).with_name("background.py")

#: Bytes of the ring that are paged in at the start: the part that is reused while the background
#: keeps up.
_TOUCHED_BYTES = 4 << 20


class WorkerLink:
    """Starts, wakes and ends the background; used by the engine's side alone.

    Args:
        config: of the agent.
        held: whether nothing is sent before `release`.
    """

    def __init__(self, config: AgentConfig, *, held: bool = False) -> None:
        size = COUNTER_BYTES + config.ring_bytes
        self._owner = os.getpid()
        self._sock, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: Worker | None = None
        fd = _anonymous_file(size) if config.background == "process" else -1
        self._memory = memoryview(mmap.mmap(fd, size))
        self.words = self._memory[:COUNTER_BYTES].cast("Q")
        self.words[Word.HELD] = held
        if config.background == "process":
            try:
                self._process = _spawn(config, fd, theirs)
            finally:
                os.close(fd)
                theirs.close()
            # Reaps the process; the end of the thread shows that it ended.
            work: Callable[[], object] = self._process.wait
        else:
            self._worker = Worker(config, self._memory, theirs, 0)
            work = self._worker.run
        self._sock.setblocking(False)
        self.ring = Ring(self._memory[COUNTER_BYTES:], behind=self.wake)
        self.ring.touch(_TOUCHED_BYTES)
        self._woken = 0  # bytes that were written when the background was woken last
        self._thread = threading.Thread(target=work, name="routetrace-worker", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the background is running."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int:
        """Id of the process that the background runs in."""
        return self._process.pid if self._process else os.getpid()

    @property
    def leftover(self) -> str | None:
        """Drop reason of rows in flight once the background ended; None while it runs."""
        if self.alive:
            return None
        ended = self.words[Word.ENDED]
        return Ended(ended).name.lower() if ended else "agent_lost"

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
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(max(0.0, seconds * 1000)) and not self._sock.recv(4096):
                self._thread.join(seconds)
        except (OSError, ValueError):
            pass  # another thread read it, or closed the socket

    def hang_up(self) -> None:
        """Have the background finish, without a deadline."""
        if os.getpid() == self._owner:
            with suppress(OSError):  # it has ended
                # Not close() alone: a forked process may hold the socket as well.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def finish(self, deadline: float) -> None:
        """Have the background finish by `deadline` (monotonic), without waiting for it."""
        self.words[Word.DEADLINE] = int(deadline * 1e9)
        self.hang_up()

    def close(self, deadline: float) -> None:
        """As `finish`, but wait, and kill the process at the deadline."""
        self.finish(deadline)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process and self.alive:
            self._process.kill()
            self._thread.join(1)

    def forget_in_child(self) -> None:
        """After a fork, in the child: release the resources of the parent."""
        self._sock.close()
        if self._worker:
            self._worker.forget_in_child()


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
