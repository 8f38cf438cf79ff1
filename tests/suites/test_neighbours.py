"""Isolation: one tenant's load, by accident or on purpose, beside another tenant's reads."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from routetrace.client import RouteClient
from routetrace.common.drops import DROP_REASONS, OTHER_REASON
from routetrace.common.errors import PermissionDenied, Unauthenticated
from routetrace.common.layout import ModelLayout
from routetrace.common.security import Security
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder
from support.scrape import Scraped
from support.waiting import wait_for

#: Rows that zstd does not shrink: a trace larger than gRPC's window needs few of them.
LAYOUT = ModelLayout(tuple(range(48)), 48, 128, 8)


def rows_of(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    keys = rng.random((count, len(LAYOUT.layer_ids), LAYOUT.num_experts), np.float32)
    return np.argsort(keys, axis=2)[..., : LAYOUT.top_k].astype(np.uint8)


def token(text: str, name: str, runs: list[str], scopes: list[str], **more: list[str]) -> str:
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    entry = {"name": name, "sha256": sha256, "runs": runs, "scopes": scopes, **more}
    lines = [f"{key} = {value!r}" for key, value in entry.items()]
    return "\n".join(["[[token]]", *lines, ""])


def feed(server: ServerProcess, run: str, names: list[str], count: int, **more: object) -> None:
    feeder = Feeder(server.target, LAYOUT, run=run, **more)  # type: ignore[arg-type]
    for seed, name in enumerate(names):
        handle = feeder.begin(name, prompt_len=count)
        rows = rows_of(count, seed)
        for at in range(0, count, 256):
            part = rows[at : at + 256]
            feeder.step(part, [(handle, at, len(part))])
            feeder.flush()
        feeder.finish(handle, count + 1)
        feeder.flush()
    feeder.close()


@contextmanager
def stalled_reads(server: ServerProcess, run: str, name: str, count: int) -> Iterator[list]:
    """Open reads that take the first message and no more, over several connections."""
    with ExitStack() as stack:
        calls = []
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        for at in range(count):
            if at % 32 == 0:
                channel = grpc.insecure_channel(server.target, options)
                stub = pb_grpc.TraceServiceStub(stack.enter_context(channel))
            calls.append(stub.GetTrace(pb.GetTraceRequest(run=run, trace_id=name)))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(first_message, calls))
        yield calls


def first_message(call: object) -> object:
    try:
        return next(call)  # type: ignore[call-overload]
    except grpc.RpcError as error:
        return error


@pytest.mark.slow
def test_reads_that_take_nothing_leave_a_neighbour_its_reads_and_end() -> None:
    with run_server(
        max_streaming_reads=8, stalled_read_seconds=4, metrics_listen="127.0.0.1:0"
    ) as server:
        feed(server, "attacker", ["large"], 8192)
        feed(server, "victim", ["t"], 64)
        with (
            stalled_reads(server, "attacker", "large", 64),
            RouteClient(server.target, run="victim", timeout=20) as client,
        ):
            for _ in range(20):
                assert len(client.get("t").topk_ids) == 64

            def stalled() -> float:
                return Scraped(server.metrics_target).value("routetrace_stalled_reads_total")

            wait_for(lambda: stalled() >= 8, 60)
            assert len(client.get("t").topk_ids) == 64
        wait_for(
            lambda: Scraped(server.metrics_target).value("routetrace_reads", state="sending") == 0
        )


def test_waiting_reads_of_one_run_leave_room_for_another() -> None:
    with run_server(max_reads=16) as server:
        feed(server, "victim", ["t"], 4)

        async def attack() -> None:
            async with grpc.aio.insecure_channel(server.target) as channel:
                stub = pb_grpc.TraceServiceStub(channel)
                request = pb.GetTraceRequest(
                    run="attacker", trace_id="never", wait_for=pb.WAIT_FOR_END
                )
                waiting = [
                    asyncio.ensure_future(stub.GetTrace(request, timeout=60).read())
                    for _ in range(40)
                ]
                refused, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                while len(refused) < 40 - 9:
                    refused, _ = await asyncio.wait(waiting, timeout=0.05)
                codes = {call.exception().code() for call in refused}  # type: ignore[union-attr]
                assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
                assert len(refused) == 40 - 9, "half of the limit, and one"

                def read() -> int:
                    with RouteClient(server.target, run="victim", timeout=20) as client:
                        return len(client.get("t").topk_ids)

                assert await asyncio.to_thread(read) == 4
                for call in waiting:
                    call.cancel()

        asyncio.run(attack())


def test_a_waiting_read_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    all_scopes = ["ingest", "read", "admin"]
    path.write_text(token("rt_a", "a", ["*"], all_scopes) + token("rt_b", "b", ["*"], all_scopes))
    with run_server(tokens_file=path) as server:
        security = Security(token="rt_a")
        with RouteClient(server.target, security=security, timeout=60) as client:
            failed: list[BaseException] = []

            def wait() -> None:
                try:
                    client.get("never", wait_for="end")
                except Exception as error:
                    failed.append(error)

            thread = threading.Thread(target=wait)
            thread.start()
            part = path.with_suffix(".part")
            part.write_text(token("rt_b", "b", ["*"], all_scopes))
            part.replace(path)
            thread.join(30)
            assert [type(error) for error in failed] == [Unauthenticated]


def test_only_an_admin_ends_a_lease_earlier(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(
        token("rt_reader", "reader", ["default"], ["read", "ingest"])
        + token("rt_admin", "admin", ["default"], ["read", "admin"])
    )
    with run_server(tokens_file=path, default_ttl_seconds=1000) as server:
        feed(server, "default", ["t"], 4, security=Security(token="rt_reader"))
        with RouteClient(server.target, security=Security(token="rt_reader")) as reader:
            with pytest.raises(PermissionDenied, match="admin"):
                reader.renew(["t"], ttl_seconds=1)
            assert reader.renew(["t"], ttl_seconds=5000) == 1
            assert reader.stat("t").num_rows == 4
        with RouteClient(server.target, security=Security(token="rt_admin")) as admin:
            assert admin.renew(["t"], ttl_seconds=1) == 1


def test_a_token_feeds_its_engines_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(token("rt_7", "node7", ["default"], ["ingest"], engines=["node7-*"]))
    with run_server(tokens_file=path) as server:
        security = Security(token="rt_7")
        Feeder(server.target, LAYOUT, engine_id="node7-0", security=security).close()
        with pytest.raises(grpc.RpcError, match="node7 does not cover engine 'node8-0'"):
            Feeder(server.target, LAYOUT, engine_id="node8-0", security=security)


def test_drop_reasons_of_an_agent_make_a_fixed_number_of_series() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server:
        feeder = Feeder(server.target, LAYOUT)
        report = pb.Heartbeat(dropped_rows={"queue_full": 3, **{f"r{i}": 1 for i in range(1000)}})
        feeder.stream._out.put(pb.IngestRequest(heartbeat=report))

        def dropped() -> dict[str, float]:
            samples = Scraped(server.metrics_target).samples("routetrace_agent_dropped_rows")
            return {labels["reason"]: value for labels, value in samples}

        wait_for(lambda: dropped().get(OTHER_REASON) == 1000)
        assert set(dropped()) == {*DROP_REASONS, OTHER_REASON}
        assert dropped()["queue_full"] == 3
        assert dropped()["rewound"] == 0, "a rate needs an initial zero"
        feeder.close()


def test_half_requests_at_the_metrics_port_do_not_add_up() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server, ExitStack() as stack:
        host, _, port = server.metrics_target.rpartition(":")
        before = threads_of(server)
        for _ in range(200):
            half = stack.enter_context(socket.create_connection((host, int(port))))
            half.sendall(b"GET /met")
        assert threads_of(server) - before <= 40
        # Connections that send nothing end by themselves.
        wait_for(lambda: _scrapes(server), 60)


def _scrapes(server: ServerProcess) -> bool:
    try:
        return Scraped(server.metrics_target).value("routetrace_ready") == 1
    except OSError:
        return False


def threads_of(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def test_deletion_and_listing_of_many_traces_are_exact() -> None:
    with run_server() as server:
        feeder = Feeder(server.target, LAYOUT)
        rows = rows_of(1)
        for at in range(1500):
            handle = feeder.begin(f"t{at}", prompt_len=1)
            feeder.step(rows, [(handle, 0, 1)])
            if at % 3:
                feeder.finish(handle, 2)
            if at % 500 == 499:
                feeder.flush()
        with RouteClient(server.target, timeout=60) as client:
            names = {trace.trace_id for trace in client.find()}
            assert names == {f"t{at}" for at in range(1500)}
            assert client.renew(sorted(names)) == 1500
            assert client.retire_through(0).traces == 1000
            assert {trace.trace_id for trace in client.find()} == {
                f"t{at}" for at in range(0, 1500, 3)
            }
        feeder.close()
