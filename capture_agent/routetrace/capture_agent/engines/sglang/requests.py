"""Requests under way: from SGLang's batches to the calls of a `CaptureAgent`.

A request has a lane, a small number that stands for it in tables. `Requests` follows what SGLang
launches and decides, on SGLang's own thread. `Deliveries` reports passes whose rows have arrived,
on another one; see `timeline` for the events between. They share nothing but plans and free lanes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.engines.request_options import RequestOptions
from routetrace.capture_agent.engines.sglang.disaggregation import Arrival, arrival_of
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_NONCE

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint32]

#: In place of the handle of a request that is not captured.
NO_HANDLE = -1

#: Page that SGLang gives to no request.
PADDING = 0

#: Attribute of SGLang's `Req` that holds its `Live`.
_MARK = "_routetrace_live"


@dataclass(eq=False, slots=True)
class Live:
    """A request that has begun, and has not ended."""

    lane: int
    request_id: str
    options: RequestOptions | None
    """None: the request is not captured."""
    prompt_len: int
    prompt: Sequence[int] | None
    """For digests; None if token ids do not identify the model's input."""
    nonce: int
    """Names the request where its trace id is used again. A random number will do: one agent
    reports all of an engine."""
    arrival: Arrival | None = None
    """How its prompt's KV came from another engine, where that is known."""
    sent_as: str | None = None
    """Hand-over by which another engine takes its KV, once it has ended."""
    launched: bool = True
    """Whether it has been in a pass; otherwise it was aborted before, or another engine computed
    its KV."""
    retracted: bool = False


@dataclass(eq=False, slots=True)
class Start:
    """A request begins or resumes in a pass."""

    live: Live
    index: int
    """Index of its span in the plan."""
    resumed: bool
    num_computed: int
    """Tokens whose KV is in the cache."""
    had: int


@dataclass(eq=False, slots=True)
class Plan:
    """Order of the rows of one pass."""

    lanes: Ints
    """[m] of the requests, in the order of their rows."""
    positions: Ints
    """[m] of their first rows."""
    counts: Ints
    """[m] numbers of their rows."""
    version: int | None
    """Version of the weights; None: unknown."""
    starts: list[Start]
    num_lanes: int
    """Size of a table by lane."""
    torn: bool = False
    """Whether the weights may be of several versions: the pass is reported as skipped."""


class Requests:
    """Requests of one scheduler.

    Args:
        options_of: returns the options of a request (SGLang's `Req`), None if it is not captured.
        free: lanes of requests that have ended, to which another thread appends.
    """

    def __init__(self, options_of: Callable[[Any], RequestOptions | None], free: list[int]) -> None:
        self._options_of = options_of
        self._free = free
        self._num_lanes = 0
        # By lane: position after the last launched row, of the passes before the last one.
        self._ends = np.zeros(0, np.int64)
        self._batch: list[Any] = []  # requests of the last pass, their lanes and rows
        self._lanes = self._positions = self._counts = np.empty(0, np.int64)

    def plan(
        self,
        reqs: Sequence[Any],
        positions: Ints,
        counts: Ints,
        version: int | None,
        torn: bool = False,
    ) -> Plan:
        """Return the plan of a pass that is launched now.

        Args:
            reqs: SGLang's requests, in the order of their rows.
            positions: [m] of their first rows; not changed later.
            counts: [m] numbers of their rows; not changed later.
            version: of the weights; None: unknown.
            torn: whether the weights may be of several versions.
        """
        starts: list[Start] = []
        if self._batch != reqs:  # the same objects in most passes, which is compared first
            self._note_ends()
            self._batch = []
            for index, req in enumerate(reqs):
                live: Live | None = getattr(req, _MARK, None)
                if live is None or live.retracted:
                    starts.append(self._start(req, live, index, int(positions[index])))
            self._batch = list(reqs)
            self._lanes = np.array([getattr(req, _MARK).lane for req in reqs], np.int64)
        self._positions, self._counts = positions, counts
        return Plan(self._lanes, positions, counts, version, starts, self._num_lanes, torn)

    def _note_ends(self) -> None:
        """Note the ends of the rows of the last pass."""
        if len(self._lanes):
            self._ends[self._lanes] = self._positions + self._counts

    def retract(self, req: Any, num_tokens: int) -> tuple[Live, int] | None:
        """Note that a request loses its KV.

        Args:
            req: the request.
            num_tokens: of its prompt, and of those sampled ones that it keeps.

        Returns:
            It, and the number of its rows that count: the token which the last one samples is
            dropped, where it is under way. None if the request was in no pass.
        """
        live: Live | None = getattr(req, _MARK, None)
        if live is None or live.retracted:
            return None
        live.retracted = True
        self._batch = []
        self._note_ends()
        return live, min(int(self._ends[live.lane]), num_tokens - 1)

    def live(self, req: Any) -> Live | None:
        """Return a request that has begun and has not ended; None if it has not, or is over."""
        live: Live | None = getattr(req, _MARK, None)
        return live

    def enter(self, req: Any) -> None:
        """Note a request that ends, if it was in no pass."""
        if not hasattr(req, _MARK):
            setattr(req, _MARK, self._live(req, self._options(req), launched=False))

    def end(self, req: Any) -> Live | None:
        """Note that a request has ended; return it, None if it has not begun or has ended."""
        live: Live | None = getattr(req, _MARK, None)
        if live is not None:
            setattr(req, _MARK, None)
            self._batch = []
        return live

    def _start(self, req: Any, live: Live | None, index: int, position: int) -> Start:
        resumed = live is not None
        if live is None:
            live = self._live(req, None if req.finished() else self._options(req))
            setattr(req, _MARK, live)
        live.retracted = False
        had = len(req.origin_input_ids) + len(req.output_ids)
        return Start(live, index, resumed, position, had)

    def _live(self, req: Any, options: RequestOptions | None, *, launched: bool = True) -> Live:
        prompt = req.origin_input_ids
        known = copy(prompt) if _is_text(req) else None
        return Live(
            lane=self._new_lane(),
            request_id=req.rid,
            options=options,
            prompt_len=len(prompt),
            prompt=known,
            nonce=1 + secrets.randbelow(MAX_NONCE - 1),
            arrival=arrival_of(req),
            launched=launched,
        )

    def _options(self, req: Any) -> RequestOptions | None:
        try:
            return self._options_of(req)
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", req.rid, error)
            return None

    def _new_lane(self) -> int:
        if not self._free:
            size = self._num_lanes
            self._num_lanes = max(64, 2 * size)
            self._ends = np.concatenate([self._ends, np.zeros(self._num_lanes - size, np.int64)])
            self._free.extend(range(size, self._num_lanes))
        return self._free.pop()


class Deliveries:
    """Reports of passes and requests to an agent.

    Args:
        block_size: SGLang's page size.
        free: takes the lanes of requests that have ended.
        labels: of all requests.
    """

    def __init__(
        self, block_size: int, free: list[int], labels: Mapping[str, str] | None = None
    ) -> None:
        self._block_size = block_size
        self._free = free
        self._labels = dict(labels or {})
        self._handles = np.full(64, NO_HANDLE, np.int64)  # by lane

    def deliver(
        self,
        plan: Plan,
        rows: npt.NDArray[np.unsignedinteger],
        slots: Ints,
        prefixes: Ints,
        agent: CaptureAgent,
    ) -> None:
        """Report a pass: its begins, blocks and rows.

        Args:
            plan: of the pass.
            rows: [n, L, K] ids.
            slots: [n] of the rows.
            prefixes: slots of the cached tokens of all requests that start, one after the other.
            agent: to report to.
        """
        size, counts, n = self._block_size, plan.counts, len(rows)
        self._fit(plan.num_lanes)
        total = int(np.add.reduce(counts))
        if n != len(slots) or n != total:
            raise RuntimeError(f"{n} rows, {len(slots)} slots, {total} tokens")
        stops = firsts = counts
        if plan.starts or n > len(counts):
            stops = np.cumsum(counts)
            firsts = stops - counts
        at = 0
        for start in plan.starts:
            cached = prefixes[at : at + start.num_computed]
            at += start.num_computed
            own = np.concatenate([cached, slots[firsts[start.index] : stops[start.index]]])
            self._report_start(start, (own[::size] // size).tolist(), agent)
        handles = self._handles[plan.lanes]
        spans = np.empty((len(counts), 3), np.int64)
        spans[:, 0], spans[:, 1], spans[:, 2] = handles, plan.positions, counts
        positions, owners = spans[:, 1], handles
        if n > len(counts):
            positions = np.repeat(positions - firsts, counts) + np.arange(n)
            owners = np.repeat(handles, counts)
        new = positions % size == 0
        captured = owners != NO_HANDLE
        every = bool(captured.all())
        if not every:
            new &= captured
        if plan.starts:
            going_on = np.ones(len(counts), np.bool_)
            going_on[[start.index for start in plan.starts]] = False
            new &= going_on if n == len(counts) else np.repeat(going_on, counts)
        if new.any():
            agent.add_blocks(owners[new], slots[new] // size)
        if not every:
            agent.mark_external(np.unique(slots[~captured] // size).tolist())
            rows, spans = rows[captured], spans[handles != NO_HANDLE]
        if plan.torn:
            agent.skip(spans)
        else:
            agent.step(rows, spans)  # without rows, too: it has written KV

    def _report_start(self, start: Start, blocks: list[int], agent: CaptureAgent) -> None:
        live, handle = start.live, int(self._handles[start.live.lane])
        if start.resumed:
            if handle != NO_HANDLE:
                agent.resume(handle, start.num_computed, block_ids=blocks, num_tokens=start.had)
            return
        arrival = live.arrival
        if arrival is None or start.num_computed != live.prompt_len:  # not as it was allocated
            self._begin(live, start.num_computed, blocks, agent)
            return
        external = max(0, live.prompt_len - arrival.num_cached)
        self._begin(live, start.num_computed, blocks, agent, external, arrival.transfer_id)

    def _begin(
        self,
        live: Live,
        num_computed: int,
        blocks: list[int],
        agent: CaptureAgent,
        num_external: int = 0,
        transfer_id: str | None = None,
    ) -> None:
        prompt = live.prompt
        if prompt is not None:
            live.prompt = ()  # no longer needed
        if live.options is None:
            return
        try:
            self._handles[live.lane] = agent.begin(
                live.request_id,
                trace_id=live.options.trace_id or None,
                prompt_len=live.prompt_len,
                labels={**live.options.labels, **self._labels},
                ttl_seconds=live.options.ttl_seconds or None,
                num_computed_tokens=num_computed,
                num_external_tokens=num_external,
                block_ids=blocks,
                prompt_token_ids=None if prompt is None else tokens_of(prompt),
                transfer_id=transfer_id,
                nonce=live.nonce,
            )
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", live.request_id, error)

    def report_retraction(self, live: Live, num_rows: int, agent: CaptureAgent) -> None:
        """Report a retraction that `retract` noted."""
        self._fit(live.lane + 1)
        if (handle := int(self._handles[live.lane])) != NO_HANDLE:
            agent.preempt(handle, num_rows)

    def report_end(
        self, live: Live, parts: Sequence[Sequence[int]], reason: str, agent: CaptureAgent
    ) -> None:
        """Report an end that `end` noted, and free the lane: no pass refers to it any more.

        Args:
            live: the request.
            parts: all its tokens, one part after the other.
            reason: of the end.
            agent: to report to.
        """
        self._fit(live.lane + 1)
        num_tokens = sum(map(len, parts))
        if not live.launched:
            computed, name = 0, None
            if reason != "abort":  # its answer was sampled from the sender's KV
                computed = max(0, num_tokens - 1)
                name = None if live.arrival is None else live.arrival.transfer_id
            blocks = [PADDING] * -(-computed // self._block_size)
            self._begin(live, computed, blocks, agent, computed, name)
        handle = int(self._handles[live.lane])
        self._handles[live.lane] = NO_HANDLE
        self._free.append(live.lane)
        if handle != NO_HANDLE:
            known = None if live.prompt is None else tokens_of(*parts)
            agent.finish(
                handle, num_tokens, reason=reason, token_ids=known, transfer_id=live.sent_as
            )

    def _fit(self, num_lanes: int) -> None:
        """Have room for so many lanes."""
        if len(self._handles) < num_lanes:
            more = np.full(num_lanes - len(self._handles), NO_HANDLE, np.int64)
            self._handles = np.concatenate([self._handles, more])

    def give_up(self) -> None:
        """Drop all handles, since their agent is lost."""
        self._handles[:] = NO_HANDLE


def tokens_of(*parts: Sequence[int]) -> Tokens:
    """Return token ids, concatenated."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts]).astype(np.uint32)


def _is_text(req: Any) -> bool:
    """Whether the token ids of a request and the weights alone determine its rows."""
    given = (req.input_embeds, req.multimodal_inputs, req.lora_id, req.extra_key)
    return all(each is None for each in (*given, req.positional_embed_overrides))
