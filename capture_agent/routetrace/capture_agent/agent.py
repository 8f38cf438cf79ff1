"""CaptureAgent: what an engine calls."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent import counters
from routetrace.capture_agent.checks import (
    Ints,
    Rows,
    blocks_of,
    computed_of,
    external_of,
    labels_of,
    number,
    rows_of,
    runs_of,
    slots_of,
    tokens_of,
    wrong,
)
from routetrace.capture_agent.config import AgentConfig, check_id
from routetrace.capture_agent.counters import AgentStats, CloseReport, Ended, Word
from routetrace.capture_agent.feed import Feed
from routetrace.capture_agent.handles import Handles
from routetrace.capture_agent.link import WorkerLink
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import Closed, InvalidArgument
from routetrace.v1.records import FinishReason
from routetrace.v1.security import Security

_OFFERED = int(Word.OFFERED)
_REASONS = {reason.name.lower(): reason for reason in FinishReason}


class CaptureAgent:
    """Takes an engine's routing and sends it to a server, in the background.

    No call waits for the server or the network, except for flush() and close(). In a child after
    os.fork() an inherited agent does nothing and counts nothing.

    Positions count the tokens of a request from 0. A request of N tokens has N - 1 rows, since its
    last token is never forwarded.

    Calls come in the order of the engine's steps: what a step's schedule decides (begin, blocks,
    resume, preempt, external) after the rows of the steps before it and before its own. What its
    outcome says (rewind, finish) may come one step late, as asynchronous engines learn it late;
    rows of a request that has ended or was preempted by then are late, and dropped.

    An engine of several shards has an agent for each, and tells each of them of every request. To
    step() each gives its own layers and positions; a token and its drafts are of one rank.

    Args:
        config: whom to send to, and what rows look like.

    Raises:
        InvalidArgument: if a certificate, a key or a token can not be used.
        OSError: if the background can not be started.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.config = config = replace(config, boot_id=config.boot_id or secrets.token_hex(8))
        cast("Security", config.security).check(config.target)
        layout = config.layout
        self._columns = (len(layout.layer_ids), layout.top_k)
        # A top-1 whose dtype has no id to spare can not mark a cell.
        self._markable = layout.top_k > 1 or layout.num_experts <= np.iinfo(layout.dtype).max
        # Reentrant, since a signal handler may come in between; the ring copes with that.
        self._lock = threading.RLock()
        self._inert = False  # inherited over a fork
        self._closed = False
        self._abandoned = False  # nobody reads the ring any more
        self._final: AgentStats | None = None
        self._done = threading.Event()
        self._weight_version = 0
        self._step = 0
        self._flushes = 0
        self._begun = 0
        self._handles = Handles()
        self._link = WorkerLink(config)
        self._words = self._link.words
        self._feed = Feed(self._link.ring, layout)
        _agents.add(self)
        _close_at_exit()
        # Collected without close(): the background sends what it has.
        weakref.finalize(self, _collected, self._link, config.close_timeout_s).atexit = False

    # ------------------------------------------------------------------ requests

    def begin(
        self,
        request_id: str,
        *,
        trace_id: str = "",
        prompt_len: int = 0,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: int = 0,
        num_computed_tokens: int = 0,
        num_external_tokens: int = 0,
        block_ids: Iterable[int] = (),
        prompt_token_ids: npt.ArrayLike | None = None,
    ) -> int:
        """A request begins.

        Args:
            request_id: the engine's name for it; free again once it has finished.
            trace_id: the trace that its rows belong to; the request id if empty.
            prompt_len: prompt tokens.
            labels: group, session, sample and whatever else readers look traces up by.
            ttl_seconds: life of the trace after its last change; 0: the server's default.
            num_computed_tokens: leading tokens whose KV is in the cache already, in `block_ids`, or
                gets there in the step of its first rows; the server hears of it with those.
            num_external_tokens: how many of them, the last ones, were loaded from elsewhere
                (another engine, CPU memory, a remote cache): nobody here knows what computed them.
            block_ids: its KV blocks, in order; none where block_size is 0.
            prompt_token_ids: the prompt, [prompt_len]; lets the server prove that rows of different
                engines belong to the same tokens.

        Returns:
            A handle for the other calls.

        Raises:
            InvalidArgument: naming the argument that is wrong; nothing happened.
            Closed: after close().
        """
        with self._lock:
            if not self._active():
                return 0
            check_id("request_id", request_id)
            check_id("trace_id", trace_id, required=False)
            if request_id in self._handles:
                raise wrong("request_id", request_id, "one that is not running")
            facts = pb.RequestBegin(
                trace_id=trace_id,
                prompt_len=number("prompt_len", prompt_len),
                labels=labels_of(labels or {}),
                ttl_seconds=number("ttl_seconds", ttl_seconds, 1 << 32),
            )
            blocks = blocks_of(block_ids, self.config)
            computed = computed_of(num_computed_tokens, blocks, self.config)
            external = external_of(num_external_tokens, computed)
            prompt = tokens_of("prompt_token_ids", prompt_token_ids, prompt_len)
            handle = self._handles.new(request_id)
            index, self._begun = self._begun, self._begun + 1
            event = request_id, facts.SerializeToString(), index, computed, external, blocks, prompt
            try:
                self._event("begin", *event, handle=handle)
            except InvalidArgument:  # larger than the ring
                self._handles.free(handle)
                self._begun = index
                raise
            return handle

    def add_blocks(self, handle: int, block_ids: Iterable[int]) -> None:
        """A request gets more KV blocks, newly allocated; told before the step that writes them."""
        with self._lock:
            if self._active():
                self._handles.check(handle)
                blocks = array("I", blocks_of(block_ids, self.config))
                self._give([handle] * len(blocks), blocks)

    def add_blocks_of(self, handles: Iterable[int], block_ids: Iterable[int]) -> None:
        """Requests get more KV blocks, as `add_blocks`: block i goes to handle i."""
        with self._lock:
            if self._active():
                told = list(handles)
                for handle in set(told):
                    self._handles.check(handle)
                blocks = array("I", blocks_of(block_ids, self.config))
                if len(told) != len(blocks):
                    raise wrong("block_ids", f"{len(blocks)} ids", f"{len(told)}, one a handle")
                self._give(told, blocks)

    def rewind(self, handle: int, position: int, step: int = 0) -> None:
        """Rows of a request at `position` and after were rejected (speculative decoding).

        Not needed where the next rows start at `position`; but of context-parallel ranks another
        one may compute those, so that all are told.

        Args:
            handle: of the request; one that has finished is passed over.
            position: first position that was rejected.
            step: what step() returned for the rows. Needed where an engine learns of a rejection
                late, when rows of a later step have taken the place already: those stay.
        """
        with self._lock:
            if self._active() and not self._handles.is_late(handle):
                self._handles.check(handle)
                number("step", step, 1 << 63)
                self._event("rewind", number("position", position), int(step), handle=handle)

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        """A request gives up its blocks; rows at `num_computed_tokens` and after were not kept.

        Rows that come before it is resumed are late: they are dropped.
        """
        with self._lock:
            if self._active():
                self._handles.check(handle)
                computed = number("num_computed_tokens", num_computed_tokens)
                self._event("preempt", computed, handle=handle)

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        block_ids: Iterable[int],
        num_external_tokens: int = 0,
    ) -> None:
        """A preempted request starts over; arguments as for begin()."""
        with self._lock:
            if self._active():
                self._handles.check(handle)
                blocks = blocks_of(block_ids, self.config)
                computed = computed_of(num_computed_tokens, blocks, self.config)
                external = external_of(num_external_tokens, computed)
                self._event("resume", computed, external, blocks, handle=handle)

    def finish(
        self,
        handle: int,
        num_tokens: int,
        reason: str = "stop",
        token_ids: npt.ArrayLike | None = None,
    ) -> None:
        """A request ends.

        Args:
            handle: of the request; void from now on. Rows that come later are dropped.
            num_tokens: tokens of prompt and answer; rows beyond num_tokens - 1 do not count.
            reason: "stop", "length", "abort", or "handoff": another engine goes on with the same
                trace, which has not ended.
            token_ids: all its tokens, [num_tokens], for what begin() says.
        """
        with self._lock:
            if self._active():
                self._handles.check(handle)
                if reason not in _REASONS:
                    raise wrong("reason", reason, " or ".join(map(repr, _REASONS)))
                number("num_tokens", num_tokens)
                tokens = tokens_of("token_ids", token_ids, num_tokens)
                why = int(_REASONS[reason])
                self._event("finish", int(num_tokens), why, tokens, handle=handle)
                self._handles.free(handle)
                self._feed.forget()
                self._link.wake()

    # ------------------------------------------------------------------ the engine

    def external(self, block_ids: Iterable[int]) -> None:
        """KV of these blocks was loaded from elsewhere: nobody knows what computed it.

        Told after the rows of every step that was under way before, to step_slots() too: a slot
        does not say whose row it takes.
        """
        with self._lock:
            if self._active():
                self._event("external", blocks_of(block_ids, self.config))

    def reset_prefix_cache(self) -> None:
        """The engine forgot its prefix cache."""
        with self._lock:
            if self._active():
                self._event("reset")

    def set_weight_version(self, version: int) -> None:
        """Steps from now on are computed by these weights."""
        with self._lock:
            if self._active():
                if not -(1 << 63) <= version < 1 << 63:
                    raise wrong("version", version, "a signed 64-bit number")
                self._weight_version = int(version)

    # ------------------------------------------------------------------ rows

    def step(self, rows: Rows, runs: npt.ArrayLike) -> int:
        """The routing of one forward pass.

        Args:
            rows: [n, L, K] of any integer dtype: for each token and each of the layout's layers its
                expert ids, in the order of the router. Copied. A cell that was not captured is
                marked by an id twice, or one out of range: its row is reported as missing.
            runs: [m, 3] of (handle, first position, number of rows), covering the n rows in order.
                A position below the end of its request takes back the rows from there on. Rows
                behind the first of a run and the prompt count as drafts, which readers do not get
                before a later step or the end of the request confirms them.

        Returns:
            The number of the step, from 1; 0 if there was nothing to take.

        Raises:
            InvalidArgument: naming the argument that is wrong; nothing was taken.
            Closed: after close().
        """
        # Each call of Python counts here: `with` takes twice as long.
        self._lock.acquire()
        try:
            if (self._inert or self._closed) and not self._active():
                return 0
            feed, number = self._feed, 0
            steady, feed.steady = feed.steady, None
            if steady is not None and steady.goes_on(rows, runs):
                self._step = number = self._step + 1
                self._words[_OFFERED] += steady.num_rows
                if feed.again(steady, rows, number, self._weight_version):
                    return number
                self._words[_OFFERED] -= steady.num_rows
            return self._take_step(rows, runs, number)
        finally:
            self._lock.release()

    def _take_step(self, rows: Rows, runs: npt.ArrayLike, number: int) -> int:
        """A step that has to be looked at; with its number, if it has one."""
        rows = rows_of(rows, self._columns)
        if len(rows) == 0 and np.size(runs) == 0:
            return 0
        columns = runs_of(runs, len(rows))
        late = self._handles.late(columns[0])
        if not number:
            self._step = number = self._step + 1
        self._words[_OFFERED] += len(rows)
        if late is not None:
            kept = np.repeat(~late, columns[2])
            self._words[Word.TOO_LATE] += len(rows) - int(kept.sum())
            columns, rows = np.ascontiguousarray(columns[:, ~late]), rows[kept]
        if len(rows) and not self._abandoned:
            self._send_step(columns, rows)
        return number

    def skip(self, runs: npt.ArrayLike) -> int:
        """One forward pass whose routing was not captured: its rows are missing.

        Args:
            runs: as for step().

        Returns:
            The number of the step, from 1; 0 if there was nothing to take.

        Raises:
            InvalidArgument: if runs are none; nothing was taken.
            Closed: after close().
        """
        with self._lock:
            if not self._active() or np.size(runs) == 0:
                return 0
            columns = runs_of(runs)
            late = self._handles.late(columns[0])
            if late is not None:
                columns = columns[:, ~late]
            self._step += 1
            if not self._abandoned:
                self._lose(columns, pb.MISSING_REASON_NOT_CAPTURED)
                self._feed.drain()
                self._look_after()
            return self._step

    def step_slots(self, rows: Rows, slots: npt.ArrayLike) -> int:
        """The routing of one forward pass of an engine that knows only slots.

        Args:
            rows: as for step().
            slots: [n] the slot of each row; of a slot named twice, the last row stays.

        Returns:
            The number of the step, from 1: what `RouteClient.bind` asks for; 0 if there was
            nothing to take.
        """
        with self._lock:
            if not self._active():
                return 0
            rows = rows_of(rows, self._columns)
            column = slots_of(slots, len(rows), self.config.num_slots)
            if len(rows) == 0:
                return 0
            self._step += 1
            self._words[_OFFERED] += len(rows)
            if not self._abandoned:
                self._send_slots(column, rows)
            return self._step

    def _send_step(self, runs: Ints, rows: Rows) -> None:
        most = max(1, self._feed.room(runs.nbytes))
        if len(rows) > most:
            for at in range(0, len(rows), most):
                self._send_step(_cut(runs, at, at + most), rows[at : at + most])
            return
        bad = self._feed.bad_cells(rows)
        if bad is not None and not self._markable:
            self._words[Word.UNMARKABLE] += len(rows)
            self._lose(runs, pb.MISSING_REASON_INVALID_IDS)
        elif not self._feed.step(runs, rows, self._step, self._weight_version, bad):
            self._refuse(len(rows))
            self._lose(runs, pb.MISSING_REASON_QUEUE_FULL)

    def _lose(self, runs: Ints, reason: int) -> None:
        for handle, position, count in runs.T.tolist():
            self._feed.lose(handle, position, count, reason, self._step)

    def _send_slots(self, column: npt.NDArray[np.uint64], rows: Rows) -> None:
        most = max(1, self._feed.room(0) // 2)  # a slot takes 8 bytes beside its row
        for at in range(0, len(rows), most):
            slots, part = column[at : at + most], rows[at : at + most]
            bad = self._feed.bad_cells(part)
            if bad is not None and not self._markable:
                self._words[Word.UNMARKABLE] += len(part)
            elif self._feed.slots(slots, part, self._step, self._weight_version, bad):
                continue
            else:
                self._refuse(len(part))
            self._feed.lose_blocks(np.unique(slots // self.config.block_size).tolist())

    def _refuse(self, rows: int) -> None:
        """There was no room for them."""
        self._words[Word.REFUSED] += rows
        self._look_after()

    # ------------------------------------------------------------------ ends

    def flush(self, timeout: float = 10.0) -> bool:
        """Sends everything handed over before, without waiting for frames and chunks to fill up.

        Args:
            timeout: seconds to wait for the server's acknowledgement.

        Returns:
            True once nothing of it is in flight any more; False if that takes too long, or the
            background is gone.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if not self._active():
                return False
            self._flushes += 1
            token = self._flushes
            self._event("flush", token)
            self._link.wake()
        while self._words[Word.FLUSHED] < token:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed or self._link.leftover:
                return self._words[Word.FLUSHED] >= token
            self._link.wait(min(left, 0.05))
            with self._lock:
                self._feed.drain()
        return True

    @property
    def worker_pid(self) -> int:
        """Process that the background runs in."""
        return self._link.pid

    def stats(self) -> AgentStats:
        """What became of the rows so far."""
        if self._inert:
            return AgentStats()
        return self._final or counters.read(self._words, self._link.leftover)

    def close(self, timeout: float | None = None) -> CloseReport:
        """Sends what is left and ends; requests that are running are reported as lost.

        Args:
            timeout: seconds for all of it; the configuration's close_timeout_s if None.

        Returns:
            What became of the rows; the same again if it was called before.
        """
        deadline = time.monotonic() + (self.config.close_timeout_s if timeout is None else timeout)
        if self._inert:
            return CloseReport()
        if not self._finish(deadline):
            self._done.wait(max(0.0, deadline - time.monotonic()))
            return _report(self._final or self.stats())
        return self._end(deadline)

    def __enter__(self) -> CaptureAgent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ private

    def _finish(self, deadline: float) -> bool:
        """Takes nothing more, and hands over what is remembered; False if that was done before."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            while self._link.alive and not self._feed.drain() and time.monotonic() < deadline:
                self._link.wake()
                self._link.wait(0.01)
        return first

    def _end(self, deadline: float) -> CloseReport:
        """Waits for the background, until `deadline` at most."""
        leftover = self._link.leftover
        self._link.close(deadline)
        if ended := self._words[Word.ENDED]:
            leftover = Ended(ended).name.lower()
        self._final = counters.read(self._words, leftover or "unsent")
        self._done.set()
        _agents.discard(self)
        return _report(self._final)

    def _active(self) -> bool:
        if self._inert:
            return False
        if self._closed:
            raise Closed("the agent is closed")
        return True

    def _give(self, handles: list[int], blocks: array[int]) -> None:
        if not self._abandoned:
            self._feed.blocks(handles, blocks)
            if self._feed.stuck:
                self._look_after()

    def _event(self, *event: Any, handle: int = -1) -> None:
        if not self._abandoned:
            self._feed.event(*event, handle=handle)
            self._look_after()

    def _look_after(self) -> None:
        """Gives up where the background is gone, or has been stuck for too long."""
        if self._feed.behind:
            self._link.wake()
            if self._feed.stuck or not self._link.alive:
                self._abandoned = True
                self._feed.clear()
                self._link.hang_up()

    def _after_fork_in_child(self) -> None:
        self._inert = True
        self._lock = threading.RLock()  # some thread of the parent may have held it
        self._link.forget_in_child()


def _cut(runs: Ints, start: int, stop: int) -> Ints:
    """The parts of runs that cover the rows [start, stop)."""
    handles, positions, counts = runs
    stops = np.cumsum(counts)
    starts = stops - counts
    skipped = np.maximum(start - starts, 0)
    left = np.minimum(stops, stop) - starts - skipped
    part = np.array([handles, positions + skipped, left])
    return np.ascontiguousarray(part[:, left > 0])


def _report(stats: AgentStats) -> CloseReport:
    dropped = dict(stats.dropped_rows)
    unsent = dropped.pop("unsent", 0)
    return CloseReport(stats.acknowledged_rows, dropped, unsent)


_agents: weakref.WeakSet[CaptureAgent] = weakref.WeakSet()


# Links of agents that were collected, if they end with this process.
_left: list[tuple[WorkerLink, float]] = []


def _collected(link: WorkerLink, timeout: float) -> None:
    """The background of an agent that nobody closed sends what it has, in its own time."""
    link.hang_up()
    _left[:] = [other for other in _left if other[0].alive]
    if link.pid == os.getpid():
        _left.append((link, timeout))


def _close_all() -> None:
    """Ends all agents side by side."""
    now = time.monotonic()
    ends: list[tuple[Callable[[float], object], float]] = []
    for link, timeout in _left:
        if link.alive:
            link.finish(now + timeout)
            ends.append((link.close, now + timeout))
    for agent in list(_agents):
        deadline = now + agent.config.close_timeout_s
        if not agent._inert and agent._finish(deadline):
            agent._link.finish(deadline)
            ends.append((agent._end, deadline))
    for end, deadline in ends:
        end(deadline)


def _close_at_exit() -> None:
    """As atexit would, which does not run in the children of multiprocessing."""
    if parent_process() is not None:
        Finalize(None, _close_all, exitpriority=1)


def _after_fork_in_child() -> None:
    for agent in list(_agents):
        agent._after_fork_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
