"""Checks of a request to bind blocks, which need no state."""

from __future__ import annotations

from routetrace.codec.records import DIGEST, unpack
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_BLOCK_TOKENS, MAX_STEP, check_id
from routetrace.server.index.chunk import check_begin
from routetrace.v1 import routetrace_pb2 as pb


def check_bind(request: pb.BindRequestRequest) -> int:
    """Return the number of leading tokens that a forward pass computed.

    Raises:
        InvalidArgument: if a field has an invalid value.
    """
    check_id("request_id", request.request_id)
    check_begin(request.begin)
    if request.num_tokens < 1:
        raise InvalidArgument(field="num_tokens", value=request.num_tokens, expected="at least 1")
    num_computed_tokens = request.num_tokens - 1
    if request.HasField("num_computed_tokens"):
        num_computed_tokens = request.num_computed_tokens
    if num_computed_tokens >= request.num_tokens:
        raise InvalidArgument(
            field="num_computed_tokens",
            value=request.num_computed_tokens,
            expected=f"less than num_tokens = {request.num_tokens}",
        )
    if request.num_tokens > MAX_BLOCK_TOKENS:
        raise InvalidArgument(
            field="num_tokens", value=request.num_tokens, expected=f"at most {MAX_BLOCK_TOKENS}"
        )
    if request.step > MAX_STEP:
        raise InvalidArgument(field="step", value=request.step, expected=f"at most {MAX_STEP}")
    digests = unpack(request.token_digests, DIGEST, "token_digests")
    if len(digests) > request.num_tokens:
        raise InvalidArgument(
            field="token_digests",
            value=f"{len(digests)} digests",
            expected=f"at most num_tokens = {request.num_tokens}",
        )
    return num_computed_tokens
