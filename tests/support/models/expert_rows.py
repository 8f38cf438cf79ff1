"""Routing to test with: small drawn rows, and recorded ones where they are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: As benchmarks/measure.py finds it.
DATA = Path(__file__).parents[4] / "shared" / "data"
RECORDED = (
    "real_qwen_text", "real_qwen_gen", "real_dsv3_text", "syn_qwen3_30b_1k", "syn_dsv3_1k",
    "syn_kimi_k2_1k", "syn_gptoss120b_1k", "syn_mixtral_1k", "randinit_qwen3moe_1k",
)  # fmt: skip


def drawn(n: int, layers: int, experts: int, top_k: int, seed: int) -> np.ndarray[Any, Any]:
    """Rows [n, L, K] with favourites that last, so that recency and frequency both tell."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 1, (layers, experts))
    now = rng.normal(0, 1, (layers, experts))
    rows = np.empty((n, layers, top_k), np.uint8 if experts <= 256 else np.uint16)
    for i in range(n):
        now = 0.9 * now + rng.normal(0, 0.5, (layers, experts))
        rows[i] = np.argsort(-(taste + now + rng.gumbel(0, 0.5, (layers, experts))))[:, :top_k]
    return rows


def recorded(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Rows, the first row of each request, and the number of experts of a recording.

    Skips the test where recordings are not there; a drawn set is tested beside them.
    """
    if name == "drawn":
        rows = drawn(300, 3, 24, 4, 7)
        return rows, np.arange(300) % 100 == 0, 24
    if not DATA.is_dir():
        pytest.skip(f"no recordings in {DATA}")
    with np.load(DATA / f"{name}.npz") as file:
        return file["ids"], file["bound"], int(file["E"])
