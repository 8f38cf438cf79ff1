"""Isolation of tenants: scopes, runs and engines of tokens, revoked tokens, and pending calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from routetrace.client import RouteClient, Security
from routetrace.common.errors import NotFound, PermissionDenied, Unauthenticated
from routetrace.server.access.control import _SCOPES as SCOPES
from routetrace.server.access.tokens import read_tokens
from routetrace.server.daemon import _server_options
from routetrace.server.settings.config import ServerConfig
from routetrace.server.testing import free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.servers.client_server import LAYOUT
from support.servers.guarded import entry, error_of, feed, replace
from support.waiting import wait_for

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")


def test_the_scope_of_each_method_is_that_of_the_page() -> None:
    rows = re.findall(r"^\| (.*?) \| scope `(\w+)` \|", PAGE, re.M)
    stated = {
        method: scope for cell, scope in rows for method in re.findall(r"`(\w+)`(?! that)", cell)
    }
    assert {method.rpartition("/")[2]: scope for method, scope in SCOPES.items()} == stated


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("exp-1", ["exp-1", "exp-1@report:trainer"], ["exp-", "exp-10", "exp-1/a", "my-exp-1"]),
        ("exp-*", ["exp-", "exp-1", "exp-1@report:trainer"], ["exp", "EXP-1", "my-exp-1"]),
        ("exp-?", ["exp-1", "exp-2@report:a"], ["exp-", "exp-10"]),
        ("exp-[12]", ["exp-1", "exp-2"], ["exp-3", "exp-12", "exp-"]),
        ("a@report:b", ["a@report:b"], ["a", "a@report:c"]),
        ("*", ["a", "exp-1@report:trainer"], []),
    ],
)
def test_names_and_patterns_of_runs(
    tmp_path: Path, pattern: str, covered: list[str], others: list[str]
) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_a", "a", runs=(pattern,)))
    [token] = read_tokens(path).values()
    assert {run: token.covers(run) for run in (*covered, *others)} == {
        **dict.fromkeys(covered, True),
        **dict.fromkeys(others, False),
    }


@pytest.mark.parametrize("spread", [False, True])
def test_a_token_with_scope_read_shortens_no_lease(tmp_path: Path, spread: bool) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_all", "all") + entry("rt_reader", "reader", ("read",)))
    settings: dict[str, Any] = {}
    if spread:
        settings = {"port": free_ports(2), "workers": 2, "spread_runs": '["*"]'}
    with (
        run_server(tokens_file=path, **settings) as server,
        RouteClient(server.target, security=Security(token="rt_all"), timeout=60) as owner,
        RouteClient(server.target, security=Security(token="rt_reader"), timeout=60) as reader,
    ):
        feed(server.target, Security(token="rt_all"), "default", "r0")
        assert reader.renew(["r0"], ttl_seconds=10**6) == 1
        before = reader.stat("r0").expires_at
        with pytest.raises(PermissionDenied, match="token reader does not cover the scope 'admin'"):
            reader.renew(["r0"], ttl_seconds=10)
        assert reader.stat("r0").expires_at == before
        assert owner.renew(["r0"], ttl_seconds=10**5) == 1
        assert reader.stat("r0").expires_at < before


def denied(call: Callable[[], object]) -> tuple[str | None, str | None]:
    """Return the field and the value of the PermissionDenied of a call."""
    with pytest.raises((PermissionDenied, grpc.RpcError)) as caught:
        call()
    error = error_of(caught.value) if isinstance(caught.value, grpc.RpcError) else caught.value
    assert isinstance(error, PermissionDenied)
    return error.field, error.value


def test_a_token_feeds_its_engines_and_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(
        entry("rt_all", "all") + entry("rt_node", "node", runs=("mine",), engines=("node7-*",))
    )
    node = Security(token="rt_node")
    with run_server(tokens_file=path) as server, ExitStack() as opened:

        def feeder(run: str, engine_id: str, security: Security = node) -> Feeder:
            made = Feeder(server.target, LAYOUT, run=run, engine_id=engine_id, security=security)
            return opened.enter_context(closing(made))

        def client(token: str, run: str = "mine") -> RouteClient:
            security = Security(token=token)
            made = RouteClient(server.target, run=run, security=security, timeout=60)
            return opened.enter_context(made)

        feeder("mine", "node7-0")
        assert denied(lambda: feeder("mine", "node8-0")) == ("engines", "node8-0")
        assert denied(lambda: feeder("theirs", "node7-0")) == ("runs", "theirs")
        for run, engines in (("mine", ["node7-0"]), ("theirs", [])):
            assert [agent.engine_id for agent in client("rt_all", run).agents()] == engines
        feeder("mine", "node8-0", Security(token="rt_all"))
        mine = client("rt_node")
        foreign = ("engines", "node8-0")
        assert denied(lambda: mine.bind("node8-0", "r", [0], 4)) == foreign
        assert denied(lambda: mine.forget_engine("node8-0")) == foreign


def test_names_of_runs_are_those_of_the_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_all", "all") + entry("rt_mine", "mine", runs=("mine*",)))
    mine = Security(token="rt_mine")
    with run_server(tokens_file=path) as server:
        for run in ("mine", "theirs"):
            feed(server.target, Security(token="rt_all"), run, "r0")
        with RouteClient(server.target, run="mine-2", security=mine, timeout=60) as client:
            with pytest.raises(NotFound, match=r"no run 'mine-2'; runs: mine$"):
                client.get("r0")
            assert list(client.server_info().runs) == ["mine"]


#: Trace that never begins; reads that wait for it, as method and request.
NONE = {"run": "default", "trace_id": "none"}
WAITING: dict[str, tuple[str, Message]] = {
    "get": ("GetTrace", pb.GetTraceRequest(**NONE, wait_for=pb.WAIT_FOR_END)),
    "follow": ("GetTrace", pb.GetTraceRequest(**NONE, follow=True, wait_ms=300_000)),
    "stat": ("StatTrace", pb.StatTraceRequest(**NONE, wait=True)),
}


@pytest.mark.parametrize("kind", WAITING)
def test_a_read_that_waits_ends_when_its_token_is_revoked(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(entry("rt_a", "a") + entry("rt_b", "b"))
    security, (method, request) = Security(token="rt_a"), WAITING[kind]
    with (
        run_server(tokens_file=path, metrics_listen="127.0.0.1:0") as server,
        security.channel(server.target, []) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        feed(server.target, Security(token="rt_b"), "default", "r0")
        stub = getattr(pb_grpc.TraceServiceStub(channel), method)

        def read() -> grpc.RpcError:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub(request, timeout=40, metadata=security.metadata()))
            return caught.value

        call = pool.submit(read)

        def waits() -> bool:
            held = Scraped(server.metrics_target).samples("routetrace_budget_held")
            owner = {"limit": "max_reads", "owner": "token a"}
            return any(value for labels, value in held if owner.items() <= labels.items())

        wait_for(waits)
        replace(path, entry("rt_b", "b"))
        assert isinstance(error_of(call.result()), Unauthenticated)


def test_pending_calls_are_bounded_as_the_page_says() -> None:
    options = dict(_server_options(ServerConfig(store="memory")))

    def stated(limit: str) -> list[int]:
        [cell] = re.findall(rf"^\| {limit} \| ([\d, to]+) \|", PAGE, re.M)
        return [int(number.replace(",", "")) for number in cell.split(" to ")]

    assert stated("open calls of a connection") == [options["grpc.max_concurrent_streams"]]
    assert stated("pending calls of all connections") == [
        options["grpc.server.max_pending_requests"],
        options["grpc.server.max_pending_requests_hard_limit"],
    ]
