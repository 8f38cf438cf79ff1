"""slime's lazy hook: routers get their rows when they run, each rank only its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from routetrace.client import FetchPlan, Rank, RouteClient, Rows, Sample, Segment
from routetrace.common.errors import Incomplete, InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.dialects import slime
from support.ranks.dialect_samples import LAYOUTS, randoms
from support.ranks.rank_rows import rows_of as fetched
from support.servers.client_server import LAYOUT, ScriptedServer, rows_of, truth


class Replay:
    """slime.utils.routing_replay.RoutingReplay, as far as it takes lazy objects."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.at = {"forward": 0, "backward": 0}

    def record(self, top_indices: Any) -> None:
        assert hasattr(top_indices, "materialize_for_routing_replay")
        self.items.append(top_indices)

    def pop(self, stage: str) -> torch.Tensor:
        item = self.items[self.at[stage]]
        self.at[stage] += 1
        return item.materialize_for_routing_replay(stage)


class Client:
    """Gives the rows of plans, and counts how often."""

    def __init__(self, samples: dict[int, list[np.ndarray]], missing: float = 0.0) -> None:
        self.samples, self.missing = samples, missing
        self.fetched: list[int] = []
        self.open = 0

    def fetch(self, plan: Any) -> Rows:
        self.fetched.append(id(plan))
        return fetched(plan, self.samples[id(plan)], missing=self.missing)

    def prefetch(self, plans: Any, *, max_bytes: int) -> Any:
        self.open += 1
        rows = map(self.fetch, plans)

        class Ahead:
            def __next__(ahead) -> Rows:  # noqa: N805
                return next(rows)

            def close(ahead) -> None:  # noqa: N805
                self.open -= 1

        return Ahead()


def slime_tokens(
    lengths: list[int], pad_size: int, cp: tuple[int, int], sp: tuple[int, int], gather: bool
) -> list[tuple[int, int]]:
    """get_batch: (sample, position) of each local token; the position is the length for padding."""
    cp_size, cp_rank = cp
    streams = [[(i, p) for p in range(n)] for i, n in enumerate(lengths)]

    def padded(tokens: list, to: int) -> list:
        return tokens + [(-1, -1)] * (-len(tokens) % to)

    if gather:
        stream = padded([token for one in streams for token in one], cp_size * pad_size)
        size = len(stream) // cp_size
        local = stream[cp_rank * size : (cp_rank + 1) * size]
    else:
        local = []
        for tokens in streams:
            if cp_size == 1:
                local += tokens
                continue
            chunk = -(-len(tokens) // (2 * cp_size))
            whole = tokens + [(-1, -1)] * (2 * cp_size * chunk - len(tokens))
            mirror = 2 * cp_size - 1 - cp_rank
            local += whole[chunk * cp_rank : chunk * (cp_rank + 1)]
            local += whole[chunk * mirror : chunk * (mirror + 1)]
        local = padded(local, pad_size)
    size = len(local) // sp[0]
    return local[sp[1] * size : (sp[1] + 1) * size]


def slime_plans(rng: random.Random, layout: ModelLayout):
    """Micro-batches of one rank, as slime lays them out, and the tokens that it then has."""
    sp_size, cp_size = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    pad_size = sp_size * rng.choice([2, 4, 8])
    rank = (rng.randrange(cp_size), rng.randrange(sp_size))
    gather = cp_size > 1 and rng.random() < 0.4
    kept = sorted(rng.sample(layout.layer_ids, rng.randint(1, len(layout.layer_ids))))
    plans, tokens = [], []
    for _ in range(rng.randint(1, 3)):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 4))]
        samples = [Sample.of(f"r{i}", n) for i, n in enumerate(lengths)]
        batch = slime.micro_batch(samples, pad_size, cp_size=cp_size, allgather_cp=gather)
        plans.append(
            FetchPlan.make(
                layout,
                batch,
                Rank(
                    kept,
                    cp_size,
                    rank[0],
                    "ulysses" if gather else "zigzag",
                    sp_size,
                    rank[1],
                ),
            )
        )
        tokens.append(
            slime_tokens(lengths, pad_size, (cp_size, rank[0]), (sp_size, rank[1]), gather)
        )
    return plans, tokens


def check_pass(rng, layout, plans, tokens, ids, replays, stages) -> None:
    for number, plan in enumerate(plans):
        for stage in stages:
            order = list(enumerate(replays))
            if stage == "backward":
                order.reverse()
            for column, replay in order:
                got = replay.pop(stage)
                assert got.dtype == torch.int32
                assert got.shape == (plan.num_tokens, layout.top_k)
                layer = layout.moe_layer_ids.index(plan.layer_ids[column])
                for row, (sample, position) in zip(got.tolist(), tokens[number], strict=True):
                    assert len(set(row)) == layout.top_k
                    assert all(0 <= i < layout.num_experts for i in row)
                    if sample >= 0 and position < len(ids[number][sample]):
                        assert row == ids[number][sample][position, layer].tolist()


@settings(max_examples=60)
@given(randoms)
def test_slime_lazily(rng: random.Random):
    layout = rng.choice(LAYOUTS[:5])
    plans, tokens = slime_plans(rng, layout)
    for plan, local in zip(plans, tokens, strict=True):
        assert list(zip(plan.sample_of, plan.position_of, strict=True)) == local
    ids = [
        [rows_of(layout, s.num_tokens - 1, rng.randrange(2**32)) for s in plan.samples]
        for plan in plans
    ]
    client = Client({id(plan): one for plan, one in zip(plans, ids, strict=True)})
    routing = slime.LazyRouting(client, plans)
    replays = [Replay() for _ in plans[0].layer_ids]
    routing.fill(replays)
    told = rng.randrange(2)
    if told:
        routing.begin_pass("forward")
    check_pass(rng, layout, plans, tokens, ids, replays, ["forward"])
    assert len(client.fetched) == len(plans)
    for replay in replays:
        replay.at["forward"] = 0  # clear_all_forward
    if told:
        assert not routing._rows
        routing.begin_pass("backward")
    check_pass(rng, layout, plans, tokens, ids, replays, ["forward", "backward"])
    assert len(client.fetched) == len(plans) * (2 if told else 1)
    assert not routing._rows
    routing.close()
    assert not client.open


def test_slime_lazily_out_of_order():
    plans = [
        FetchPlan.make(LAYOUT, slime.micro_batch([Sample.of("r", n)], 4), Rank((2, 5)))
        for n in (9, 5, 7)
    ]
    ids = [[rows_of(LAYOUT, p.samples[0].num_tokens - 1, i)] for i, p in enumerate(plans)]
    client = Client({id(p): one for p, one in zip(plans, ids, strict=True)})
    routing = slime.LazyRouting(client, plans)
    replays = [Replay(), Replay()]
    routing.fill(replays)
    routing.begin_pass("forward")
    for number in (2, 0, 0, 1, 2):
        for column, replay in enumerate(replays):
            got = replay.items[number].materialize_for_routing_replay("forward")
            rows = ids[number][0][:, LAYOUT.moe_layer_ids.index((2, 5)[column])]
            assert np.array_equal(got[: len(rows)], rows)
    assert not routing._rows
    routing.close()
    with pytest.raises(InvalidArgument, match="1 routers; expected 2"):
        routing.fill(replays[:1])
    with pytest.raises(InvalidArgument, match="release_stage"):
        routing.begin_pass("record")


def test_slime_lazily_refuses_missing_rows():
    samples = [Sample.of("r", 9), Sample(6, (Segment("s", 0, 3), Segment("s", 4, 5)))]
    plan = FetchPlan.make(LAYOUT, slime.micro_batch(samples, 4), Rank((2, 5)))
    ids = [rows_of(LAYOUT, 8), rows_of(LAYOUT, 5)]
    replay = Replay()
    routing = slime.LazyRouting(Client({id(plan): ids}), [plan])
    routing.fill([replay, Replay()])
    with pytest.raises(
        Incomplete, match="2 cells are missing, the first at position 3 of sample 1"
    ):
        replay.pop("forward")
    routing = slime.LazyRouting(Client({id(plan): ids}, missing=0.9), [plan])
    with pytest.raises(Incomplete, match="slime cannot mark missing rows"):
        routing.take(0, 0, "forward")


@pytest.fixture
def server():
    server = ScriptedServer()
    yield server
    server.stop()


def test_slime_lazily_from_a_server(server: ScriptedServer):
    source = truth(20)
    server.serve(source)
    plans = [
        FetchPlan.make(LAYOUT, slime.micro_batch([Sample.of("req", 21)], 8), Rank((2, 5)))
        for _ in range(2)
    ]
    with RouteClient(server.target) as client:
        routing = slime.LazyRouting(client, plans)
        replays = [Replay(), Replay()]
        routing.fill(replays)
        tokens = [[(0, p) for p in range(21)] + [(-1, -1)] * 3] * 2
        check_pass(None, LAYOUT, plans, tokens, [[source.ids]] * 2, replays, ["forward"])
        routing.close()
    asked = [message for name, message in server.requests if name == "GetTrace"]
    assert all(list(message.layer_ids) == [2, 5] for message in asked)
