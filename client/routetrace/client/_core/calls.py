"""One function per call of the clients: checks the arguments, returns the plan."""

# Over 400 lines: a function for each call; most lines are signatures and messages.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._core.assemble import Want
from routetrace.client._core.config import Config
from routetrace.client._core.fetch import Fetch
from routetrace.client._core.proof import Search, read_proven
from routetrace.client._core.reads import (
    called,
    named,
    pages,
    read,
    read_parts,
    read_waiting,
    unary,
)
from routetrace.client._core.steps import Emit, Plan
from routetrace.client._memory import check_pin
from routetrace.client.description import TraceDescription, stat_from_proto
from routetrace.client.explanation import Explanation
from routetrace.client.options import Missing, ReadOptions
from routetrace.client.plan import FetchPlan
from routetrace.client.stat import (
    TraceStat,
    TraceState,
    facts_from_proto,
)
from routetrace.client.summary import Retired
from routetrace.client.trace import Trace
from routetrace.codec.records import digest_key, token_digests
from routetrace.common.errors import InvalidArgument, NotFound
from routetrace.common.limits import MAX_BLOCK_TOKENS, MAX_STEP
from routetrace.common.missing import reason_of
from routetrace.v1 import routetrace_pb2 as pb

Errors = Literal["raise", "return"]

_POLICIES = {
    "as_sampled": pb.READ_POLICY_AS_SAMPLED,
    "latest": pb.READ_POLICY_LATEST,
}
_PREFIX_ROWS = {
    "never": pb.PREFIX_ROWS_NEVER,
    "unique": pb.PREFIX_ROWS_UNIQUE,
    "any": pb.PREFIX_ROWS_ANY,
}
_WAITS = {
    "rows": pb.WAIT_FOR_ROWS,
    "end": pb.WAIT_FOR_END,
}
#: Traces of a page, unless fewer are wanted.
_PAGE = 1000
_GET = "use get() for a trace id"
_STATES = tuple(state.value for state in TraceState)


def get(
    config: Config,
    trace_id: str,
    options: ReadOptions,
    *,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    incarnation: int | None,
    pin_memory: bool,
    nonce: int | None = None,
    num_tokens: int | None = None,
    token_ids: npt.ArrayLike | None = None,
    id_field: str = "trace_id",
) -> Plan[Trace]:
    """See RouteClient.get, which names its id `request_id`."""
    pin = check_pin(pin_memory)
    want = _want(
        trace_id, options, layer_ids, token_start, token_stop, incarnation, nonce, id_field, pin
    )
    if num_tokens is not None:
        want = replace(want, num_tokens=check.whole("num_tokens", num_tokens, 1))
        if options.wait_for is None:
            raise InvalidArgument(
                field="num_tokens", value=num_tokens, expected="None, or wait_for 'end' or 'rows'"
            )
    if token_ids is None:
        return _reader(config, options)(want)
    tokens = check.tokens("token_ids", token_ids)
    if not tokens.size:
        raise InvalidArgument(field="token_ids", value="empty", expected="prompt and output tokens")
    limit = config.limit(options.timeout)
    if options.wait_for is not None and num_tokens is None:
        want = replace(want, num_tokens=tokens.size)

    def read_for(want: Want, seconds: float, last: bool) -> Plan[Any]:
        request = _get_request(config, want, options)
        if options.wait_for is None:
            return read("GetTrace", request, want, limit)
        request.wait_for = _WAITS[options.wait_for]
        if last:
            return read_waiting(request, want, seconds, config.timeout)
        return read("GetTrace", request, want, seconds)

    wait = None if options.wait_for is None else limit
    search = Search(config, trace_id, tokens)
    return named(trace_id, read_proven(search, want, read_for, wait))


def fetch(config: Config, options: ReadOptions, *, pin_memory: bool) -> Callable[..., Fetch]:
    """See RouteClient.fetch; makes a fetch of a plan, and of an `out` if there is one."""
    read = _reader(config, options)
    pin = check_pin(pin_memory)

    def make(plan: FetchPlan, out: Any = None) -> Fetch:
        check.instance("plan", plan, FetchPlan, _GET if isinstance(plan, str) else "")
        return Fetch(config, plan, read, options, out, pin)

    return make


def _reader(config: Config, options: ReadOptions) -> Callable[[Want], Plan[Any]]:
    """Return a function that reads a trace, now or after waiting."""
    limit = config.limit(options.timeout)

    def reader(want: Want) -> Plan[Any]:
        request = _get_request(config, want, options)
        if options.wait_for is None:
            return named(want.trace_id, read("GetTrace", request, want, limit))
        request.wait_for = _WAITS[options.wait_for]
        return named(want.trace_id, read_waiting(request, want, limit, config.timeout))

    return reader


def follow(
    config: Config,
    trace_id: str,
    options: ReadOptions,
    *,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    incarnation: int | None,
    nonce: int | None = None,
) -> Plan[Trace]:
    """See RouteClient.follow."""
    want = _want(trace_id, options, layer_ids, token_start, token_stop, incarnation, nonce)
    want = replace(want, follow=True)
    request = _get_request(config, want, options)
    limit = config.limit(options.timeout)
    if options.wait_for:
        request.wait_ms = min(math.ceil(1000 * limit), 2**32 - 1)
    return named(trace_id, read_parts(request, want, limit, options.timeout))


def get_blocks(
    config: Config,
    engine_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    *,
    token_start: int,
    layer_ids: Sequence[int] | None,
    missing: Missing,
    timeout: float | None,
) -> Plan[Trace]:
    """See RouteClient.get_blocks."""
    want = Want(
        "",
        check.layers(layer_ids),
        check.whole("token_start", token_start),
        mask=check.choice("missing", missing, ("raise", "mask")) == "mask",
        num_rows=check.whole("num_tokens", num_tokens, 0, MAX_BLOCK_TOKENS),
    )
    request = pb.GetBlocksRequest(
        run=config.run,
        engine_id=check.identifier("engine_id", engine_id),
        block_ids=check.wholes("block_ids", block_ids),
        num_tokens=num_tokens,
        token_start=want.token_start,
        layer_ids=want.layer_ids or (),
    )
    return read("GetBlocks", request, want, config.limit(timeout))


def stat(
    config: Config, trace_id: str, *, incarnation: int | None, timeout: float | None
) -> Plan[TraceStat]:
    """See RouteClient.stat."""
    request = pb.StatTraceRequest(
        run=config.run,
        trace_id=check.identifier("trace_id", trace_id),
        incarnation=_incarnation(incarnation),
    )

    def convert(response: pb.StatTraceResponse) -> TraceStat:
        return stat_from_proto(response.info, response.missing)

    return named(trace_id, unary("StatTrace", request, config.limit(timeout), convert))


def describe(
    config: Config,
    trace_id: str,
    *,
    incarnation: int | None,
    policy: str,
    origins: bool,
    timeout: float | None,
) -> Plan[TraceDescription]:
    """See RouteClient.describe."""
    request = pb.DescribeTraceRequest(
        run=config.run,
        trace_id=check.identifier("trace_id", trace_id),
        incarnation=_incarnation(incarnation),
        policy=_POLICIES[check.choice("policy", policy, [*_POLICIES])],
        omit_origins=not check.flag("origins", origins),
    )
    limit = config.limit(timeout)
    call = unary("DescribeTrace", request, limit, TraceDescription.from_proto)
    return named(trace_id, call)


def explain(
    config: Config,
    trace_id: str,
    position: int,
    *,
    layer_id: int | None,
    incarnation: int | None,
    nonce: int | None,
    policy: str,
    weight_version: int | None,
    timeout: float | None,
) -> Plan[Explanation]:
    """See RouteClient.explain."""
    request = pb.ExplainCellRequest(
        run=config.run,
        trace_id=check.identifier("trace_id", trace_id),
        incarnation=_incarnation(incarnation),
        nonce=0 if nonce is None else check.nonce(nonce),
        policy=_POLICIES[check.choice("policy", policy, [*_POLICIES])],
        weight_version=None if weight_version is None else check.weight_version(weight_version),
        position=check.whole("position", position),
        layer_id=None if layer_id is None else check.whole("layer_id", layer_id),
    )

    def convert(response: pb.ExplainCellResponse) -> Explanation:
        return Explanation.from_proto(trace_id, position, response)

    return named(trace_id, unary("ExplainCell", request, config.limit(timeout), convert))


def find(
    config: Config,
    *,
    labels: Mapping[str, str] | None,
    states: Iterable[TraceState | str],
    limit: int | None,
    retirable_through: int | None,
    timeout: float | None,
) -> Plan[TraceStat]:
    """See RouteClient.find."""
    if limit is not None:
        check.whole("limit", limit, 1)
    if retirable_through is not None:
        check.weight_version(retirable_through)
    states = check.several("states", states, "str")
    names = [check.choice("states", state, _STATES) for state in states]
    request = pb.ListTracesRequest(
        run=config.run,
        labels=check.labels(labels),
        states=[TraceState(name).to_proto() for name in names],
        retirable_through=retirable_through,
        page_size=min(limit or 0, _PAGE),
    )
    seconds = config.limit(timeout)
    return pages("ListTraces", request, seconds, lambda page: page.traces, _stat, limit)


def bind(
    config: Config,
    engine_id: str,
    request_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    *,
    num_computed_tokens: int | None,
    token_ids: npt.ArrayLike | None,
    step: int | None,
    trace_id: str | None,
    prompt_len: int | None,
    labels: Mapping[str, str] | None,
    ttl_seconds: int | None,
    timeout: float | None,
) -> Plan[TraceStat]:
    """See RouteClient.bind."""
    num_tokens = check.whole("num_tokens", num_tokens, 1, MAX_BLOCK_TOKENS)
    if num_computed_tokens is not None:
        check.whole("num_computed_tokens", num_computed_tokens, 0, num_tokens - 1)
    digests, named = b"", check.labels(labels)
    if token_ids is not None:
        tokens = check.tokens("token_ids", token_ids, num_tokens)
        digests = token_digests(tokens, key=digest_key(named)).tobytes()
    request = pb.BindRequestRequest(
        run=config.run,
        engine_id=check.identifier("engine_id", engine_id),
        request_id=check.identifier("request_id", request_id),
        block_ids=check.wholes("block_ids", block_ids),
        num_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
        token_digests=digests,
        step=0 if step is None else check.whole("step", step, 0, MAX_STEP),
        begin=pb.RequestBegin(
            trace_id="" if trace_id is None else check.identifier("trace_id", trace_id),
            prompt_len=0 if prompt_len is None else check.whole("prompt_len", prompt_len),
            labels=named,
            ttl_seconds=_lease(ttl_seconds),
        ),
    )
    # Bound once more, blocks that were given away meanwhile would count as missing.
    return unary(
        "BindRequest",
        request,
        config.limit(timeout),
        lambda response: _stat(response.trace),
        idempotent=False,
    )


def delete(
    config: Config, trace_ids: tuple[str, ...], *, missing_ok: bool, timeout: float | None
) -> Plan[int]:
    """See RouteClient.delete."""
    names = check.identifiers("trace_ids", trace_ids)
    limit = config.limit(timeout)
    missing_ok = check.flag("missing_ok", missing_ok)
    if not names:
        raise InvalidArgument(field="trace_ids", value="empty", expected="at least one id")
    return _deleted(config, names, missing_ok, limit)


def _deleted(config: Config, names: list[str], missing_ok: bool, limit: float) -> Plan[int]:
    count = 0
    for name in names:
        request = pb.DeleteTraceRequest(run=config.run, trace_id=name)
        try:
            yield from called("DeleteTrace", request, limit)
        except NotFound as error:
            if not missing_ok:
                error.trace_id = name
                raise
        else:
            count += 1
    yield Emit(count)


def retire_through(config: Config, weight_version: int, *, timeout: float | None) -> Plan[Retired]:
    """See RouteClient.retire_through."""
    request = pb.RetireTracesRequest(
        run=config.run,
        through_weight_version=check.weight_version(weight_version),
    )
    return unary(
        "RetireTraces",
        request,
        config.limit(timeout),
        lambda r: Retired(r.num_retired, r.num_unknown),
    )


def renew(
    config: Config, trace_ids: Iterable[str], *, ttl_seconds: int | None, timeout: float | None
) -> Plan[int]:
    """See RouteClient.renew."""
    request = pb.RenewLeaseRequest(
        run=config.run,
        trace_ids=check.identifiers("trace_ids", trace_ids),
        ttl_seconds=_lease(ttl_seconds),
    )
    return unary("RenewLease", request, config.limit(timeout), lambda r: int(r.num_renewed))


def _want(
    trace_id: str,
    options: ReadOptions,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    incarnation: int | None,
    nonce: int | None = None,
    id_field: str = "trace_id",
    pin_memory: bool = False,
) -> Want:
    if nonce is not None and incarnation is not None:
        raise InvalidArgument(
            field="nonce", value=nonce, expected="None beside an incarnation, which it names itself"
        )
    return Want(
        check.identifier(id_field, trace_id),
        check.layers(layer_ids),
        check.whole("token_start", token_start),
        check.stop(token_start, token_stop),
        mask=options.missing == "mask",
        weight_version=options.weight_version,
        incarnation=_incarnation(incarnation),
        nonce=0 if nonce is None else check.nonce(nonce),
        pin_memory=pin_memory,
    )


def _get_request(config: Config, want: Want, options: ReadOptions) -> pb.GetTraceRequest:
    ranges = want.into.ranges if want.into else ()
    return pb.GetTraceRequest(
        run=config.run,
        trace_id=want.trace_id,
        token_start=0 if ranges else want.token_start,
        token_stop=0 if ranges else want.token_stop or 0,
        token_ranges=[pb.TokenRange(start=a, stop=b) for a, b in ranges],
        layer_ids=want.layer_ids or (),
        policy=_POLICIES[options.policy],
        prefix_rows=_PREFIX_ROWS[options.prefix_rows],
        incarnation=want.incarnation,
        nonce=want.nonce,
        num_tokens=want.num_tokens,
        follow=want.follow,
        weight_version=want.weight_version,
        omit_token_digests=not want.token_digests,
    )


def _lease(seconds: int | None) -> int:
    # The wire says "the server's default" with 0.
    return 0 if seconds is None else check.whole("ttl_seconds", seconds, 1)


def _incarnation(incarnation: int | None) -> int:
    return 0 if incarnation is None else check.whole("incarnation", incarnation, 1)


def _stat(info: pb.TraceInfo) -> TraceStat:
    cells: dict[str, int] = {reason_of(m.reason): m.cells for m in info.missing_cells}
    return TraceStat(**facts_from_proto(info), missing_cells=cells)
