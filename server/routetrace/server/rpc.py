"""How errors of the server reach its callers: a status, and an ErrorDetail in trailing metadata."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from routetrace.v1.errors import ERROR_METADATA_KEY, RouteTraceError

_log = logging.getLogger(__name__)

S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]


async def fail(context: Context, error: RouteTraceError) -> NoReturn:
    """Ends a call with a typed error."""
    detail = error.to_detail().SerializeToString()
    await context.abort(error.status, error.message, ((ERROR_METADATA_KEY, detail),))


def unary(
    handler: Callable[[S, Q, Context], Awaitable[R]],
) -> Callable[[S, Q, Context], Awaitable[R]]:
    """A unary handler whose typed errors reach the caller."""

    @functools.wraps(handler)
    async def wrapped(self: S, request: Q, context: Context) -> R:
        try:
            return await handler(self, request, context)
        except RouteTraceError as error:
            await fail(context, error)

    return wrapped


def streaming(
    handler: Callable[[S, Q, Context], AsyncIterator[R]],
) -> Callable[[S, Q, Context], AsyncIterator[R]]:
    """A streaming handler whose typed errors reach the caller."""

    @functools.wraps(handler)
    async def wrapped(self: S, request: Q, context: Context) -> AsyncIterator[R]:
        try:
            async for response in handler(self, request, context):
                yield response
        except RouteTraceError as error:
            await fail(context, error)

    return wrapped
