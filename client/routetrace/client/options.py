"""ReadOptions: the choices that all reads of traces share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Literal, TypedDict

from routetrace.client import _arguments as check
from routetrace.common.values import Values

Missing = Literal["raise", "mask"]
WaitFor = Literal["rows", "end"]
Policy = Literal["as_sampled", "latest"]
PrefixRows = Literal["never", "unique", "any"]
Equal = Literal["refuse", "any"]

#: Names of 0.8 for "any"; they go with 0.10.
_OLD_PREFIX_ROWS = ("same_version", "any_version")


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Values):
    """Options of get, get_many, fetch, prefetch and follow, which also take each by keyword.

    Raises:
        InvalidArgument: naming the option that is wrong.
    """

    missing: Missing = "raise"
    """Treatment of missing rows: "raise" Incomplete, or "mask" them in `Trace.valid`. Rows
    to the end are missing as long as the end is unknown: while the request runs, or if no agent
    reported its end."""
    wait_for: WaitFor | None = None
    """"end": wait until the request has ended. "rows": wait until every requested row is there;
    if the read is to the end of the trace, that includes the end. None: read at once. A wait that
    runs out is a DeadlineExceeded, with `missing="mask"` too, unless all that is missing can no
    longer come: that is an Incomplete, or masked, at once if the trace has ended. Of a session
    under one trace id, the end of an earlier turn counts until the server has the next begin: read
    it with `get(num_tokens=)`, or by positions (`fetch`). `follow` reads to the end anyway: both
    make it wait for an unknown trace to begin."""
    timeout: float | None = None
    """Seconds that a call may take; None: the client's timeout. get_many, fetch and prefetch read
    up to 32 traces with one call. A read that waited in vain is repeated once, within the client's
    timeout, to report the state of the trace.
    `follow`: seconds for the whole stream, if given with the call; else until the request ends, and
    the client's timeout for its beginning."""
    policy: Policy = "as_sampled"
    """Choice among the rows of a token that was computed more than once. "as_sampled": rows of the
    pass that sampling used: the first one of a preempted request, the earlier request's where one
    continues another (continued rollout, prefill handoff). "latest": rows of the last pass."""
    prefix_rows: PrefixRows = "never"
    """Rows of other requests that stand in for a prompt's KV of which only the weight version is
    known, such as KV that an engine restored from elsewhere; they are marked as `provenance`
    "prefix". They are of the same tokens, model and weight version; nothing proves that they are of
    the pass that made the KV. "never"; "unique": where all such rows for a position are of one
    pass; "any": the first one."""
    weight_version: int | None = None
    """Weight version of all rows, others are missing; None: any."""
    equal: Equal = "refuse"
    """Samples of fetch and prefetch that are found by their tokens, where several requests have
    these tokens equally: "refuse" makes their rows missing, as `ambiguous`; with "any" equal
    samples of a plan get the requests in turn, the newest first. See `RouteClient.locate`."""

    def __post_init__(self) -> None:
        check.choice("missing", self.missing, ("raise", "mask"))
        if self.wait_for is not None:
            check.choice("wait_for", self.wait_for, ("rows", "end"), or_none=True)
        if self.timeout is not None:
            check.seconds("timeout", self.timeout)
        check.choice("policy", self.policy, ("as_sampled", "latest"))
        if isinstance(self.prefix_rows, str) and self.prefix_rows in _OLD_PREFIX_ROWS:
            warnings.warn(
                f'prefix_rows="{self.prefix_rows}" is read as "any"; routetrace 0.10 refuses it',
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "prefix_rows", "any")
        check.choice("prefix_rows", self.prefix_rows, ("never", "unique", "any"))
        if self.weight_version is not None:
            check.weight_version(self.weight_version)
        check.choice("equal", self.equal, ("refuse", "any"))


_NAMES = tuple(field.name for field in fields(ReadOptions))


class ReadKeywords(TypedDict, total=False):
    """The fields of `ReadOptions` as keyword arguments."""

    missing: Missing
    wait_for: WaitFor | None
    timeout: float | None
    policy: Policy
    prefix_rows: PrefixRows
    weight_version: int | None
    equal: Equal


def merged(
    call: Callable[..., Any],
    options: ReadOptions | None,
    keywords: Mapping[str, Any],
    default: ReadOptions,
) -> ReadOptions:
    """Return the options of one call.

    Args:
        call: method that takes the options.
        options: its options; `default` if None.
        keywords: its other keyword arguments, which win.
        default: options of its client.

    Raises:
        InvalidArgument: naming a keyword that the call does not have; it is also a TypeError.
    """
    for name in keywords:
        if name not in _NAMES:
            own = [p.name for p in signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY]
            raise check.unknown_keyword(call.__name__, name, [*own, *_NAMES])
    if options is None:
        options = default
    options = check.instance("options", options, ReadOptions)
    return replace(options, **keywords) if keywords else options
