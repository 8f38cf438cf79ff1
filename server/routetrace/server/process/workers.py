"""Several workers behind one server: one process each, started and watched by this one.

The watching process has no gRPC, no event loop and no thread, so that it can fork at any time.
Each worker holds one end of a socket pair. Over it the worker reports that it is ready and
receives whether all are; end of file means that the other side has ended.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from routetrace.server.access.partition import Partition
from routetrace.server.ops import logs
from routetrace.server.process import announce
from routetrace.server.process.partitions import check_partitions, make_partitions, worker_config
from routetrace.server.settings.config import ConfigError, ServerConfig

_log = logging.getLogger(__name__)

#: Messages of a worker, and to one.
READY = b"r"
ALL_READY, NOT_ALL_READY, STOP = b"a", b"n", b"s"

#: Seconds between the end of a worker and its next start.
_RESTART_SECONDS = 1.0

#: Maximum bytes of the path of a Unix socket.
_MAX_SOCKET_PATH = 107

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class WorkerState(Enum):
    """Phase of one worker."""

    ENDED = "ended"
    """There is no process."""
    STARTING = "starting"
    """The process rebuilds its state."""
    READY = "ready"
    """The process serves its runs."""


#: States that may follow each state.
TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.ENDED: frozenset({WorkerState.STARTING}),
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.ENDED}),
    WorkerState.READY: frozenset({WorkerState.ENDED}),
}


@dataclass
class Worker:
    """One worker, as the watching process sees it."""

    number: int
    pid: int = 0
    link: socket.socket | None = None
    start_at: float = 0.0
    """Monotonic time of the next start."""
    state: WorkerState = WorkerState.ENDED

    def enter(self, state: WorkerState) -> bool:
        """Change to a state; return False, and stay, where `TRANSITIONS` has no such change."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    def send(self, message: bytes) -> None:
        """Send a message, unless the worker has ended."""
        if self.link:
            with suppress(OSError):
                self.link.send(message)


@dataclass(frozen=True)
class Seat:
    """Place of a worker among the others, for its own process."""

    partition: Partition
    link: socket.socket
    directory: Path
    """Private directory of the workers' sockets."""

    @property
    def socket(self) -> str:
        """Path of the socket on which the other workers ask this one."""
        return self._path(self.partition.number)

    @property
    def parts_socket(self) -> str:
        """Path of the socket on which this worker serves its parts of traces to the others."""
        return self._path(self.partition.number, "parts")

    @property
    def parts_sockets(self) -> dict[int, str]:
        """Paths of the same sockets of the other workers, by their numbers."""
        count, own = self.partition.count, self.partition.number
        return {number: self._path(number, "parts") for number in range(count) if number != own}

    @property
    def peers(self) -> list[str]:
        """Paths of the other workers' sockets."""
        count, own = self.partition.count, self.partition.number
        return [self._path(number) for number in range(count) if number != own]

    def _path(self, number: int, name: str = "worker") -> str:
        return str(self.directory / f"{name}-{number}")


def supervise(config: ServerConfig, serve: Callable[[ServerConfig, Seat], int]) -> int:
    """Run all workers until SIGTERM or SIGINT, or until one of them does not start.

    A worker that ends after it was ready is started again.

    Args:
        config: settings of the whole server.
        serve: body of a worker; returns its exit code.

    Returns:
        0 after a clean shutdown, else the exit code of the worker that did not start.

    Raises:
        ConfigError: if the data directory is for another number of workers, or the path of the
            directory for temporary files is too long.
    """
    if config.store == "disk":
        check_partitions(config.data_dir, config.workers)
        make_partitions(config.data_dir, config.workers)
    with tempfile.TemporaryDirectory(prefix="routetrace-", ignore_cleanup_errors=True) as path:
        over = len(os.fsencode(path)) + len(f"/worker-{config.workers}") - _MAX_SOCKET_PATH
        if over > 0:
            raise ConfigError(
                f"the directory for temporary files is {tempfile.gettempdir()}: expected one whose "
                f"path is {over} bytes shorter, for the workers' sockets; TMPDIR names another"
            )
        return _Supervisor(config, serve, Path(path)).run()


@dataclass
class _Supervisor:
    config: ServerConfig
    serve: Callable[[ServerConfig, Seat], int]
    directory: Path
    workers: list[Worker] = field(default_factory=list)
    code: int = 0
    stopping: bool = False
    all_ready: bool = False

    def run(self) -> int:
        """See `supervise`."""
        self.workers = [Worker(number) for number in range(self.config.workers)]
        if self.config.ready_file:
            self.config.ready_file.unlink(missing_ok=True)
        try:
            with _woken_by_signals() as wake:
                while True:
                    for worker in self.workers:
                        if not self.stopping and worker.state is WorkerState.ENDED:
                            self._start_due(worker)
                    self._wait(wake)
                    self._reap()
                    self._report()
                    if self.stopping and not any(w.pid for w in self.workers):
                        break
        finally:
            if self.config.ready_file:
                self.config.ready_file.unlink(missing_ok=True)
        _log.info("stopped")
        return self.code

    # ------------------------------------------------------------------ starting

    def _start_due(self, worker: Worker) -> None:
        if time.monotonic() < worker.start_at:
            return
        ours, theirs = socket.socketpair()
        # A signal between the fork and the worker's own handlers must not be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if not pid:
                self._become(worker, ours, theirs)  # does not return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        ours.setblocking(False)
        worker.pid, worker.link = pid, ours
        worker.enter(WorkerState.STARTING)

    def _become(self, worker: Worker, ours: socket.socket, theirs: socket.socket) -> None:
        """Be a worker, in the forked process, to its end."""
        code = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the watching process alone
            os.environ.pop("NOTIFY_SOCKET", None)  # systemd watches the other process
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            ours.close()
            for other in self.workers:
                if other.link:  # else its end of file would come late
                    other.link.close()
            logs.set_up(self.config.log_level, self.config.log_format, worker.number)
            partition = Partition(
                worker.number,
                self.config.workers,
                self.config.host_port[1],
                self.config.run_workers,
                tuple(self.config.spread_runs),
            )
            seat = Seat(partition, theirs, self.directory)
            code = self.serve(worker_config(self.config, worker.number), seat)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):  # left by the last worker, where the watching process is gone
                for name in ("worker", "parts"):
                    Path(self.directory / f"{name}-{worker.number}").unlink(missing_ok=True)
                if os.getppid() != self._pid:
                    self.directory.rmdir()
            logging.shutdown()
            os._exit(code)

    def __post_init__(self) -> None:
        self._pid = os.getpid()

    # ------------------------------------------------------------------ watching

    def _wait(self, wake: socket.socket) -> None:
        """Wait for a signal, a message of a worker, or the time of a start."""
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for worker in self.workers:
                if worker.link and worker.state is WorkerState.STARTING:
                    selector.register(worker.link, selectors.EVENT_READ, worker)
            due = [w.start_at for w in self.workers if w.state is WorkerState.ENDED]
            left = max(0.0, min(due) - time.monotonic()) if due and not self.stopping else None
            for key, _ in selector.select(left):
                if key.data is None:
                    self._signalled(wake.recv(4096))
                else:
                    self._receive(key.data)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            _log.info("%s", signal.Signals(number).name)
            if self.stopping:  # the stores survive a crash
                for worker in self.workers:
                    if worker.pid:
                        os.kill(worker.pid, signal.SIGKILL)
                os._exit(128 + number)
            self._stop()

    def _stop(self) -> None:
        self.stopping = True
        announce.stopping()
        for worker in self.workers:
            worker.send(STOP)

    def _receive(self, worker: Worker) -> None:
        assert worker.link
        try:
            message = worker.link.recv(16)
        except OSError:
            return
        if message:
            worker.enter(WorkerState.READY)
        else:  # it is ending; `_reap` says how
            worker.link.close()
            worker.link = None

    def _reap(self) -> None:
        """Note the workers that have ended, and what follows."""
        for worker in self.workers:
            if not worker.pid:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            started = worker.state is WorkerState.READY
            worker.pid = 0
            worker.enter(WorkerState.ENDED)
            if worker.link:
                worker.link.close()
                worker.link = None
            if self.stopping:
                self.code = self.code or (code if code >= 0 else 1)
                continue
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            if started:
                _log.warning("worker %d ended %s and is started again", worker.number, how)
                worker.start_at = time.monotonic() + _RESTART_SECONDS
            else:
                _log.error("worker %d ended %s before it was ready", worker.number, how)
                self.code = code if code > 0 else 1
                self._stop()

    def _report(self) -> None:
        """Send readiness of all to each worker, and once to the process manager."""
        now = all(worker.state is WorkerState.READY for worker in self.workers)
        if now == self.all_ready or self.stopping:
            return
        self.all_ready = now
        for worker in self.workers:
            worker.send(ALL_READY if now else NOT_ALL_READY)
        if now:
            addresses = [self.config.listen, self.config.metrics_listen]
            announce.ready(self.config.ready_file, list(filter(None, addresses)))


@contextmanager
def _woken_by_signals() -> Iterator[socket.socket]:
    """Yield a socket that gets a byte with the number of each signal."""
    wake, wakes = socket.socketpair()
    for end in (wake, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    try:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        yield wake
    finally:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        wake.close()
        wakes.close()
