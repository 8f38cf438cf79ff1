"""Life of a client: its channel, its threads, forks, pickles and its close."""

from __future__ import annotations

import asyncio
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from contextlib import aclosing
from importlib import metadata

import pytest

import routetrace.client
from routetrace.client import AsyncRouteClient, ReadOptions, RouteClient
from routetrace.client._core import retry as _retry
from routetrace.common import errors
from routetrace.common.errors import (
    Closed,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
)
from routetrace.common.security import Security
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import fail, truth
from support.servers.scripted import GONE, assert_rows


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("traces", "traces:7411"),
        ("traces:1", "traces:1"),
        ("10.0.0.1", "10.0.0.1:7411"),
        ("[::1]", "[::1]:7411"),
        ("[::1]:80", "[::1]:80"),
        ("dns:///traces:80", "dns:///traces:80"),
        ("unix:/run/traces.sock", "unix:/run/traces.sock"),
        ("ipv4:10.0.0.1:80,10.0.0.2:80", "ipv4:10.0.0.1:80,10.0.0.2:80"),
    ],
)
def test_targets(connect, target, address):
    assert f" {address} run=" in repr(connect(target))


@pytest.mark.parametrize(
    "target",
    [
        *("", "http://traces:7411", "grpc://traces", "traces:", "traces:0", "traces:65536"),
        *("traces:x", "::1", "traces:7411/", "a b", ":7411", 7411, b"traces"),
    ],
)
def test_wrong_targets(connect, target):
    with pytest.raises(InvalidArgument, match=r"(target|port) is .*; expected ") as caught:
        connect(target)
    assert caught.value.field == ("port" if str(target)[7:] in ("0", "65536") else "target")


def test_every_error_is_public():
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    names = [kind.__name__ for kind in kinds if not kind.__name__.startswith("_")]
    assert len(names) == 16
    # Agents alone hear these two, and handle them.
    for name in {*names} - {"Fenced", "OutOfSequence"}:
        assert getattr(routetrace.client, name) is getattr(errors, name)


def test_options_and_keywords_are_one(client, server):
    options = ReadOptions(policy="latest", weight_version=3, missing="mask")
    server.serve(truth(3))
    for asked in (
        {"options": options},
        {"policy": "latest", "weight_version": 3, "missing": "mask"},
        {"options": ReadOptions(policy="latest", weight_version=4), "weight_version": 3}
        | {"missing": "mask"},
    ):
        client.get("req", **asked)
    requests = [request for _, request in server.requests]
    assert requests[0] == requests[1] == requests[2]
    assert requests[0].weight_version == 3


def test_a_misspelled_option_is_refused(client):
    with pytest.raises(TypeError, match="weight_versions"):
        client.get("req", weight_versions=3)


def test_the_version():
    assert routetrace.client.__version__ == metadata.version("routetrace")


def test_configuration(connect, server, monkeypatch):
    monkeypatch.delenv("ROUTETRACE_TARGET", raising=False)
    with pytest.raises(InvalidArgument, match=r"target .* ROUTETRACE_TARGET"):
        connect(None)
    for field, wrong in [
        ("timeout", 0),
        ("timeout", "5"),
        ("run", 7),
        ("run", b"x"),
        ("run", ""),
        ("run", "x" * 513),
        ("timeout", True),
        ("timeout", 1e12),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            connect("x:1", **{field: wrong})
        assert caught.value.field == field
    monkeypatch.setenv("ROUTETRACE_TARGET", server.target)
    monkeypatch.setenv("ROUTETRACE_RUN", "from-env")
    server.script["DeleteTrace"] = lambda r, c: pb.DeleteTraceResponse()
    connect(None).delete("a")
    connect(None, run="mine").delete("a")
    assert [r.run for _, r in server.requests] == ["from-env", "mine"]


def test_a_copy_of_a_client(server):
    server.serve(truth(3))
    settings = {"run": "r", "timeout": 7, "security": Security(token="rt_x")}
    with RouteClient(server.target, **settings) as client:
        client.get("req")
        data = pickle.dumps(client)
    with pickle.loads(data) as copy:
        assert repr(copy) == f"<RouteClient {server.target} run='r' idle>"
        assert len(copy.get("req")) == 3
        assert copy._config == client._config

    async def main():
        async with AsyncRouteClient(server.target, **settings) as client:
            copy = pickle.loads(pickle.dumps(client))
            assert len(await copy.get("req")) == 3
            await copy.aclose()
            assert len(await client.get("req")) == 3

    asyncio.run(main())


def test_states_of_a_client(connect, server):
    server.serve(truth(3))
    client = connect(server.target, run="r")
    assert repr(client) == f"<RouteClient {server.target} run='r' idle>"
    with pytest.raises(NotFound):
        client.get("unknown")
    assert repr(client).endswith("open>")
    client.close()
    client.close()
    assert repr(client).endswith("closed>")
    for call in (
        lambda: client.get("req"),
        lambda: client.stat("req"),
        lambda: list(client.get_many(["req"])),
        lambda: next(client.follow("req")),
    ):
        with pytest.raises(Closed):
            call()


def test_context_managers(server):
    server.serve(truth(3))
    with RouteClient(server.target) as client:
        client.get("req")
    assert "closed" in repr(client)

    async def main():
        async with AsyncRouteClient(server.target) as client:
            await client.get("req")
        assert "closed" in repr(client)

    asyncio.run(main())


@pytest.fixture
def hanging(server):
    """A server whose reads hang; a semaphore of those that started."""
    started, release = threading.Semaphore(0), threading.Event()

    def handler(request, context):
        started.release()
        release.wait(GONE)
        return iter(())

    server.script["GetTrace"] = server.script["StatTrace"] = handler
    yield started
    release.set()


@pytest.mark.parametrize("call", ["get", "stat", "get_many"])
def test_closing_ends_what_is_under_way(server, hanging, call):
    client = RouteClient(server.target, timeout=60)
    outcome = []

    def run():
        try:
            list(client.get_many(["a", "b"])) if call == "get_many" else getattr(client, call)("a")
        except RouteTraceError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert hanging.acquire(timeout=GONE)
    client.close()
    thread.join(GONE)
    assert outcome == [Closed]


@pytest.fixture
def paused(monkeypatch):
    """Set as a call begins to pause between two attempts."""
    begun, pause_of = threading.Event(), _retry.retry_pause

    def retry_pause(*args):
        begun.set()
        return pause_of(*args)

    monkeypatch.setattr(_retry, "retry_pause", retry_pause)
    return begun


def test_closing_ends_a_pause_between_attempts(server, paused):
    server.script["StatTrace"] = lambda _, c: fail(c, Overloaded("full", retry_after=30))
    # So long that another attempt is worth the pause, whatever its jitter.
    client = RouteClient(server.target, timeout=600)
    outcome = []

    def run():
        try:
            client.stat("a")
        except RouteTraceError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert paused.wait(GONE)
    client.close()
    thread.join(GONE)
    assert outcome == [Closed]


async def test_closing_ends_a_pause_between_attempts_of_a_task(server, paused):
    server.script["StatTrace"] = lambda _, c: fail(c, Overloaded("full", retry_after=300))
    client = AsyncRouteClient(server.target, timeout=6000)
    task = asyncio.create_task(client.stat("a"))
    assert await asyncio.to_thread(paused.wait, GONE)
    await client.aclose()
    with pytest.raises(Closed):
        await asyncio.wait_for(task, GONE)


@pytest.mark.parametrize("call", ["get", "stat", "get_many"])
async def test_closing_ends_tasks(server, hanging, call):
    client = AsyncRouteClient(server.target, timeout=60)

    async def run():
        if call == "get_many":
            return [t async for t in client.get_many(["a", "b"])]
        return await getattr(client, call)("a")

    task = asyncio.create_task(run())
    assert await asyncio.to_thread(hanging.acquire, timeout=GONE)
    await client.aclose()
    with pytest.raises(Closed):
        await asyncio.wait_for(task, GONE)


@pytest.mark.parametrize("call", ["get", "get_many"])
async def test_cancelling_a_task_cancels_the_call(server, call):
    started, gone = threading.Event(), threading.Event()

    def handler(request, context):
        context.add_callback(gone.set)
        started.set()
        gone.wait(GONE)
        return iter(())

    server.script["GetTrace"] = handler
    async with AsyncRouteClient(server.target, timeout=60) as client:

        async def run():
            if call == "get_many":
                return [t async for t in client.get_many(["a"])]
            return await client.get("a")

        task = asyncio.create_task(run())
        assert await asyncio.to_thread(started.wait, GONE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gone.wait, GONE)


def test_one_async_client_on_several_loops(server):
    source = truth(3)
    server.serve(source)
    client = AsyncRouteClient(server.target)
    for _ in range(3):
        assert_rows(asyncio.run(client.get("req")), source)
    asyncio.run(client.aclose())


async def test_many_tasks_share_a_client(server):
    sources = [truth(5, trace_id=f"r{i}", rng=random.Random(i)) for i in range(20)]
    server.serve(*sources)
    async with AsyncRouteClient(server.target) as client:
        traces = await asyncio.gather(
            *(client.get(s.info.trace_id, missing="mask") for s in sources)
        )
        for trace, source in zip(traces, sources, strict=True):
            assert_rows(trace, source)
        async with aclosing(client.get_many(["r0", "r1"], missing="mask")) as many:
            assert (await anext(many)).trace_id == "r0"


def test_many_threads_share_a_client(server):
    sources = [truth(5, trace_id=f"r{i}", rng=random.Random(i)) for i in range(20)]
    server.serve(*sources)
    wrong = []
    with RouteClient(server.target) as client:

        def run(source):
            try:
                assert_rows(client.get(source.info.trace_id, missing="mask"), source)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(s,)) for s in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


FORK = """
import asyncio, os, sys
from routetrace.client import AsyncRouteClient, RouteClient

target, parent_uses, child_uses = sys.argv[1:]

def use(kind, client):
    trace = client.get("req") if kind == "sync" else asyncio.run(client.get("req"))
    assert len(trace) == 12

def make(kind):
    return (RouteClient if kind == "sync" else AsyncRouteClient)(target, timeout=30)

client = make(parent_uses)
use(parent_uses, client)
if parent_uses == "async":
    asyncio.run(client.aclose())
if not (pid := os.fork()):
    if parent_uses == child_uses == "sync":
        assert "idle" in repr(client)
        use("sync", client)
        assert "open" in repr(client)
    use(child_uses, make(child_uses))
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
if parent_uses == "sync":
    use("sync", client)  # the child did not end its parent's connection
"""


@pytest.mark.parametrize("parent_uses", ["sync", "async"])
@pytest.mark.parametrize("child_uses", ["sync", "async"])
def test_a_forked_child_makes_its_own_connection(server, parent_uses, child_uses):
    server.serve(truth(12))
    subprocess.run(
        [sys.executable, "-c", FORK, server.target, parent_uses, child_uses],
        check=True,
        timeout=60,
    )


def test_asyncio_that_would_hang_after_a_fork_is_refused(server):
    server.serve(truth(12))
    code = """
    import asyncio, os, sys
    from routetrace.client import AsyncRouteClient
    from routetrace.common.errors import Unavailable

    async def main():
        client = AsyncRouteClient(sys.argv[1])
        await client.get("req")
        if not (pid := os.fork()):
            for child in (client, AsyncRouteClient(sys.argv[1])):
                try:
                    child.get("req").send(None)
                except Unavailable as error:
                    assert "fork" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        await client.get("req")
        await client.aclose()

    asyncio.run(main())
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), server.target], check=True, timeout=60
    )


def test_dead_clients_do_not_trouble_a_fork():
    code = """
    import gc, os
    from routetrace.client import RouteClient
    from routetrace.client._shells import fork as _fork
    for _ in range(5):
        RouteClient("127.0.0.1:1")
    gc.collect()
    assert not _fork._all
    if not (pid := os.fork()):
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
