"""Plans of samples without ids: the rows of the requests that have their tokens."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import (
    AsyncRouteClient,
    DeadlineExceeded,
    FetchPlan,
    Incomplete,
    Located,
    MicroBatch,
    MissingReason,
    Rank,
    RouteClient,
    Sample,
)
from routetrace.server.testing import run_server
from support.servers.client_server import LAYOUT, rows_of
from support.waiting import wait_for

WHOLE = Rank(LAYOUT.layer_ids, flatten="batch")
PROMPT = 40


@pytest.fixture(scope="module")
def target():
    with run_server() as server:
        yield server.target


class Requests:
    """Requests of one run, with random tokens and rows."""

    def __init__(self, target: str, run: str) -> None:
        self.target, self.run = target, run
        config = AgentConfig(
            target=target, run=run, engine_id="e", layout=LAYOUT, background="thread"
        )
        self.agent = CaptureAgent(config)
        self.tokens: dict[str, np.ndarray] = {}
        self.rows: dict[str, np.ndarray] = {}
        self._handles: dict[str, Any] = {}

    def begin(self, name: str, tokens: np.ndarray) -> None:
        self.tokens[name] = tokens
        self.rows[name] = rows_of(LAYOUT, len(tokens) - 1, len(self.rows))
        handle = self.agent.begin(name, prompt_token_ids=tokens[:PROMPT])
        self.agent.step(self.rows[name], [(handle, 0, len(tokens) - 1)])
        self._handles[name] = handle

    def end(self, name: str) -> None:
        tokens = self.tokens[name]
        self.agent.finish(self._handles[name], len(tokens), token_ids=tokens)
        assert self.agent.flush(30)

    def add(self, name: str, tokens: np.ndarray) -> None:
        self.begin(name, tokens)
        self.end(name)


@pytest.fixture
def requests(target, request):
    made = Requests(target, request.node.name[:60])
    with made.agent:
        yield made


@pytest.fixture
def client(requests):
    with RouteClient(requests.target, run=requests.run) as client:
        yield client


def random_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, count)


def by_tokens(*sequences: np.ndarray) -> FetchPlan:
    samples = [Sample.of(token_ids=ids) for ids in sequences]
    return FetchPlan.make(LAYOUT, MicroBatch.packed(samples), WHOLE)


def check_rows(rows, requests: Requests, names: list[str | None], stops: list[int]) -> None:
    """Check that each sample has the first rows of a request, and no others."""
    for sample, (name, stop) in enumerate(zip(names, stops, strict=True)):
        places = np.flatnonzero(rows.plan.sample_of == sample)
        valid = rows.valid[:, places]
        assert valid[:, :stop].all()
        assert not valid[:, stop:].any()
        if name is not None:
            found = rows.topk_ids[:, places[:stop]].transpose(1, 0, 2)
            assert np.array_equal(found, requests.rows[name][:stop])


def test_samples_get_the_rows_of_the_requests_with_their_tokens(requests, client):
    for seed, name in enumerate("abc"):
        requests.add(name, random_tokens(seed, 150))
    tokens = requests.tokens
    plan = by_tokens(
        tokens["b"],
        tokens["a"][:128],  # cut at a digest
        tokens["c"][:140],  # cut behind one
        np.concatenate([tokens["a"], random_tokens(9, 20)]),  # with a tool's answer behind it
    )
    rows = client.fetch(plan, missing="mask")
    check_rows(rows, requests, ["b", "a", "c", "a"], [149, 127, 128, 149])
    assert [each and each.trace_id for each in rows.plan.locations] == ["b", "a", "c", "a"]
    assert rows.missing[0][0] == 2
    assert rows.missing[0][1].reason is MissingReason.NOT_PROVEN
    assert [(sample, m.start, m.stop) for sample, m in rows.missing] == [
        (2, 128, 139),
        (3, 149, 169),
    ]
    assert rows.coverage == (149 + 127 + 128 + 149) / (149 + 127 + 139 + 169)
    assert (rows.stats.samples_found, rows.stats.samples_not_found) == (4, 0)


def test_the_same_plan_by_ids_gives_the_same_rows(requests, client):
    names = [f"r{i}" for i in range(40)]  # more than one call reads
    for seed, name in enumerate(names):
        requests.add(name, random_tokens(seed, 60 + seed))
    layout = MicroBatch.padded(
        [Sample.of(name, token_ids=requests.tokens[name]) for name in names],
        100,
        padding_side="left",
    )
    by_id = client.fetch(FetchPlan.make(LAYOUT, layout, WHOLE))
    ids = np.zeros((40, 100), int)
    mask = np.zeros((40, 100), bool)
    for row, name in enumerate(names):
        ids[row, 100 - len(requests.tokens[name]) :] = requests.tokens[name]
        mask[row, 100 - len(requests.tokens[name]) :] = True
    plan = FetchPlan.make(LAYOUT, MicroBatch.from_mask(ids, mask), WHOLE)
    with client.prefetch([plan, plan], concurrency=2) as fetched:
        for rows in (client.fetch(plan), client.fetch(plan, concurrency=4), *fetched):
            assert rows.coverage == 1
            assert np.array_equal(rows.valid, by_id.valid)
            assert np.array_equal(rows.topk_ids[rows.valid], by_id.topk_ids[by_id.valid])
            assert all(rows.verified)


async def test_asyncio_finds_them_as_well(requests):
    requests.add("a", random_tokens(1, 90))
    async with AsyncRouteClient(requests.target, run=requests.run) as client:
        rows = await client.fetch(by_tokens(requests.tokens["a"]))
        assert (await client.locate([requests.tokens["a"]])) == [Located("a", 1, 90, 90)]
    check_rows(rows, requests, ["a"], [89])


def test_rows_that_are_not_proven_are_missing(requests, client):
    requests.add("a", random_tokens(1, 90))
    plan = by_tokens(requests.tokens["a"], random_tokens(2, 30))
    with pytest.raises(Incomplete, match=r"samples\[1\] of 30 tokens: positions \[0, 29\)"):
        client.fetch(plan)
    with client.prefetch([plan]) as fetched, pytest.raises(Incomplete):
        next(fetched)
    rows = client.fetch(plan, missing="mask")
    check_rows(rows, requests, ["a", None], [89, 0])
    assert rows.stats.samples_not_found == 1
    located = plan.with_locations(client.locate(plan.sequences))
    with pytest.raises(Incomplete):
        client.fetch(located)
    check_rows(client.fetch(located, missing="mask"), requests, ["a", None], [89, 0])


def test_equal_samples_are_ambiguous_unless_the_caller_says_which(requests, client):
    same = random_tokens(1, 45)
    for name in "abc":
        requests.add(name, same)
    plan = by_tokens(same, same, same)
    with pytest.raises(Incomplete, match="several requests have its tokens, or may have them"):
        client.fetch(plan)
    rows = client.fetch(plan, missing="mask")
    assert not rows.valid.any()
    assert {m.reason for _, m in rows.missing} == {MissingReason.AMBIGUOUS}
    assert rows.stats.samples_ambiguous == 3
    each = client.locate(plan.sequences, equal="any")
    assert each.any_of_several == (0, 1, 2)
    rows = client.fetch(plan.with_locations(each))
    check_rows(rows, requests, ["c", "b", "a"], [44, 44, 44])
    assert rows.stats.samples_of_several == 3
    chosen = client.locate([same, same], indexes=[2, 3])
    assert [each and each.trace_id for each in chosen] == ["c", None]


def test_a_fetch_waits_for_requests_that_have_not_ended(requests, client):
    requests.begin("late", random_tokens(3, 100))
    assert requests.agent.flush(30)
    plan = by_tokens(requests.tokens["late"])
    with pytest.raises(DeadlineExceeded, match=r"samples\[0\] of 100 tokens"):
        client.fetch(plan, wait_for="end", timeout=0.3)
    found: list[Any] = []
    reader = threading.Thread(
        target=lambda: found.append(client.fetch(plan, wait_for="end", timeout=60))
    )
    reader.start()
    wait_for(lambda: client.locate(plan.sequences).unsettled == (0,))
    requests.end("late")
    reader.join(60)
    check_rows(found[0], requests, ["late"], [99])


def test_all_ranks_of_a_plan_mean_the_same_requests(requests, client):
    same = random_tokens(5, 50)
    for name in "ab":
        requests.add(name, same)
    samples = [Sample.of(token_ids=same), Sample.of(token_ids=same)]
    batch = MicroBatch.packed(samples, align=4)
    found = []
    for number in range(2):
        rank = Rank(LAYOUT.layer_ids, cp_size=2, cp_rank=number, cp_layout="ulysses")
        plan = FetchPlan.make(LAYOUT, batch, rank)
        located = client.locate(plan.sequences, equal="any")
        rows = client.fetch(plan.with_locations(located))
        found.append([facts.trace_id for facts in rows.reads])
    assert found == [["b"], ["a"]]
