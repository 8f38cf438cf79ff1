"""Measures the row's path as ratios against a limit taken in the same run: medians over rounds.

Prints a table and writes results.json. Payloads: recorded routing where ../shared/data exists, and
the shape of Qwen3-30B-A3B (48 layers, top-8 of 128) drawn with the published skew otherwise.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from routetrace.v1.frame import decode_into, encode_frame, slice_frame
from routetrace.v1.layout import RoutingLayout

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data"
LAYOUT = RoutingLayout(tuple(range(48)), 48, 128, 8)
SOME = LAYOUT.layer_ids[12:24]
ROUNDS = 9


def payload(n: int) -> np.ndarray[Any, Any]:
    """[n, 48, 8] uint8."""
    file = DATA / "syn_qwen3_30b_1k.npz"
    if file.exists():
        ids = np.load(file)["ids"]
        return np.concatenate([ids] * -(-n // len(ids)))[:n]
    rng = np.random.default_rng(0)
    skew = rng.normal(0, 1, (48, 128))
    noise = rng.gumbel(0, 1, (n, 48, 128))
    return np.argsort(-(skew + noise), axis=-1)[..., :8].astype(np.uint8)


class Table:
    """Rows as they are measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: float, against: str, spread: float = 0.0) -> None:
        row = {"name": name, "value": value, "unit": "x", "against": against, "spread": spread}
        self.rows.append(row)
        print(f"{name:<44} {value:9.3f} x {against:<42} +- {spread / 2:.3f}", flush=True)

    def time(
        self,
        name: str,
        ours: Callable[[], Any],
        limit: Callable[[], Any],
        against: str,
        repeat: int = 50,
        between: Callable[[], Any] = lambda: None,
    ) -> None:
        """Adds the median over interleaved rounds of ours / limit, and its spread."""
        ratios = []
        for _ in range(ROUNDS + 1):
            ratios.append(timed(ours, repeat) / timed(limit, repeat))
            between()
        del ratios[0]  # warm-up
        self.add(name, statistics.median(ratios), against, max(ratios) - min(ratios))


def timed(function: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return time.perf_counter() - start


def codec(table: Table, n: int) -> None:
    ids = payload(n)
    frame = encode_frame(ids, LAYOUT)
    out, part = np.empty((48, n, 8), np.uint8), np.empty((12, n, 8), np.uint8)
    whole = partial(decode_into, frame, out, LAYOUT.layer_ids)
    plain = zstandard.ZstdCompressor(3).compress(ids.transpose(1, 0, 2).tobytes())
    unpack = partial(zstandard.ZstdDecompressor().decompress, plain)

    def some() -> None:
        decode_into(slice_frame(frame, SOME), part, SOME)

    table.add(f"bytes of a frame, {n} rows", len(frame) / ids.nbytes / 4, "int32")
    table.time(f"decode, {n} rows", whole, unpack, "one plain zstd decompress of the ids")
    table.time(f"decode 12 of 48 layers, {n} rows", some, whole, "all layers")


def step_path(table: Table, agent: CaptureAgent, n: int) -> None:
    ids, target = payload(n), np.empty((n, 48, 8), np.uint8)
    handles = [agent.begin(f"step-{n}-{i}") for i in range(n)]
    runs = np.stack([np.array(handles), np.zeros(n, int), np.ones(n, int)], 1)

    def step() -> None:
        agent.step(ids, runs)
        runs[:, 1] += 1

    name = f"engine hands over a step of {n} requests"
    copy = partial(np.copyto, target, ids)
    # Faster than any engine: let the background catch up, or its ring overflows.
    flush = partial(agent.flush, 60)
    table.time(name, step, copy, "one np.copyto of the rows", 20, flush)
    for handle in handles:
        agent.finish(handle, int(runs[0, 1]) + 1)


def reads(table: Table, client: RouteClient, whole: Any) -> None:
    frames = [encode_frame(whole[i : i + 2048], LAYOUT) for i in range(0, len(whole), 2048)]
    out = np.empty((48, 2048, 8), np.uint8)

    def bare() -> None:
        for frame in frames:
            decode_into(frame, out, LAYOUT.layer_ids)

    get = partial(client.get, "long")
    table.time("get of a 32k-token trace", get, bare, "bare decode of the same frames", 1)
    part = partial(client.get, "long", layer_ids=SOME)
    table.time("get of 12 of its 48 layers", part, get, "all layers", 1)


def main() -> None:
    table = Table()
    for n in (256, 1024):
        codec(table, n)
    with run_server() as server:
        config = AgentConfig(target=server.target, engine_id="bench", layout=LAYOUT)
        with CaptureAgent(config) as agent:
            for n in (64, 256, 1024):
                step_path(table, agent, n)
            whole = payload(32768)
            handle = agent.begin("long")
            for at in range(0, len(whole), 2048):
                agent.step(whole[at : at + 2048], [(handle, at, 2048)])
                agent.flush(60)
            agent.finish(handle, len(whole) + 1)
            agent.flush(120)
        with RouteClient(server.target) as client:
            reads(table, client, whole)
    (HERE / "results.json").write_text(json.dumps({"rows": table.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
