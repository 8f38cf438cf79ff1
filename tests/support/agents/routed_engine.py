"""An engine of short requests behind a real agent; every row that it made is compared."""

from __future__ import annotations

import numpy as np

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)
BOUND_S = 90.0


def rows_of(count: int, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).random((count, 3, 300))
    return np.argsort(keys, axis=-1)[..., :3].astype(np.uint16)


class Engine:
    """An engine whose every request is compared."""

    def __init__(self, target: str, run: str) -> None:
        config = AgentConfig(
            target=target,
            run=run,
            engine_id="e0",
            layout=LAYOUT,
            block_size=16,
            num_blocks=4096,
            background="thread",
            flush_interval_seconds=0.01,
        )
        self.agent = CaptureAgent(config)
        self.rows: dict[str, np.ndarray] = {}

    def generate(self, count: int) -> None:
        for _ in range(count):
            number = len(self.rows)
            name, rows = f"r{number}", rows_of(20, number)
            handle = self.agent.begin(
                name, prompt_len=10, block_ids=[2 * number % 4000, 2 * number % 4000 + 1]
            )
            self.agent.step(rows, [(handle, 0, 20)])
            self.agent.finish(handle, num_tokens=21)
            self.rows[name] = rows

    def compare(self, client: RouteClient) -> int:
        for name, rows in self.rows.items():
            trace = client.get(name, wait_for="end", timeout=BOUND_S)
            np.testing.assert_array_equal(trace.topk_ids, rows)
        return len(self.rows)

    def end(self) -> None:
        assert self.agent.flush(BOUND_S)
        stats = self.agent.stats()
        assert stats.offered_rows == stats.acknowledged_rows == 20 * len(self.rows)
        self.agent.close()
