"""An agent and a client at a server, with the bytes of their messages."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from previous.scenario import LAYOUT, described
from previous.serving import Relay, Serving
from routetrace.capture_agent import CaptureAgent
from routetrace.capture_agent.config import AgentConfig
from routetrace.client import RouteClient
from routetrace.common.errors import NotFound
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.reads import Reads, collect

INGEST = "/routetrace.v1.IngestService/Ingest"
TRACES = [f"w{i}" for i in range(6)]


def exchange(directory: Path) -> dict[str, Any]:
    """Let an agent write and a client read; return their messages, and what both must lead to."""
    with Serving(directory) as serving, Relay(serving.target) as relay:
        config = AgentConfig(
            target=relay.target, engine_id="e0", layout=LAYOUT, boot_id="boot", block_size=4,
            num_blocks=14, background="thread", attributes={"model": "small"},
        )  # fmt: skip
        agent = CaptureAgent(config)
        sim = SmallEngine(agent, LAYOUT, 7, num_blocks=14)
        for i, name in enumerate(TRACES):
            sim.submit(name, [i % 2] * (4 + i), 6)
        while sim.step():
            pass
        assert agent.flush(30)
        agent.close()
        with RouteClient(relay.target) as client:
            results = read(client)
        return {
            "calls": [_text(call) for call in relay.calls],
            "answers": answers(serving.target),
            "results": results,
        }


def answers(target: str) -> dict[str, Any]:
    """Return what a server answers about the agent's traces."""
    reads = Reads(target)
    found = {name: described(*reads.get(name)) for name in TRACES}
    reads.close()
    for answer in found.values():
        del answer["times"]
    return found


def read(client: RouteClient) -> list[Any]:
    """Read by each kind of call; return the results."""
    found: list[Any] = []
    traces = [client.get(name, missing="mask") for name in TRACES]
    traces += client.get_many(TRACES, missing="mask", layer_ids=[2, 4], token_start=1)
    traces += client.get_many(TRACES, missing="mask", policy="latest")
    traces.append(client.get_blocks("e0", [0, 1, 2], 12, missing="mask"))
    for trace in traces:
        ids = trace.topk_ids.copy()
        ids[~trace.valid] = 0
        rows = hashlib.blake2b(ids.tobytes() + trace.valid.tobytes(), digest_size=16)
        missing = [(m.start, m.stop, m.reason.value) for m in trace.missing]
        found.append(
            [trace.trace_id, ids.shape, rows.hexdigest(), trace.state.value, trace.num_tokens,
             missing, trace.weight_versions, trace.provenance]
        )  # fmt: skip
    found += [
        [stat.trace_id, stat.state.value, stat.labels, stat.finish_reason]
        for stat in (*client.find(), client.stat(TRACES[0]))
    ]
    try:
        client.get("none")
    except NotFound as error:
        found.append([type(error).__name__, error.value])
    info = client.server_info()
    found.append([info.ack_mode, info.store, info.num_traces])
    return found


class Replayer:
    """A server that gives recorded answers, those of a method in their order; a context manager."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._answers: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for call in calls:
            if call["method"] != INGEST:
                self._answers[call["method"]].append(call)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))  # type: ignore[arg-type]
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Replayer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call."""

        def handle(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._answers[details.method].popleft()
            yield from map(base64.b64decode, call["responses"])
            if call.get("status"):
                context.set_trailing_metadata(
                    [(key, base64.b64decode(value)) for key, value in call["metadata"]]
                )
                context.abort(getattr(grpc.StatusCode, call["status"]), call["details"])

        # Also of calls with one answer: on the wire, they are the same.
        return grpc.unary_stream_rpc_method_handler(handle)


def feed(target: str, calls: list[dict[str, Any]]) -> list[str]:
    """Send the recorded messages of the agent; return the kinds of the responses that differ."""
    different = []
    for call in calls:
        if call["method"] != INGEST:
            continue
        with grpc.insecure_channel(target) as channel:
            requests = map(base64.b64decode, call["requests"])
            ingest = channel.stream_stream(INGEST)
            got = [pb.IngestResponse.FromString(r) for r in ingest(requests, timeout=60)]
        recorded = [pb.IngestResponse.FromString(base64.b64decode(r)) for r in call["responses"]]
        different += [str(r) for r in got if r.WhichOneof("message") == "reject"]
        # One ack may stand for several chunks.
        if got[0].welcome.next_sequence != recorded[0].welcome.next_sequence:
            different.append(str(got[0]))
        if got[-1].ack != recorded[-1].ack:
            different.append(str(got[-1]))
    return different


def ask(target: str, calls: list[dict[str, Any]]) -> list[Any]:
    """Send the recorded reads of the client; return where the rows of an answer differ."""
    different = []
    for call in calls:
        if call["method"].endswith("/GetTrace") and call["responses"]:
            requests = map(base64.b64decode, call["requests"])
            with grpc.insecure_channel(target) as channel:
                got = [*channel.stream_stream(call["method"])(requests, timeout=60)]
            now, before = (
                described(*collect(map(pb.GetTraceResponse.FromString, responses)))
                for responses in (got, map(base64.b64decode, call["responses"]))
            )
            if now | {"times": []} != before | {"times": []}:
                different.append((now, before))
    return different


def _text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as JSON holds it."""
    encoded = {
        part: [base64.b64encode(message).decode() for message in call[part]]
        for part in ("requests", "responses")
    }
    return {**call, **encoded}
