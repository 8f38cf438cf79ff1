"""Checks of calls and of their requests, before anything is looked up."""

from __future__ import annotations

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_LAYERS, check_id
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle
from routetrace.server.access.partition import Partition
from routetrace.server.access.tokens import Scope
from routetrace.server.common.rpc import Context
from routetrace.server.rows.reader import MAX_RANGES
from routetrace.v1 import routetrace_pb2 as pb

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
_LONGEST_PAGE_TOKEN = 20

_POLICIES = frozenset(pb.ReadPolicy.values())
_WAITS = frozenset(pb.WaitFor.values())
_PREFIX_ROWS = frozenset(pb.PrefixRows.values())


class Checks:
    """Checks of calls: their run, their token, and the server's state.

    Args:
        access: tokens.
        lifecycle: state of the server.
        partition: runs of this worker.
    """

    def __init__(self, access: Access, lifecycle: Lifecycle, partition: Partition) -> None:
        self._access = access
        self._lifecycle = lifecycle
        self._partition = partition

    def call(self, context: Context, scope: Scope, run: str, engine_id: str = "") -> str:
        """Check a call about a run, or one of its engines; return its owner."""
        check_id("run", run)
        owner = self._access.check(context, scope, run)
        self._partition.check(run, engine_id)
        self._lifecycle.check_ready()
        return owner

    def ready(self) -> None:
        """Check that data calls are served."""
        self._lifecycle.check_ready()


def page_of(request: pb.ListTracesRequest | pb.ListAgentsRequest) -> tuple[int, int]:
    """Return the number after which a page begins, 0 for the first page, and its maximum length."""
    token = request.page_token or "0"
    if not (len(token) <= _LONGEST_PAGE_TOKEN and token.isascii() and token.isdigit()):
        raise InvalidArgument(
            field="page_token", value=token, expected="next_page_token of an earlier response"
        )
    return int(token), min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def at_most(field: str, value: int, most: int) -> None:
    """Raise InvalidArgument if a value is over its maximum."""
    if value > most:
        raise InvalidArgument(field=field, value=value, expected=f"at most {most}")


def check_read(request: pb.GetTraceRequest) -> None:
    """Raise InvalidArgument if a field of a read has an invalid value."""
    check_id("trace_id", request.trace_id)
    at_most("token_ranges", len(request.token_ranges), MAX_RANGES)
    at_most("layer_ids", len(request.layer_ids), MAX_LAYERS)
    if request.policy not in _POLICIES:
        raise InvalidArgument(field="policy", value=request.policy, expected="a ReadPolicy")
    if request.wait_for not in _WAITS:
        raise InvalidArgument(field="wait_for", value=request.wait_for, expected="a WaitFor")
    if request.prefix_rows not in _PREFIX_ROWS:
        raise InvalidArgument(
            field="prefix_rows", value=request.prefix_rows, expected="a PrefixRows"
        )
    if request.follow and request.token_ranges:
        raise InvalidArgument(
            field="token_ranges", value=len(request.token_ranges), expected="none to follow"
        )


def check_part(read: pb.GetTraceRequest) -> None:
    """Raise InvalidArgument if a read cannot be one of several."""
    for field in ("run", "follow"):
        if value := getattr(read, field):
            raise InvalidArgument(field=f"reads.{field}", value=value, expected="not set")
    check_read(read)
