"""The trainer's side of every way from an engine: a process that ends up with torch tensors.

A round is a line on stdin, "round NAME"; then, for ours, "done TRACE SESSION ROWS" for each session
that ended, and "over". Each tensor is compared with the truth, in CPU time of its own, and
let go.
"""

# Not all of it is installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch

from ways.load import SHAPE, Load, is_true

_K = SHAPE.layout.top_k
_L = len(SHAPE.layout.layer_ids)


class Checked:
    """Compares tensors with the truth; counts rows, and the CPU time that it took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows = 0
        self.received = 0

    def __call__(self, tensor: torch.Tensor, session: int, rows: int) -> None:
        begin = time.thread_time()
        if tuple(tensor.shape) != (rows, _L, _K):
            raise SystemExit(f"session {session}: {tuple(tensor.shape)} instead of {rows} rows")
        if not is_true(tensor.numpy(), session):
            raise SystemExit(f"rows of session {session} are wrong")
        self.rows += rows
        self.seconds += time.thread_time() - begin


def vllm_tensor(answer: dict[str, Any]) -> torch.Tensor:
    """Of a completion's base64 .npy file."""
    import pybase64

    file = io.BytesIO(pybase64.b64decode(answer["choices"][0]["routed_experts"]))
    return torch.from_numpy(np.load(file))


def sglang_tensor(answer: dict[str, Any]) -> torch.Tensor:
    """Of the flat int32 ids in the meta information."""
    import pybase64

    flat = pybase64.b64decode_as_bytearray(answer["meta_info"]["routed_experts"])
    return torch.from_numpy(np.frombuffer(flat, np.int32).reshape(-1, _L, _K))


async def receive(
    load: Load,
    ports: list[str],
    name: str,
    tensor_of: Callable[[dict[str, Any]], torch.Tensor],
    loads: Callable[[bytes], Any],
    checked: Checked,
) -> None:
    """All sessions of a round, over HTTP; rows are taken from the answer to the last turn.

    Args:
        load: of each engine.
        ports: of the engines.
        name: of the round.
        tensor_of: makes a tensor of an answer.
        loads: of JSON.
        checked: takes the tensors.
    """
    import aiohttp

    async def session_of(http: aiohttp.ClientSession, engine: int, number: int) -> None:
        for turn in load.all_turns[number]:
            url = f"http://127.0.0.1:{ports[engine]}/generate/{name}-{engine}-{turn.name}"
            async with http.post(url) as response:
                body = await response.read()
            checked.received += len(body)
            answer = loads(body)
            del body
            if turn.last:
                checked(tensor_of(answer), turn.session, turn.rows)
            del answer

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as http:
        sessions = product(range(len(ports)), range(load.sessions))
        await asyncio.gather(*(session_of(http, *each) for each in sessions))


def read_each(client: Any, checked: Checked) -> None:
    """Get each trace when its session has ended."""
    while (line := sys.stdin.readline()) != "over\n":
        _, trace_id, session, rows = line.split()
        trace = client.get(trace_id, wait_for="rows", timeout=60)
        while len(trace) < int(rows):  # it ends with the turn before, so far
            time.sleep(0.02)
            trace = client.get(trace_id, wait_for="rows", timeout=60)
        trace.require_valid()
        checked(trace.to_torch(), int(session), int(rows))
        del trace


def read_together(client: Any, checked: Checked) -> None:
    """Get all traces when the last session has ended, as a trainer does with its batch."""
    ended = []
    while (line := sys.stdin.readline()) != "over\n":
        ended.append(line.split()[1:])
    traces = client.get_many([trace_id for trace_id, _, _ in ended], wait_for="end", timeout=60)
    for (_, session, rows), trace in zip(ended, traces, strict=True):
        trace.require_valid()
        checked(trace.to_torch(), int(session), int(rows))


def main() -> None:
    """See the module."""
    kind, load_json, ports, target, how = sys.argv[1:]
    load = Load(**json.loads(load_json))
    client: Any = None
    loads: Callable[[bytes], Any] = json.loads
    if kind == "ours":
        from routetrace.client import RouteClient

        client = RouteClient(target)
    else:
        import uvloop

        if kind != "vllm-shipped":
            import orjson

            loads = orjson.loads
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    print("ready", flush=True)
    for line in sys.stdin:
        _, name = line.split()
        checked = Checked()
        if client is None:
            make = sglang_tensor if kind == "sglang" else vllm_tensor
            asyncio.run(receive(load, ports.split(","), name, make, loads, checked))
        else:
            (read_together if how == "together" else read_each)(client, checked)
        print(f"over {checked.rows} {checked.seconds} {checked.received}", flush=True)


if __name__ == "__main__":
    main()
