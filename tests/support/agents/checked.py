"""Agents in both modes against a recording server, and checks of their counts."""

from __future__ import annotations

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, AgentStats
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.ingest_server import IngestServer

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)
BIG = ModelLayout(tuple(range(40)), 40, 256, 8)  # 320 bytes a row
MODES = pytest.mark.parametrize("mode", ["thread", "process"])
FULL = pb.MISSING_REASON_QUEUE_FULL


def config_for(server: IngestServer, layout: ModelLayout = LAYOUT, **settings) -> AgentConfig:
    settings = {
        "background": "thread",
        "linger_seconds": 0.02,
        "flush_interval_seconds": 0.01,
        **settings,
    }
    return AgentConfig(server.target, "e0", layout, **settings)


def make_rows(n: int, layout: ModelLayout = LAYOUT, seed: int = 0) -> np.ndarray:
    first = np.random.default_rng(seed).integers(0, layout.num_experts, (n, len(layout.layer_ids)))
    ids = first[:, :, None] + 31 * np.arange(layout.top_k)
    return (ids % layout.num_experts).astype(layout.dtype)


def assert_kept(stats: AgentStats, **dropped: int) -> None:
    """Law 12, with nothing in flight and nothing dropped but that."""
    assert stats.in_flight_rows == 0
    assert stats.dropped_rows == dropped
    assert stats.offered_rows == stats.acknowledged_rows + sum(dropped.values())
