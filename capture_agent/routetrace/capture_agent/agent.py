"""CaptureAgent: the interface for engines."""

# Over 400 lines: one public class, half of it docstrings that are the contract with engines.

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent import counters
from routetrace.capture_agent.config import AgentConfig, config_of
from routetrace.capture_agent.counters import AgentStats, CloseReport, Word
from routetrace.capture_agent.link import WorkerLink
from routetrace.capture_agent.pipeline.window import last_bad
from routetrace.capture_agent.step_path.checks import (
    Ints,
    Rows,
    blocks_for,
    blocks_of,
    check_pairs,
    computed_of,
    distinct,
    external_of,
    handles_of,
    labels_of,
    number,
    rows_of,
    slots_of,
    spans_of,
    tokens_of,
    transfer_of,
    version_of,
    wrong,
)
from routetrace.capture_agent.step_path.feed import Feed
from routetrace.capture_agent.step_path.handles import Handles
from routetrace.capture_agent.step_path.kv_version import KvVersion
from routetrace.codec.records import UNKNOWN_VERSION, FinishReason
from routetrace.common.checks import MAX_SECONDS, choice, flag, instance, real, whole
from routetrace.common.errors import Closed, InvalidArgument, quoted
from routetrace.common.limits import MAX_NONCE, check_id
from routetrace.common.security import Security
from routetrace.common.target import targets_of
from routetrace.v1 import routetrace_pb2 as pb

_OFFERED = int(Word.OFFERED)
#: Requests of one boot; the server refuses more.
_MAX_BEGUN = 1 << 62
#: Most late spans of one record, so that it fits into the smallest ring.
_LATE_SPANS = 1 << 10
#: Most seconds that close() waits for a background that is being started, beside its own time.
_START_S = 60.0
#: Logged once, with engine, run and process.
_STUCK = (
    "routetrace: engine %r of run %r: the background of the agent (process %d) does not read what "
    "the engine reports; nothing is captured until the engine restarts: look why the process is "
    "stopped, or gets no processor time"
)
_log = logging.getLogger(__name__)

_REASONS = {reason.name.lower(): reason for reason in FinishReason}


class CaptureAgent:
    """Sends an engine's routing to a server, in the background.

    No call waits for the server or the network, except flush() and close(). In a child after
    os.fork() an inherited agent does nothing and counts nothing.

    Positions count the tokens of a request from 0. A request of N tokens has N - 1 rows, since its
    last token is never forwarded.

    Calls follow the order of the engine's steps: decisions of a step's schedule (begin, blocks,
    resume, preempt, mark_external, copy_blocks) after the rows of the steps before it and before
    its own rows. Outcomes of a step (rewind, finish) may follow one step late, since asynchronous
    engines learn them late; rows of a request that has ended or was preempted by then are late, and
    dropped.

    An engine of several shards has one agent per shard, and reports every request to each. To
    step() each passes its own layers and positions; a token and its drafts belong to one rank.

    Args:
        config: server, engine and layout; None: `AgentConfig.from_env(**fields)`.
        own_thread: whether calls come from a thread that the engine does not wait for: copies of
            rows then release Python's global lock.
        predecessor: agent of the same engine that this one replaces. It is closed in the
            background, and nothing is sent before: the server keeps to the agent that connected
            last. With the same boot id this one goes on from its count of requests, by which the
            server joins shards; see `index` of begin().
        **fields: fields of `AgentConfig`, in place of `config`.

    Raises:
        InvalidArgument: naming a field that is wrong; if a certificate, a key or a token cannot be
            used.
        OSError: if the background cannot be started.
    """

    def __init__(
        self,
        config: AgentConfig | None = None,
        *,
        own_thread: bool = False,
        predecessor: CaptureAgent | None = None,
        **fields: Any,
    ) -> None:
        if config is None:
            config = config_of("CaptureAgent", fields)
        elif fields:
            raise InvalidArgument(
                field="config",
                value=f"given beside {', '.join(fields)}",
                expected="an AgentConfig, or its fields",
            )
        instance(
            "config", config, AgentConfig, "use AgentConfig(target=..., engine_id=..., layout=...)"
        )
        flag("own_thread", own_thread)
        if predecessor is not None:
            instance("predecessor", predecessor, CaptureAgent)
        self.config = config = replace(config, boot_id=config.boot_id or secrets.token_hex(8))
        for target in targets_of(config.target):
            cast("Security", config.security).check(target)
        layout = config.layout
        self._columns = (len(layout.layer_ids), layout.top_k)
        # A top-1 layout whose dtype has no spare id cannot mark a cell.
        self._markable = layout.top_k > 1 or layout.num_experts <= np.iinfo(layout.dtype).max
        # Reentrant: a signal handler may call the agent in between, and the ring allows that.
        self._lock = threading.RLock()
        self._inert = False  # inherited over a fork
        self._closed = False
        self._replaced = False  # another agent of the engine goes on
        self._abandoned = False  # the background is dead or stuck; the ring is not read
        self._final: AgentStats | None = None
        self._done = threading.Event()
        self._weight_version = UNKNOWN_VERSION
        self._kv = KvVersion(config.external_kv_emptied)
        self._went_back = False  # that is logged once
        self._step = 0
        self._flushes = 0
        # A count that restarted within a boot would give requests the identity of earlier ones.
        same_boot = predecessor is not None and predecessor.config.boot_id == config.boot_id
        self._begun: int = predecessor._begun if predecessor is not None and same_boot else 0
        self._handles = Handles()
        self._link = WorkerLink(config, held=predecessor is not None)
        if predecessor is not None:
            predecessor._replaced = True
            threading.Thread(
                target=_succeed,
                args=(predecessor, self._link),
                name="routetrace-close",
                daemon=True,
            ).start()
        self._words = self._link.words
        self._feed = Feed(self._link.ring, layout, yields=own_thread)
        _agents.add(self)
        _close_at_exit()
        # Collected without close(): the background sends its chunks.
        weakref.finalize(self, _collected, self._link, config.close_timeout_seconds).atexit = False

    # ------------------------------------------------------------------ requests

    def begin(
        self,
        request_id: str,
        *,
        trace_id: str | None = None,
        prompt_len: int | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        num_computed_tokens: int = 0,
        num_external_tokens: int = 0,
        block_ids: Iterable[int] = (),
        prompt_token_ids: npt.ArrayLike | None = None,
        transfer_id: str | None = None,
        nonce: int | None = None,
        index: int | None = None,
    ) -> int:
        """Begin a request.

        Args:
            request_id: name given by the engine; reusable once the request has finished.
            trace_id: trace that its rows belong to; the request id if None.
            prompt_len: prompt tokens; None: as many as `prompt_token_ids`, unknown without them.
            labels: group, session, sample and other names that readers look traces up by.
            ttl_seconds: lease of the trace after its last change; the server's default if None.
            num_computed_tokens: leading tokens whose KV is in the cache, in `block_ids`, at the
                latest after the step of its first rows. It inherits their rows together with its
                own first ones.
            num_external_tokens: the last ones of them, loaded from elsewhere (another engine, CPU
                memory, a remote cache); their rows are unknown.
            block_ids: its KV blocks, in order, at most num_blocks; none where block_size is 0.
            prompt_token_ids: the prompt, [prompt_len]; lets the server prove that rows of different
                engines belong to the same tokens.
            transfer_id: hand-over that its external KV comes by: the request that finished with the
                same id computed that KV. Each hand-over has an id of its own.
            nonce: names the request where its trace id is used again; the same at all shards, in 1
                to 2**53 - 1. The engine's answer hands it to readers.
            index: number of requests that the engine began before it in this boot, by which the
                server knows it at all shards; no other request of the boot has the same. None: as
                many as began at this agent and at the agents that it replaced. Give it where the
                agents of an engine may see different requests, as after a fault. The server joins
                shards of a request only if their numbers are equal.

        Returns:
            A handle for the other calls.

        Raises:
            InvalidArgument: naming the wrong argument; nothing was recorded.
            Closed: after close().
        """
        with self._lock:
            if not self._active():
                return 0
            check_id("request_id", request_id)
            if trace_id is not None:
                check_id("trace_id", trace_id)
            if request_id in self._handles:
                raise wrong("request_id", quoted(request_id), "an id that is not running")
            if prompt_len is not None:
                prompt_len = number("prompt_len", prompt_len)
            prompt = tokens_of("prompt_token_ids", prompt_token_ids, prompt_len)
            if prompt_len is None:
                prompt_len = len(prompt or b"") // 4
            facts = pb.RequestBegin(
                trace_id=trace_id or "",
                prompt_len=prompt_len,
                labels=labels_of({} if labels is None else labels),
                ttl_seconds=0 if ttl_seconds is None else whole("ttl_seconds", ttl_seconds, 1),
                transfer_id=transfer_of(transfer_id),
                nonce=0 if nonce is None else whole("nonce", nonce, 1, MAX_NONCE - 1),
            )
            index = self._begun if index is None else number("index", index, _MAX_BEGUN)
            blocks = blocks_of(block_ids, self.config)
            computed = computed_of(num_computed_tokens, blocks, self.config)
            external = external_of(num_external_tokens, computed)
            kv, version = self._noted_kv(), self._weight_version
            cached = computed > external
            outside = external > 0 or (cached and self.config.num_host_blocks > 0)
            if computed and kv.is_of(version, cached=cached, external=outside):
                facts.kv_weight_version = version
            handle = self._handles.new(request_id)
            former, self._begun = self._begun, max(self._begun, index + 1)
            event = request_id, facts.SerializeToString(), index, computed, external, blocks, prompt
            if external:
                kv.load(version)
            try:
                self._event("begin", *event, handle=handle)
            except InvalidArgument:  # larger than the ring
                self._handles.free(handle)
                self._begun = former
                raise
            return handle

    def add_blocks(self, handles: int | npt.ArrayLike, block_ids: Iterable[int]) -> None:
        """Add newly allocated KV blocks to requests, before the step that writes them.

        Args:
            handles: one request that gets all the blocks, or a request for each block.
            block_ids: blocks in the order of the requests' tokens.

        Raises:
            InvalidArgument: naming the wrong argument; nothing was recorded.
        """
        with self._lock:
            if not self._active():
                return
            owners = handles_of(handles)
            if owners is None:
                handle = self._handles.check(handles, "handles")
                blocks = np.frombuffer(blocks_of(block_ids, self.config), np.uint32)
                self._give(np.full(len(blocks), handle), blocks.astype(np.int64))
                return
            several = blocks_for(block_ids, len(owners), self.config)
            self._handles.check_all(owners)
            self._give(owners, several)

    def rewind(self, handle: int, position: int, *, step: int = 0) -> None:
        """Reject rows of a request at `position` and after (speculative decoding).

        Not needed where the next rows start at `position`. With context parallelism another rank
        may compute those, so call it on every rank.

        Args:
            handle: request; ignored if it has finished.
            position: first position that was rejected.
            step: value that step() returned for the rows. Needed where an engine learns of a
                rejection late, after rows of a later step took the place: those stay.
        """
        with self._lock:
            if self._active():
                position = number("position", position)
                step = number("step", step, 1 << 63)
                if not self._handles.is_late(handle):
                    self._event("rewind", position, step, handle=self._handles.check(handle))

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        """Preempt a request: it releases its blocks, and keeps rows below `num_computed_tokens`.

        If that is `prompt_len` or more, the attempt that ends has sampled: readers get its rows,
        and those of the next attempt behind them. Where the engine drops the sample of a pass, do
        not count the last token of that pass. Rows that arrive before it is resumed are late: they
        are dropped.
        """
        with self._lock:
            if self._active():
                handle = self._handles.check(handle)
                computed = number("num_computed_tokens", num_computed_tokens)
                self._event("preempt", computed, handle=handle)

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        *,
        block_ids: Iterable[int] = (),
        num_external_tokens: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        """Start the next attempt of a request; arguments as for begin().

        One that was not preempted is preempted first, with the same `num_computed_tokens`.
        `num_tokens` are the tokens that the request has now, prompt and answer, with those that
        passes in flight at the preemption sampled; None: not known. An attempt that does not
        compute the last of these tokens samples nothing, so readers do not get its rows.
        """
        with self._lock:
            if self._active():
                handle = self._handles.check(handle)
                blocks = blocks_of(block_ids, self.config)
                computed = computed_of(num_computed_tokens, blocks, self.config)
                external = external_of(num_external_tokens, computed)
                had = 0 if num_tokens is None else number("num_tokens", num_tokens)
                if external:
                    self._noted_kv().load(self._weight_version)
                self._event("resume", computed, external, blocks, had, handle=handle)

    def finish(
        self,
        handle: int,
        num_tokens: int,
        *,
        reason: str = "stop",
        token_ids: npt.ArrayLike | None = None,
        transfer_id: str | None = None,
    ) -> None:
        """End a request.

        Args:
            handle: request; void afterwards. Later rows are dropped, and their slots unknown.
            num_tokens: tokens of prompt and answer; rows beyond num_tokens - 1 do not count.
            reason: "stop", "length", "abort", or "handoff": another engine continues the trace,
                which has not ended.
            token_ids: all its tokens, [num_tokens]; see prompt_token_ids of begin().
            transfer_id: hand-over by which another request takes its KV, with any reason; see
                begin().
        """
        with self._lock:
            if self._active():
                handle = self._handles.check(handle)
                num_tokens = number("num_tokens", num_tokens)
                why = int(_REASONS[choice("reason", reason, _REASONS)])
                tokens = tokens_of("token_ids", token_ids, num_tokens)
                transfer = transfer_of(transfer_id)
                now_ms = time.time_ns() // 1_000_000
                self._event("finish", num_tokens, why, tokens, now_ms, transfer, handle=handle)
                self._handles.free(handle)
                self._feed.interrupt()
                if not self._handles:  # the background sends what it has
                    self._link.wake()

    # ------------------------------------------------------------------ the engine

    def mark_external(self, block_ids: Iterable[int]) -> None:
        """Note that the KV of these blocks was loaded from elsewhere: their rows are unknown.

        A block may be named several times. Call it after step() or step_slots() of every step that
        was under way before, since a slot does not name the request of its row.
        """
        with self._lock:
            if self._active():
                blocks = distinct(blocks_of(block_ids, self.config, host=True), self.config)
                if blocks:
                    self._noted_kv().load(self._weight_version)
                self._event("external", blocks)

    def copy_blocks(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Note that KV was copied, block by block: the copies have the rows of their sources.

        For writes to the engine's host tier, and loads from there. Call it as mark_external(),
        after the step of every pass that runs before the copy; for a load also before begin() or
        resume() of the requests that use the blocks, to which these are no external KV.

        Args:
            sources: blocks of the engine or of its host tier (num_blocks and above).
            targets: as many blocks, each named once. A block may be a source, too: all sources are
                read before a target is written.

        Raises:
            InvalidArgument: naming the wrong argument; nothing was recorded.
        """
        with self._lock:
            if self._active():
                read = blocks_of(sources, self.config, host=True, name="sources")
                written = blocks_of(targets, self.config, host=True, name="targets")
                check_pairs(read, written)
                if read:
                    self._event("copy", read, written)

    def reset_prefix_cache(self) -> None:
        """Note that the engine cleared its prefix cache; host blocks keep their rows.

        If no request is live, all KV in the engine's blocks is of the weight versions of the steps
        that follow.
        """
        with self._lock:
            if self._active():
                config = self.config
                self._noted_kv().empty_blocks(live=bool(self._handles))
                self._event("reset", config.num_blocks if config.num_host_blocks else 0)

    def reset_external_kv(self) -> None:
        """Note that all KV stores outside of the engine's blocks were emptied, its host tier too.

        Call reset_prefix_cache() first: a block that holds older KV can be written to a store after
        this. Of stores that other engines fill, too, and of KV that they hand over, this agent does
        not see all passes: declare `AgentConfig.external_kv_emptied` for them, or nothing.
        """
        with self._lock:
            if self._active():
                config = self.config
                self._noted_kv().empty_outside(live=bool(self._handles))
                if config.num_host_blocks:
                    host = range(config.num_blocks, config.num_blocks + config.num_host_blocks)
                    self._event("external", blocks_of(host, config, host=True))

    def set_weight_version(self, version: int | None) -> None:
        """Set the weight version of the following steps; it is unknown until it is set.

        Call it before begin() of the requests that the new weights compute: begin() tells the
        server of which version all KV is that the engine could reuse, if that is known. Versions
        ascend, except after a rollback: one that goes back is logged once.

        Args:
            version: number that the trainer gave, a signed 64-bit integer above -2**63; None: the
                weights have changed, and no one gave their version.
        """
        with self._lock:
            if self._active():
                version = version_of(version)
                if UNKNOWN_VERSION < version < self._weight_version and not self._went_back:
                    self._went_back = True
                    _log.warning(
                        "routetrace: the weight version of engine %r goes back from %d to %d: if "
                        "that is no rollback, set versions that ascend; retire_through(%d) does "
                        "not spare new rows",
                        self.config.engine_id,
                        self._weight_version,
                        version,
                        self._weight_version,
                    )
                self._noted_kv()
                self._weight_version = version

    # ------------------------------------------------------------------ rows

    def step(self, rows: Rows, spans: npt.ArrayLike) -> int:
        """Record the routing of one forward pass.

        Args:
            rows: [n, L, K] of any integer dtype: expert ids of each token in each layer of the
                layout, in the order of the router. Copied. To mark a cell that was not captured,
                repeat an id or use one out of range: its row is reported as missing.
            spans: [m, 3] of (handle, first position, number of rows), covering the n rows in order.
                A position below the end of its request rejects the rows from there on. Rows after
                the prompt, except the first of a span, are drafts, which readers do not get before
                a later step or the end of the request confirms them.

        Returns:
            The number of the step, from 1; 0 if there were no rows.

        Raises:
            InvalidArgument: naming the wrong argument; nothing was recorded.
            Closed: after close().
        """
        # Each Python call counts here: `with` takes twice as long.
        self._lock.acquire()
        try:
            if (self._inert or self._closed) and not self._active():
                return 0
            feed, number = self._feed, 0
            steady, feed.steady = feed.steady, None
            if steady is not None and steady.matches(rows, spans):
                self._step = number = self._step + 1
                self._words[_OFFERED] += steady.num_rows
                if feed.again(steady, rows, number, self._weight_version):
                    return number
                self._words[_OFFERED] -= steady.num_rows
            return self._take_step(rows, spans, number)
        finally:
            self._lock.release()

    def _take_step(self, rows: Rows, spans: npt.ArrayLike, number: int) -> int:
        """Check and record a step; `number` is its number, 0 if it has none yet."""
        rows = rows_of(rows, self._columns)
        columns = spans_of(spans, len(rows))
        if columns is None:
            self._kv.add(self._weight_version)  # a pass of requests that are not captured
            return 0
        late = self._handles.late(columns[0])
        if not number:
            self._step = number = self._step + 1
        self._words[_OFFERED] += len(rows)
        if late is not None:
            kept = np.repeat(~late, columns[2])
            self._words[Word.TOO_LATE] += len(rows) - int(kept.sum())
            self._report_late(columns[:, late])
            columns, rows = np.ascontiguousarray(columns[:, ~late]), rows[kept]
        if len(rows) and not self._abandoned:
            self._send_step(columns, rows)
        return number

    def skip(self, spans: npt.ArrayLike) -> int:
        """Record a forward pass that was not captured: its rows are missing.

        Args:
            spans: as for step().

        Returns:
            The number of the step, from 1; 0 if there are no spans.

        Raises:
            InvalidArgument: if `spans` is wrong; nothing was recorded.
            Closed: after close().
        """
        with self._lock:
            if not self._active():
                return 0
            columns = spans_of(spans)
            self._kv.add(UNKNOWN_VERSION)
            if columns is None:
                return 0
            late = self._handles.late(columns[0])
            if late is not None:
                self._report_late(columns[:, late])
                columns = columns[:, ~late]
            self._step += 1
            if not self._abandoned:
                self._lose(columns, pb.MISSING_REASON_NOT_CAPTURED)
                self._feed.drain()
                self._look_after()
            return self._step

    def step_slots(self, rows: Rows, slots: npt.ArrayLike) -> int:
        """Record the routing of one forward pass of an engine that knows only slots.

        Args:
            rows: as for step().
            slots: [n] the slot of each row; of a slot named twice, the last row counts.

        Returns:
            The number of the step, from 1, for `RouteClient.bind`; 0 if there were no rows.
        """
        with self._lock:
            if not self._active():
                return 0
            rows = rows_of(rows, self._columns)
            column = slots_of(slots, len(rows), self.config.num_slots)
            if len(rows) == 0:
                self._kv.add(self._weight_version)
                return 0
            self._step += 1
            self._words[_OFFERED] += len(rows)
            if not self._abandoned:
                self._send_slots(column, rows)
            return self._step

    def _noted_kv(self) -> KvVersion:
        """Note the steps of the present weight version so far."""
        self._kv.ran(self._step, self._weight_version)
        return self._kv

    def _send_step(self, spans: Ints, rows: Rows) -> None:
        most = max(1, self._feed.room(spans.nbytes))
        if len(rows) > most:
            for at in range(0, len(rows), most):
                self._send_step(_cut(spans, at, at + most), rows[at : at + most])
            return
        bad = self._feed.bad_cells(rows)
        if bad is not None and not self._markable:
            lost = np.any(bad, axis=1)
            self._event("bad", self._step, np.packbits(lost).tobytes())
        if not self._feed.step(spans, rows, self._step, self._weight_version, bad):
            self._refuse(len(rows))
            self._lose(spans, pb.MISSING_REASON_QUEUE_FULL)

    def _report_late(self, spans: Ints) -> None:
        """Report late rows: they are dropped, but the pass has written their slots."""
        for at in range(0, spans.shape[1], _LATE_SPANS) if self.config.block_size else ():
            self._event("late", spans[:, at : at + _LATE_SPANS].tobytes())

    def _lose(self, spans: Ints, reason: int) -> None:
        for handle, position, count in spans.T.tolist():
            self._feed.lose(handle, position, count, reason, self._step)

    def _send_slots(self, column: npt.NDArray[np.uint64], rows: Rows) -> None:
        most = max(1, self._feed.room(0) // 2)  # a slot takes 8 bytes beside its row
        for at in range(0, len(rows), most):
            slots, part = column[at : at + most], rows[at : at + most]
            bad = self._feed.bad_cells(part)
            if bad is not None and not self._markable:
                lost = np.any(bad, axis=1)
                self._words[Word.UNMARKABLE] += int(lost.sum())
                forgotten = last_bad(slots, lost)
                slots, part, bad = slots[~lost], part[~lost], None
            else:
                forgotten = slots[:0]
            if not self._feed.slots(slots, part, self._step, self._weight_version, bad):
                self._refuse(len(part))
                self._feed.lose_blocks(np.unique(slots // self.config.block_size).tolist())
            if len(forgotten):
                self._event("forget", forgotten.tobytes())

    def _refuse(self, rows: int) -> None:
        """Count rows that found no room in the ring."""
        self._words[Word.REFUSED] += rows
        self._look_after()

    # ------------------------------------------------------------------ ends

    def flush(self, timeout: float = 10.0) -> bool:
        """Send everything recorded so far, without waiting for frames and chunks to fill.

        Args:
            timeout: seconds to wait for the server's acknowledgement; 0 does not wait.

        Returns:
            True once none of it is in flight; False after the timeout, or if the background ended
            or died.

        Raises:
            InvalidArgument: if `timeout` is wrong.
            Closed: after close().
        """
        deadline = time.monotonic() + _wait(timeout)
        with self._lock:
            if not self._active():
                return False
            self._flushes += 1
            token = self._flushes
            deaths = self._link.deaths
            self._event("flush", token)
            self._link.wake()
        while self._words[Word.FLUSHED] < token:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed or self._abandoned or self._link.leftover:
                return self._words[Word.FLUSHED] >= token
            if self._link.deaths > deaths:  # the background died, maybe with the flush
                return False
            self._link.wait(min(left, 0.05))
            with self._lock:
                self._feed.drain()
        return True

    @property
    def worker_pid(self) -> int:
        """Id of the process that the background runs in, of the last one where one died."""
        return self._link.pid

    def stats(self) -> AgentStats:
        """Counters of the rows so far."""
        if self._inert:
            return AgentStats()
        return self._final or counters.read(self._words, self._link.leftover)

    def close(self, timeout: float | None = None) -> CloseReport:
        """Send the rest and end; readers of running requests learn that no end will come.

        Rows that are lost, as time runs out or the background died, are also logged, as a warning.

        Args:
            timeout: seconds in total. None: the configuration's close_timeout_seconds, from when
                the background works; a start may take up to 60 s more.

        Returns:
            Final counters of the rows; a second call returns the same report.

        Raises:
            InvalidArgument: if `timeout` is wrong; the agent stays open.
        """
        seconds = _wait(self.config.close_timeout_seconds if timeout is None else timeout)
        if self._inert:
            return CloseReport()
        if timeout is None and not self._closed:
            self._link.wait_until_up(time.monotonic() + _START_S)
        deadline = time.monotonic() + seconds
        if not self._finish(deadline):
            self._done.wait(max(0.0, deadline - time.monotonic()))
            return _report(self._final or self.stats())
        return self._end(deadline)

    def __repr__(self) -> str:
        stats = self.stats()
        state = "connected" if stats.connected else "not connected"
        if self._closed or self._inert:
            state = "closed" if self._closed else "inherited over a fork"
        dropped = sum(stats.dropped_rows.values())
        return (
            f"<CaptureAgent of {self.config.engine_id!r} for {self.config.target} {state}: rows "
            f"{stats.offered_rows} offered, {stats.acknowledged_rows} acknowledged, {dropped} "
            "dropped>"
        )

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
        """Refuse further calls and write the backlog; return False if that was done before."""
        with self._lock:
            first, self._closed = not self._closed, True
        while first and self._link.alive and time.monotonic() < deadline:
            with self._lock:  # a flush() under way in another thread drains as well
                if self._feed.drain():
                    # What is not in the ring is lost, ends of requests among it.
                    self._words[Word.CLOSED] = not (self._abandoned or self._replaced)
                    break
            self._link.wake()
            self._link.wait(0.01)
        return first

    def _end(self, deadline: float) -> CloseReport:
        """Wait for the background, at most until `deadline`."""
        self._final = counters.read(self._words, self._link.close(deadline))
        self._done.set()
        _agents.discard(self)
        return _report(self._final)

    def _active(self) -> bool:
        if self._inert:
            return False
        if self._closed:
            raise Closed("the agent is closed")
        return True

    def _give(self, handles: Ints, blocks: Ints) -> None:
        if not self._abandoned:
            self._feed.blocks(handles, blocks)
            if self._feed.stuck:
                self._look_after()

    def _event(self, *event: Any, handle: int = -1) -> None:
        if not self._abandoned:
            self._feed.event(*event, handle=handle)
            self._look_after()

    def _look_after(self) -> None:
        """Abandon the background if it is dead, or if the backlog exceeds its limit."""
        if self._feed.behind:
            self._link.wake()
            if self._feed.stuck or not self._link.alive:
                self._abandoned = True
                self._feed.clear()
                self._link.hang_up()
                if self._link.alive:  # else its end was logged
                    _log.error(_STUCK, self.config.engine_id, self.config.run, self._link.pid)

    def _after_fork_in_child(self) -> None:
        self._inert = True
        self._lock = threading.RLock()  # some thread of the parent may have held it
        self._link.forget_in_child()


def _wait(timeout: float) -> float:
    return real("timeout", timeout, 0, MAX_SECONDS, "seconds")


def _succeed(predecessor: CaptureAgent, link: WorkerLink) -> None:
    """Close an agent, then let the one that replaces it send."""
    try:
        predecessor.close()
    finally:
        link.release()


def _cut(spans: Ints, start: int, stop: int) -> Ints:
    """Return the parts of spans that cover the rows [start, stop)."""
    handles, positions, counts = spans
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


# Links of agents that were collected, if their background runs in this process.
_left: list[tuple[WorkerLink, float]] = []


def _collected(link: WorkerLink, timeout: float) -> None:
    """Have the background of an agent that was not closed send its chunks and end."""
    link.hang_up()
    _left[:] = [other for other in _left if other[0].alive]
    if link.pid == os.getpid():
        _left.append((link, timeout))


def _close_all() -> None:
    """Close all agents side by side."""
    agents = [agent for agent in list(_agents) if not (agent._inert or agent._closed)]
    until = time.monotonic() + _START_S
    for agent in agents:
        agent._link.wait_until_up(until)
    now = time.monotonic()
    ends: list[tuple[Callable[[float], object], float]] = []
    for link, timeout in _left:
        if link.alive:
            link.finish(now + timeout)
            ends.append((link.close, now + timeout))
    for agent in agents:
        deadline = now + agent.config.close_timeout_seconds
        if agent._finish(deadline):
            agent._link.finish(deadline)
            ends.append((agent._end, deadline))
    for end, deadline in ends:
        end(deadline)


def _close_at_exit() -> None:
    """Close agents at exit of a child of multiprocessing, where atexit does not run."""
    if parent_process() is not None:
        Finalize(None, _close_all, exitpriority=1)


def _after_fork_in_child() -> None:
    for agent in list(_agents):
        agent._after_fork_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
