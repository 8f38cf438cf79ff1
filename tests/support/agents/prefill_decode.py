"""A prefill and a decode engine, and the rows that a read returns."""

from __future__ import annotations

import numpy as np

from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)


def rows_of(n: int, seed: int = 0) -> np.ndarray:
    keys = np.random.default_rng(seed).random((n, 3, 300))
    return np.argsort(keys, axis=-1)[..., :3].astype(np.uint16)


def assert_rows(cells, *expected: tuple[int, np.ndarray]) -> None:
    """The cells are these rows from these positions on, in all layers, and nothing else."""
    rows = {start + i: row for start, rows in expected for i, row in enumerate(rows)}
    assert {p for p, _ in cells} == set(rows)
    for (position, layer), (ids, _, _) in cells.items():
        np.testing.assert_array_equal(ids, rows[position][LAYOUT.column[layer]])
    assert len(cells) == 3 * len(rows)


def reasons(end) -> list[tuple[int, int, str]]:
    names = [pb.MissingReason.Name(m.reason).removeprefix("MISSING_REASON_") for m in end.missing]
    return [(m.start, m.stop, r.lower()) for m, r in zip(end.missing, names, strict=True)]


class Pair:
    """A prefill and a decode engine with one request of 100 prompt tokens."""

    def __init__(self, server, run: str) -> None:
        self.prompt = np.arange(100)
        self.prefill, self.decode = (
            Feeder(server.target, LAYOUT, run=run, engine_id=e, block_size=16, num_blocks=20)
            for e in ("prefill", "decode")
        )
        self.rows, self.more = rows_of(100, 1), rows_of(10, 2)

    def fill(self, reason: str = "handoff") -> None:
        handle = self.prefill.begin(
            "p", trace_id="t", prompt_len=100, block_ids=range(7), prompt_token_ids=self.prompt
        )
        self.prefill.step(self.rows, [(handle, 0, 100)])
        self.prefill.finish(handle, 101, reason=reason, transfer_id="kv")
        self.prefill.flush()

    def begin(self) -> int:
        handle = self.decode.begin(
            "d",
            trace_id="t",
            prompt_len=100,
            num_computed_tokens=99,
            num_external_tokens=99,
            block_ids=range(3, 10),
            prompt_token_ids=self.prompt,
            transfer_id="kv",
        )
        self.decode.step(self.more, [(handle, 99, 10)])
        self.decode.flush()
        return handle

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
