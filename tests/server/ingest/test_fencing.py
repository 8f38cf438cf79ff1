"""Two agents of one engine: what the server logs and counts, and what it does not take for two."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from routetrace.server.core import Core
from routetrace.server.ingest.replies import Replies
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import ServerProcess, run_server
from routetrace.server.wire.messages import Chunk
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder, Stream, seal
from support.scrape import Scraped
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(log_format="json", metrics_listen="127.0.0.1:0") as process:
        yield process


def hello(
    run: str, host: str = "", epoch: int = 0, shard: str = "", former_epoch: int = 0
) -> pb.Hello:
    return pb.Hello(
        run=run,
        engine_id="dup",
        shard=shard,
        boot_id=f"boot of {host}",
        epoch=epoch,
        layout=LAYOUT.to_proto(),
        attributes={"host": host} if host else {},
        former_epoch=former_epoch,
    )


def warnings(server: ServerProcess, run: str) -> list[str]:
    """Return what the log warns of about a run."""
    entries = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [e["event"] for e in entries if e["level"] == "warning" and f"run {run!r}" in e["event"]]


def count(server: ServerProcess, run: str) -> float:
    return Scraped(server.metrics_target).value("routetrace_agents_fenced_total", run=run)


def fenced(call: Any) -> str:
    """Return the error of a call of an agent that is fenced."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def refused_chunk(stream: Stream) -> None:
    """Send a chunk that the server refuses, and logs."""
    stream.send(seal(1, b"no header", b""))
    stream.receive()


def beat(stream: Stream) -> None:
    stream._out.put(pb.IngestRequest(heartbeat=pb.Heartbeat(offered_rows=1)))


def test_a_second_agent_is_reported_with_both_hosts(server):
    old = Stream(server.target, hello("two", "n1"))
    new = Stream(server.target, hello("two", "n2"))
    old_epoch, new_epoch = old.welcome.epoch, new.welcome.epoch
    beat(old)  # a sign of life is enough: an engine may be idle
    assert fenced(old.receive) == (
        f"another agent of engine 'dup' of run 'two' connected later (host 'n2', epoch {new_epoch})"
        ": expected one agent at a time; give each engine an engine_id of its own"
    )
    assert warnings(server, "two") == [
        "engine 'dup' of run 'two' has two agents: a later one connected (host 'n2', epoch "
        f"{new_epoch}), so the older one (host 'n1', epoch {old_epoch}) is fenced and all its "
        "further rows are dropped; give each engine an engine_id of its own, or end the older "
        "process if it was to be replaced"
    ]
    assert count(server, "two") == 1
    new.close()


def test_an_agent_that_comes_back_after_a_later_one_is_reported(server):
    """Its stream had ended before the later one connected."""
    old = Stream(server.target, hello("back", shard="tp0"))
    epoch = old.welcome.epoch
    old.close()
    new = Stream(server.target, hello("back", "n2", shard="tp0"))
    assert warnings(server, "back") == []
    assert "(host 'n2', epoch" in fenced(
        lambda: Stream(server.target, hello("back", "n1", epoch, "tp0"))
    )
    (line,) = warnings(server, "back")
    assert line.startswith("engine 'dup', shard 'tp0', of run 'back' has two agents: ")
    assert f"the older one (host 'n1', epoch {epoch})" in line
    assert count(server, "back") == 1
    new.close()


def test_an_agent_whose_background_died_does_not_take_over_from_a_later_boot(server):
    old = Stream(server.target, hello("died", "n1"))
    epoch = old.welcome.epoch
    old.close()
    new = Stream(server.target, hello("died", "n2"))
    assert "(host 'n2', epoch" in fenced(
        lambda: Stream(server.target, hello("died", "n1", former_epoch=epoch))
    )
    (line,) = warnings(server, "died")
    assert f"the older one (host 'n1', epoch {epoch})" in line
    refused_chunk(new)  # it goes on
    new.close()


def test_an_agent_whose_background_died_opens_an_epoch_of_its_boot(server):
    """Also where it asks again, as the answer was lost."""
    run = "died and came back"
    first = Stream(server.target, hello(run, "n1"))
    former = first.welcome.epoch
    second, third = (Stream(server.target, hello(run, "n1", former_epoch=former)) for _ in range(2))
    assert former < second.welcome.epoch < third.welcome.epoch
    restarts = Scraped(server.metrics_target).value("routetrace_agents_restarted_total", run=run)
    assert restarts == 2
    assert count(server, run) == 0
    for stream in (first, second, third):
        stream.close()


def test_agents_that_name_no_host_are_reported(server):
    old, new = (Stream(server.target, hello("bare")) for _ in range(2))
    beat(old)
    assert f"(host unknown, epoch {new.welcome.epoch})" in fenced(old.receive)
    (line,) = warnings(server, "bare")
    assert line.count("host unknown") == 2
    new.close()


def assert_not_reported(server: ServerProcess, run: str, newest: Stream) -> None:
    """Assert that the only warning of a run is that of a refused chunk of its newest stream."""
    refused_chunk(newest)  # its line follows those of the old stream
    wait_for(lambda: warnings(server, run))
    (line,) = warnings(server, run)
    assert line.startswith("chunk 1 of engine 'dup' of run ")
    assert count(server, run) == 0


@pytest.mark.parametrize("host", ["n1", "n2"])
@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_a_restart_is_not_reported(server, host, ending):
    run = f"{ending} and {host}"
    feeder = Feeder(server.target, LAYOUT, run=run, engine_id="dup")
    handle = feeder.begin("r")
    feeder.step(rows_of(LAYOUT, 2), [(handle, 0, 2)])
    feeder.flush()
    beat(feeder.stream)  # in flight as the stream ends
    if ending == "closed":
        feeder.close()
    else:
        feeder.stream.channel.close()
    again = Stream(server.target, hello(run, host))
    assert_not_reported(server, run, again)
    again.close()


@pytest.mark.parametrize("late", ["heartbeat", "chunk"])
def test_an_agent_that_connects_again_is_not_reported(server, late):
    """Its broken connection may bring a message later than the new one."""
    run = f"again with a {late}"
    old = Stream(server.target, hello(run, "n1"))
    epoch = old.welcome.epoch
    new = Stream(server.target, hello(run, "n1", epoch))
    assert new.welcome.epoch == epoch
    if late == "heartbeat":
        beat(old)
    else:
        old.send(seal(1, b"", b""))
    assert fenced(old.receive) == f"epoch is {epoch}; expected the newest stream of this epoch"
    assert_not_reported(server, run, new)
    new.close()


async def test_a_chunk_in_flight_as_its_agent_connects_again_is_refused_with_the_reason():
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    await core.start()
    session = await core._ingest._open(hello("in flight", "n1"), "")
    epoch = session.writer.epoch
    await core._ingest._open(hello("in flight", "n1", epoch), "")
    replies = Replies(1)
    chunk = Chunk(1, 0, 0, b"", b"")
    core._ingest._intake.take(session, chunk, replies.expect(chunk))
    reply, _ = await replies.next()
    expected = f"epoch is {epoch}; expected the newest stream of this epoch"
    assert reply.reject.error.message == expected


def test_a_writer_that_opens_is_logged_in_words(server):
    Stream(server.target, hello("words", "n1", shard="tp0")).close()
    partial = hello("words", shard="pp0")
    del partial.layout.layer_ids[2:]
    Stream(server.target, partial).close()
    single = hello("words", shard="pp1")
    del single.layout.layer_ids[1:], single.layout.moe_layer_ids[1:]
    Stream(server.target, single).close()
    lines = [json.loads(line)["event"] for line in server.log.read_text().splitlines()]
    opened = [re.sub(r"epoch \d+", "epoch N", one) for one in lines if "run 'words'" in one]
    assert opened == [
        "engine 'dup', shard 'tp0', of run 'words' opened epoch N: 5 MoE layers, top-3 of 40 "
        "experts, on host 'n1'",
        "engine 'dup', shard 'pp0', of run 'words' opened epoch N: 2 of 5 MoE layers, top-3 of 40 "
        "experts",
        "engine 'dup', shard 'pp1', of run 'words' opened epoch N: 1 MoE layer, top-3 of 40 "
        "experts",
    ]


def test_a_refused_chunk_is_logged_with_its_engine(server):
    stream = Stream(server.target, hello("refused"))
    refused_chunk(stream)
    wait_for(lambda: warnings(server, "refused"))
    (line,) = warnings(server, "refused")
    assert line.startswith("chunk 1 of engine 'dup' of run 'refused' refused: ")
    stream.close()
