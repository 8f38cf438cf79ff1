"""Budgets: two tenants with tokens, one of which takes all it gets; the other one is served."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from routetrace.client import RouteClient
from routetrace.codec.records import OP, FinishReason, OpKind
from routetrace.common.errors import (
    ERROR_METADATA_KEY,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
    from_detail,
)
from routetrace.common.layout import ModelLayout
from routetrace.common.security import Security
from routetrace.server.ingest.service import MAX_BIND_BYTES
from routetrace.server.testing import ServerProcess, run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder, Stream, seal
from support.scrape import Scraped
from support.waiting import wait_for, with_time

LAYOUT = ModelLayout((0, 1), 2, 8, 2)
ALL = ["ingest", "read", "admin"]
VICTIM, ATTACKER = Security(token="rt_victim"), Security(token="rt_attacker")


def rows_of(count: int) -> np.ndarray:
    offsets = np.array([[0, 2], [4, 6]], np.uint8)
    return np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2) // 3 % 2 + offsets


def token(name: str, runs: list[str], **more: list[str]) -> str:
    sha256 = hashlib.sha256(f"rt_{name}".encode()).hexdigest()
    entry = {"name": name, "sha256": sha256, "runs": runs, "scopes": ALL, **more}
    return "\n".join(["[[token]]", *(f"{key} = {value!r}" for key, value in entry.items()), ""])


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(token("victim", ["victim"]) + token("attacker", ["attack-*"]))
    return path


class Victim:
    """A tenant that writes and reads a trace at each call."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self.count = server, 0
        self.feeder = Feeder(server.target, LAYOUT, run="victim", security=VICTIM)

    def works(self) -> None:
        """Write a trace; read it and the first one, exactly."""
        name = f"t{self.count}"
        self.count += 1
        handle = self.feeder.begin(name, prompt_len=3)
        self.feeder.step(rows_of(5), [(handle, 0, 5)])
        self.feeder.finish(handle, 6)
        self.feeder.flush()
        with RouteClient(self.server.target, run="victim", security=VICTIM, timeout=60) as client:
            for some in {name, "t0"}:
                assert np.array_equal(client.get(some).topk_ids, rows_of(5))


def stub_of(server: ServerProcess) -> tuple[pb_grpc.IngestServiceStub, pb_grpc.TraceServiceStub]:
    channel = ATTACKER.channel(server.target, [("grpc.max_send_message_length", -1)])
    return pb_grpc.IngestServiceStub(channel), pb_grpc.TraceServiceStub(channel)


def typed(error: BaseException | None) -> RouteTraceError:
    metadata = dict(error.trailing_metadata())  # type: ignore[union-attr]
    return from_detail(pb.ErrorDetail.FromString(metadata[ERROR_METADATA_KEY]))


def refusal(call: Iterator[object] | object) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if hasattr(call, "__next__") else call()  # type: ignore[call-overload,operator]
    return typed(caught.value)


def expect_refused(calls: list[Any], count: int, message: str) -> None:
    """Wait until `count` of the calls are refused as Overloaded, with this message."""
    wait_for(lambda: sum(call.done() for call in calls) == count, 60)
    for error in [typed(call.exception()) for call in calls if call.done()]:
        assert isinstance(error, Overloaded)
        assert message in str(error)


def attacker_of(server: ServerProcess, engine_id: str, **more: object) -> Feeder:
    return Feeder(
        server.target,
        LAYOUT,
        run="attack-1",
        engine_id=engine_id,
        security=ATTACKER,
        **more,  # type: ignore[arg-type]
    )


def test_binds_are_bounded_and_their_waits_end(tokens: Path) -> None:
    with run_server(tokens_file=tokens, max_ingest_bytes=1 << 16) as server:
        victim = Victim(server)
        victim.works()
        feeder = attacker_of(server, "e", block_size=4, num_blocks=64)
        ingest, _ = stub_of(server)

        def bind(timeout: float = 60, **fields: object) -> pb.BindRequestResponse:
            request = pb.BindRequestRequest(run="attack-1", engine_id="e", request_id="r", **fields)
            return ingest.BindRequest(request, timeout=timeout, metadata=ATTACKER.metadata())

        too_long = refusal(lambda: bind(block_ids=[1 << 31] * 1_000_000, num_tokens=4_000_000))
        assert isinstance(too_long, InvalidArgument)
        assert f"at most {MAX_BIND_BYTES} bytes" in str(too_long)
        steps = refusal(lambda: bind(block_ids=[0], num_tokens=4, step=1 << 63))
        assert isinstance(steps, InvalidArgument)
        assert steps.field == "step"
        many = refusal(lambda: bind(block_ids=[0], num_tokens=(1 << 22) + 1))
        assert isinstance(many, InvalidArgument)
        assert many.field == "num_tokens"

        def bind_late(seconds: float) -> Exception:
            with pytest.raises(grpc.RpcError) as caught:
                bind(timeout=seconds, block_ids=[0], num_tokens=4, step=7)
            if caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded("late")
            return typed(caught.value)

        late = with_time(bind_late, 3)
        assert isinstance(late, NotFound)
        assert late.field == "step"
        assert "last one is 0" in str(late)
        # Those that wait hold no more than their share of the limit.
        waiting = [
            ingest.BindRequest.future(
                pb.BindRequestRequest(
                    run="attack-1", engine_id="e", request_id=f"r{i}", block_ids=[0], num_tokens=4,
                    step=9,
                ),
                timeout=120,
                metadata=ATTACKER.metadata(),
            )
            for i in range(12)
        ]  # fmt: skip
        expect_refused(
            waiting, 9, "max_ingest_bytes = 65536 is reached: token attacker holds 49152"
        )
        victim.works()
        for call in waiting:
            call.cancel()
        # Ids beyond the tokens are ignored, as ever.
        handle = feeder.begin("x", prompt_len=4, block_ids=[3])
        feeder.step(rows_of(4), [(handle, 0, 4)])
        feeder.flush()
        assert bind(block_ids=[3, 99], num_tokens=4).trace.num_rows == 3


def test_a_waiting_bind_ends_when_its_token_is_revoked(tokens: Path) -> None:
    with run_server(tokens_file=tokens) as server:
        attacker_of(server, "e", block_size=4, num_blocks=64)
        ingest, _ = stub_of(server)
        for engine_id, step in (("e", 9), ("none", 0)):
            tokens.write_text(token("victim", ["victim"]) + token("attacker", ["attack-*"]))
            request = pb.BindRequestRequest(
                run="attack-1", engine_id=engine_id, request_id="r", block_ids=[0], num_tokens=4,
                step=step,
            )  # fmt: skip
            call = ingest.BindRequest.future(request, timeout=300, metadata=ATTACKER.metadata())
            part = tokens.with_suffix(".part")
            part.write_text(token("victim", ["victim"]))
            part.replace(tokens)
            wait_for(call.done, 60)
            assert isinstance(typed(call.exception()), Unauthenticated)


def test_reads_of_blocks_are_bounded_and_exact(tokens: Path) -> None:
    with run_server(tokens_file=tokens, max_ingest_bytes=1 << 20) as server:
        victim = Victim(server)
        feeder = attacker_of(server, "e", block_size=4, num_blocks=1 << 16)
        handle = feeder.begin("x", prompt_len=8, block_ids=[3, 5])
        feeder.step(rows_of(8), [(handle, 0, 8)])
        feeder.flush()
        _, traces = stub_of(server)

        def read(**fields: object) -> Iterator[object]:
            request = pb.GetBlocksRequest(run="attack-1", engine_id="e", **fields)
            return traces.GetBlocks(request, timeout=60, metadata=ATTACKER.metadata())

        error = refusal(read(block_ids=[1 << 31] * 1_000_000, num_tokens=4))
        assert isinstance(error, InvalidArgument)
        assert "bytes" in str(error)
        huge = refusal(read(block_ids=[0] * 30_000, num_tokens=(1 << 22) + 1))
        assert isinstance(huge, InvalidArgument)
        assert huge.field == "num_tokens"
        victim.works()
        with RouteClient(server.target, run="attack-1", security=ATTACKER) as client:
            assert np.array_equal(client.get_blocks("e", [3, 5], 8).topk_ids, rows_of(8))


def test_writers_and_slots_have_shares(tokens: Path) -> None:
    settings = {"max_writers": 8, "max_slots": 4000, "metrics_listen": "127.0.0.1:0"}
    with run_server(tokens_file=tokens, **settings) as server:
        for i in range(5):
            attacker_of(server, f"e{i}", block_size=10, num_blocks=40).close()
        with pytest.raises(
            grpc.RpcError, match="max_slots = 4000 is reached: token attacker holds 1600"
        ):
            attacker_of(server, "e0", block_size=10, num_blocks=400)
        with pytest.raises(grpc.RpcError) as caught:
            attacker_of(server, "e5")
        assert isinstance(typed(caught.value), Overloaded)
        for part in ("max_writers = 8", "token attacker holds 5", "routetrace forget-engine"):
            assert part in str(caught.value)
        victim = Victim(server)
        victim.works()
        scraped = Scraped(server.metrics_target)
        held = {"limit": "max_writers", "owner": "token attacker"}
        assert scraped.value("routetrace_budget_held", **held) == 5
        assert scraped.value("routetrace_budget_limit", limit="max_writers") == 8
        with RouteClient(server.target, run="attack-1", security=ATTACKER) as client:
            with pytest.raises(NotFound, match="none"):
                client.forget_engine("none")
            assert [client.forget_engine(name) for name in ("e0", "e1")] == [1, 1]
        with (
            RouteClient(server.target, run="victim", security=ATTACKER) as client,
            pytest.raises(PermissionDenied),
        ):
            client.forget_engine("e0")
        with (
            RouteClient(server.target, run="victim", security=VICTIM) as client,
            pytest.raises(InvalidArgument, match="disconnected"),
        ):
            client.forget_engine("e0")
        attacker_of(server, "e5").close()
        victim.works()


def test_a_forgotten_engine_stays_forgotten_and_its_traces_stay(tmp_path: Path) -> None:
    for boot in range(2):
        with (
            run_server(data_dir=tmp_path) as server,
            RouteClient(server.target, timeout=60) as client,
        ):
            if not boot:
                feeder = Feeder(server.target, LAYOUT, block_size=4, num_blocks=8)
                handle = feeder.begin("t", prompt_len=4, block_ids=[1, 2])
                feeder.step(rows_of(5), [(handle, 0, 5)])
                feeder.finish(handle, 6)
                feeder.close()
                wait_for(lambda: not next(iter(client.agents())).connected)
                assert client.forget_engine("e0") == 1
            assert list(client.agents()) == []
            assert np.array_equal(client.get("t").topk_ids, rows_of(5))


def test_many_begins_in_a_chunk_are_applied_in_turns_beside_a_neighbour(tokens: Path) -> None:
    count = 30_000
    with run_server(tokens_file=tokens) as server:
        victim = Victim(server)
        victim.works()
        hello = pb.Hello(run="attack-1", engine_id="e", layout=LAYOUT.to_proto())
        stream = Stream(server.target, hello, ATTACKER)
        ops = np.zeros(2 * count, OP)
        ops["kind"][0::2], ops["kind"][1::2] = OpKind.BEGIN, OpKind.FINISH
        ops["arg"][0::2], ops["arg"][1::2] = np.arange(count), FinishReason.STOP
        ops["request"] = np.repeat(np.arange(count), 2)
        ops["value"][0::2] = np.arange(count)
        ops["count"][1::2] = 2
        header = pb.ChunkHeader(
            layout=LAYOUT.to_proto(),
            request_ids=[f"r{i}" for i in range(count)],
            begins=[pb.RequestBegin(prompt_len=1)] * count,
            ops=ops.tobytes(),
        ).SerializeToString()
        stream.send(seal(1, header, b""))
        for _ in range(3):
            victim.works()
        assert stream.receive().ack.sequence == 1
        with RouteClient(server.target, run="attack-1", security=ATTACKER, timeout=60) as client:
            assert client.server_info().num_traces == count
        stream.close()


def test_streams_of_agents_have_shares(tokens: Path) -> None:
    with run_server(tokens_file=tokens, max_agents=8) as server:
        held = [attacker_of(server, f"e{i}") for i in range(5)]
        with pytest.raises(
            grpc.RpcError, match="max_agents = 8 is reached: token attacker holds 5"
        ):
            attacker_of(server, "e5")
        Victim(server).works()
        for feeder in held:
            feeder.close()


def test_reads_that_wait_have_shares(tokens: Path) -> None:
    with run_server(tokens_file=tokens, max_reads=8) as server:
        victim = Victim(server)
        _, traces = stub_of(server)
        request = pb.GetTraceRequest(run="attack-1", trace_id="none", wait_for=pb.WAIT_FOR_END)
        calls = [
            traces.GetTrace(request, timeout=300, metadata=ATTACKER.metadata()) for _ in range(12)
        ]
        expect_refused(calls, 7, "max_reads = 8 is reached: token attacker holds 5")
        victim.works()
        for call in calls:
            call.cancel()
