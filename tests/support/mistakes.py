"""A table of mistakes: calls, the error that each raises, and the whole of its message."""

from __future__ import annotations

import builtins
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import routetrace.client
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import free_ports, run_server
from support.servers import forked
from support.waiting import wait_for

# Layer 0 is dense.
LAYOUT = ModelLayout((1, 2, 3), 4, 16, 2)
ROWS = np.broadcast_to(np.arange(2, dtype=np.uint8), (9, 3, 2))

#: Seconds of a case; it takes far fewer.
_LIMIT = 30.0
#: Seconds of a call that is not given its own.
_TIMEOUT = 4.0
_BOX = re.compile("[│╭╮╰╯─]")


class Case(NamedTuple):
    """One mistake."""

    number: int
    """Row of the table."""
    name: str
    call: Callable[[World], object]
    error: str
    """Names of the classes that the error has; "" if the call returns."""
    message: Any
    """The whole message, or a pattern of it; addresses in braces. The value of a call that returns.
    """

    @property
    def id(self) -> str:
        return f"{self.number:02d}-{self.name}"


@dataclass
class World:
    """Server, client and agent of the mistakes; the wrong types of arguments are on purpose."""

    target: str
    """A server with the trace 'done', of 10 tokens, and the trace 'running', of 4 rows so far."""
    web: str
    """An HTTP/1 server."""
    silent: str
    """A port that takes connections and never answers."""
    dead: str
    """A closed port."""
    agent: Any
    """Agent of the engine 'e1', which reports no slots."""

    def connect(self, target: Any = None, **options: Any) -> Any:
        target = self.target if target is None else target
        return routetrace.client.RouteClient(target, **{"timeout": _TIMEOUT, **options})

    @property
    def client(self) -> Any:
        return self.connect()

    @property
    def trace(self) -> Any:
        return self.client.get("done")


def config(**options: Any) -> AgentConfig:
    """Return the configuration of an agent."""
    given = {"target": "127.0.0.1", "engine_id": "e1", "layout": LAYOUT, "background": "thread"}
    return AgentConfig(**{**given, **options})


@contextmanager
def world() -> Iterator[World]:
    """Run servers, good and bad ones; settings of the environment are hidden."""
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
            environment.delenv(name)
        target = stack.enter_context(run_server()).target
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
        stack.callback(web.server_close)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        stack.callback(web.shutdown)
        silent = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        agent = stack.enter_context(CaptureAgent(config(target=target)))
        done = agent.begin("done", prompt_len=9)
        agent.step(ROWS, [(done, 0, 9)])
        agent.finish(done, 10)
        agent.step(ROWS[:4], [(agent.begin("running", prompt_len=4), 0, 4)])
        assert agent.flush(_LIMIT)
        made = World(
            target,
            f"127.0.0.1:{web.server_port}",
            f"127.0.0.1:{silent.getsockname()[1]}",
            f"127.0.0.1:{free_ports(1)}",
            agent,
        )
        wait_for(lambda: made.client.stat("running").num_rows == 4, 10)
        yield made


def check(case: Case, things: World) -> None:
    """Make a mistake, and compare its error with the table's."""
    begun, error, got = time.monotonic(), None, None
    try:
        got = case.call(things)
    except Exception as raised:
        error = raised
    assert time.monotonic() - begun < _LIMIT
    if not case.error:
        if error is not None:
            raise error
        assert _is(got, case.message, things), got
        return
    told = f"returned {got!r}" if error is None else f"raised {type(error).__name__}: {error}"
    for name in case.error.split():
        assert isinstance(error, _class_of(name, told)), told
    assert _is(str(error), case.message, things), told
    if "MissingDependency" in case.error:
        dependency: Any = error
        assert dependency.package
        assert dependency.install


def command(*words: str) -> str:
    """Run a command; return its exit code and what it printed, as one line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
    done = forked.run(*words, env=env, timeout=_LIMIT)
    text = " ".join(_BOX.sub(" ", done.stdout + done.stderr).split())
    return f"exit {done.returncode}: {text}"


def _is(got: object, wanted: Any, things: World) -> bool:
    if isinstance(wanted, re.Pattern):
        return wanted.fullmatch(str(got)) is not None
    if isinstance(wanted, str):
        for name in ("target", "web", "silent", "dead"):
            wanted = wanted.replace(f"{{{name}}}", getattr(things, name))
    return bool(got == wanted)


def _class_of(name: str, told: str) -> type[BaseException]:
    for module in (routetrace.client, builtins):
        found = getattr(module, name, None)
        if isinstance(found, type):
            return found
    pytest.fail(f"no class {name} in routetrace.client; the call {told}")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
