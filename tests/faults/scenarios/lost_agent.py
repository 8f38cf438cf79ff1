"""Agents that die or fall silent in mid-request: their traces end with a reason, others go on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import grpc
import numpy as np

from faults.check import Violation, check, temporary
from faults.script import LAYOUT, RUN
from faults.serving import Server
from routetrace.capture_agent import AgentConfig, CaptureAgent, supervisor
from routetrace.client import RouteClient, TraceState
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Stream
from support.servers.client_server import rows_of
from support.waiting import wait_for

HEARTBEAT_S = 0.5
#: A poll, a call, and a machine that has other things to do.
_SLACK_S = 0.5
_TRIES = 3
_ROWS = 40


def _agent(target: str, engine_id: str, boot_id: str = "boot") -> CaptureAgent:
    return CaptureAgent(
        AgentConfig(
            target=target,
            engine_id=engine_id,
            layout=LAYOUT,
            run=RUN,
            boot_id=boot_id,
            linger_seconds=0.01,
            flush_interval_seconds=0.01,
            close_timeout_seconds=5,
        )
    )


def _rows(seed: int, i: int) -> np.ndarray:
    return rows_of(LAYOUT, _ROWS, seed * 1000 + i)


class _Late(Violation):
    """A heartbeat or a loss that was late: by the machine's fault, unless it always is."""


def once(seed: int, how: str) -> dict[str, float]:
    """Lose one agent of several; try again where the machine may have been late."""
    for _ in range(_TRIES - 1):
        with suppress(_Late):
            return _once(seed, how)
    return _once(seed, how)


def _once(seed: int, how: str) -> dict[str, float]:
    """One agent of several is killed, or stopped; it comes back, or another one in its place."""
    with (
        temporary() as path,
        patch.object(supervisor, "_DELAYS_S", (3600.0, 3600.0)),  # as where the machine is gone
        Server(
            Path(path),
            heartbeat_seconds=HEARTBEAT_S,
            agent_timeout_seconds=2 * HEARTBEAT_S,
            sweep_interval_seconds=0.2,
        ) as server,
        RouteClient(server.target, run=RUN) as client,
    ):
        agents = [_agent(server.target, f"e{i}") for i in range(4)]
        handles = []
        for i, agent in enumerate(agents):
            handles.append(agent.begin("r", trace_id=f"t{i}", prompt_len=25))
            agent.step(_rows(seed, i)[:25], [(handles[i], 0, 25)])
            check(agent.flush(30), "an agent did not get through")
        old_epoch = _epoch(server, "e0")
        # Heartbeats keep those alive that have nothing to say.
        time.sleep(3 * HEARTBEAT_S)
        for i in range(4):
            state = client.stat(f"t{i}").state
            if state is not TraceState.RUNNING:
                raise _Late(f"t{i} is {state.value}, and its agent is there")
        pid = agents[0].worker_pid
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        gone = time.monotonic()
        while client.stat("t0").state is not TraceState.INCOMPLETE:
            check(time.monotonic() - gone < 10, "the trace of a lost agent stays running")
            time.sleep(0.01)
        took = time.monotonic() - gone
        limit = 2 * HEARTBEAT_S + _SLACK_S
        if took > limit:
            raise _Late(f"lost after {took:.2f} s, expected {limit} s at most")
        got = client.get("t0", token_stop=30, missing="mask")
        reasons = {m.reason for m in got.missing}
        check(reasons == {"agent_lost"}, f"missing rows of a lost agent: {reasons or 'none'}")
        check(np.array_equal(got.topk_ids[:25], _rows(seed, 0)[:25]), "other rows")
        # The next sweep counts it; an agent that has been replaced is not counted any more.
        wait_for(lambda: server.metrics()["routetrace_agents_lost_total"] >= 1)
        # Another boot of the engine takes over.
        second = _agent(server.target, "e0", "another boot")
        handle = second.begin("r", trace_id="t0-again", prompt_len=25)
        second.step(_rows(seed, 9), [(handle, 0, _ROWS)])
        second.finish(handle, _ROWS + 1)
        check(second.flush(30), "the new agent did not get through")
        _fenced(server, old_epoch)
        if how == "stopped":
            os.kill(pid, signal.SIGCONT)
            agents[0].step(_rows(seed, 0)[25:], [(handles[0], 25, _ROWS - 25)])
            agents[0].flush(5)
            stats = agents[0].stats()
            check("fenced" in stats.dropped_rows, f"the old agent was not fenced: {stats}")
        for i, agent in enumerate(agents[1:], 1):
            agent.step(_rows(seed, i)[25:], [(handles[i], 25, _ROWS - 25)])
            agent.finish(handles[i], _ROWS + 1)
            check(agent.flush(30), "an agent did not get through")
        for name, i in [("t0-again", 9), ("t1", 1), ("t2", 2), ("t3", 3)]:
            trace = client.get(name)
            check(trace.state is TraceState.COMPLETE, f"{name} is {trace.state.value}")
            check(np.array_equal(trace.topk_ids, _rows(seed, i)), f"{name}: other rows")
        old = client.get("t0", missing="mask")
        check(len(old) == 25 and old.num_tokens is None, f"rows of a fenced agent: {old}")
        for agent in [*agents, second]:
            agent.close(2)
        check(server.stop() == 0, "no clean end")
    return {"agents": 5, "heartbeat_s": HEARTBEAT_S, f"lost_after_{how}_s": took}


def _hello(engine_id: str, epoch: int) -> pb.Hello:
    return pb.Hello(
        run=RUN, engine_id=engine_id, boot_id="boot", epoch=epoch, layout=LAYOUT.to_proto()
    )


def _epoch(server: Server, engine_id: str) -> int:
    """Its newest epoch: the one that fences a lower one."""
    try:
        Stream(server.target, _hello(engine_id, 1))
    except grpc.RpcError as error:
        check(error.code() is grpc.StatusCode.FAILED_PRECONDITION, f"{error}")
        # "epoch is 1, expected 17953..., the newest"
        digits = "".join(c if c.isdigit() else " " for c in error.details() or "").split()
        return max(map(int, digits))
    raise AssertionError("epoch 1 was not fenced")


def _fenced(server: Server, epoch: int) -> None:
    try:
        Stream(server.target, _hello("e0", epoch))
    except grpc.RpcError as error:
        check(error.code() is grpc.StatusCode.FAILED_PRECONDITION, f"{error}")
    else:
        check(False, f"the old epoch {epoch} was taken")


def run(seed: int, *, runs: int = 1) -> dict[str, float]:
    """Figures of agents that were killed, and of some that only fell silent."""
    figures: dict[str, float] = {}
    for i in range(runs):
        for how in ("killed", "stopped"):
            for name, value in once(seed + i, how).items():
                figures[name] = max(figures.get(name, 0.0), value)
    return figures
