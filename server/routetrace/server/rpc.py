"""How errors of the server reach its callers: a status, and an ErrorDetail in trailing metadata."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc

from routetrace.v1.errors import ERROR_METADATA_KEY, RouteTraceError

F = TypeVar("F", bound=Callable[..., Any])
Context = grpc.aio.ServicerContext[Any, Any]


async def fail(context: Context, error: RouteTraceError) -> NoReturn:
    """Ends a call with a typed error."""
    detail = error.to_detail().SerializeToString()
    await context.abort(error.status, error.message, ((ERROR_METADATA_KEY, detail),))


def unary(handler: F) -> F:
    """A unary handler whose typed errors reach the caller."""

    @functools.wraps(handler)
    async def wrapped(self: object, request: object, context: Context) -> object:
        try:
            return await handler(self, request, context)
        except RouteTraceError as error:
            await fail(context, error)

    return cast("F", wrapped)


def streaming(handler: F) -> F:
    """A streaming handler whose typed errors reach the caller."""

    @functools.wraps(handler)
    async def wrapped(self: object, request: object, context: Context) -> AsyncIterator[object]:
        try:
            async for response in handler(self, request, context):
                yield response
        except RouteTraceError as error:
            await fail(context, error)

    return cast("F", wrapped)
