"""Rollouts that were aborted, and go on from fewer tokens than the engine had sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.client import (
    FetchPlan,
    MicroBatch,
    MissingReason,
    Rank,
    RouteClient,
    Sample,
    TraceState,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 1), 2, 64, 2)
BLOCK, PROMPT, GOT, SAMPLED = 16, 40, 100, 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouteClient, dict]]:
    data: Path = tmp_path_factory.mktemp("data")
    with ExitStack() as stack:
        target = stack.enter_context(run_server(data_dir=data)).target
        client = stack.enter_context(RouteClient(target))
        shape = {"layout": LAYOUT, "block_size": BLOCK, "num_blocks": 32, "background": "thread"}
        yield (
            client,
            {
                name: stack.enter_context(CaptureAgent(target=target, engine_id=name, **shape))
                for name in ("same", "other")
            },
        )


def rows(count: int, seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).random((count, 2, 64)).argsort(axis=2)
    return order[:, :, :2].astype(np.uint8)


def cut_and_gone_on(
    agents: dict, engine: str, turn: int, more: int, lacking: int = 0
) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Abort a request, and go on at an engine, with `turn` tokens of the caller behind the cut.

    The last `lacking` rows of the first request are not computed.

    Returns:
        The trace id, the tokens of the second request, and the rows of both.
    """
    trace_id = f"{engine} {turn} {more}"
    old, new = rows(GOT + more - 1, 1), rows(GOT + turn + SAMPLED - 1, 2)
    tokens = np.random.default_rng(3).integers(0, 1 << 16, GOT + turn + SAMPLED)

    first = agents["same"]
    first.set_weight_version(1)
    facts = {"trace_id": trace_id, "block_ids": [*range(7)]}
    handle = first.begin("a", prompt_len=PROMPT, prompt_token_ids=tokens[:PROMPT], **facts)
    first.step(old[:PROMPT], [(handle, 0, PROMPT)])
    for position in range(PROMPT, len(old) - lacking):
        first.step(old[position : position + 1], [(handle, position, 1)])
    sampled = [*tokens[:GOT], *[7] * more]
    first.finish(handle, len(sampled), reason="abort", token_ids=sampled)
    assert first.flush()

    then, length = agents[engine], GOT + turn
    cached = (GOT - 1) // BLOCK * BLOCK if engine == "same" else 0
    facts = {"trace_id": trace_id, "num_computed_tokens": cached}
    facts["block_ids"] = [*range(cached // BLOCK), *range(10, 20)]
    then.set_weight_version(2)
    handle = then.begin("b", prompt_len=length, prompt_token_ids=tokens[:length], **facts)
    then.step(new[cached:length], [(handle, cached, length - cached)])
    for position in range(length, len(new)):
        then.step(new[position : position + 1], [(handle, position, 1)])
    then.finish(handle, len(tokens), token_ids=tokens)
    assert then.flush()
    return trace_id, tokens, old, new


def test_rows_that_an_abort_kept_from_a_turn_are_missing_with_that_reason(
    place: tuple[RouteClient, dict],
) -> None:
    client, agents = place
    trace_id, *_ = cut_and_gone_on(agents, "same", 31, 0, lacking=2)
    missing = client.get(trace_id, missing="mask").missing
    assert [(m.start, m.stop, m.reason) for m in missing] == [
        (GOT - 3, GOT - 1, MissingReason.ABORTED)
    ]


@pytest.mark.parametrize("more", [0, 1, 2, 3])
@pytest.mark.parametrize(("engine", "turn"), [("same", 0), ("other", 0), ("same", 30)])
def test_rows_of_all_tokens_that_the_caller_got_are_of_the_passes_that_sampled_them(
    place: tuple[RouteClient, dict], engine: str, turn: int, more: int
) -> None:
    """The caller goes on under new weights."""
    client, agents = place
    trace_id, _, old, new = cut_and_gone_on(agents, engine, turn, more)
    trace = client.get(trace_id)
    # The row at the last token that the caller got sampled what comes next, or nothing.
    cut = GOT - 1
    assert trace.state is TraceState.COMPLETE
    assert trace.weight_versions == ((0, cut, 1), (cut, len(new), 2))
    np.testing.assert_array_equal(trace.topk_ids, [*old[:cut], *new[cut:]])


@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_the_tokens_of_a_cut_answer_prove_its_rows_where_the_next_prompt_does_not(
    place: tuple[RouteClient, dict], more: int
) -> None:
    client, agents = place
    trace_id, tokens, old, new = cut_and_gone_on(agents, "other", 30, more)
    trace = client.get(trace_id, token_ids=tokens[:GOT])
    np.testing.assert_array_equal(trace.topk_ids[: GOT - 1], old[: GOT - 1])
    sample = Sample.of(trace_id, token_ids=tokens[:GOT])
    plan = FetchPlan.make(LAYOUT, MicroBatch.packed([sample]), Rank(LAYOUT.layer_ids))
    fetched = client.fetch(plan).topk_ids.transpose(1, 0, 2)
    np.testing.assert_array_equal(fetched[: GOT - 1], old[: GOT - 1])
    trace = client.get(trace_id, token_ids=tokens)
    np.testing.assert_array_equal(trace.topk_ids[GOT:], new[GOT:])
