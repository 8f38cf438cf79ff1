"""Route of a client's calls: one of its targets, or the worker there which serves its run."""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.common.target import moved_target, targets_of
from routetrace.v1 import routetrace_pb2 as pb

#: Field of a MOVED that sends one read to the worker with its trace; later calls stay.
TRACE_FIELD = "trace_id"

#: Seconds after a move to another target in which calls fail that began before it.
_MOVE_S = 0.2


class Route:
    """Target of new calls, as the failures of earlier ones say. Not thread-safe.

    A client reads one run, so the worker that serves one call serves all. Where that worker does
    not answer, the next call goes to the configured target, which may name another one. Of several
    targets, one serves the run, and the others may name it: the next call goes to the one after a
    target, or a worker, that does neither.
    """

    def __init__(self, target: str) -> None:
        self._targets = targets_of(target)
        self._at = 0
        self._moves_from = 0.0  # no other move earlier
        self.target = self._targets[0]
        """Target of new calls."""
        self.unreached = ""
        """Worker that did not answer, in place of the configured target; "" if none."""

    def failed(self, failure: Any) -> None:
        """Note a failed call.

        Args:
            failure: its grpc.RpcError.

        Raises:
            InvalidArgument: if the configured target cannot be combined with a worker's port, or
                the call belongs to a server that is not configured.
        """
        details = dict(failure.trailing_metadata() or ())
        answer = details.get(ERROR_METADATA_KEY)
        if answer is not None:
            self.unreached = ""
            detail = _detail(answer)
            if detail.kind == pb.ERROR_KIND_MOVED:
                if detail.field != TRACE_FIELD:
                    self.target = self.of(detail.target)
                return
        if self._leaves(failure.code(), answered=answer is not None):
            self._leave()

    def of(self, worker: str) -> str:
        """Return the target of a worker that a MOVED names.

        Raises:
            InvalidArgument: as `failed`.
        """
        return moved_target(self._targets[self._at], worker, self._targets)

    def _leaves(self, code: grpc.StatusCode, *, answered: bool) -> bool:
        several = len(self._targets) > 1
        if code is grpc.StatusCode.UNAVAILABLE:  # with an answer: a standby, or it stops
            return several or not answered
        # One that stops cancels calls that it has not begun.
        gone = code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        return several and not answered and gone

    def _leave(self) -> None:
        now = time.monotonic()
        if len(self._targets) > 1:
            if now < self._moves_from:
                return
            self._moves_from = now + _MOVE_S
        self.unreached = "" if self.target in self._targets else self.target
        self._at = (self._at + 1) % len(self._targets)
        self.target = self._targets[self._at]


def _detail(answer: bytes) -> pb.ErrorDetail:
    try:
        return pb.ErrorDetail.FromString(answer)
    except DecodeError:
        return pb.ErrorDetail()
