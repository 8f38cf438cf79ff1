"""Watching a run of a real server: what comes, when, and how it ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from routetrace.client import (
    AsyncRouteClient,
    Closed,
    RouteClient,
    RouteTraceError,
    Security,
    TraceChanges,
    TraceSummary,
    Unauthenticated,
    Unavailable,
)
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.agents.feeder import Feeder
from support.servers.client_server import LAYOUT, rows_of
from support.servers.guarded import entry
from support.waiting import wait_for

LAYERS = len(LAYOUT.layer_ids)


class Mirror:
    """The traces of a run as a watcher was told, kept by a thread."""

    def __init__(self, client: RouteClient) -> None:
        self.traces: dict[str, TraceSummary] = {}
        self.parts: list[TraceChanges] = []
        self.ended: RouteTraceError | None = None
        self._client = client
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        try:
            for changes in self._client.watch():
                for trace_id in changes.gone:
                    self.traces.pop(trace_id, None)
                self.traces |= {summary.trace_id: summary for summary in changes.traces}
                self.parts.append(changes)
        except RouteTraceError as error:
            self.ended = error

    @property
    def whole(self) -> bool:
        return bool(self.parts) and self.parts[-1].whole

    def states(self) -> dict[str, str]:
        return {trace_id: summary.state.value for trace_id, summary in self.traces.items()}

    def join(self) -> RouteTraceError | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.ended


@contextmanager
def watching(client: RouteClient) -> Iterator[Mirror]:
    mirror = Mirror(client)
    try:
        wait_for(lambda: mirror.whole or mirror.ended)
        yield mirror
    finally:
        client.close()
        mirror.join()


def add(feeder: Feeder, name: str, tokens: int, *, ends: bool = True) -> str:
    handle = feeder.begin(name, prompt_len=1, labels={"task": "math"})
    feeder.step(rows_of(LAYOUT, tokens - 1), [(handle, 0, tokens - 1)])
    if ends:
        feeder.finish(handle, tokens)
    feeder.flush()
    return handle


@pytest.fixture(params=[1, 3], ids=["one worker", "spread over three"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    workers: int = request.param
    settings: dict[str, Any] = {}
    if workers > 1:
        settings = {"port": free_ports(workers), "workers": workers, "spread_runs": '["*"]'}
    with run_server(agent_timeout_seconds=3, sweep_interval_seconds=0.1, **settings) as process:
        yield process


def test_all_traces_then_what_changes(server: ServerProcess):
    feeder = Feeder(server.target, LAYOUT)
    for number in range(1100):  # more than two messages
        add(feeder, f"t{number}", 2)
    running = add(feeder, "running", 4, ends=False)
    with watching(RouteClient(server.target)) as mirror:
        assert set(mirror.traces) == {*(f"t{n}" for n in range(1100)), "running"}
        assert len(mirror.parts) > 2
        assert not mirror.parts[0].whole
        assert next(iter(mirror.traces)) == "running", "newest first"
        assert mirror.states()["running"] == "running"
        assert mirror.traces["t7"].labels == {"task": "math"}

        feeder.finish(running, 6)
        feeder.flush()
        wait_for(lambda: mirror.states()["running"] == "incomplete")
        summary = mirror.traces["running"]
        assert (summary.num_tokens, summary.num_rows, summary.num_cells) == (6, 5, 5 * LAYERS)
        assert summary.missing_cells == {"not_captured": 2 * LAYERS}
        assert summary.coverage == pytest.approx(3 / 5)

        with RouteClient(server.target) as other:
            other.delete("t3")
            other.renew(["t4"], ttl_seconds=777)
            other.renew(["t5"], ttl_seconds=1)
            lease = other.stat("t4").expires_at
        wait_for(lambda: "t3" not in mirror.traces)
        wait_for(lambda: mirror.traces["t4"].expires_at == lease)
        add(feeder, "late", 3, ends=False)
        wait_for(lambda: mirror.states().get("late") == "running")
        feeder.close()  # its agent is lost: nothing reports that
        wait_for(lambda: mirror.states()["late"] == "incomplete")
        wait_for(lambda: "t5" not in mirror.traces)
    assert isinstance(mirror.ended, Closed)


async def test_the_asyncio_client():
    with run_server() as server:
        feeder = Feeder(server.target, LAYOUT)
        add(feeder, "a", 3)
        async with AsyncRouteClient(server.target) as client:
            async for changes in client.watch():
                told = changes.to_dict()
                assert json.dumps(told, default=str)
                if changes.whole:
                    break
        assert [trace["trace_id"] for trace in told["traces"]] == ["a"]
        await asyncio.to_thread(feeder.close)


def _ends(act: Callable[[ServerProcess, Path], object], tmp_path: Path) -> RouteTraceError | None:
    """Return the error with which a watch ends that was under way."""
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("rt_a", "a") + entry("rt_b", "b"))
    with (
        run_server(tokens_file=tokens) as server,
        watching(RouteClient(server.target, security=Security(token="rt_a"))) as mirror,
    ):
        act(server, tokens)
        return mirror.join()


def test_it_ends_when_its_token_is_revoked(tmp_path: Path):
    def revoke(_: ServerProcess, tokens: Path) -> None:
        part = tokens.with_suffix(".part")
        part.write_text(entry("rt_b", "b"))
        part.replace(tokens)

    assert isinstance(_ends(revoke, tmp_path), Unauthenticated)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_it_ends_with_its_server(end: str, tmp_path: Path):
    error = _ends(lambda server, _: getattr(server, end)(), tmp_path)
    assert isinstance(error, Unavailable)


def test_a_token_sees_its_runs_alone(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("rt_a", "a", runs=("mine",)))
    with run_server(tokens_file=tokens) as server:
        client = RouteClient(server.target, run="other", security=Security(token="rt_a"))
        with watching(client) as mirror:
            assert type(mirror.ended).__name__ == "PermissionDenied"


def test_a_watch_counts_as_a_read_while_it_lasts():
    with run_server(max_reads=4) as server:  # each counts as one of so few
        watches = [RouteClient(server.target, timeout=1).watch() for _ in range(5)]
        begun = [next(watch, None) for watch in watches[:2]]
        assert all(changes and changes.whole for changes in begun)
        with pytest.raises(RouteTraceError, match="max_reads"):
            [next(watch) for watch in watches[2:]]
        watches[0].close()
        again = RouteClient(server.target, timeout=30).watch()
        assert next(again).whole
        for watch in (*watches[1:], again):
            watch.close()
