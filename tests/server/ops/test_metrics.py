"""Metrics of real servers: what each says, and that the documentation knows them all."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import Agreement, RouteClient
from routetrace.client.agreement import Choices
from routetrace.common.errors import NotFound
from routetrace.common.security import Security
from routetrace.server.common.metrics import Metrics
from routetrace.server.core import Core
from routetrace.server.ops import scrape
from routetrace.server.ops.endpoint import Endpoint
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.agents.feeder import Feeder, seal
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \| ([^|]*)\| [^|]+ \|$", PAGE, re.M)

BEAT = pb.Heartbeat(
    offered_rows=9,
    acknowledged_rows=5,
    dropped_rows={"queue_full": 3},
    in_flight_rows=1,
    queued_bytes=70,
    spilled_bytes=7,
    lag_ms=2500,
)


def feed(feeder: Feeder, name: str, num_rows: int, *, finish: bool = True) -> None:
    """One trace, in one chunk."""
    handle = feeder.begin(name, prompt_len=num_rows)
    feeder.step(rows_of(LAYOUT, num_rows), [(handle, 0, num_rows)])
    if finish:
        feeder.finish(handle, num_rows + 1)
    feeder.flush()


def beat(feeder: Feeder, report: pb.Heartbeat) -> None:
    feeder.stream._out.put(pb.IngestRequest(heartbeat=report))


def rows_by_state(scraped: Scraped, **agent: str) -> dict[str, float]:
    samples = scraped.samples("routetrace_agent_rows", **agent)
    return {labels["state"]: value for labels, value in samples}


def test_the_documentation_has_a_row_for_each_metric_and_no_other(tmp_path: Path) -> None:
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROWS}
    assert len(documented) == len(ROWS)
    ca, pem = trustme.CA(), str(tmp_path / "server.pem")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    Path(pem).touch(0o600)
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    with run_server(
        metrics_listen="127.0.0.1:0",
        run_quota="1GiB",
        sweep_interval_seconds=0.1,
        tls_cert=pem,
        tls_key=pem,
    ) as server:
        security = Security(ca_file=str(tmp_path / "ca.pem"))
        feeder = Feeder(server.target, LAYOUT, security=security)
        feed(feeder, "t", 5)
        beat(feeder, BEAT)
        with RouteClient(server.target, security=security) as client:
            client.report_agreement(1, Agreement())
        wait_for(lambda: rows_by_state(Scraped(server.metrics_target)))
        wait_for(lambda: Scraped(server.metrics_target).value("routetrace_counted_traces"))
        scraped = Scraped(server.metrics_target)
        feeder.stream.close()
    # Some have no sample before something goes wrong.
    made = [vars(series) for series in vars(Metrics()).values()]
    labels = {series["_name"]: {*series["_labelnames"]} for series in made if "_name" in series}
    found = {
        name: (kind, scraped.labels[name] or labels.get(name.removesuffix("_total"), set()))
        for name, kind in scraped.types.items()
    }
    assert found == documented


def test_what_a_server_holds_and_has_done() -> None:
    with run_server(metrics_listen="127.0.0.1:0", run_quotas='{"a": "1MiB"}') as server:
        stub = pb_grpc.TraceServiceStub(channel := grpc.insecure_channel(server.target))
        feeders = {run: Feeder(server.target, LAYOUT, run=run) for run in "ab"}
        feed(feeders["a"], "t0", 5)
        feed(feeders["a"], "t1", 6)
        feed(feeders["b"], "t0", 7, finish=False)
        answers = stub.GetTrace(pb.GetTraceRequest(run="b", trace_id="t0"))
        size = sum(len(message.payload) for message in answers)
        waiting = stub.GetTrace(
            pb.GetTraceRequest(run="b", trace_id="t0", wait_for=pb.WAIT_FOR_END), timeout=60
        )
        beat(feeders["b"], BEAT)
        stream = feeders["b"].stream
        stream.send(chunk := seal(2, b"not a header", b""))
        assert stream.receive().reject.error.kind == pb.ERROR_KIND_INVALID_ARGUMENT
        chunk.header_crc32 ^= 1
        stream.send(chunk)
        assert stream.receive().reject.error.kind == pb.ERROR_KIND_CORRUPT

        wait_for(lambda: Scraped(server.metrics_target).value("routetrace_reads", state="waiting"))
        value = Scraped(server.metrics_target).value
        expected = {
            "ready": 1,
            "agents": 2,
            "traces": 3,
            "store_records": 3,
            "run_quota_bytes": 1 << 20,
            "ingest_chunks_total": 3,
            "ingest_rows_total": 5 + 6 + 7,
            "commit_seconds_count": 3,
            "read_bytes_total": size,
        }
        assert {name: value(f"routetrace_{name}") for name in expected} == expected
        assert value("routetrace_traces", run="a") == 2
        assert value("routetrace_run_bytes", run="b") == size
        assert value("routetrace_run_bytes") == value("routetrace_store_payload_bytes")
        assert value("routetrace_run_quota_bytes", run="b") == 0
        assert value("routetrace_ingest_rejected_total", kind="corrupt") == 1
        assert value("routetrace_ingest_rejected_total", kind="invalid_argument") == 1
        assert value("routetrace_memory_bytes") > 1 << 20
        agent = {"run": "b", "engine_id": "e0", "shard": ""}
        assert rows_by_state(Scraped(server.metrics_target), **agent) == {
            "offered": BEAT.offered_rows,
            "acknowledged": BEAT.acknowledged_rows,
            "in_flight": BEAT.in_flight_rows,
        }
        assert value("routetrace_agent_dropped_rows", reason="queue_full", **agent) == 3
        assert value("routetrace_agent_queued_bytes", **agent) == BEAT.queued_bytes
        assert value("routetrace_agent_spilled_bytes", **agent) == BEAT.spilled_bytes
        assert value("routetrace_agent_lag_seconds", **agent) == 2.5
        with RouteClient(server.target, run="b") as client:
            for step, reporter, differing in ((9, "r0", 5), (8, "r0", 1), (8, "r1", 2)):
                layers = {0: Choices(10, differing, 60, 80), 3: Choices(10, 1, 79, 80)}
                client.report_agreement(step, Agreement(by_layer=layers), reporter=reporter)
        value = Scraped(server.metrics_target).value
        assert value("routetrace_agreement_step", run="b") == 8
        assert value("routetrace_agreement_cells", run="b") == 2 * 20
        assert value("routetrace_agreement_differing_cells", run="b") == 1 + 2 + 2

        waiting.cancel()
        stub.DeleteTrace(pb.DeleteTraceRequest(run="a", trace_id="t0"))
        for feeder in feeders.values():
            feeder.stream.close()
        channel.close()
        wait_for(lambda: not Scraped(server.metrics_target).value("routetrace_agents"))
        value = Scraped(server.metrics_target).value
        assert value("routetrace_reads") == 0
        assert value("routetrace_traces", run="a") == 1
        assert value("routetrace_forgotten_traces_total", reason="deleted") == 1


def test_calls_of_a_real_server() -> None:
    with (
        run_server(metrics_listen="127.0.0.1:0") as server,
        grpc.insecure_channel(server.target) as channel,
        RouteClient(server.target) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            stub.Check(health_pb2.HealthCheckRequest())
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        watch.cancel()
        with pytest.raises(NotFound):
            client.stat("nothing")
        feeder = Feeder(server.target, LAYOUT)
        for name in ("t", "u"):
            feed(feeder, name, 5)
        feeder.close()
        client.get("t")
        expected = {
            ("Check", "OK"): 3,
            ("Watch", "CANCELLED"): 1,
            ("StatTrace", "NOT_FOUND"): 1,
            ("Ingest", "OK"): 1,
            ("GetTrace", "OK"): 1,
        }

        def handled() -> dict[tuple[str, str], float]:
            samples = Scraped(server.metrics_target).samples("grpc_server_handled_total")
            return {(of["grpc_method"], of["grpc_code"]): count for of, count in samples if count}

        wait_for(lambda: handled() == expected)
        value = Scraped(server.metrics_target).value
        assert value("grpc_server_started_total") == sum(expected.values())
        assert value("grpc_server_handling_seconds_count") == sum(expected.values())
        assert value("grpc_server_msg_received_total", grpc_method="Ingest") == 3
        assert value("grpc_server_msg_sent_total", grpc_method="Ingest") == 3


def test_every_row_of_an_agent_is_accounted_for() -> None:
    """offered = acknowledged + dropped + in flight, from the metrics alone, at all times."""
    rows = rows_of(LAYOUT, 64)
    with run_server(metrics_listen="127.0.0.1:0", heartbeat_seconds=0.1) as server:
        config = AgentConfig(target=server.target, engine_id="e", layout=LAYOUT)
        with CaptureAgent(config) as agent:
            seen: set[float] = set()
            count = 0
            while len(seen) < 4:
                count += 1
                handle = agent.begin(f"t{count}", prompt_len=len(rows))
                agent.step(rows, [(handle, 0, len(rows))])
                if count % 5 == 0:
                    agent.rewind(handle, 30)  # takes back rows that may be on their way
                agent.finish(handle, 31 if count % 5 == 0 else len(rows) + 1)
                offered, rest = accounted(Scraped(server.metrics_target))
                assert offered == rest
                seen.add(offered)
            assert agent.flush(30)
            whole = (count * len(rows),) * 2
            wait_for(lambda: accounted(Scraped(server.metrics_target)) == whole)
            wait_for(lambda: rows_by_state(Scraped(server.metrics_target))["in_flight"] == 0)


def accounted(scraped: Scraped) -> tuple[float, float]:
    """Rows that were offered, and what became of them."""
    by_state = rows_by_state(scraped)
    offered = by_state.pop("offered", 0)
    return offered, sum(by_state.values()) + scraped.value("routetrace_agent_dropped_rows")


def test_callers_that_say_nothing_do_not_keep_others_from_scraping() -> None:
    with run_server(metrics_listen="127.0.0.1:0") as server:
        host, _, port = server.metrics_target.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        assert Scraped(server.metrics_target).value("routetrace_ready") == 1
        for connection in silent:
            connection.close()


async def test_a_scrape_goes_without_the_state_while_the_loop_is_busy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    core.metrics.chunks.inc(3)
    endpoint = Endpoint(core.metrics.registry, "[::1]:0", {})
    core.register_scrape()
    scraped: list[Scraped] = []
    thread = threading.Thread(target=lambda: scraped.append(Scraped(endpoint.address)))
    with monkeypatch.context() as patch:
        patch.setattr(scrape, "_LOOP_SECONDS", 0.05)
        thread.start()
        thread.join()  # the loop does nothing meanwhile
    assert scraped[0].value("routetrace_ingest_chunks_total") == 3
    assert "routetrace_traces" not in scraped[0].types
    assert "the server is busy" in caplog.text
    whole = await asyncio.to_thread(Scraped, endpoint.address)
    assert whole.value("routetrace_ready") == 1
    assert "routetrace_traces" in whole.types
    await asyncio.to_thread(endpoint.close)
