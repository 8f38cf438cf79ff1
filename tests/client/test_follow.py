"""Followers of a badly behaved engine end up with exactly its rows."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest

from routetrace.client import RouteClient, TraceState
from routetrace.common.errors import NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from routetrace.simulation.small_engine import SmallEngine
from support.agents.feeder import Feeder

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)


def follow(target, run, name, followed) -> None:
    """Keep what the parts say to keep: a part replaces what follows its start."""
    rows = {}
    with RouteClient(target, run=run) as client:
        while name not in followed:
            with suppress(NotFound):  # not begun yet
                for part in client.follow(name, missing="mask", timeout=60):
                    rows = {p: row for p, row in rows.items() if p < part.token_start}
                    for i, row in enumerate(zip(part.valid, part.topk_ids, strict=True)):
                        rows[part.token_start + i] = row
                followed[name] = rows, part.state


@pytest.mark.parametrize("seed", [0, 1])
def test_followers_of_a_bad_engine(seed):
    followed: dict = {}
    with run_server() as server:
        run = f"run-{seed}"
        feeder = Feeder(server.target, LAYOUT, run=run, block_size=4, num_blocks=24)
        sim = SmallEngine(feeder, LAYOUT, seed)
        names = [f"r{i}" for i in range(8)]
        for name in names:
            sim.submit(name, [sim.rng.randrange(4) for _ in range(9)], 14)
        threads = [
            threading.Thread(target=follow, args=(server.target, run, name, followed))
            for name in names
        ]
        for thread in threads:
            thread.start()
        while sim.step():
            feeder.flush()
        feeder.flush()
        for thread in threads:
            thread.join()
        feeder.stream.close()
    compared = 0
    for request in sim.done:
        rows, state = followed[request.name]
        truth = request.truth("as_sampled")
        assert sorted(rows) == list(range(len(request.tokens) - 1))
        for position, (valid, ids) in rows.items():
            assert valid.all() == (truth.get(position) is not None)
            if valid.all():
                np.testing.assert_array_equal(ids, truth[position][0])
                compared += 1
        whole = all(valid.all() for valid, _ in rows.values())
        assert state == (TraceState.COMPLETE if whole else TraceState.INCOMPLETE)
    assert compared > 100
