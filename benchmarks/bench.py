"""Measures the row's path as ratios against a limit taken in the same run: medians over rounds.

Prints a table and writes results.json. Payloads: recorded routing where ../shared/data exists, and
the shape of Qwen3-30B-A3B (48 layers, top-8 of 128) drawn with the published skew otherwise.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
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


def ratio(ours: Callable[[], Any], limit: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Median over interleaved rounds of time(ours) / time(limit), and its spread."""

    def timed(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return time.perf_counter() - start

    timed(ours), timed(limit)
    ratios = [timed(ours) / timed(limit) for _ in range(ROUNDS)]
    return statistics.median(ratios), max(ratios) - min(ratios)


def main() -> None:
    rows: list[dict[str, Any]] = []

    def row(name: str, value: float, unit: str, against: str, spread: float = 0.0) -> None:
        rows.append(
            {"name": name, "value": value, "unit": unit, "against": against, "spread": spread}
        )
        print(f"{name:<44} {value:9.3f} {unit:<6} {against:<44} +- {spread / 2:.3f}", flush=True)

    for n in (256, 1024):
        ids = payload(n)
        frame = encode_frame(ids, LAYOUT)
        row(f"bytes of a frame, {n} rows", len(frame) / ids.nbytes / 4, "x", "int32")
        out = np.empty((48, n, 8), np.uint8)
        plain = zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(ids.transpose(1, 0, 2)))
        row(
            f"decode, {n} rows: time",
            *_with_unit(
                ratio(
                    lambda f=frame, o=out: decode_into(f, o, LAYOUT.layer_ids),
                    lambda p=plain: zstandard.ZstdDecompressor().decompress(p),
                    50,
                ),
                "one plain zstd decompress of the same ids",
            ),
        )
        part = np.empty((12, n, 8), np.uint8)
        row(
            f"decode 12 of 48 layers, {n} rows: time",
            *_with_unit(
                ratio(
                    lambda f=frame, p=part: decode_into(slice_frame(f, SOME), p, SOME),
                    lambda f=frame, o=out: decode_into(f, o, LAYOUT.layer_ids),
                    50,
                ),
                "all layers",
            ),
        )

    with run_server() as server:
        config = AgentConfig(
            target=server.target, engine_id="bench", layout=LAYOUT, ring_bytes=1 << 30
        )
        with CaptureAgent(config) as agent:
            for n in (64, 256, 1024):
                ids, target = payload(n), np.empty((n, 48, 8), np.uint8)
                handles = [agent.begin(f"step-{n}-{i}") for i in range(n)]
                runs = np.stack([np.array(handles), np.zeros(n, int), np.ones(n, int)], 1)

                def step(runs: Any = runs, ids: Any = ids) -> None:
                    agent.step(ids, runs)
                    runs[:, 1] += 1

                row(
                    f"engine hands a step of {n} requests over: time",
                    *_with_unit(
                        ratio(step, lambda t=target, i=ids: np.copyto(t, i), 50),
                        "one np.copyto of the rows",
                    ),
                )
                for handle in handles:
                    agent.finish(handle, int(runs[0, 1]) + 1)
            whole = payload(32768)
            handle = agent.begin("long")
            for at in range(0, len(whole), 2048):
                agent.step(whole[at : at + 2048], [(handle, at, 2048)])
            agent.finish(handle, len(whole) + 1)
            agent.flush(120)
        with RouteClient(server.target) as client:
            blobs = [encode_frame(whole[i : i + 2048], LAYOUT) for i in range(0, 32768, 2048)]
            out = np.empty((48, 2048, 8), np.uint8)
            row(
                "get of a 32k-token trace: time",
                *_with_unit(
                    ratio(
                        lambda: client.get("long"),
                        lambda: [decode_into(b, out, LAYOUT.layer_ids) for b in blobs],
                        1,
                    ),
                    "bare decode of the same frames",
                ),
            )
            row(
                "get of 12 of 48 layers of it: time",
                *_with_unit(
                    ratio(
                        lambda: client.get("long", layer_ids=range(12, 24)),
                        lambda: client.get("long"),
                        1,
                    ),
                    "all layers",
                ),
            )
    (HERE / "results.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _with_unit(measured: tuple[float, float], against: str) -> tuple[float, str, str, float]:
    return measured[0], "x", against, measured[1]


if __name__ == "__main__":
    main()
