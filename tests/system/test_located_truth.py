"""`locate` finds the requests that a model written from docs/rows.md alone finds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.located import AMBIGUOUS, NOT_FOUND, Found, Tokens
from routetrace.client import AsyncRouteClient
from routetrace.server.testing import ServerProcess, free_ports, run_server
from support.agents.located import LONG, SHARDS, Drawn, Place
from support.seeds import seeds

WORKERS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server() as process:
        yield process


@pytest.fixture(params=["model", "server"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A run of the model alone, and the same on a server."""
    server = request.getfixturevalue("server") if request.param == "server" else None
    with ExitStack() as stack:
        yield Place(server and server.target, stack, [*SHARDS])


def answers_to(prompt: int, *lengths: int) -> list[Tokens]:
    """Answers to one prompt that differ from their first token on."""
    return [
        (*range(prompt), *range(1000 * (i + 1), 1000 * (i + 1) + n - prompt))
        for i, n in enumerate(lengths)
    ]


def test_whole_answers_and_ones_that_go_on(place: Place) -> None:
    first, second, unknown = answers_to(40, 60, 90, 60)
    place.whole(first, 40, "t1")
    place.whole(second, 40, "t2", engine="two")
    asked = [first, second, (*second, 7), second[:64], second[:66], unknown, first[:40], first[:50]]
    found = Found("t2", 1, 90, 90, 1)
    assert place.locate(asked) == [
        ("t1", 1, 60, 60, 1), found, found, found._replace(proven=64), found._replace(proven=64),
        NOT_FOUND, NOT_FOUND, NOT_FOUND,
    ]  # fmt: skip


def test_an_aborted_answer_that_was_cut(place: Place) -> None:
    [tokens] = answers_to(10, 50)
    place.whole(tokens, 10, "t", "abort")
    assert place.locate([tokens[:n] for n in (50, 49, 30, 11, 10)]) == [
        *(("t", 1, 50, n, 1) for n in (50, 49, 30, 11)),
        NOT_FOUND,
    ]


def test_equal_answers_by_label_by_index_and_by_turn(place: Place) -> None:
    tokens, other = answers_to(10, 20, 20)
    for i in range(3):
        place.whole(tokens, 10, f"t{i}", labels={"sample": str(i), "group": "g"})
    each = [Found(f"t{i}", 1, 20, 20, 3) for i in range(3)]
    assert place.locate([tokens, other]) == [AMBIGUOUS, NOT_FOUND]
    assert place.locate([tokens], labels={"sample": "1"}) == [each[1]._replace(num_equal=1)]
    labels = [{"sample": "2", "group": "g"}, {"sample": "2", "group": "h"}, None]
    assert place.locate([tokens] * 3, labels=labels) == [
        each[2]._replace(num_equal=1), NOT_FOUND, AMBIGUOUS,
    ]  # fmt: skip
    assert place.locate([tokens] * 3, indexes=[2, None, 3]) == [each[2], AMBIGUOUS, NOT_FOUND]
    asked = [tokens, other, *[tokens] * 3]
    assert place.locate(asked, equal="any") == [each[2], NOT_FOUND, each[1], each[0], each[2]]


def test_weight_versions(place: Place) -> None:
    [tokens] = answers_to(10, 20)
    for first, last in ((None, None), (1, 1), (1, 3), (2, 2)):
        place.version = first
        one = place.begin(tokens, 10, f"t{last}")
        place.version = last
        place.end(one)
    assert [place.locate([tokens], weight_versions=v) for v in ([0], [1, 4], [2, 3])] == [
        [NOT_FOUND], [("t1", 1, 20, 20, 1)], [AMBIGUOUS],
    ]  # fmt: skip


@pytest.mark.parametrize("length", [75, 60])
def test_a_cut_answer_and_a_sibling_that_may_have_sampled_it(place: Place, length: int) -> None:
    """One that still runs, or has ended with enough tokens and no digest that differs."""
    first, second = answers_to(10, 90, length)
    place.whole(first, 10, "t1")
    assert place.locate([first[:70]]) == [("t1", 1, 90, 64, 1)]
    running = place.begin(second, 10, "t2")
    assert place.locate([first[:70], first], equal="any") == [AMBIGUOUS, ("t1", 1, 90, 90, 1)]
    place.end(running)  # it differs at 64, or has fewer tokens
    assert place.locate([first[:70]]) == [("t1", 1, 90, 64, 1)]
    place.whole(first[:64] + second[64:80], 10, "t3", "handoff")
    assert place.locate([first[:70]]) == [AMBIGUOUS if length == 75 else ("t1", 1, 90, 64, 1)]


def test_adapters(place: Place) -> None:
    tokens, other = answers_to(10, 30, 30)
    place.whole(tokens, 10, "plain")
    place.whole(other, 10, "lora", labels={"adapter": "a"})
    place.whole(other, 10, "both", labels={"adapter": "a", "kv_cache_dtype": "fp8"})
    lora, both = Found("lora", 1, 30, 30, 1), Found("both", 1, 30, 30, 1)
    assert place.locate([tokens, other]) == [("plain", 1, 30, 30, 1), AMBIGUOUS]
    assert place.locate([tokens, other], labels={"adapter": "a"}) == [NOT_FOUND, lora]
    assert place.locate([other], labels={"adapter": "a", "kv_cache_dtype": "fp8"}) == [both]
    assert place.locate([other], labels={"kv_cache_dtype": "fp8"}) == [NOT_FOUND]


def test_turns_of_a_trace_another_run_and_a_deleted_trace(place: Place) -> None:
    [first] = answers_to(10, 30)
    second = (*first, *range(6))  # a digest of it is where the first one ended
    place.whole(first, 10, "t")
    place.whole(second, 32, "t")
    turns = [Found("t", 1, 30, 30, 1), Found("t", 2, 36, 36, 1)]
    assert place.locate([first, second]) == turns
    other = Place(place.target, place.stack)
    other.whole(first, 10, "mine")
    assert other.locate([first, second]) == [("mine", 1, 30, 30, 1)] * 2
    assert place.locate([first, second]) == turns
    place.delete("t")
    place.whole(second, 32, "t")
    assert place.locate([first, second]) == [NOT_FOUND, ("t", 1, 36, 36, 1)]


def test_what_follows_from_another_request_of_the_trace(place: Place) -> None:
    """The cut answer stands in a prompt, whose digest at its end names a position of both."""
    [first] = answers_to(10, 90)
    place.whole(first, 10, "t", "length")
    place.whole((*first[:50], 7, 8), 50, "t")
    assert place.locate([first[:50]]) == [NOT_FOUND]  # they share no digest behind it
    place.whole((*first, 7, 8), 91, "t")
    place.whole((*first[:64], 5), 50, "t")
    assert place.locate([first[:50]]) == [("t", 1, 90, 50, 1)]


def test_bound_requests_of_the_same_passes(server: ServerProcess) -> None:
    """The model leaves them out."""
    [tokens] = answers_to(10, 40)
    with ExitStack() as stack:
        place = Place(server.target, stack, [])
        config = {"block_size": 16, "num_blocks": 8}
        [agent] = map(stack.enter_context, place.shards("e0", **config))
        rows = place.numbers.random((39, 2, 64)).argsort(axis=2)[:, :, :2].astype(np.uint8)
        agent.step_slots(rows, np.arange(39))
        assert agent.flush(LONG)
        for name in ("b1", "b2"):
            place.client.bind("e0", name, [0, 1, 2], 40, token_ids=tokens, prompt_len=10)
            np.testing.assert_array_equal(place.client.get(name).topk_ids, rows)
        [found] = place.client.locate([tokens])
        assert (found.trace_id, found.incarnation, found.proven) == ("b1", 1, 40)


def test_more_traces_with_a_prompt_than_are_looked_at(server: ServerProcess) -> None:
    """None of the others is as long as the cut answer; the model has no limit."""
    [first, *others] = answers_to(10, 90, *[12] * 256)
    with ExitStack() as stack:
        place = Place(server.target, stack)
        place.whole(first, 10, "t")
        [agent] = place.agents["e0"]
        for part, expected in (
            (others[:255], ("t", 1, 90, 64, 1)),
            (others[255:], AMBIGUOUS),
        ):
            for tokens in part:
                handle = agent.begin(f"with {tokens[-1]}", prompt_token_ids=tokens[:10])
                agent.finish(handle, len(tokens), token_ids=tokens)
            assert agent.flush(LONG)
            found = place.client.locate([first[:70], first])
            assert place.answers(found) == [expected, ("t", 1, 90, 90, 1)]


def test_more_adapters_than_are_tried(server: ServerProcess) -> None:
    """The first of them is found by its label; the model has no limit."""
    answers = answers_to(10, *[20] * 17)
    with ExitStack() as stack:
        place = Place(server.target, stack)
        for i, tokens in enumerate(answers):
            place.whole(tokens, 10, f"t{i}", labels={"adapter": f"a{i}"})
        of_all = [NOT_FOUND, *(Found(f"t{i}", 1, 20, 20, 1) for i in range(1, 17))]
        assert place.answers(place.client.locate(answers)) == of_all
        assert place.locate(answers[:1], labels={"adapter": "a0"}) == [("t0", 1, 20, 20, 1)]


def test_asyncio(server: ServerProcess) -> None:
    tokens, other = answers_to(10, 30, 30)

    async def locate(place: Place) -> Any:
        async with AsyncRouteClient(server.target, run=place.run) as client:
            return await client.locate([tokens, other], labels=[None, {"a": "b"}])

    with ExitStack() as stack:
        place = Place(server.target, stack)
        place.whole(tokens, 10, "t")
        found = asyncio.run(locate(place))
    assert Place.answers(found) == [("t", 1, 30, 30, 1), NOT_FOUND]


def serve(data_dir: Path, port: int, *, spread: bool) -> ServerProcess:
    several = {"workers": WORKERS, "spread_runs": '["*"]'} if spread else {}
    return run_server(data_dir=data_dir, port=port, **several)


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(1, 6))
@pytest.mark.parametrize("spread", [False, True], ids=["alone", "spread"])
def test_drawn_runs_are_answered_as_by_the_model(tmp_path: Path, first: int, spread: bool) -> None:
    """Before a restart of the server and after it."""
    port, worlds = free_ports(WORKERS), 2 if spread else 6
    with ExitStack() as servers, ExitStack() as agents:
        server = servers.enter_context(serve(tmp_path, port, spread=spread))
        drawn = [Drawn(server.target, agents, worlds * first + i) for i in range(worlds)]
        before = [one.locate() for one in drawn]
        servers.close()
        servers.enter_context(serve(tmp_path, port, spread=spread))
        assert [one.locate() for one in drawn] == before


def test_drawn_runs_have_all_kinds_of_answers() -> None:
    """The model alone: what the test above draws is found, ambiguous and unknown often enough."""
    kinds: Counter[str] = Counter()
    for seed in range(6):
        for answers in Drawn(None, ExitStack(), seed).locate():
            for one in answers:
                found = isinstance(one, Found)
                kinds[one if not found else "one" if one.num_equal == 1 else "equal"] += 1
                kinds["cut"] += found and one.proven < one.num_tokens
    assert min(kinds.values()) > 50, kinds
    assert len(kinds) == 5
