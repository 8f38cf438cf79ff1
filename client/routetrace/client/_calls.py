"""One function per call of the clients: checks the arguments, returns the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._assemble import Want
from routetrace.client._core import Config, Plan, pages, read, read_parts, read_waiting, unary
from routetrace.client._fetch import Fetch
from routetrace.client.plan import Plan as RankPlan
from routetrace.client.stat import (
    ServerInfo,
    TraceStat,
    TraceState,
    facts_from_proto,
    missing_from_proto,
)
from routetrace.client.trace import RoutingTrace
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.records import token_digests

Missing = Literal["raise", "mask"]
MissingOrWait = Literal["raise", "mask", "wait"]
Policy = Literal["as_sampled", "latest"]
Errors = Literal["raise", "return"]

_POLICIES = {
    "as_sampled": pb.READ_POLICY_AS_SAMPLED,
    "latest": pb.READ_POLICY_LATEST,
}
_STATES = tuple(state.value for state in TraceState)


def get(
    config: Config,
    request_id: str,
    *,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    missing: MissingOrWait,
    wait: float | None,
    policy: Policy,
    weight_version: int | None,
    incarnation: int | None,
    timeout: float | None,
) -> Plan[RoutingTrace]:
    """See RouteClient.get."""
    what = request_id, layer_ids, token_start, token_stop, weight_version, incarnation
    want = _want(*what, missing, ("raise", "mask", "wait"))
    return _reading(config, missing, wait, policy, timeout)(want)


def fetch(
    config: Config,
    *,
    missing: MissingOrWait,
    wait: float | None,
    policy: Policy,
    weight_version: int | None,
    pin_memory: bool,
    timeout: float | None,
) -> Callable[..., Fetch]:
    """See RouteClient.fetch; makes a fetch of a plan, and of an `out` if there is one."""
    mask = check.choice("missing", missing, ("raise", "mask", "wait")) == "mask"
    read = _reading(config, missing, wait, policy, timeout)
    version = None if weight_version is None else check.weight_version(weight_version)

    def make(plan: RankPlan, out: Any = None) -> Fetch:
        return Fetch(plan, read, mask, version, out, pin_memory)

    return make


def _reading(
    config: Config,
    missing: MissingOrWait,
    wait: float | None,
    policy: Policy,
    timeout: float | None,
) -> Callable[[Want], Plan[Any]]:
    """How traces are read: at once, or once they are what is waited for."""
    limit = config.limit(timeout)
    check.choice("policy", policy, _POLICIES)
    if missing == "wait":
        wait_for, seconds = pb.WAIT_FOR_ROWS, limit if wait is None else check.seconds("wait", wait)
    elif wait is not None:
        wait_for, seconds = pb.WAIT_FOR_END, check.seconds("wait", wait)
    else:
        return lambda want: read("GetTrace", _get_request(config, want, policy), want, limit)
    return lambda want: read_waiting(
        _get_request(config, want, policy), want, wait_for, seconds, limit
    )


def follow(
    config: Config,
    request_id: str,
    *,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    missing: Missing,
    policy: Policy,
    weight_version: int | None,
    incarnation: int | None,
    timeout: float | None,
) -> Plan[RoutingTrace]:
    """See RouteClient.follow."""
    what = request_id, layer_ids, token_start, token_stop, weight_version, incarnation
    want = _want(*what, missing, ("raise", "mask"), follow=True)
    request = _get_request(config, want, policy)
    if timeout is not None:
        check.positive("timeout", timeout)
    return read_parts(request, want, config.timeout, timeout)


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
) -> Plan[RoutingTrace]:
    """See RouteClient.get_blocks."""
    want = Want(
        "",
        check.layers(layer_ids),
        check.whole("token_start", token_start),
        mask=check.choice("missing", missing, ("raise", "mask")) == "mask",
        num_rows=check.whole("num_tokens", num_tokens),
    )
    request = pb.GetBlocksRequest(
        run=config.run,
        engine_id=check.text("engine_id", engine_id),
        block_ids=check.wholes("block_ids", block_ids),
        num_tokens=num_tokens,
        token_start=want.token_start,
        layer_ids=want.layer_ids or (),
    )
    return read("GetBlocks", request, want, config.limit(timeout))


def stat(
    config: Config, request_id: str, *, incarnation: int | None, timeout: float | None
) -> Plan[TraceStat]:
    """See RouteClient.stat."""
    request = pb.StatTraceRequest(
        run=config.run,
        trace_id=check.text("request_id", request_id),
        incarnation=_incarnation(incarnation),
    )

    def convert(response: pb.StatTraceResponse) -> TraceStat:
        facts = facts_from_proto(response.info)
        missing = missing_from_proto(response.missing, facts["layout"].layer_ids)
        return TraceStat(**facts, missing=missing)

    return unary("StatTrace", request, config.limit(timeout), convert)


def find(
    config: Config,
    *,
    labels: Mapping[str, str] | None,
    states: Iterable[TraceState | str],
    timeout: float | None,
) -> Plan[TraceStat]:
    """See RouteClient.find."""
    names = [check.choice("states", state, _STATES) for state in states]
    request = pb.ListTracesRequest(
        run=config.run,
        labels=labels or {},
        states=[TraceState(name).to_proto() for name in names],
    )
    return pages(request, config.limit(timeout), _stat)


def bind(
    config: Config,
    engine_id: str,
    request_id: str,
    block_ids: Sequence[int],
    num_tokens: int,
    *,
    num_computed_tokens: int | None,
    token_ids: npt.ArrayLike | None,
    step: int,
    trace_id: str,
    prompt_len: int,
    labels: Mapping[str, str] | None,
    ttl_seconds: int,
    timeout: float | None,
) -> Plan[TraceStat]:
    """See RouteClient.bind."""
    num_tokens = check.whole("num_tokens", num_tokens, 1)
    if num_computed_tokens is not None:
        check.whole("num_computed_tokens", num_computed_tokens, 0, num_tokens - 1)
    digests = b""
    if token_ids is not None:
        digests = token_digests(check.tokens("token_ids", token_ids, num_tokens)).tobytes()
    request = pb.BindRequestRequest(
        run=config.run,
        engine_id=check.text("engine_id", engine_id),
        request_id=check.text("request_id", request_id),
        block_ids=check.wholes("block_ids", block_ids),
        num_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
        token_digests=digests,
        step=check.whole("step", step, 0, 2**64 - 1),
        begin=pb.RequestBegin(
            trace_id=trace_id,
            prompt_len=check.whole("prompt_len", prompt_len),
            labels=labels or {},
            ttl_seconds=check.whole("ttl_seconds", ttl_seconds),
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


def delete(config: Config, request_id: str, *, timeout: float | None) -> Plan[None]:
    """See RouteClient.delete."""
    request = pb.DeleteTraceRequest(run=config.run, trace_id=check.text("request_id", request_id))
    return unary("DeleteTrace", request, config.limit(timeout), lambda _: None)


def retire_through(config: Config, weight_version: int, *, timeout: float | None) -> Plan[int]:
    """See RouteClient.retire_through."""
    request = pb.RetireTracesRequest(
        run=config.run,
        through_weight_version=check.weight_version(weight_version),
    )
    return unary("RetireTraces", request, config.limit(timeout), lambda r: int(r.num_retired))


def renew(
    config: Config, request_ids: Iterable[str], ttl_seconds: int, *, timeout: float | None
) -> Plan[int]:
    """See RouteClient.renew."""
    request = pb.RenewLeaseRequest(
        run=config.run,
        trace_ids=[check.text("request_ids", i) for i in request_ids],
        ttl_seconds=check.whole("ttl_seconds", ttl_seconds),
    )
    return unary("RenewLease", request, config.limit(timeout), lambda r: int(r.num_renewed))


def server_info(config: Config, *, timeout: float | None) -> Plan[ServerInfo]:
    """See RouteClient.server_info."""
    request = pb.GetServerInfoRequest(run=config.run)
    return unary("GetServerInfo", request, config.limit(timeout), ServerInfo.from_proto)


def _want(
    request_id: str,
    layer_ids: Sequence[int] | None,
    token_start: int,
    token_stop: int | None,
    weight_version: int | None,
    incarnation: int | None,
    missing: MissingOrWait,
    choices: tuple[str, ...],
    *,
    follow: bool = False,
) -> Want:
    return Want(
        check.text("request_id", request_id),
        check.layers(layer_ids),
        check.whole("token_start", token_start),
        check.stop(token_start, token_stop),
        mask=check.choice("missing", missing, choices) == "mask",
        follow=follow,
        weight_version=None if weight_version is None else check.weight_version(weight_version),
        incarnation=_incarnation(incarnation),
    )


def _get_request(config: Config, want: Want, policy: Policy) -> pb.GetTraceRequest:
    ranges = want.into.ranges if want.into else ()
    return pb.GetTraceRequest(
        run=config.run,
        trace_id=want.request_id,
        token_start=0 if ranges else want.token_start,
        token_stop=0 if ranges else want.token_stop or 0,
        token_ranges=[pb.TokenRange(start=a, stop=b) for a, b in ranges],
        layer_ids=want.layer_ids or (),
        policy=_POLICIES[check.choice("policy", policy, _POLICIES)],
        incarnation=want.incarnation,
        follow=want.follow,
        weight_version=want.weight_version,
        omit_token_digests=not want.token_digests,
    )


def _incarnation(incarnation: int | None) -> int:
    return 0 if incarnation is None else check.whole("incarnation", incarnation, 1)


def _stat(info: pb.TraceInfo) -> TraceStat:
    return TraceStat(**facts_from_proto(info))
