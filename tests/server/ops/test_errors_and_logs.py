"""Refused chunks are logged at a limited rate, and no answer holds a path of the server."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from routetrace.common.errors import Overloaded, Unavailable
from routetrace.common.limited import MAX_LINES, WINDOW_SECONDS, LimitedLog
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import streaming, unary
from routetrace.server.ingest.intake import Intake
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder, seal
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.servers.store_records import record

SECRET = "/srv/secret/data"
HIDDEN = FileNotFoundError(errno.ENOENT, "No such file or directory", SECRET)


# ---------------------------------------------------------------------------- the log


def test_lines_are_limited_by_key_and_in_all(caplog: pytest.LogCaptureFixture) -> None:
    time = 0.0
    lines = LimitedLog(logging.getLogger("routetrace.test"), "refused chunks", lambda: time)
    for _ in range(5):
        lines.warning("a", "refused %s", "a")
        lines.warning("b", "refused %s", "b")
    assert caplog.messages == ["refused a", "refused b"]
    caplog.clear()
    time = WINDOW_SECONDS - 0.1
    lines.warning("a", "refused %s", "a")
    assert not caplog.messages
    time = WINDOW_SECONDS
    for key in range(MAX_LINES + 50):
        lines.warning(key, "refused %s", key)
    assert caplog.messages[0] == "9 more refused chunks in 10 s are not logged"
    assert len(caplog.messages) == 1 + MAX_LINES
    caplog.clear()
    time = 3 * WINDOW_SECONDS
    lines.warning("a", "refused %s", "a")
    assert caplog.messages == ["50 more refused chunks in 20 s are not logged", "refused a"]


def test_refused_chunks_are_counted_each_and_logged_now_and_then(tmp_path: Path) -> None:
    with run_server(log_format="json", metrics_listen="127.0.0.1:0") as server:
        feeder = Feeder(server.target, LAYOUT)
        for _ in range(60):
            feeder.stream.send(seal(1, b"no header", b""))
            error = feeder.stream.receive().reject.error
            assert error.kind == pb.ERROR_KIND_INVALID_ARGUMENT
            feeder.stream.send(pb.Chunk(sequence=1, header_crc32=1))
            assert feeder.stream.receive().reject.error.kind == pb.ERROR_KIND_CORRUPT
        handle = feeder.begin("t")
        feeder.step(rows_of(LAYOUT, 3), [(handle, 0, 3)])
        feeder.close()
        rejected = Scraped(server.metrics_target)
        events = [json.loads(line)["event"] for line in server.log.read_text().splitlines()]
    for kind in ("invalid_argument", "corrupt"):
        assert rejected.value("routetrace_ingest_rejected_total", kind=kind) == 60
    refused = [event for event in events if event.startswith("chunk 1 of engine")]
    assert 2 <= len(refused) <= 14  # one of each kind in 10 s; the stream ends after 60 s


# ---------------------------------------------------------------------------- answers


@pytest.mark.parametrize("streams", [False, True])
async def test_failed_calls_hold_no_path(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC sends the text of an error that is not typed, paths included."""

    class Servicer:
        @unary
        async def Fail(self, request: bytes, context: Any) -> bytes:
            raise HIDDEN

        @streaming
        async def FailLater(self, request: bytes, context: Any) -> Any:
            yield b"one"
            raise HIDDEN

    servicer = Servicer()
    handler = (
        grpc.unary_stream_rpc_method_handler(servicer.FailLater)
        if streams
        else grpc.unary_unary_rpc_method_handler(servicer.Fail)
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = (
                channel.unary_stream("/s/m")(b"") if streams else channel.unary_unary("/s/m")(b"")
            )
            if streams:
                assert await call.read() == b"one"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if streams else call)
    finally:
        await server.stop(None)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    text = "internal error of the server (FileNotFoundError); its log has the details"
    assert caught.value.details() == text
    assert SECRET not in str(caught.value.trailing_metadata())
    assert SECRET in caplog.text


def test_chunks_that_fail_hold_no_path(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[pb.ErrorDetail] = []
    intake = Intake(
        config=None,  # type: ignore[arg-type]
        admission=SimpleNamespace(committed=lambda _: None),  # type: ignore[arg-type]
        fencing=None,  # type: ignore[arg-type]
        history=None,  # type: ignore[arg-type]
        journal=None,  # type: ignore[arg-type]
        retention=None,  # type: ignore[arg-type]
        room=None,  # type: ignore[arg-type]
        metrics=Metrics(),
    )
    session: Any = SimpleNamespace(writer=SimpleNamespace(key=("r", "e", "")))
    answer: Any = SimpleNamespace(sequence=7, nbytes=1, give=answers.append)
    for _ in range(3):
        intake._refuse(session, answer, HIDDEN)
    assert [detail.kind for detail in answers] == [pb.ERROR_KIND_UNAVAILABLE] * 3
    assert all(detail.retry_after_ms for detail in answers)
    assert not any(SECRET in str(detail) for detail in answers)
    assert caplog.text.count(SECRET) == 1


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(errno.EIO, "Input/output error", SECRET), Unavailable, "Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device", SECRET), Overloaded, "disk is full"),
        (OSError(f"{SECRET} is odd"), Unavailable, "cannot write: OSError"),
        (RuntimeError(SECRET), Unavailable, "cannot write: RuntimeError"),
    ],
)
def test_commits_that_fail_hold_no_path(tmp_path, monkeypatch, caplog, error, kind, text) -> None:
    store = DiskStore(tmp_path, capacity_bytes=1 << 24)

    def failing(*_: object) -> None:
        raise error

    try:
        monkeypatch.setattr(store, "_commit", failing)
        with pytest.raises(kind, match=text) as caught:
            store.append(record(1)).result(10)
        assert SECRET not in str(caught.value)
        assert SECRET in caplog.text
    finally:
        store.close()
