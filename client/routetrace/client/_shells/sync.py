"""RouteClient: the blocking client.

Generated from aio.py by scripts/make_sync_client.py.
"""

# Over 400 lines: one class; most lines are signatures and docstrings of its methods.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy.typing as npt

from routetrace.client import _arguments
from routetrace.client._core import calls as _calls
from routetrace.client._core import locating as _locating
from routetrace.client._core import run_calls as _run_calls
from routetrace.client._core.calls import Errors
from routetrace.client._core.config import Config
from routetrace.client._core.counting import LoadCount
from routetrace.client._core.reads import one_of_many
from routetrace.client._core.reporting import WriterNames, report_of, sent
from routetrace.client._core.steps import Plan
from routetrace.client._shells.drive import Driver
from routetrace.client._shells.prefetch import Prefetch, fetch_blocking
from routetrace.client.agreement import Agreement
from routetrace.client.agreement_history import AgreementHistory
from routetrace.client.config import TIMEOUT, ClientConfig, settings_of
from routetrace.client.description import TraceDescription
from routetrace.client.expert_load import ExpertLoad
from routetrace.client.explanation import Explanation
from routetrace.client.history import RunHistory
from routetrace.client.located import Locations
from routetrace.client.options import (
    Equal,
    Missing,
    Policy,
    ReadKeywords,
    ReadOptions,
    merged,
)
from routetrace.client.plan import FetchPlan
from routetrace.client.progress import Meter, Progress
from routetrace.client.rows import Rows
from routetrace.client.stat import AgentStat, ServerInfo, TraceStat, TraceState
from routetrace.client.summary import Retired, TraceChanges
from routetrace.client.trace import Trace
from routetrace.common.errors import RouteTraceError
from routetrace.common.report_runs import report_run
from routetrace.common.security import Security

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DEFAULTS = ReadOptions()


class RouteClient:
    """Reads traces from a routetrace-server. Thread-safe.

    Usable again in a forked child. Fork while no call is under way and no asyncio client is open:
    gRPC may crash or hang in the child otherwise.

    Connects at the first call. A call that fails because the server is unreachable or busy is
    repeated, with growing pauses, until its timeout. `ReadOptions` describes the options that
    get, get_many, fetch, prefetch and follow share: each is a keyword argument of them, which wins
    over `options` of the call, and these over `options` of the client. A client pickles as its
    arguments, with files and token of `security`; the copy connects anew.

    Every call raises errors of `routetrace.client` only; a gRPC error is at most their `__cause__`:

    * InvalidArgument: a wrong argument; raised before anything is sent where possible. For an
      unknown keyword of these calls it is also a TypeError
    * NotFound: no such trace, engine or run
    * Corrupt: the answer fails its checksums, or contradicts itself
    * Unavailable, Overloaded: server not reachable, or without room, until the timeout
    * DeadlineExceeded: no answer within the timeout
    * Unauthenticated, PermissionDenied
    * Closed: the client was closed

    Args:
        target: host:port, host (port 7411), several with commas between, or a gRPC target;
            $ROUTETRACE_TARGET if None.
        run: training job of the traces; $ROUTETRACE_RUN or "default" if None.
        timeout: seconds of a call that is not given its own.
        security: TLS files and a token, also as a mapping of the fields of `Security`; from the
            environment if None.
        config: all connection settings, in place of the arguments above.
        options: options of the calls that are not given their own.

    Raises:
        InvalidArgument: if there is no target or it has a scheme such as http, an argument has a
            wrong type or range or stands beside `config`, a file of `security` is not usable, or
            its token would travel in plain text.
    """

    @overload
    def __init__(
        self,
        target: str | None = None,
        *,
        run: str | None = None,
        timeout: float = TIMEOUT,
        security: Security | Mapping[str, Any] | None = None,
        options: ReadOptions = _DEFAULTS,
    ) -> None: ...

    @overload
    def __init__(self, *, config: ClientConfig, options: ReadOptions = _DEFAULTS) -> None: ...

    def __init__(
        self,
        target: str | None = None,
        *,
        run: str | None = None,
        timeout: float = TIMEOUT,
        security: Security | Mapping[str, Any] | None = None,
        config: ClientConfig | None = None,
        options: ReadOptions = _DEFAULTS,
    ) -> None:
        given = {"target": target, "run": run, "timeout": timeout, "security": security}
        self._begin(settings_of(config, given), options)

    def _begin(self, settings: ClientConfig, options: ReadOptions) -> None:
        self._options = _arguments.instance("options", options, ReadOptions)
        self._config = Config.of(settings)
        self._driver = Driver(self._config)
        self._writers = WriterNames()

    def __repr__(self) -> str:
        config = self._config
        return f"<RouteClient {config.target} run={config.run!r} {self._driver.state}>"

    def __getstate__(self) -> tuple[ClientConfig, ReadOptions]:
        return self._config.settings, self._options

    def __setstate__(self, state: tuple[ClientConfig, ReadOptions]) -> None:
        self._begin(*state)

    def __enter__(self) -> RouteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and disconnect; may be called more than once."""
        self._driver.close()

    def get(
        self,
        request_id: str,
        *,
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        incarnation: int | None = None,
        nonce: int | None = None,
        num_tokens: int | None = None,
        token_ids: npt.ArrayLike | None = None,
        pin_memory: bool = False,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Trace:
        """Return the rows of one trace.

        Args:
            request_id: id of the trace: the engine's request id, unless another one was given.
            layer_ids: absolute decoder layer ids, strictly ascending; all MoE layers if None.
            token_start: first position.
            token_stop: one past the last position; to the end if None.
                Frames of up to 512 rows travel whole, whatever part of them is requested.
            incarnation: `TraceStat.incarnation` of the requested one, or the arrival number of
                any engine request with this id. None: the newest one that is complete and was not
                aborted, else the newest.
            nonce: that of the requested engine request, from the handle in the engine's answer, in
                place of `incarnation`. An id may be used again: with `wait_for` this waits for that
                request, whatever requests of the id ended before.
            num_tokens: with `wait_for`, prompt and output tokens of the trace, as the engine's
                answer counts them. Several requests under one id make up one trace (turns of a
                session): until the next one has begun at the server, up to a second later, the
                trace is complete as of the last. An end at fewer tokens does not count. It says
                nothing of which tokens they are.
            token_ids: prompt and output tokens, from position 0 on. Where an id is used again and
                no handle came, they prove which incarnation is meant: the digest at their end
                agrees, or, of an answer that was cut, a digest behind the prompt. With `wait_for`
                that incarnation is waited for. Of several with these tokens, the same one is taken
                as among all. Beside `incarnation` or `nonce`, they are compared alone.
            pin_memory: use page-locked memory for the ids (needs torch with CUDA), so that
                `Trace.to_torch` copies at full speed and does not block.
            options: see `ReadOptions`; those of the client if None.
            **keywords: fields of `ReadOptions` that replace those of `options`.

        Raises:
            InvalidArgument: also if `token_ids` prove no incarnation; says where each one differs.
            Incomplete: if rows are missing, or may be because the end is unknown, and `missing` is
                "raise"; lists the missing ranges and the reasons.
            DeadlineExceeded: also if `wait_for` waited in vain; `stat` has the facts about the
                trace at that moment.
            NotFound: also if there is no such incarnation or request.
            RouteTraceError: see the class.
        """
        plan = _calls.get(
            self._config,
            request_id,
            merged(self.get, options, keywords, self._options),
            layer_ids=layer_ids,
            token_start=token_start,
            token_stop=token_stop,
            incarnation=incarnation,
            nonce=nonce,
            num_tokens=num_tokens,
            token_ids=token_ids,
            pin_memory=pin_memory,
            id_field="request_id",
        )
        return self._driver.one(plan)

    @overload
    def get_many(
        self,
        trace_ids: Iterable[str],
        *,
        concurrency: int = 32,
        errors: Literal["raise"] = "raise",
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        pin_memory: bool = False,
        progress: Callable[[Progress], None] | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Generator[Trace, None, None]: ...

    @overload
    def get_many(
        self,
        trace_ids: Iterable[str],
        *,
        concurrency: int = 32,
        errors: Literal["return"],
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        pin_memory: bool = False,
        progress: Callable[[Progress], None] | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Generator[Trace | RouteTraceError, None, None]: ...

    def get_many(
        self,
        trace_ids: Iterable[str],
        *,
        concurrency: int = 32,
        errors: Errors = "raise",
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        pin_memory: bool = False,
        progress: Callable[[Progress], None] | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Generator[Any, None, None]:
        """Return the rows of many traces, in the order of their ids, read ahead in the background.

        Args:
            trace_ids: ids of the traces; consumed as reading advances.
            concurrency: maximum of traces that are being read or ready. Calls of half as many, at
                most 32, read them; `timeout` bounds each call.
            errors: "raise" the error of a trace at its turn, which ends the iteration, or "return"
                it in its place, and go on. Errors that are not of one trace end the iteration in
                either case: Unavailable, Unauthenticated, PermissionDenied, Closed.
            layer_ids: as in `get`.
            token_start: as in `get`.
            token_stop: as in `get`.
            pin_memory: as in `get`.
            progress: called with a `Progress` before each value is returned, or error raised; an
                error of it ends the iteration.
            options: as in `get`; they apply to each trace from the start of its read.
            **keywords: as in `get`.

        Returns:
            A generator; reading starts with its first value, and ends when it is closed.

        Raises:
            RouteTraceError: as `get`; with `errors="return"` only those that are not of one trace.
        """
        _arguments.whole("concurrency", concurrency, 1)
        _arguments.choice("errors", errors, ("raise", "return"))
        _arguments.several("trace_ids", trace_ids, "str")
        read_options = merged(self.get_many, options, keywords, self._options)

        def plan(trace_id: str) -> Plan[Trace]:
            read = _calls.get(
                self._config,
                trace_id,
                read_options,
                layer_ids=layer_ids,
                token_start=token_start,
                token_stop=token_stop,
                incarnation=None,
                pin_memory=pin_memory,
            )
            return one_of_many(read) if errors == "raise" else read

        plan("any").close()  # raises for wrong arguments now
        meter = Meter(progress, trace_ids)
        return self._driver.many(plan, trace_ids, concurrency, errors == "return", meter)

    def expert_load(
        self,
        trace_ids: Iterable[str],
        ranges: Iterable[tuple[int, int | None] | None] | None = None,
        *,
        layer_ids: Sequence[int] | None = None,
        concurrency: int = 4,
        progress: Callable[[Progress], None] | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> ExpertLoad:
        """Count how often traces chose each expert, such as those of a planned micro-batch.

        Rows are read, counted and dropped, trace by trace, as the server does not decompress any.

        Args:
            trace_ids: ids of the traces, at least one; an id may be there several times.
            ranges: positions (start, stop) of each trace, with None as `stop` for its end, or None
                for all its rows; None: all rows of all traces.
            layer_ids: as in `get`.
            concurrency: as in `get_many`.
            progress: as in `get_many`.
            options: as in `get`. With `missing="mask"` the cells that are there are counted.
            **keywords: as in `get`.

        Raises:
            InvalidArgument: also if the traces are of several models.
            Corrupt: also if an id is not below the number of experts.
            RouteTraceError: as `get`, of the first trace that fails.
        """
        _arguments.whole("concurrency", concurrency, 1)
        read_options = merged(self.expert_load, options, keywords, self._options)
        count = LoadCount(self._config, trace_ids, ranges, read_options, layer_ids=layer_ids)
        meter = Meter(progress, count.parts)
        self._driver.use_each(count.add, count.plan, count.parts, concurrency, meter)
        return count.result

    def fetch(
        self,
        plan: FetchPlan,
        *,
        out: Any = None,
        pin_memory: bool = False,
        concurrency: int = 1,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Rows:
        """Return the rows that a rank needs of a micro-batch, decoded into one buffer.

        Only its layers and tokens cross the wire; the server cuts them out of the stored frames.

        Args:
            plan: result of `routetrace.client.FetchPlan.make`.
            out: [layers, tokens, top_k] to decode into, `plan.shape` of `plan.layout.dtype`: an
                array, or a CPU tensor, pinned for example (16-bit ids also as int16); a new array
                if None. Of undefined content after an error.
            pin_memory: use page-locked memory for new arrays (needs torch with CUDA), so that
                `Rows.to_torch` does not block.
            concurrency: maximum of calls at a time, each for up to 32 requests within `timeout`: a
                higher one helps if the server is far away, and takes more memory beside the buffer.
            options: as in `get`; they apply to each request of the plan.
            **keywords: as in `get`.

        Raises:
            InvalidArgument: also if a request is of another model than the plan, or its tokens are
                not those of its sample: another number, or other token digests; says how. Where an
                id is used again: if its token ids prove none of several incarnations.
            Incomplete: as `get`.
            RouteTraceError: see the class.
        """
        make = _calls.fetch(
            self._config,
            merged(self.fetch, options, keywords, self._options),
            pin_memory=pin_memory,
        )
        _arguments.whole("concurrency", concurrency, 1)
        return fetch_blocking(self._driver, make(plan, out), concurrency)

    def prefetch(
        self,
        plans: Iterable[FetchPlan],
        *,
        max_bytes: int = 256 << 20,
        pin_memory: bool = False,
        concurrency: int = 2,
        progress: Callable[[Progress], None] | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Prefetch:
        """Fetch the rows of many plans, in their order, in the background from now on.

        For example while rewards are computed. Close it (it is a context manager) if it is not
        iterated to its end.

        Args:
            plans: results of `routetrace.client.FetchPlan.make`; consumed as the budget allows.
            max_bytes: budget of the buffers that are being filled, are ready, or were returned last
                (asking for the next releases the last); one plan is always read.
            pin_memory: as in `fetch`.
            concurrency: as in `fetch`, over all plans.
            progress: called with a `Progress` before each result is returned, or error raised; an
                error of it ends the iteration.
            options: as in `fetch`.
            **keywords: as in `get`.

        Returns:
            An iterator that counts in `stats` the bytes fetched and avoided, and the wait.

        Raises:
            RouteTraceError: as `fetch`, at the turn of the plan; the iteration may continue after
                it.
        """
        make = _calls.fetch(
            self._config,
            merged(self.prefetch, options, keywords, self._options),
            pin_memory=pin_memory,
        )
        remedy = "use [plan]" if isinstance(plans, FetchPlan) else ""
        _arguments.several("plans", plans, "FetchPlan", remedy)
        _arguments.whole("max_bytes", max_bytes, 0, 2**63 - 1)
        _arguments.whole("concurrency", concurrency, 1)
        meter = Meter(progress, plans)
        return Prefetch(self._driver, plans, make, max_bytes, concurrency, meter)

    def follow(
        self,
        trace_id: str,
        *,
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        token_stop: int | None = None,
        incarnation: int | None = None,
        nonce: int | None = None,
        options: ReadOptions | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> Generator[Trace, None, None]:
        """Return the rows of one trace as they arrive, in consecutive parts, until it ends.

        Rows after a hole are held back until it is filled, or the request has ended. The last part
        has the final state of the trace; it may hold no rows. A part that starts before the end of
        the previous one replaces its rows from there on: the engine took them back (rejected
        speculative tokens).

        Args:
            trace_id: as in `get`.
            layer_ids: as in `get`.
            token_start: as in `get`.
            token_stop: as in `get`.
            incarnation: as in `get`; if None, and another engine request continues the one that
                is followed (a handoff), that one is followed from there on.
            nonce: as in `get`; then no other engine request is followed.
            options: as in `get`. `missing` concerns the last part; `wait_for` waits for an unknown
                trace to begin; `timeout`, if it is of this call, covers the whole stream.
            **keywords: as in `get`.

        Returns:
            A generator; closing it ends the call.

        Raises:
            NotFound: if the trace is unknown and `wait_for` is None.
            DeadlineExceeded: if the trace was still unknown after waiting, or the timeout passed.
            Incomplete: if the request ended with rows missing and `missing` is "raise".
            Unavailable: also if the connection breaks after a first part.
            RouteTraceError: see the class.
        """
        plan = _calls.follow(
            self._config,
            trace_id,
            merged(self.follow, options, keywords, replace(self._options, timeout=None)),
            layer_ids=layer_ids,
            token_start=token_start,
            token_stop=token_stop,
            incarnation=incarnation,
            nonce=nonce,
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
    ) -> Trace:
        """Return the rows of KV blocks of one engine, as they are now.

        Args:
            engine_id: the engine whose blocks are meant.
            block_ids: the request's blocks, in order.
            num_tokens: how many rows: those of the first `num_tokens` slots of the blocks.
            token_start: first of them.
            layer_ids: as in `get`.
            missing: "raise" or "mask", as in `get`.
            timeout: seconds; the client's timeout if None.

        Returns:
            A trace with an empty id: one of `num_tokens` + 1 tokens that has ended.

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

    def locate(
        self,
        sequences: Iterable[npt.ArrayLike],
        *,
        weight_versions: Iterable[int] | None = None,
        labels: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
        indexes: Sequence[int | None] | None = None,
        equal: Equal = "refuse",
        timeout: float | None = None,
    ) -> Locations:
        """Find the engine requests whose rows sequences of token ids take.

        No id is needed: token digests are compared, which agents report that know their tokens. A
        sequence may be cut, or go on behind the request. Only requests that have ended, and whose
        end has arrived, are found. See docs/rows.md, section 9.

        Args:
            sequences: token ids of each, prompt and answer, without padding.
            weight_versions: only requests whose newest rows are of one of these versions.
            labels: only requests with these labels: a mapping for all sequences, or one for each.
            indexes: for each sequence, which one of several equal requests is meant: from 0 in
                order of arrival; None: refuse.
            equal: "refuse" makes a sequence ambiguous that several requests have equally; with
                "any" equal sequences of the call get them in turn, the newest first.
            timeout: seconds; the client's timeout if None.

        Returns:
            A `Located` or None for each sequence; its `ambiguous` and `not_found` tell which are
            None, and why.

        Raises:
            InvalidArgument: naming the wrong argument.
            RouteTraceError: see the class.
        """
        plan = _locating.locate(
            self._config,
            sequences,
            weight_versions=weight_versions,
            labels=labels,
            indexes=indexes,
            equal=equal,
            timeout=timeout,
        )
        return self._driver.one(plan)

    def stat(
        self, trace_id: str, *, incarnation: int | None = None, timeout: float | None = None
    ) -> TraceStat:
        """Return the facts about a trace, and its missing cells.

        Args:
            trace_id: id of the trace.
            incarnation: as in `get`.
            timeout: seconds; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.stat(self._config, trace_id, incarnation=incarnation, timeout=timeout)
        return self._driver.one(plan)

    def describe(
        self,
        trace_id: str,
        *,
        incarnation: int | None = None,
        policy: Policy = "as_sampled",
        origins: bool = True,
        timeout: float | None = None,
    ) -> TraceDescription:
        """Return the origin of a trace: incarnations, times, and the agent of each row.

        Args:
            trace_id: id of the trace.
            incarnation: as in `get`.
            policy: see `ReadOptions`.
            origins: whether the origins of rows are wanted.
            timeout: seconds; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.describe(
            self._config,
            trace_id,
            incarnation=incarnation,
            policy=policy,
            origins=origins,
            timeout=timeout,
        )
        return self._driver.one(plan)

    def explain(
        self,
        trace_id: str,
        position: int,
        *,
        layer_id: int | None = None,
        incarnation: int | None = None,
        nonce: int | None = None,
        policy: Policy = "as_sampled",
        weight_version: int | None = None,
        timeout: float | None = None,
    ) -> Explanation:
        """Return where the row of one cell comes from, or why there is none.

        Args:
            trace_id: id of the trace.
            position: position of the token.
            layer_id: absolute layer id; the first MoE layer if None.
            incarnation: as in `get`.
            nonce: as in `get`.
            policy: see `ReadOptions`.
            weight_version: see `ReadOptions`.
            timeout: seconds; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.explain(
            self._config,
            trace_id,
            position,
            layer_id=layer_id,
            incarnation=incarnation,
            nonce=nonce,
            policy=policy,
            weight_version=weight_version,
            timeout=timeout,
        )
        return self._driver.one(plan)

    def find(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Iterable[TraceState | str] = (),
        limit: int | None = None,
        retirable_through: int | None = None,
        timeout: float | None = None,
    ) -> Generator[TraceStat, None, None]:
        """Return the traces of the run, newest first; request pages as the iteration advances.

        Args:
            labels: labels that a trace must have, all of them.
            states: one of these states ("running", "complete", "incomplete"); any if empty.
            limit: maximum of traces; all if None.
            retirable_through: only traces that `retire_through` would delete with this weight
                version.
            timeout: seconds; the client's timeout if None. For each page.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _calls.find(
            self._config,
            labels=labels,
            states=states,
            limit=limit,
            retirable_through=retirable_through,
            timeout=timeout,
        )
        return self._driver.run(plan)

    def watch(self, *, timeout: float | None = None) -> Generator[TraceChanges, None, None]:
        """Return summaries of the traces of the run, newest first, then of those that change.

        The first parts hold all traces; the last one of them, and all later parts, are `whole`.
        After that, a trace is in one part a second at most, in its state at that time. A change of
        a trace that no agent reports (its agent is lost, rows of other traces stand in) comes
        within some seconds. A part comes at least every 10 seconds, without traces if nothing has
        changed.

        Args:
            timeout: seconds for further attempts before the first part, where one fails; the
                client's timeout if None.

        Returns:
            A generator without an end; closing it ends the call.

        Raises:
            Unavailable: also if the connection breaks after a first part: a new call begins with
                all traces again.
            RouteTraceError: see the class.
        """
        return self._driver.run(_run_calls.watch(self._config, timeout=timeout))

    def bind(
        self,
        engine_id: str,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        num_computed_tokens: int | None = None,
        token_ids: npt.ArrayLike | None = None,
        step: int | None = None,
        trace_id: str | None = None,
        prompt_len: int | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        timeout: float | None = None,
    ) -> TraceStat:
        """Make a trace of the rows of KV blocks, for an agent that knows only slots.

        Waits for the engine's agent to connect, at most `timeout`: NotFound if it has not by then.
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
                missing, and the server waits for it. None: all rows that are there.
            trace_id: the trace's id; the request's if None.
            prompt_len: prompt tokens; None if unknown.
            labels: labels for `find`.
            ttl_seconds: seconds that it lives after its last change; the server's default if None.
            timeout: seconds; the client's timeout if None.

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

    def delete(
        self, *trace_ids: str, missing_ok: bool = False, timeout: float | None = None
    ) -> int:
        """Delete traces at once, in their order.

        Args:
            *trace_ids: ids of the traces.
            missing_ok: whether unknown ids are no error.
            timeout: seconds for each trace; the client's timeout if None.

        Returns:
            Number of deleted traces.

        Raises:
            NotFound: at the first unknown id, unless `missing_ok`; the traces before it are
                deleted.
            RouteTraceError: see the class.
        """
        plan = _calls.delete(self._config, trace_ids, missing_ok=missing_ok, timeout=timeout)
        return self._driver.one(plan)

    def forget_engine(self, engine_id: str, *, timeout: float | None = None) -> int:
        """Forget the disconnected agents of an engine, and the rows that its KV blocks name.

        Its traces stay. For engines that never come back under their name.

        Args:
            engine_id: the engine.
            timeout: seconds; the client's timeout if None.

        Returns:
            Number of its shards that were forgotten.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(_run_calls.forget_engine(self._config, engine_id, timeout=timeout))

    def retire_through(self, weight_version: int, *, timeout: float | None = None) -> Retired:
        """Delete the ended traces of the run that hold nothing newer than a weight version.

        An unknown weight version is older than all others.

        Args:
            weight_version: newest version to delete.
            timeout: seconds; the client's timeout if None.

        Returns:
            Number of deleted traces, and of those of them with rows of an unknown weight version.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(
            _calls.retire_through(self._config, weight_version, timeout=timeout)
        )

    def renew(
        self,
        trace_ids: Iterable[str],
        *,
        ttl_seconds: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Give traces another time to live.

        Args:
            trace_ids: ids of the traces.
            ttl_seconds: seconds from now; the server's default if None.
            timeout: seconds; the client's timeout if None.

        Returns:
            Number of known traces among them.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(
            _calls.renew(self._config, trace_ids, ttl_seconds=ttl_seconds, timeout=timeout)
        )

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return the state of the server, and its contents of the run.

        Args:
            timeout: seconds; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(_run_calls.server_info(self._config, timeout=timeout))

    def agents(self, *, timeout: float | None = None) -> Generator[AgentStat, None, None]:
        """Return the agents of the run, also those that have left within a default lease.

        Args:
            timeout: seconds; the client's timeout if None. For each page of 1,000.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.run(_run_calls.agents(self._config, timeout=timeout))

    def history(self, *, after: int = 0, timeout: float | None = None) -> RunHistory:
        """Return rows, bytes, reads and drops of the last ten minutes of the run, in steps of 2 s.

        Args:
            after: only later steps: `last_step` of an earlier result; 0: all that are known.
            timeout: seconds; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        return self._driver.one(_run_calls.history(self._config, after=after, timeout=timeout))

    def report_routing(
        self,
        trace_id: str,
        topk_ids: Any,
        *,
        valid: Any = None,
        layer_ids: Sequence[int] | None = None,
        token_start: int = 0,
        step: int | None = None,
        weight_version: int | None = None,
        reporter: str = "trainer",
        incarnation: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Report the experts that a trainer's own routers chose for the tokens of a trace.

        They are stored in a run of their own, which `reports` reads, for the time that is left of
        the trace's lease; deleting the trace does not delete them. Report some traces, such as the
        worst of a step; all of them would double what is stored. Of several reports of a trace by
        one reporter, the newest whole one counts, else the newest.

        Args:
            trace_id: id of the trace, which has ended.
            topk_ids: integers [tokens, layers, top_k], experts of each cell in any order; an array,
                or a tensor on any device. The last token of the trace may be among the tokens.
            valid: bool [tokens, layers], the cells that count; all if None. A token is reported if
                all of its cells are valid.
            layer_ids: absolute layer ids of `topk_ids`, ascending; all MoE layers if None.
            token_start: position of the first token.
            step: training step, kept as the label "step".
            weight_version: weight version of the trainer.
            reporter: name of the report: of a rank, if each one reports its own layers or tokens.
            incarnation: as in `get`.
            timeout: seconds; the client's timeout if None.

        Raises:
            InvalidArgument: if an argument is wrong, or the trace has not ended.
            PermissionDenied: if the token does not cover "ingest" beside "read".
            RouteTraceError: see the class.
        """
        stat = self.stat(trace_id, incarnation=incarnation, timeout=timeout)
        report = report_of(
            stat,
            topk_ids,
            valid=valid,
            layer_ids=layer_ids,
            token_start=token_start,
            step=step,
            weight_version=weight_version,
        )
        with self.reports(reporter) as other:
            plan = sent(report, stat, other._config, reporter, self._writers, timeout)
            other._driver.one(plan)

    def reports(self, reporter: str = "trainer") -> RouteClient:
        """Return a client of what a reporter has reported with `report_routing`.

        Its traces have the ids of those that they are about. Close it, as this one.

        Args:
            reporter: name of the report.

        Raises:
            InvalidArgument: if it is no id, or too long together with the run.
        """
        run = report_run(self._config.run, reporter)
        settings = replace(self._config.settings, run=run)
        return RouteClient(config=settings, options=self._options)

    def report_agreement(
        self,
        step: int,
        agreement: Agreement,
        *,
        weight_version: int | None = None,
        reporter: str = "trainer",
        diagnosis: str = "",
        trace_ids: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        """Report the agreement of the trainer's own routers with replayed rows in a training step.

        It replaces the report of the same reporter for the same step, so that a call may be
        repeated. The server keeps the 2,000 steps of a run that were reported last, and at most
        8 MiB of reports.

        Args:
            step: training step.
            agreement: sums of the step, such as those of `replay`; their sum over micro-batches and
                ranks, or those of a rank.
            weight_version: weight version of the trainer, to which the ages of rows relate.
            reporter: name of the rank, if each one reports its own sums.
            diagnosis: likely cause in words, such as those of `diagnose`; at most 1,000 characters.
            trace_ids: traces to look at, worst first; at most 10.
            timeout: seconds; the client's timeout if None.

        Raises:
            InvalidArgument: if the reports of the step would take more than 512 KiB.
            RouteTraceError: see the class.
        """
        self._driver.one(
            _run_calls.report_agreement(
                self._config,
                step,
                agreement,
                weight_version=weight_version,
                reporter=reporter,
                diagnosis=diagnosis,
                trace_ids=trace_ids,
                timeout=timeout,
            )
        )

    def agreement_history(
        self, *, start: int = 0, stop: int | None = None, timeout: float | None = None
    ) -> AgreementHistory:
        """Return the agreement that trainers have reported, by training step.

        Args:
            start: first step.
            stop: one past the last step; None: no limit.
            timeout: seconds for each page of 256 KiB; the client's timeout if None.

        Raises:
            RouteTraceError: see the class.
        """
        plan = _run_calls.agreement_history(self._config, start=start, stop=stop, timeout=timeout)
        return AgreementHistory.from_proto(self._driver.every(plan))
