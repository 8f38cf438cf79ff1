"""The rows of a data-parallel rank: every layout, against what the ranks have by construction."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent.engines.parallel import local_rows
from routetrace.common.errors import InvalidArgument
from support.ranks.gloo_ranks import all_gather_rows, run_ranks

CONCATENATED, LOCAL, GATHERED_SHARDS, SHARD = "all ranks", "own", "gathered shards", "own shard"
LAYOUTS = (CONCATENATED, LOCAL, GATHERED_SHARDS, SHARD)
K = 3


class World(NamedTuple):
    """Data-parallel ranks with `tokens` each, of tp_size tensor-parallel ranks."""

    tokens: list[int]
    tp_size: int

    def rows(self, dp_rank: int) -> torch.Tensor:
        """Return ids that name rank and token."""
        ids = torch.arange(self.tokens[dp_rank] * K).reshape(-1, K)
        return ids + 1000 * (dp_rank + 1)

    def shards(self, dp_rank: int) -> list[torch.Tensor]:
        """The same in equal parts, with padding that chose something, too."""
        size = -(-self.tokens[dp_rank] // self.tp_size)
        padded = torch.full((size * self.tp_size, K), 999)
        padded[: self.tokens[dp_rank]] = self.rows(dp_rank)
        return list(padded.reshape(self.tp_size, size, K))

    def seen(self, layout: str, dp_rank: int, tp_rank: int) -> torch.Tensor:
        """Return the input of a router."""
        ranks = range(len(self.tokens))
        if layout == CONCATENATED:
            return torch.cat([self.rows(rank) for rank in ranks])
        if layout == LOCAL:
            return self.rows(dp_rank)
        if layout == SHARD:
            return self.shards(dp_rank)[tp_rank]
        return torch.cat([shard for rank in ranks for shard in self.shards(rank)])

    @property
    def shard_sizes(self) -> list[int]:
        return [len(shard) for rank in range(len(self.tokens)) for shard in self.shards(rank)]


@settings(max_examples=400)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 7, 8]), min_size=1, max_size=4),
    tp_size=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_every_layout_gives_a_rank_its_own_rows(
    tokens: list[int], tp_size: int, layout: str, data: st.DataObject
) -> None:
    world = World(tokens, tp_size)
    dp_rank = data.draw(st.integers(0, len(tokens) - 1))
    # What an engine says beyond what the layout needs.
    knows_sizes = layout == GATHERED_SHARDS or data.draw(st.booleans())
    can_gather = layout == SHARD or data.draw(st.booleans())
    as_tensor = data.draw(st.booleans())
    gathers = []
    for tp_rank in range(tp_size):
        calls = []

        def all_gather(rows: torch.Tensor, tp_rank: int = tp_rank, calls: list = calls):
            parts = [world.seen(layout, dp_rank, rank) for rank in range(tp_size)]
            assert torch.equal(rows, parts[tp_rank])
            calls.append(len(rows))
            return torch.cat(parts)

        rows = local_rows(
            world.seen(layout, dp_rank, tp_rank),
            torch.tensor(tokens) if as_tensor else tokens,
            dp_rank,
            tp_size=tp_size,
            shard_sizes=world.shard_sizes if knows_sizes else None,
            all_gather=all_gather if can_gather else None,
        )
        assert torch.equal(rows, world.rows(dp_rank))
        gathers.append(calls)
    # A collective that some ranks do not come to never ends.
    assert all(calls == gathers[0] for calls in gathers)
    assert not gathers[0] or tokens[dp_rank] == 1 or layout == SHARD


def test_without_data_parallelism_all_rows_are_taken() -> None:
    rows = torch.arange(12).reshape(4, 3)
    assert local_rows(rows, None, 0) is rows


def test_sizes_of_no_layout_are_refused_by_name() -> None:
    world = World([5, 3], 2)
    fitting = {8, 3, 10, 2}
    for n in range(13):
        rows = torch.zeros((n, K), dtype=torch.int64)

        def call(rows: torch.Tensor = rows) -> torch.Tensor:
            return local_rows(
                rows,
                world.tokens,
                1,
                tp_size=2,
                shard_sizes=world.shard_sizes,
                all_gather=lambda shard: torch.cat([shard, shard]),
            )

        if n in fitting:
            assert len(call()) == 3
            continue
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert (caught.value.field, caught.value.value) == ("topk_ids", f"{n} rows")
        for size, name in ((8, CONCATENATED), (3, LOCAL), (10, GATHERED_SHARDS), (2, SHARD)):
            assert f"{size} ({name})" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "n", "arguments"),
    [
        # Without a gather a shard is none of the sizes; nor are gathered shards of unknown sizes.
        ("topk_ids", 2, {}),
        ("topk_ids", 10, {"shard_sizes": None}),
        # Shards of another split, as context parallelism makes them.
        ("shard_sizes", 16, {"shard_sizes": [5, 5, 3, 3]}),
        ("shard_sizes", 10, {"tp_size": 1}),
        ("all_gather", 2, {"all_gather": lambda shard: shard}),
        ("dp_rank", 8, {"dp_rank": 2}),
        ("dp_rank", 8, {"dp_rank": -1}),
    ],
)
def test_what_contradicts_itself_is_refused(field: str, n: int, arguments: dict) -> None:
    world = World([5, 3], 2)
    defaults = {"dp_rank": 1, "tp_size": 2, "shard_sizes": world.shard_sizes}
    with pytest.raises(InvalidArgument) as caught:
        local_rows(torch.zeros((n, K)), world.tokens, **{**defaults, **arguments})
    assert caught.value.field == field


# ---------------------------------------------------------------------- processes


def compare_layouts(rank: int, dp_size: int, tp_size: int, steps: list[list[int]]) -> int:
    """A router per process, fed as the layouts say; returns how many rows were compared."""
    dp_rank, tp_rank = divmod(rank, tp_size)
    tp_groups = [dist.new_group([d * tp_size + t for t in range(tp_size)]) for d in range(dp_size)]
    dp_groups = [dist.new_group([d * tp_size + t for d in range(dp_size)]) for t in range(tp_size)]
    gate = torch.randn(8, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    compared = 0

    def tp_gather(rows: torch.Tensor) -> torch.Tensor:
        return all_gather_rows(rows, tp_groups[dp_rank], [len(rows)] * tp_size)

    for step, tokens in enumerate(steps):
        own, shard = tokens[dp_rank], -(-tokens[dp_rank] // tp_size)
        seed = torch.Generator().manual_seed(100 * step + dp_rank)
        hidden = torch.randn(own, 8, generator=seed, dtype=torch.float64)
        padded = torch.cat([hidden, torch.ones(shard * tp_size - own, 8, dtype=torch.float64)])
        part = padded[tp_rank * shard :][:shard]
        sizes = [-(-count // tp_size) for count in tokens for _ in range(tp_size)]
        inputs = {
            CONCATENATED: all_gather_rows(hidden, dp_groups[tp_rank], tokens),
            LOCAL: hidden,
            GATHERED_SHARDS: all_gather_rows(part, None, sizes),
            SHARD: part,
        }
        expected = (hidden @ gate).topk(K).indices
        for layout, x in inputs.items():
            sharded = layout in (GATHERED_SHARDS, SHARD)
            rows = local_rows(
                (x @ gate).topk(K).indices,
                tokens,
                dp_rank,
                tp_size=tp_size,
                shard_sizes=sizes if layout == GATHERED_SHARDS else None,
                all_gather=tp_gather if sharded else None,
            )
            assert torch.equal(rows, expected), (layout, tokens, rank)
            compared += len(rows)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp_size", "tp_size", "steps"),
    [
        pytest.param(1, 2, [[5], [8], [1], [2]], marks=pytest.mark.long),
        (2, 2, [[5, 3], [8, 2], [1, 1], [1, 6], [7, 1]]),
    ],
)
def test_processes_that_gather_over_gloo_get_their_own_rows(
    dp_size: int, tp_size: int, steps: list[list[int]]
) -> None:
    compared = run_ranks(dp_size * tp_size, compare_layouts, dp_size, tp_size, steps)
    assert compared == [
        len(LAYOUTS) * sum(tokens[dp_rank] for tokens in steps)
        for dp_rank in range(dp_size)
        for _ in range(tp_size)
    ]
