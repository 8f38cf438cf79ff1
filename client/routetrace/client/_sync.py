"""RouteClient: the blocking client."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy.typing as npt

from routetrace.client import _arguments, _calls
from routetrace.client._calls import Errors, Missing, MissingOrWait, Policy
from routetrace.client._core import Config, Plan
from routetrace.client._drive import Driver
from routetrace.client.plan import Plan as RankPlan
from routetrace.client.prefetch import Prefetch
from routetrace.client.rows import RankRows
from routetrace.client.stat import ServerInfo, TraceStat, TraceState
from routetrace.client.trace import RoutingTrace
from routetrace.v1.errors import RouteTraceError
from routetrace.v1.security import Security


class RouteClient:
    """Reads traces from a routetrace-server. Thread-safe.

    Usable again in a forked child. Fork while no call is under way and no asyncio client is open:
    gRPC may crash or hang in the child otherwise.

    Connects at the first call. Calls that fail because the server is away or busy are repeated,
    with growing pauses, until their timeout. Every call raises errors of `routetrace.v1.errors`
    alone; a gRPC error is at most their `__cause__`:

    * InvalidArgument: an argument is wrong; told before anything is sent where possible
    * NotFound: no such trace, engine or run
    * Corrupt: the answer fails its checksums, or contradicts itself
    * Unavailable, Overloaded: the server could not be reached, or had no room, until the timeout
    * DeadlineExceeded: no answer within the timeout
    * Unauthenticated, PermissionDenied
    * Closed: the client was closed

    Args:
        target: host:port; $ROUTETRACE_TARGET if None.
        run: the training job whose traces are meant; $ROUTETRACE_RUN or "default" if None.
        timeout: seconds that a call may take, where the call is not given its own.
        max_message_bytes: largest message that is taken or sent.
        options: more gRPC channel options, which win over the client's own.
        security: TLS files and a token; what the environment says if None. Certificates that are
            replaced are used by new calls, within a second or so.

    Raises:
        InvalidArgument: if there is no target, a number is not positive, a file of `security` can
            not be used, or its token would travel in plain text.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        run: str | None = None,
        timeout: float = 60.0,
        max_message_bytes: int = 64 << 20,
        options: Iterable[tuple[str, Any]] = (),
        security: Security | None = None,
    ) -> None:
        self._config = Config.make(target, run, timeout, max_message_bytes, options, security)
        self._driver = Driver(self._config)

    def __repr__(self) -> str:
        config = self._config
        return f"<RouteClient {config.target} run={config.run!r} {self._driver.state}>"

    def __enter__(self) -> RouteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way and disconnects; may be called more than once."""
        self._driver.close()

    def get(
        self,
        request_id: str,
        *,
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        incarnation: int | None = None,
        timeout: float | None = None,
    ) -> RoutingTrace:
        """The rows of one request.

        Args:
            request_id: the trace's id.
            layer_ids: absolute decoder layer ids, strictly ascending; all MoE layers if None.
            token_start: first position.
            token_stop: one past the last position; to the end if None.
            missing: what to do if a row asked for is not there: "raise" Incomplete, "mask" it in
                `RoutingTrace.valid`, or "wait" for it. Rows to the end are not all there before the
                end is known: while the request runs, or if nobody told how it ended.
            wait: how many seconds to wait, in addition to the timeout: for the rows if `missing` is
                "wait", then as many as the timeout has if None; else for the request to be known
                and to end, and not at all if None.
            policy: which rows to take where a token was computed more than once. "as_sampled":
                those of the pass that sampling went by: of a preempted request the first one; of a
                request that goes on from another (a continued rollout, a prefill handed over) that
                other's. "latest": those of the last pass.
            weight_version: only rows that this version computed; those of any if None.
            incarnation: `TraceFacts.incarnation` of the one that is meant, or the arrival number of
                any engine request with this id; the newest complete one, else the newest, if None.
            timeout: seconds; the client's if None.

        Raises:
            Incomplete: if rows are missing, or may be as the end is not known, and `missing` is
                "raise", or is "wait" and they did not come in time; says which and why.
            DeadlineExceeded: also if the request had not ended after `wait` seconds, or none was
                known after waiting for its rows; says how far it was.
            NotFound: also if there is no such incarnation.
            RouteTraceError: see the class.
        """
        plan = _calls.get(
            self._config,
            request_id,
            layer_ids=layer_ids,
            token_start=token_start,
            token_stop=token_stop,
            missing=missing,
            wait=wait,
            policy=policy,
            weight_version=weight_version,
            incarnation=incarnation,
            timeout=timeout,
        )
        return self._driver.one(plan)

    @overload
    def get_many(
        self,
        request_ids: Iterable[str],
        *,
        prefetch: int = 8,
        errors: Literal["raise"] = "raise",
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        timeout: float | None = None,
    ) -> Generator[RoutingTrace, None, None]: ...

    @overload
    def get_many(
        self,
        request_ids: Iterable[str],
        *,
        prefetch: int = 8,
        errors: Literal["return"],
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        timeout: float | None = None,
    ) -> Generator[RoutingTrace | RouteTraceError, None, None]: ...

    def get_many(
        self,
        request_ids: Iterable[str],
        *,
        prefetch: int = 8,
        errors: Errors = "raise",
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        timeout: float | None = None,
    ) -> Generator[Any, None, None]:
        """The rows of many requests, in the order of their ids, read ahead in the background.

        Args:
            request_ids: the traces' ids; taken from as reading gets on.
            prefetch: most traces that are being read or lie ready.
            errors: "raise" the error of a trace at its turn, which ends the iteration, or "return"
                it in its place.
            layer_ids: as in `get`, and so are the others.
            token_start: as in `get`.
            token_stop: as in `get`.
            missing: as in `get`.
            wait: as in `get`, for each trace from when its reading starts.
            policy: as in `get`.
            weight_version: as in `get`.
            timeout: as in `get`, for each trace.

        Returns:
            A generator; reading starts with its first value, and ends when it is closed.

        Raises:
            RouteTraceError: as `get`.
        """
        _arguments.whole("prefetch", prefetch, 1)
        _arguments.choice("errors", errors, ("raise", "return"))

        def plan(request_id: str) -> Plan[RoutingTrace]:
            return _calls.get(
                self._config,
                request_id,
                layer_ids=layer_ids,
                token_start=token_start,
                token_stop=token_stop,
                missing=missing,
                wait=wait,
                policy=policy,
                weight_version=weight_version,
                incarnation=None,
                timeout=timeout,
            )

        plan("any").close()  # tells of wrong arguments now
        return self._driver.many(plan, request_ids, prefetch, errors == "return")

    def fetch(
        self,
        plan: RankPlan,
        *,
        out: Any = None,
        pin_memory: bool = False,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> RankRows:
        """The rows that a rank needs of a micro-batch, decoded into one buffer.

        Only its layers and tokens cross the wire, cut by the server out of what it stored.

        Args:
            plan: of `routetrace.client.plan.make_plan`.
            out: [layers, tokens, top_k] to decode into, `plan.shape` of `plan.layout.dtype`: an
                array, or a CPU tensor, pinned for example (16-bit ids also as int16); a new array
                if None. Of undefined content after an error.
            pin_memory: takes page-locked memory for new arrays (needs torch with CUDA), so that
                `RankRows.to_torch` need not wait.
            missing: as in `get`, of the rows that the plan asks for.
            wait: as in `get`, for each request.
            policy: as in `get`.
            weight_version: as in `get`.
            concurrency: most requests that are read at a time: more help where the server is far,
                and take more memory beside the buffer.
            timeout: as in `get`, for each request.

        Raises:
            InvalidArgument: also if a request is of another model than the plan, or its tokens are
                not those of its sample: another number, or other token digests; says how.
            Incomplete: as `get`.
            RouteTraceError: see the class.
        """
        make = _calls.fetch(
            self._config,
            missing=missing,
            wait=wait,
            policy=policy,
            weight_version=weight_version,
            pin_memory=pin_memory,
            timeout=timeout,
        )
        _arguments.whole("concurrency", concurrency, 1)
        fetch = make(plan, out)
        if concurrency == 1:  # no thread has to be started for that
            began = time.monotonic()
            reads = self._driver.one_by_one(fetch.reads())
            return fetch.rows(reads, time.monotonic() - began)
        with Prefetch(self._driver, [fetch], 0, concurrency) as fetched:
            return next(fetched)

    def prefetch(
        self,
        plans: Iterable[RankPlan],
        *,
        max_bytes: int = 256 << 20,
        pin_memory: bool = False,
        missing: MissingOrWait = "raise",
        wait: float | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        concurrency: int = 2,
        timeout: float | None = None,
    ) -> Prefetch:
        """The rows of many plans, in their order, fetched in the background from now on.

        While rewards are computed, say. Close it (it is a context manager) if it is not iterated to
        its end.

        Args:
            plans: of `routetrace.client.plan.make_plan`; taken from as the budget allows.
            max_bytes: for the buffers that are being filled, lie ready, or were handed out last
                (asking for the next says that the last is done with); one plan is always read.
            pin_memory: as in `fetch`, and so are the others.
            missing: as in `fetch`.
            wait: as in `fetch`.
            policy: as in `fetch`.
            weight_version: as in `fetch`.
            concurrency: as in `fetch`, over all plans.
            timeout: as in `fetch`.

        Returns:
            An iterator that counts in `stats` what was fetched, avoided and waited for.

        Raises:
            RouteTraceError: as `fetch`, at the turn of the plan; the iteration may go on behind it.
        """
        make = _calls.fetch(
            self._config,
            missing=missing,
            wait=wait,
            policy=policy,
            weight_version=weight_version,
            pin_memory=pin_memory,
            timeout=timeout,
        )
        _arguments.whole("max_bytes", max_bytes, 0, 2**63 - 1)
        _arguments.whole("concurrency", concurrency, 1)
        return Prefetch(self._driver, map(make, plans), max_bytes, concurrency)

    def follow(
        self,
        request_id: str,
        *,
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        missing: Missing = "raise",
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        incarnation: int | None = None,
        timeout: float | None = None,
    ) -> Generator[RoutingTrace, None, None]:
        """The rows of one request as they come in, in consecutive parts, until it ends.

        Rows behind a hole are held back until it is filled, or the request has ended. The last part
        tells how it ended; it may hold no rows. A part that starts before the end of the one before
        replaces its rows from there on: the engine took them back (rejected speculative tokens).

        Args:
            request_id: the trace's id.
            layer_ids: as in `get`.
            token_start: as in `get`.
            token_stop: as in `get`.
            missing: "raise" or "mask", as in `get`; tells at the end, with the last part.
            policy: as in `get`.
            weight_version: as in `get`.
            incarnation: as in `get`; if None, and another engine request goes on from the one that
                is followed (a handoff), that is followed from there on.
            timeout: seconds for all of it; None: no limit but the request's end.

        Returns:
            A generator; closing it ends the call.

        Raises:
            Incomplete: if the request ended with rows missing and `missing` is "raise".
            Unavailable: also if the connection breaks after a first part.
            RouteTraceError: see the class.
        """
        plan = _calls.follow(
            self._config,
            request_id,
            layer_ids=layer_ids,
            token_start=token_start,
            token_stop=token_stop,
            missing=missing,
            policy=policy,
            weight_version=weight_version,
            incarnation=incarnation,
            timeout=timeout,
        )
        return self._driver.run(plan)

    def get_blocks(
        self,
        engine_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        token_start: int = 0,
        layer_ids: Sequence[int] | None = None,
        missing: Missing = "raise",
        timeout: float | None = None,
    ) -> RoutingTrace:
        """The rows behind KV blocks of one engine, as they are now.

        Args:
            engine_id: the engine whose blocks are meant.
            block_ids: the request's blocks, in order.
            num_tokens: how many rows: those of the first `num_tokens` slots of the blocks.
            token_start: first of them.
            layer_ids: as in `get`.
            missing: "raise" or "mask", as in `get`.
            timeout: as in `get`.

        Returns:
            A trace without request id: one of `num_tokens` + 1 tokens that has ended.

        Raises:
            Incomplete: if rows are missing and `missing` is "raise".
            RouteTraceError: see the class.
        """
        plan = _calls.get_blocks(
            self._config,
            engine_id,
            block_ids,
            num_tokens,
            token_start=token_start,
            layer_ids=layer_ids,
            missing=missing,
            timeout=timeout,
        )
        return self._driver.one(plan)

    def stat(
        self, request_id: str, *, incarnation: int | None = None, timeout: float | None = None
    ) -> TraceStat:
        """What is known of a trace, and which of its cells are missing.

        Args:
            request_id: the trace's id.
            incarnation: as in `get`.
            timeout: as in `get`.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.stat(self._config, request_id, incarnation=incarnation, timeout=timeout)
        return self._driver.one(plan)

    def find(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Iterable[TraceState | str] = (),
        timeout: float | None = None,
    ) -> Generator[TraceStat, None, None]:
        """The traces of the run, newest first; asks for more as the iteration gets on.

        Args:
            labels: labels that a trace must have, all of them.
            states: one of these states ("running", "complete", "incomplete"); any if empty.
            timeout: as in `get`, for each page.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.find(self._config, labels=labels, states=states, timeout=timeout)
        return self._driver.run(plan)

    def bind(
        self,
        engine_id: str,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        num_computed_tokens: int | None = None,
        token_ids: npt.ArrayLike | None = None,
        step: int = 0,
        trace_id: str = "",
        prompt_len: int = 0,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: int = 0,
        timeout: float | None = None,
    ) -> TraceStat:
        """Makes a trace of the rows behind KV blocks that an agent filled which knows only slots.

        Not repeated if the connection breaks: blocks may be given away in between.

        Args:
            engine_id: the engine whose blocks are meant.
            request_id: the request's id in the engine.
            block_ids: the request's blocks, in order.
            num_tokens: tokens of the request; it has one row less.
            num_computed_tokens: its leading tokens that a forward pass has computed, 0 to
                num_tokens - 1, where it ended (an abort) before all but the last were: rows beyond
                are missing. None: all but the last.
            token_ids: [num_tokens] integers, prompt and output. Their digests prove what requests
                with the same trace id have in common; without them nothing is joined.
            step: last engine step that the request took part in; rows written later count as
                missing, and the server waits for it. 0: take what is there.
            trace_id: the trace's id; the request's if "".
            prompt_len: prompt tokens; 0 if unknown.
            labels: what to find the trace by.
            ttl_seconds: seconds that it lives after its last change; 0: the server's default.
            timeout: as in `get`.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.bind(
            self._config,
            engine_id,
            request_id,
            block_ids,
            num_tokens,
            num_computed_tokens=num_computed_tokens,
            token_ids=token_ids,
            step=step,
            trace_id=trace_id,
            prompt_len=prompt_len,
            labels=labels,
            ttl_seconds=ttl_seconds,
            timeout=timeout,
        )
        return self._driver.one(plan)

    def delete(self, request_id: str, *, timeout: float | None = None) -> None:
        """Forgets a trace at once.

        Args:
            request_id: the trace's id.
            timeout: as in `get`.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(_calls.delete(self._config, request_id, timeout=timeout))

    def retire_through(self, weight_version: int, *, timeout: float | None = None) -> int:
        """Forgets the ended traces of the run that hold nothing newer than a weight version.

        Args:
            weight_version: the newest version that is to go.
            timeout: as in `get`.

        Returns:
            How many were forgotten.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(
            _calls.retire_through(self._config, weight_version, timeout=timeout)
        )

    def renew(
        self, request_ids: Iterable[str], ttl_seconds: int = 0, *, timeout: float | None = None
    ) -> int:
        """Gives traces another time to live.

        Args:
            request_ids: the traces' ids.
            ttl_seconds: seconds from now; 0: the server's default.
            timeout: as in `get`.

        Returns:
            How many of them are known.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(
            _calls.renew(self._config, request_ids, ttl_seconds, timeout=timeout)
        )

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """How the server stands, and what it holds of the run.

        Args:
            timeout: as in `get`.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(_calls.server_info(self._config, timeout=timeout))
