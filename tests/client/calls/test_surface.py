"""Both clients have the same calls, with the same arguments."""

from __future__ import annotations

import inspect

import grpc

from routetrace.client import AsyncRouteClient, RouteClient
from routetrace.client._core.retry import to_error
from routetrace.common import errors
from routetrace.common.errors import (
    NotFound,
)


def _public(cls):
    return {
        name: member
        for name, member in vars(cls).items()
        if (callable(member) and not name.startswith("_")) or name == "__init__"
    }


def test_both_clients_are_the_same():
    sync, aio = _public(RouteClient), _public(AsyncRouteClient)
    aio = {"close" if name == "aclose" else name: member for name, member in aio.items()}
    assert list(sync) == list(aio)
    for name in sync:
        assert inspect.signature(sync[name]).parameters == inspect.signature(aio[name]).parameters
        assert sync[name].__doc__ == aio[name].__doc__, name
        returned = inspect.signature(sync[name]).return_annotation
        plain = any(word in returned for word in ("Generator", "Prefetch", "RouteClient"))
        assert inspect.iscoroutinefunction(aio[name]) != (plain or name == "__init__"), name
        returns = [inspect.signature(f[name]).return_annotation for f in (sync, aio)]
        assert returns[0].replace(", None, None]", "]") == returns[1].replace("Async", "").replace(
            ", None]", "]"
        )
    # They differ in what they say of threads, loops and forks.
    docs = [c.__doc__.split("\n\n")[2:] for c in (RouteClient, AsyncRouteClient)]
    assert docs[0] == docs[1] != []


def test_public_names():
    assert list(_public(RouteClient)) == [
        "__init__",
        "close",
        "get",
        "get_many",
        "expert_load",
        "fetch",
        "prefetch",
        "follow",
        "get_blocks",
        "locate",
        "stat",
        "describe",
        "explain",
        "find",
        "watch",
        "bind",
        "delete",
        "forget_engine",
        "retire_through",
        "renew",
        "server_info",
        "agents",
        "history",
        "report_routing",
        "reports",
        "report_agreement",
        "agreement_history",
    ]


def test_details_that_do_not_parse_do_not_hide_the_status():
    class Failed(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.NOT_FOUND

        def details(self):
            return "so"

        def trailing_metadata(self):
            return ((errors.ERROR_METADATA_KEY, b"\xff\xff"),)

    error = to_error(Failed())
    assert type(error) is NotFound
    assert "so" in error.message
