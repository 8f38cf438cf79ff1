"""Continuous batching: requests that share blocks, wait for each other and lose their blocks.

The truths are those of test_transformers_capture.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.engines.router_taps import RouterTaps
from routetrace.capture_agent.engines.transformers import TransformersCapture
from routetrace.capture_agent.engines.transformers.batching import PagedRequests, batching_config
from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument
from routetrace.server.testing import run_server
from support.models.routing_truth import RecordingAgent, Truth, assert_no_hooks, padded, reforward
from support.models.tiny_models import EOS, PAD, page_size_name, paging, tiny_model


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """The library collects garbage after every batch: spare it the modules that stay anyway."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


BATCH = [
    [3, 4, 5, 6],
    [7, 8, 9, 10, 11, 12, 13, 14, 15],
    [3, 4, 5, 6, 20],
    [7, 8, 9, 10, 11, 12, 13, 14, 2, 21],
    [30],
]
BATCH_IDS = list("abcde")


def batched(
    family: str = "qwen3_moe",
    *,
    prompts: list[list[int]] = BATCH,
    ids: list[str] = BATCH_IDS,
    slots: bool = True,
    num_blocks: int = 24,
    max_batch_tokens: int = 8,
    max_new_tokens: int = 8,
    **generation: Any,
) -> RecordingAgent:
    model, layout = tiny_model(family)
    agent = RecordingAgent(layout, *((4, 128) if slots else (0, 0)))
    capture = TransformersCapture(model, agent, layout=layout)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        pad_token_id=PAD,
        **{"eos_token_id": EOS, "do_sample": False, **generation},
    )
    attention = model.config._attn_implementation
    with Truth(model, layout) as truth:
        outputs = capture.generate_batch(
            prompts,
            request_ids=ids,
            labels=[{"id": i} for i in ids],
            generation_config=config,
            continuous_batching_config=paging(
                num_blocks=num_blocks,
                page_size=4,
                max_batch_tokens=max_batch_tokens,
                seed=0,
            ),
        )
    assert capture.failures == 0
    assert_no_hooks(model)
    assert model.config._attn_implementation == attention
    np.testing.assert_array_equal(
        np.concatenate(agent.rows), np.concatenate([truth.rows(i) for i in range(len(truth.fed))])
    )
    copies = len(ids) // len(prompts)
    for i, request_id in enumerate(ids):
        told, output = agent.requests[request_id], outputs[request_id]
        assert output.error is None
        assert told.prompt == prompts[i // copies] == output.prompt_ids
        assert told.tokens == told.prompt + output.generated_tokens
        assert told.labels == {"id": request_id}
        assert told.reason == ("stop" if told.tokens[-1] == EOS else "length")
        np.testing.assert_array_equal(
            agent.trace(request_id), reforward(model, layout, told.tokens), err_msg=request_id
        )
    return agent


def test_continuous_batching_with_shared_prefixes() -> None:
    agent = batched()
    # Blocks of `a` and `b` serve `c` and `d`, whose rows are those that filled the blocks.
    assert agent.cached == 4 + 4


def test_continuous_batching_without_slots_shares_nothing() -> None:
    agent = batched(slots=False)
    assert agent.cached == 0


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "glm4_moe"])
def test_continuous_batching_of_families(family: str) -> None:
    batched(family)


def test_continuous_batching_samples_several_sequences_per_prompt() -> None:
    ids = [f"{name}/{i}" for name in BATCH_IDS for i in range(3)]
    agent = batched(ids=ids, num_return_sequences=3, do_sample=True, temperature=1.5)
    assert len({tuple(agent.requests[i].tokens) for i in ids}) > len(BATCH)
    assert agent.cached > 12


def test_continuous_batching_goes_through_preemption() -> None:
    agent = batched(num_blocks=9, max_new_tokens=16, eos_token_id=-1)
    assert max(told.attempts for told in agent.requests.values()) > 1


def test_through_a_real_server() -> None:
    model, layout = tiny_model("qwen3_moe")
    prompts = [[3, 4, 5], [6]]
    with run_server() as server:
        config = AgentConfig(
            server.target, "engine", layout, block_size=4, num_blocks=128, background="thread"
        )
        with CaptureAgent(config) as agent, RouteClient(server.target) as client:
            capture = TransformersCapture(model, agent)
            grid = capture.generate(
                *padded(prompts), request_ids=["x", "y"], max_new_tokens=6, eos_token_id=None
            )
            outputs = capture.generate_batch(
                BATCH,
                request_ids=BATCH_IDS,
                generation_config=GenerationConfig(max_new_tokens=16, eos_token_id=-1),
                continuous_batching_config=paging(num_blocks=9, page_size=4, max_batch_tokens=8),
            )
            assert capture.failures == 0
            tokens = {i: prompts[b] + grid[b, 3:].tolist() for b, i in enumerate("xy")}
            tokens |= {i: o.prompt_ids + o.generated_tokens for i, o in outputs.items()}
            provenance = set()
            for request_id, expected in tokens.items():
                trace = client.get(request_id, wait_for="end", timeout=30)
                rows = reforward(model, layout, expected)
                np.testing.assert_array_equal(trace.topk_ids, rows, err_msg=request_id)
                provenance |= {how for _, _, how in trace.provenance}
    assert provenance == {"forward", "slot"}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("use_cuda_graph", {"use_cuda_graph": True, "page_size": 4}),
        ("use_async_batching", {"use_async_batching": True, "page_size": 4}),
        (page_size_name(), {"page_size": 8}),
        ("agent.config.num_blocks", {"page_size": 4, "num_blocks": 200, "max_batch_tokens": 8}),
    ],
)
def test_what_continuous_batching_refuses(field: str, config: dict[str, Any]) -> None:
    model, layout = tiny_model("qwen3_moe")
    capture = TransformersCapture(model, RecordingAgent(layout, 4, 128), layout=layout)
    with pytest.raises(InvalidArgument) as caught:
        capture.generate_batch(
            BATCH,
            request_ids=BATCH_IDS,
            max_new_tokens=2,
            continuous_batching_config=paging(**config),
        )
    assert caught.value.field == field
    assert_no_hooks(model)


def test_a_version_without_an_option_that_has_to_be_off_is_refused() -> None:
    model, layout = tiny_model("qwen3_moe")
    capture = TransformersCapture(model, RecordingAgent(layout), layout=layout)
    config = SimpleNamespace(**vars(paging(page_size=4)))
    del config.use_cuda_graph
    with pytest.raises(InvalidArgument, match=r"use_cuda_graph is no option .*; pin a version"):
        capture.generate_batch(BATCH, request_ids=BATCH_IDS, continuous_batching_config=config)
    assert_no_hooks(model)


def small_batches(capture: TransformersCapture) -> dict[str, Any]:
    """Two requests at a time, so that some begin late."""
    return capture.generate_batch(
        BATCH,
        request_ids=BATCH_IDS,
        generation_config=GenerationConfig(max_new_tokens=4, eos_token_id=-1, do_sample=False),
        continuous_batching_config=paging(
            num_blocks=24, page_size=4, max_batch_tokens=8, max_requests_per_batch=2
        ),
    )


def test_continuous_batching_does_not_notice_that_capture_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout, 4, 128)
    agent.gaps = True
    capture = TransformersCapture(model, agent, layout=layout)
    calls, step = iter(range(100)), agent.step

    def fail(*args: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("agent is broken")
        step(*args)

    monkeypatch.setattr(agent, "step", fail)
    outputs = small_batches(capture)
    assert capture.failures == 1
    assert all(output.error is None for output in outputs.values())
    assert {t.num_tokens - t.prompt_len for t in agent.requests.values()} == {4}
    rows = {i: reforward(model, layout, told.tokens) for i, told in agent.requests.items()}
    for request_id, told in agent.requests.items():
        for position, row in told.rows.items():
            np.testing.assert_array_equal(row, rows[request_id][position], err_msg=request_id)
    # Who was under way has no more rows. Blocks filled unseen are shared with those who come later:
    # their rows begin after the shared prefix, as nobody knows whose are before it.
    first = {i: min(told.rows) for i, told in agent.requests.items() if not told.given}
    assert first["d"] == 8
    assert all(len(told.rows) < len(rows[i]) for i, told in agent.requests.items() if told.given)
    for request_id, start in first.items():
        assert sorted(agent.requests[request_id].rows) == list(range(start, len(rows[request_id])))


def test_a_pass_that_raises_ends_continuous_batching() -> None:
    model, layout = tiny_model("qwen3_moe")
    agent = RecordingAgent(layout, 4, 128)
    capture = TransformersCapture(model, agent, layout=layout)
    passes = iter(range(100))

    def fail(*_: Any) -> None:
        if next(passes) == 4:
            raise RuntimeError("out of memory")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        outputs = small_batches(capture)
    finally:
        handle.remove()
    assert_no_hooks(model)
    assert capture.failures == 0
    assert outputs.keys() == set(BATCH_IDS)
    assert any(output.error for output in outputs.values())
    assert agent.requests.keys() == outputs.keys()
    unheard = {i: told for i, told in agent.requests.items() if not told.rows}
    assert unheard, "no request was left in the queue"
    for request_id, told in unheard.items():  # whose readers wait for their ends, too
        prompt = BATCH[BATCH_IDS.index(request_id)]
        assert (told.prompt_len, told.num_tokens, told.tokens) == (len(prompt), len(prompt), prompt)
    for request_id, told in agent.requests.items():
        assert (told.reason == "abort") == bool(outputs[request_id].error)
        rows = reforward(model, layout, told.tokens) if told.rows else ()
        for position, row in told.rows.items():
            np.testing.assert_array_equal(row, rows[position])


def test_a_pass_that_was_given_up_leaves_nothing_behind() -> None:
    model, layout = tiny_model("qwen3_moe")
    rows: list[np.ndarray] = []
    listener = SimpleNamespace(
        before=lambda _: None, after=lambda pending: rows.append(pending.rows()), failed=None
    )

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    block, tokens = model.model.layers[1].mlp, torch.tensor([[3, 4, 5]])
    with RouterTaps(model, layout).attached(listener), torch.no_grad():
        model(input_ids=tokens)
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(input_ids=tokens)  # layers 0 and 1 are in the buffer
        handle.remove()
        block.forward = torch.nn.Identity().forward
        model(input_ids=tokens)
        del block.forward
    whole, without = rows
    np.testing.assert_array_equal(whole, reforward(model, layout, [3, 4, 5, 6]))
    assert not without[:, 1].any()
    np.testing.assert_array_equal(without[:, 0], whole[:, 0])


@pytest.mark.parametrize(
    ("field", "options"),
    [("page_size", {"page_size": 8, "block_size": None}), ("block_size", {"block_size": 8})],
)
def test_the_page_size_has_two_names(field: str, options: dict[str, Any]) -> None:
    config = SimpleNamespace(**{**vars(paging(page_size=4)), **options})
    if field == "block_size" and hasattr(config, "page_size"):
        del config.page_size
    assert batching_config(config, 8).allow_block_sharing
    assert not batching_config(config, 0).allow_block_sharing
    with pytest.raises(InvalidArgument) as caught:
        batching_config(config, 4)
    assert caught.value.field == field


def stub_cache(form: str, table: dict[str, list[int]], num_blocks: int) -> Any:
    """A paged cache as transformers up to 5.17 has it, or as later ones do."""

    class FullAttentionCacheAllocator(SimpleNamespace):
        pass

    sliding = SimpleNamespace(block_table={}, blocks_per_sector=1)
    full = FullAttentionCacheAllocator(block_table=table, blocks_per_sector=1)
    if form == "groups":
        return SimpleNamespace(group_cache_managers=[sliding, full], num_blocks=num_blocks)
    allocators = {"sliding_attention": sliding, "full_attention": full}
    return SimpleNamespace(cache_allocators=allocators, num_sectors=num_blocks - 2)


@pytest.mark.parametrize("form", ["groups", "sectors"])
def test_a_cache_with_more_blocks_than_the_agent_is_refused(form: str) -> None:
    agent: Any = RecordingAgent(tiny_model("qwen3_moe")[1], 4, 8)
    processor = SimpleNamespace(cache=stub_cache(form, {}, 8))
    PagedRequests(agent, processor, {}, [])
    processor.cache = stub_cache(form, {}, 9)
    with pytest.raises(InvalidArgument, match="num_blocks is 8; expected 9"):
        PagedRequests(agent, processor, {}, [])
    agent.config.block_size = 0
    PagedRequests(agent, processor, {}, [])


class StubManager:
    """As much of a batch processor as PagedRequests looks at."""

    def __init__(self, form: str = "sectors") -> None:
        self.agent = RecordingAgent(tiny_model("qwen3_moe")[1], 4, 8)
        self.table: dict[str, list[int]] = {}
        self.active: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        self.batch = SimpleNamespace(requests_in_batch=[])
        cache = stub_cache(form, self.table, 8)
        scheduler = SimpleNamespace(active_requests=self.active, waiting_requests=self.waiting)
        processor = SimpleNamespace(cache=cache, scheduler=scheduler, inputs_and_outputs=self.batch)
        self.requests = PagedRequests(self.agent, processor, {}, [])  # type: ignore[arg-type]

    def step(self, request_id: str, count: int, block_ids: list[int]) -> None:
        state = self.active.setdefault(
            request_id,
            SimpleNamespace(
                request_id=request_id,
                initial_tokens=[3, 4, 5, 6, 7],
                generated_tokens=[],
                position_offset=0,
            ),
        )
        self.table[request_id] = block_ids
        start, stop = state.position_offset, state.position_offset + count
        state.position_offset = stop
        self.batch.requests_in_batch = [SimpleNamespace(state=state, query_length=count)]
        tokens = torch.tensor([state.initial_tokens[start:stop]])
        self.requests.before({"position_ids": torch.arange(start, stop)[None], "input_ids": tokens})
        rows = np.full((count, 3, 4), stop, dtype=np.uint8)
        self.requests.after(SimpleNamespace(hand_to=lambda take: take(rows)))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["groups", "sectors"])
def test_a_block_that_moves_while_it_is_written_is_a_new_attempt(form: str) -> None:
    """The library moves blocks only with requests that it puts back to waiting, today."""
    manager = StubManager(form)
    manager.step("a", 2, [1])
    manager.step("a", 1, [1])
    told = manager.agent.requests["a"]
    assert told.attempts == 1
    manager.step("a", 1, [5])
    assert (told.attempts, told.blocks) == (2, [5])
    manager.step("a", 1, [2, 3])  # a full block is swapped for an equal one
    assert (told.attempts, told.blocks) == (2, [5, 3])


def test_blocks_are_given_up_before_another_request_gets_them() -> None:
    manager = StubManager()
    manager.step("a", 2, [1])
    manager.waiting["a"] = manager.active.pop("a")
    manager.step("b", 3, [1])
    told = manager.agent.requests["a"]
    assert (told.preemptions, told.attempts) == (1, 1)
    manager.active["a"] = manager.waiting.pop("a")
    manager.active["a"].position_offset = 0
    manager.step("a", 2, [2])
    assert (told.preemptions, told.attempts, told.blocks) == (1, 2, [2])


def test_a_pass_that_is_not_what_the_manager_holds_is_not_told() -> None:
    manager = StubManager()
    manager.step("a", 2, [1])
    with pytest.raises(ValueError, match="inputs of the pass differ"):
        manager.requests.before(
            {"position_ids": torch.tensor([[0, 2]]), "input_ids": torch.tensor([[3, 4]])}
        )
    with pytest.raises(ValueError, match="inputs of the pass differ"):
        manager.requests.before(
            {"position_ids": torch.tensor([[0, 1]]), "input_ids": torch.tensor([[3, 3]])}
        )
