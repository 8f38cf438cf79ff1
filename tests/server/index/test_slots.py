"""Which rows slots name, call by call: docs/rows.md, sections 1 to 3, over sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import RouteClient
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0,), 1, 500, 2)
RUNS = itertools.count()


@pytest.fixture(scope="module")
def server():
    with run_server() as process:
        yield process


class Engine:
    """An agent and a reader; each row that it computes is another one."""

    def __init__(self, target: str, block_size: int = 4) -> None:
        self.run = f"run{next(RUNS)}"
        self.agent = CaptureAgent(
            AgentConfig(
                target=target,
                run=self.run,
                engine_id="e",
                layout=LAYOUT,
                block_size=block_size,
                num_blocks=64,
                num_host_blocks=32,
                background="thread",
                linger_seconds=3600,
                flush_interval_seconds=0.01,
            )
        )
        self.client = RouteClient(target, run=self.run)
        self.num_rows = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()
        self.client.close()

    def step(self, *runs: tuple[int, int, int]) -> list[int]:
        """Compute rows; their numbers."""
        n = sum(count for _, _, count in runs)
        numbers = np.arange(self.num_rows, self.num_rows + n)
        self.num_rows += n
        rows = np.stack([numbers, numbers + 1], axis=1)[:, None]
        self.agent.step(rows, np.array(runs))
        return numbers.tolist()

    def blocks(self, first: int, num_tokens: int) -> list[int]:
        size = self.agent.config.block_size
        return list(range(first, first - -num_tokens // size))

    def rows(self, trace_id: str, incarnation: int | None = None) -> list[int | None]:
        assert self.agent.flush(30)
        return numbers(self.client.get(trace_id, incarnation=incarnation, missing="mask"))

    def in_blocks(self, blocks: list[int], num_tokens: int) -> list[int | None]:
        assert self.agent.flush(30)
        return numbers(self.client.get_blocks("e", blocks, num_tokens, missing="mask"))

    def hit(self, blocks: list[int], num_tokens: int, name: str = "hit") -> list[int | None]:
        """The rows that a request inherits which finds so many tokens in blocks."""
        prompt_len = num_tokens + 1
        handle = self.agent.begin(
            name,
            prompt_len=prompt_len,
            num_computed_tokens=num_tokens,
            block_ids=[*blocks, 63],
        )
        self.step((handle, num_tokens, 1))
        self.agent.finish(handle, num_tokens + 2)
        return self.rows(name)[:num_tokens]


def numbers(part) -> list[int | None]:
    """The numbers of rows; None: missing."""
    valid = part.valid[:, 0].tolist()
    return [n if v else None for n, v in zip(part.topk_ids[:, 0, 0].tolist(), valid, strict=True)]


@pytest.fixture(params=[1, 4])
def engine(server, request) -> Iterator[Engine]:
    with Engine(server.target, request.param) as engine:
        yield engine


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("late", ["step", "skip", "none"])
@pytest.mark.parametrize("reason", ["stop", "abort", "handoff", "preempt"])
def test_a_rejected_draft_is_no_row_of_whoever_hits_its_block(engine, reason, late, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 4)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    prompt = engine.step((a, 0, 2))
    token, _ = engine.step((a, 2, 2))
    if flushed:
        assert agent.flush(30)
    # The draft was rejected, and the request ends while the next step is under way.
    if reason == "preempt":
        agent.preempt(a, 3)
    else:
        agent.finish(a, 4, reason=reason)
    if late == "step":
        engine.step((a, 3, 1))
    elif late == "skip":
        agent.skip([(a, 3, 1)])
    assert engine.in_blocks(blocks, 4) == [*prompt, token, None]
    assert engine.hit(blocks, 4) == [*prompt, token, None]
    assert engine.rows("a")[:3] == [*prompt, token]


@pytest.mark.parametrize("late", ["step", "skip"])
@pytest.mark.parametrize("ends", ["finish", "preempt"])
@pytest.mark.parametrize("given", ["cached", "new", "another", "none"])
def test_a_late_row_forgets_its_slot_unless_the_block_is_new_since(engine, ends, late, given):
    """Whoever hits the block since gets the KV that the late pass wrote."""
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    rows = engine.step((a, 0, 8))
    agent.finish(a, 9) if ends == "finish" else agent.preempt(a, 8)
    nth = 5 // agent.config.block_size
    if given == "cached":
        agent.begin("c", prompt_len=9, num_computed_tokens=8, block_ids=[*blocks, 50])
    elif given == "new":
        agent.begin("c", prompt_len=9, block_ids=[blocks[nth]])
    elif given == "another":
        agent.add_blocks(agent.begin("c", prompt_len=9), [50])
    if late == "step":
        engine.step((a, 5, 1))
    else:
        agent.skip([(a, 5, 1)])
    expected: list[int | None] = [*rows]
    if given != "new":
        expected[5] = None
    else:
        size = agent.config.block_size
        expected[nth * size : (nth + 1) * size] = [None] * size
    assert engine.in_blocks(blocks, 8) == expected
    assert engine.hit(blocks, 8) == expected


def test_late_rows_of_requests_long_gone_forget_all_slots(server):
    with Engine(server.target) as engine:
        agent = engine.agent
        first = agent.begin("first", prompt_len=4, block_ids=[0])
        rows = engine.step((first, 0, 4))
        agent.finish(first, 5)
        for i in range(300):
            agent.finish(agent.begin(f"r{i}", block_ids=[1 + i % 50]), 1)
        assert engine.in_blocks([0], 4) == rows
        engine.step((first, 4, 1))
        assert engine.in_blocks([0], 4) == [None] * 4


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("by", ["step", "skip", "finish", "preempt"])
def test_drafts_are_in_no_slot_before_they_are_confirmed(engine, by, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    rows = engine.step((a, 0, 2))
    rows += engine.step((a, 2, 3))
    if flushed:
        bound = {"num_computed_tokens": 5, "step": 2}
        assert engine.in_blocks(blocks, 5) == [*rows[:3], None, None]
        engine.client.bind("e", "bound", blocks, 6, **bound)
        assert engine.rows("bound") == [*rows[:3], None, None]
        assert engine.hit(blocks, 5) == [*rows[:3], None, None]
    if by == "step":
        rows += engine.step((a, 5, 1))
    elif by == "skip":
        agent.skip([(a, 5, 1)])
    elif by == "finish":
        agent.finish(a, 6)
    else:
        agent.preempt(a, 5)
    assert engine.in_blocks(blocks, 5) == rows[:5]
    assert engine.hit(blocks, 5, "again") == rows[:5]
    if flushed:
        engine.client.bind("e", "bound", blocks, 6, **bound)
        assert engine.rows("bound") == rows[:5]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("by", ["begin", "add_blocks"])
def test_a_draft_is_not_confirmed_in_a_block_that_was_given_away(engine, by, flushed):
    """An engine allocates, and tells then whom it has preempted for it."""
    agent, blocks = engine.agent, engine.blocks(0, 4)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    engine.step((a, 0, 2))
    engine.step((a, 2, 2))
    if flushed:
        assert agent.flush(30)
    if by == "begin":
        agent.begin("b", prompt_len=4, block_ids=blocks)
    else:
        agent.add_blocks(agent.begin("b", prompt_len=4), blocks)
    agent.preempt(a, 4)
    assert engine.in_blocks(blocks, 4) == [None] * 4
    assert engine.hit(blocks, 4) == [None] * 4


def test_a_row_with_invalid_ids_leaves_no_other_row_in_its_slot(engine):
    """Two requests that share a block computed the position."""
    agent, blocks = engine.agent, engine.blocks(0, 4)
    a = agent.begin("a", prompt_len=4, block_ids=blocks)
    shared = [*blocks[:3], *engine.blocks(40, 1)][: len(blocks)]  # a block of one slot is not
    b = agent.begin("b", prompt_len=4, num_computed_tokens=3, block_ids=shared)
    rows = engine.step((a, 0, 3))
    engine.step((b, 3, 1))
    agent.step(np.full((1, 1, 2), LAYOUT.num_experts), np.array([(a, 3, 1)]))
    assert engine.in_blocks(blocks, 4) == [*rows, None]
    assert engine.hit(blocks, 4) == [*rows, None]


@pytest.mark.parametrize("slot_by_slot", [False, True])
def test_a_bound_request_has_no_rows_that_were_copied_in_after_its_last_step(engine, slot_by_slot):
    agent, blocks = engine.agent, engine.blocks(0, 4)
    loaded = engine.blocks(len(blocks), 4)
    rows = [np.array([[[i, i + 1]] for i in range(first, first + 4)]) for first in (10, 20, 30)]
    if slot_by_slot:
        agent.step_slots(rows[0], np.arange(4))
    else:
        handle = agent.begin("a", prompt_len=4, block_ids=blocks)
        agent.step(rows[0], [(handle, 0, 4)])
    agent.copy_blocks(blocks, host(blocks))
    step = agent.step_slots(rows[1], np.arange(4, 8))
    agent.copy_blocks(host(blocks), loaded)
    assert agent.flush(30)
    engine.client.bind("e", "bound", loaded, 5, step=step)
    assert engine.rows("bound") == [None] * 4
    then = agent.step_slots(rows[2], np.arange(8, 12))
    assert agent.flush(30)
    engine.client.bind("e", "loaded", loaded, 5, step=then)
    assert engine.rows("loaded") == [10, 11, 12, 13]


def test_a_draft_is_confirmed_in_the_step_in_which_somebody_hits_it(engine):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    rows = engine.step((a, 0, 2))
    rows += engine.step((a, 2, 2))
    assert agent.flush(30)
    hit = agent.begin(
        "hit", prompt_len=5, num_computed_tokens=4, block_ids=[*engine.blocks(0, 4), 60]
    )
    engine.step((hit, 4, 1), (a, 4, 1))
    assert engine.rows("hit")[:4] == rows


def test_blocks_that_come_before_the_first_rows_change_nothing(engine):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    b = agent.begin("b", prompt_len=9, num_computed_tokens=8, block_ids=blocks)
    agent.add_blocks(b, [60])
    rows = engine.step((b, 8, 1), (a, 0, 8))
    agent.finish(b, 10)
    assert engine.rows("b") == [*rows[1:], rows[0]]
    assert engine.in_blocks([60], 1) == rows[:1]


def test_requests_of_one_trace_may_share_what_one_step_computes(engine):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", trace_id="t", prompt_len=9, block_ids=[*blocks, 50])
    reused = {"trace_id": "t", "prompt_len": 9, "num_computed_tokens": 8}
    b = agent.begin("b", block_ids=[*blocks, 51], **reused)
    c = agent.begin("c", block_ids=[*blocks, 52], **reused)
    rows = engine.step((c, 8, 1), (b, 8, 1), (a, 0, 9))
    for handle in (a, b, c):
        agent.finish(handle, 10)
    assert [engine.rows("t", i) for i in (1, 2, 3)] == [
        rows[2:],
        [*rows[2:10], rows[1]],
        [*rows[2:10], rows[0]],
    ]


@pytest.mark.parametrize("cached", [5, 6, 7])
def test_cached_tokens_may_end_inside_a_block_that_the_same_step_writes(server, cached):
    with Engine(server.target) as engine:
        agent = engine.agent
        a = agent.begin("a", prompt_len=cached, block_ids=[0, 1])
        b = agent.begin("b", prompt_len=cached + 1, num_computed_tokens=cached, block_ids=[0, 1])
        rows = engine.step((b, cached, 1), (a, 0, cached))
        agent.finish(b, cached + 2)
        assert engine.rows("b") == [*rows[1:], rows[0]]


def test_cached_tokens_are_looked_up_with_the_first_rows_not_before(engine):
    """Slots loaded over in between hold no row."""
    agent, blocks = engine.agent, engine.blocks(0, 4)
    a = agent.begin("a", prompt_len=4, block_ids=blocks)
    engine.step((a, 0, 4))
    agent.finish(a, 5)
    b = agent.begin("b", prompt_len=5, num_computed_tokens=4, block_ids=[*blocks, 60])
    agent.mark_external(blocks)
    own = engine.step((b, 4, 1))
    agent.finish(b, 6)
    assert engine.rows("b") == [None, None, None, None, *own]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("how", ["external", "reset"])
def test_drafts_are_not_confirmed_over_what_was_loaded_since(engine, how, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    engine.step((a, 0, 2))
    engine.step((a, 2, 3))
    if flushed:
        assert agent.flush(30)
    agent.mark_external(blocks) if how == "external" else agent.reset_prefix_cache()
    after = engine.step((a, 5, 1))
    agent.finish(a, 7)
    assert engine.in_blocks(blocks, 6) == [None] * 5 + after


HOST = 64
"""The first host block."""


def host(blocks: list[int]) -> list[int]:
    return [HOST + i for i in range(len(blocks))]


@pytest.mark.parametrize("flushed", [False, True])
def test_kv_that_comes_back_from_the_host_tier_names_the_pass_that_made_it(engine, flushed):
    """Also where its blocks were given to others, the cache was cleared and the weights are new."""
    agent, blocks = engine.agent, engine.blocks(0, 8)
    agent.set_weight_version(1)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    rows = engine.step((a, 0, 8))
    agent.finish(a, 9)
    agent.copy_blocks(blocks, host(blocks))
    if flushed:
        assert agent.flush(30)
    agent.set_weight_version(2)
    agent.reset_prefix_cache()
    other = agent.begin("other", prompt_len=8, block_ids=blocks)
    engine.step((other, 0, 8))
    agent.finish(other, 9)
    loaded = engine.blocks(30, 8)
    agent.copy_blocks(host(blocks), loaded)
    assert engine.hit(loaded, 8) == rows
    trace = engine.client.get("hit", missing="mask")
    assert [tuple(span) for span in trace.provenance] == [(0, 8, "slot"), (8, 9, "forward")]
    assert [tuple(span)[:3] for span in trace.weight_versions] == [(0, 8, 1), (8, 9, 2)]
    assert engine.in_blocks(host(blocks), 8) == rows


def test_a_host_block_that_is_used_again_names_what_it_holds_now(engine, caplog):
    agent, blocks = engine.agent, engine.blocks(0, 4)
    for name in ("a", "b"):
        handle = agent.begin(name, prompt_len=4, block_ids=blocks)
        rows = engine.step((handle, 0, 4))
        agent.finish(handle, 5)
        assert agent.flush(30)
        agent.copy_blocks(blocks, host(blocks))  # in a chunk of its own
        assert agent.flush(30)
    agent.copy_blocks(host(blocks), engine.blocks(30, 4))
    assert engine.hit(engine.blocks(30, 4), 4) == rows
    agent.mark_external(host(blocks))
    assert engine.in_blocks(host(blocks), 4) == [None] * 4
    assert engine.in_blocks(engine.blocks(30, 4), 4) == rows
    assert not caplog.records


def test_all_sources_are_read_before_a_target_is_written(engine):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    rows = engine.step((a, 0, 7))
    agent.finish(a, 8)
    half = len(blocks) // 2
    agent.copy_blocks(blocks, [*blocks[half:], *blocks[:half]])
    assert engine.in_blocks(blocks, 8) == [*rows[4:], None, *rows[:4]]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_copy_of_an_unconfirmed_draft_stays_unknown(engine, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    rows = engine.step((a, 0, 2))
    rows += engine.step((a, 2, 3))
    if flushed:
        assert agent.flush(30)
    agent.copy_blocks(blocks, host(blocks))
    rows += engine.step((a, 5, 1))
    assert engine.in_blocks(blocks, 6) == rows
    assert engine.in_blocks(host(blocks), 6) == [*rows[:3], None, None, None]


@pytest.mark.parametrize("flushed", [False, True])
def test_rows_that_are_rejected_after_a_copy_stay_in_it(engine, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    rows = engine.step((a, 0, 8))
    if flushed:
        assert agent.flush(30)
    agent.copy_blocks(blocks, host(blocks))
    again = engine.step((a, 5, 3))
    assert engine.in_blocks(blocks, 8) == [*rows[:5], *again]
    assert engine.in_blocks(host(blocks), 8) == rows


@pytest.mark.parametrize("flushed", [False, True])
def test_drafts_are_not_confirmed_over_what_was_copied_into_their_block(engine, flushed):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    other = agent.begin("other", prompt_len=8, block_ids=engine.blocks(20, 8))
    before = engine.step((other, 0, 8))
    a = agent.begin("a", prompt_len=2, block_ids=blocks)
    engine.step((a, 0, 2))
    engine.step((a, 2, 3))
    if flushed:
        assert agent.flush(30)
    agent.copy_blocks(engine.blocks(20, 8), blocks)
    after = engine.step((a, 5, 1))
    agent.finish(a, 7)
    assert engine.in_blocks(blocks, 6) == before[:5] + after


def test_a_request_inherits_what_was_copied_after_its_begin(engine):
    agent, blocks = engine.agent, engine.blocks(0, 4)
    a = agent.begin("a", prompt_len=4, block_ids=blocks)
    rows = engine.step((a, 0, 4))
    agent.finish(a, 5)
    loaded = engine.blocks(30, 4)
    b = agent.begin("b", prompt_len=5, num_computed_tokens=4, block_ids=[*loaded, 60])
    agent.copy_blocks(blocks, loaded)
    own = engine.step((b, 4, 1))
    agent.finish(b, 6)
    assert engine.rows("b") == [*rows, *own]


@pytest.mark.parametrize("ends", ["finish", "preempt"])
@pytest.mark.parametrize("late", ["step", "skip"])
def test_a_late_row_whose_block_was_copied_forgets_all_slots(engine, late, ends):
    """The copy may be of what the late pass wrote; others were copied from it since."""
    agent, blocks = engine.agent, engine.blocks(0, 8)
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    rows = engine.step((a, 0, 8))
    agent.finish(a, 9) if ends == "finish" else agent.preempt(a, 8)
    agent.copy_blocks(blocks, host(blocks))
    agent.copy_blocks(host(blocks), engine.blocks(30, 8))
    assert engine.in_blocks(engine.blocks(30, 8), 8) == rows
    b = agent.begin("b", prompt_len=9, num_computed_tokens=8, block_ids=[*engine.blocks(30, 8), 60])
    if late == "step":
        engine.step((a, 5, 1), (b, 8, 1))
    else:
        agent.skip([(a, 5, 1), (b, 8, 1)])
    for places in (blocks, host(blocks), engine.blocks(30, 8)):
        assert engine.in_blocks(places, 8) == [None] * 8
    assert engine.rows("b")[:8] == [None] * 8


def test_a_late_row_leaves_what_was_copied_into_its_block_since(engine):
    agent, blocks = engine.agent, engine.blocks(0, 8)
    other = agent.begin("other", prompt_len=8, block_ids=engine.blocks(20, 8))
    rows = engine.step((other, 0, 8))
    a = agent.begin("a", prompt_len=8, block_ids=blocks)
    engine.step((a, 0, 8))
    agent.finish(a, 9)
    agent.copy_blocks(engine.blocks(20, 8), blocks)
    engine.step((a, 5, 1))
    assert engine.in_blocks(blocks, 8) == rows
