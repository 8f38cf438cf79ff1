"""Fates of deleted traces: when, by whom, for whom to see, over restarts, and in the log."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from routetrace.client import RouteClient
from routetrace.common.errors import NotFound, Overloaded
from routetrace.common.security import Security
from routetrace.server.access.tokens import new_token
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.apply import apply_record
from routetrace.server.index.journal import Clock
from routetrace.server.index.records.record import decode_record, encode_delete
from routetrace.server.index.state import State
from routetrace.server.index.traces.tombstones import Fate, Tombstones
from routetrace.server.retention import retention
from routetrace.server.rows import reader
from routetrace.server.testing import ServerProcess, run_server
from routetrace.stored import format5_pb2 as stored
from support.agents.feeder import Feeder
from support.agents.sharded_requests import Engine
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

SCOPES = {
    "engine": ["ingest"],
    "trainer": ["read"],
    "janitor": ["read", "admin"],
    "broom": ["admin"],
}


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """A token for each of SCOPES, good for run r alone, and a file of them."""
    found, entries = {}, ""
    for name, scopes in SCOPES.items():
        found[name], digest = new_token()
        entries += f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\n'
        entries += f'scopes = {scopes}\nruns = ["r"]\n'
    (tmp_path / "tokens.toml").write_text(entries)
    (tmp_path / "tokens.toml").chmod(0o600)
    return found


def record(server: ServerProcess, secret: str, *traces: str) -> None:
    feeder = Feeder(server.target, LAYOUT, run="r", epoch=0, security=Security(token=secret))
    for trace in traces:
        handle = feeder.begin(trace)
        feeder.step(rows_of(LAYOUT, 5), [(handle, 0, 5)])
        feeder.finish(handle, 6)
    feeder.close()


def told(server: ServerProcess, secret: str, call: Callable[[RouteClient], Any]) -> str:
    """The error of a call that does not find its trace."""
    security = Security(token=secret)
    connected = RouteClient(server.target, run="r", security=security)
    with connected as client, pytest.raises(NotFound) as caught:
        call(client)
    return str(caught.value)


def lines(server: ServerProcess) -> list[str]:
    return [json.loads(line)["event"] for line in server.log.read_text().splitlines()]


def test_deletions_are_told_with_time_and_token(tmp_path: Path, secrets: dict[str, str]) -> None:
    settings = {
        "data_dir": tmp_path / "data",
        "tokens_file": tmp_path / "tokens.toml",
        "sweep_interval_seconds": 0.1,
        "log_format": "json",
    }
    begun = int(time.time())
    with run_server(**settings) as server:
        record(server, secrets["engine"], "one", "two", "three")
        with RouteClient(server.target, run="r", security=Security(token=secrets["janitor"])) as c:
            c.delete("one")
            assert c.retire_through(0) == (2, 0)
        assert "deleted: 1 trace of run 'r' by token janitor" in lines(server)
        assert "retired: 2 traces of run 'r' by token janitor" in lines(server)
        # Their chunks are garbage then: the snapshot without them holds the tombstones.
        wait_for(lambda: any("dropped" in line for line in lines(server)))
    with run_server(**settings) as server:
        text = told(server, secrets["trainer"], lambda client: client.get("one"))
        match = re.fullmatch(r"trace 'one' of run 'r' was deleted at (\S+Z) by token janitor", text)
        assert match, text
        when = datetime.fromisoformat(match[1].replace("Z", "+00:00")).timestamp()
        assert begun <= when <= time.time()
        text = told(server, secrets["trainer"], lambda client: client.stat("three"))
        assert re.fullmatch(
            r"trace 'three' of run 'r' was retired at \S+Z by token janitor: "
            r"all its rows are of retired weight versions",
            text,
        )
        # A token that may delete, and not read, sees no name of another.
        text = told(server, secrets["broom"], lambda client: client.delete("one"))
        assert re.fullmatch(r"trace 'one' of run 'r' was deleted at \S+Z", text)
        # Nothing is logged of a deletion that deletes nothing.
        assert not [line for line in lines(server) if line.startswith("deleted")]


def test_names_of_tokens_are_shown_on_demand_alone() -> None:
    """NotFound has no name of a token, unless the caller says that it may be shown."""
    state = State(100)
    state.tombstones.add(("r", "t"), [], Fate("deleted", 1.0, "janitor"))
    looking = object.__new__(reader.Reader)
    looking._state = state
    text = "trace 't' of run 'r' was deleted at 1970-01-01T00:00:01Z"
    assert str(looking.not_found("r", "t")) == text
    with pytest.raises(NotFound, match=r"^trace 't' of run 'r' was deleted at \S+Z$"):
        looking.find("r", "t")
    assert "by token janitor" in str(looking.not_found("r", "t", named=True))


@pytest.mark.parametrize("when", [0.0, float("nan"), float("inf"), -1.0, 1e300])
def test_fates_of_no_time_are_told_without(when: float) -> None:
    looking = object.__new__(reader.Reader)
    looking._state = State(100)
    looking._state.tombstones.add(("r", "t"), [], Fate("quota", when))
    expected = "trace 't' of run 'r' was evicted: its run came near run_quota"
    assert str(looking.not_found("r", "t")) == expected


def test_fates_of_snapshots_without_time_and_token_are_read() -> None:
    piece = stored.Piece()
    piece.deleted.add(run="r", trace_id="t", reason="retired")
    stones = Tombstones()
    stones.load(piece)
    assert stones.fate(("r", "t")) == Fate("retired", 0.0, "")
    stones.add(("r", "u"), [], Fate("deleted", 12.5, "janitor"))
    other = Tombstones()
    for part in stones.dump():
        other.load(stored.Piece.FromString(part.SerializeToString()))
    assert other.fate(("r", "t")) == Fate("retired")
    assert other.fate(("r", "u")) == Fate("deleted", 12.5, "janitor")
    assert other.fate(("r", "v")) is None


def test_times_are_those_of_records_and_leases_not_of_the_replay() -> None:
    engine = Engine(random.Random(0), "e0", [""])
    engine.requests = [("r0", "t"), ("r1", "u")]
    chunks = [engine.chunk("", "begin", index, 1) for index in (0, 1)]
    state = State(100)
    for number, data in enumerate(
        [*engine.opens(), *chunks, encode_delete(7.0, "run", ["t"], "deleted", "janitor")], 1
    ):
        apply_record(state, number, data)
    assert state.tombstones.fate(("run", "t")) == Fate("deleted", 7.0, "janitor")
    ends = state.traces.traces["run", "u"].expires
    assert state.trace(("run", "u"), ends + 1000) is None
    assert state.tombstones.fate(("run", "u")) == Fate("expired", ends)


def test_deletion_that_the_store_breaks_off_is_logged_as_far_as_it_went(monkeypatch, caplog):
    class Refusing:
        clock = Clock()
        left = 2

        async def append(self, record: bytes) -> int:
            if not self.left:
                raise Overloaded("full")
            self.left -= 1
            return len(decode_record(record).delete.trace_ids)

    monkeypatch.setattr(retention, "_MAX_DELETED", 2)
    deleting = object.__new__(retention.Retention)
    deleting._journal, deleting._metrics = Refusing(), Metrics()
    with caplog.at_level("INFO"), pytest.raises(Overloaded):
        asyncio.run(deleting.forget("r", list("abcdef"), "retired", "janitor"))
    assert caplog.messages == ["retired: 4 traces of run 'r' by token janitor"]
