"""Rows that stand in for KV of a known version: real agents, a real server, clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.client import (
    FetchPlan,
    MicroBatch,
    Rank,
    ReadOptions,
    RouteClient,
    Sample,
    Trace,
)
from routetrace.codec.records import SPAN, token_digests
from routetrace.common.errors import Incomplete
from routetrace.common.layout import ModelLayout
from routetrace.server.core import Core
from routetrace.server.index.state import Frames
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import Span
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.read.batch import Batch
from routetrace.server.rows.sending import Answer
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Record
from routetrace.server.store.memory import MemoryStore
from routetrace.server.testing import run_server
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from support.waiting import wait_for

LAYOUT = ModelLayout((1, 2, 4), 6, 300, 3)
BLOCK = 16
MODEL = "0123456789abcdef"


@pytest.fixture(scope="module")
def server():
    with run_server(forbid_prefix_rows="secret*") as process:
        yield process


def rows_of(n: int, seed: int, layout: ModelLayout = LAYOUT) -> np.ndarray:
    keys = np.random.default_rng(seed).random((n, len(layout.layer_ids), layout.num_experts))
    return np.argsort(keys, axis=-1)[..., : layout.top_k].astype(layout.dtype)


class Engine:
    """An engine that computes what it is told to, and what it chose for each request."""

    def __init__(self, agent: CaptureAgent, layout: ModelLayout) -> None:
        self.agent = agent
        self.layout = layout
        self.rows: dict[str, np.ndarray] = {}
        self.used = 0

    def blocks(self, n: int) -> list[int]:
        self.used += n
        return list(range(self.used - n, self.used))

    def ask(
        self, name: str, tokens: list[int], prompt_len: int, external: int = 0, *, cached: int = 0,
        trace_id: str = "", version: int | None = 0, end: str = "stop", stop: int | None = None,
        transfer_id: str | None = None,
    ) -> None:  # fmt: skip
        """A request: KV of so many tokens comes from elsewhere, the others are computed.

        `cached` of them are in blocks of this engine, of which no pass is known.
        """
        agent = self.agent
        agent.set_weight_version(version)
        handle = agent.begin(
            name,
            trace_id=trace_id or name,
            prompt_len=prompt_len,
            num_computed_tokens=external,
            num_external_tokens=external - cached,
            block_ids=self.blocks(-(-len(tokens) // BLOCK)),
            prompt_token_ids=tokens[:prompt_len],
        )
        stop = len(tokens) - 1 if stop is None else stop
        rows = self.rows[name] = rows_of(stop - external, hash(name) % (1 << 31), self.layout)
        if len(rows):
            agent.step(rows, [(handle, external, len(rows))])
        if end:
            agent.finish(handle, len(tokens), reason=end, token_ids=tokens, transfer_id=transfer_id)
        assert agent.flush(30)


@contextmanager
def engine(
    server, run: str, engine_id: str = "e0", layout: ModelLayout = LAYOUT, model: str = MODEL,
    emptied: bool = True, **shard: str,
) -> Iterator:  # fmt: skip
    config = AgentConfig(
        target=server.target, run=run, engine_id=engine_id, layout=layout, model=model, **shard,
        external_kv_emptied=emptied, block_size=BLOCK, num_blocks=400, background="thread",
        flush_interval_seconds=0.01,
    )  # fmt: skip
    with CaptureAgent(config) as agent:
        yield Engine(agent, layout)


def client_of(server, run: str) -> RouteClient:
    options = ReadOptions(prefix_rows="any")
    return RouteClient(server.target, run=run, timeout=20, options=options)


PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 50_000, 256)]


def gaps(trace: Trace) -> list[tuple[int, int, str]]:
    return [(m.start, m.stop, m.reason) for m in trace.missing]


def assert_rows(trace: Trace, *expected: tuple[int, np.ndarray]) -> None:
    valid = np.zeros(len(trace), np.bool_)
    for start, rows in expected:
        np.testing.assert_array_equal(trace.topk_ids[start : start + len(rows)], rows)
        valid[start : start + len(rows)] = True
    assert (trace.valid == valid[:, None]).all()


def test_the_same_prompt_twice_with_kv_from_elsewhere(server):
    with engine(server, "twice") as e, client_of(server, "twice") as client:
        e.ask("first", [*PROMPT, 1, 2, 3], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        trace = client.get("second", wait_for="end", timeout=20)
        assert (trace.state.value, trace.coverage) == ("complete", 1.0)
        assert_rows(trace, (0, e.rows["first"][:240]), (240, e.rows["second"]))
        assert trace.provenance == ((0, 240, "prefix"), (240, 257, "forward"))
        assert trace.prefix_sources == ((0, 240, "first"),)
        assert trace.prefix_trace_ids == ("first",)
        assert trace.tokens(200, 250).prefix_sources == ((200, 240, "first"),)
        # No other call knows rows that stand in.
        stat = client.stat("second")
        assert (stat.state.value, stat.prefix_trace_ids) == ("incomplete", ())
        assert [(m.start, m.stop, m.reason) for m in stat.missing] == [(0, 240, "kv_unknown")]
        assert {s.trace_id: s.state.value for s in client.find()}["second"] == "incomplete"
        part = client.get("second", token_start=100, token_stop=250, layer_ids=[2])
        np.testing.assert_array_equal(part.topk_ids, trace.topk_ids[100:250, 1:2])
        latest = client.get("second", policy="latest")
        np.testing.assert_array_equal(latest.topk_ids, trace.topk_ids)
        with pytest.raises(Incomplete, match="kv_unknown"):
            client.get("second", prefix_rows="never")
        never = client.get("second", prefix_rows="never", missing="mask")
        assert gaps(never) == [(0, 240, "kv_unknown")]
        assert never.state.value != "complete"
        # Rows that stand in for others stand in for nothing else.
        e.ask("third", [*PROMPT, 4, 5], 256, 240)
        assert client.get("third", wait_for="end", timeout=20).prefix_sources == (
            (0, 240, "first"),
        )


def test_followers_get_them_too(server):
    with engine(server, "follow") as e, client_of(server, "follow") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        parts = list(client.follow("second"))
        rows = np.concatenate([part.topk_ids for part in parts])
        np.testing.assert_array_equal(rows[:240], e.rows["first"][:240])
        assert [s for part in parts for s in part.prefix_sources] == [(0, 240, "first")]


def test_only_as_far_as_digests_prove(server):
    with engine(server, "proof") as e, client_of(server, "proof") as client:
        e.ask("first", [*PROMPT[:200], 1, 2, 3], 200)
        # The 200 tokens that both have, and then others: proven to position 192.
        e.ask("second", [*PROMPT[:200], *range(56), 4, 5], 256, 240)
        trace = client.get("second", missing="mask")
        assert trace.prefix_sources == ((0, 192, "first"),)
        assert gaps(trace)[0][:2] == (192, 240)
        # A shorter one ends at position 100: that is a digest of its own alone.
        e.ask("third", [*PROMPT[:100], 7, 7], 100, 99)
        assert client.get("third", missing="mask").prefix_sources == ((0, 64, "first"),)
        e.ask("other", [*range(256), 4, 5], 256, 240)
        assert client.get("other", missing="mask").prefix_sources == ()


def test_rows_of_other_weights_never(server):
    with engine(server, "weights") as e, client_of(server, "weights") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240, version=1)
        assert client.get("second", missing="mask").prefix_sources == ()
        # Of the same weights come first those of the last trace before.
        for name in ("third", "fourth"):
            e.ask(name, [*PROMPT, 1], 256, version=1)
        e.ask("fifth", [*PROMPT, 4, 5], 256, 240, version=1)
        assert client.get("fifth").prefix_sources == ((0, 240, "fourth"),)
        # Then those of the first trace after.
        trace = client.get("second")
        assert trace.prefix_sources == ((0, 240, "third"),)
        assert trace.weight_versions == ((0, 257, 1),)
        only = client.get("second", weight_version=0, missing="mask")
        assert gaps(only) == [(0, 257, "other_version")]


def test_rows_of_an_unknown_version_do_not_stand_in(server):
    """That nobody gave a version to two passes does not make their weights equal."""
    with engine(server, "untold") as e, client_of(server, "untold") as client:
        e.ask("first", [*PROMPT, 1], 256, version=None)
        e.ask("second", [*PROMPT, 4, 5], 256, 240, version=None)
        assert client.get("second", missing="mask").prefix_sources == ()
        # A known one is not that of rows of which nobody knows it.
        e.ask("third", [*PROMPT, 4, 5], 256, 240, version=0)
        assert client.get("third", missing="mask").prefix_sources == ()


def test_kv_whose_version_is_not_known_gets_none(server):
    """Rows of version 1 are not those of KV that was computed by version 0, and kept elsewhere."""
    run = "host-memory"
    with engine(server, run, emptied=False) as e, client_of(server, run) as client:
        e.ask("first", [*PROMPT, 1], 256, version=0)
        e.ask("computed", [*PROMPT, 1], 256, version=1)

        def sources_of(name: str, **how: int) -> tuple:
            e.ask(name, [*PROMPT, 4, 5], 256, 240, version=1, **how)
            return client.get(name, missing="mask").prefix_sources

        assert sources_of("kept") == ()
        e.agent.reset_external_kv()  # older KV of its blocks can be written to the store again
        assert sources_of("kept in blocks") == sources_of("cached", cached=240) == ()
        e.agent.reset_prefix_cache()
        assert sources_of("both", cached=100) == ()
        e.agent.reset_prefix_cache()
        e.agent.reset_external_kv()
        for cached in (0, 240, 100):
            assert sources_of(f"emptied-{cached}", cached=cached) == ((0, 240, "computed"),)


def test_all_shards_give_the_version(server):
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    run = "shards"
    for number, same in enumerate((True, False)):
        with (
            engine(server, run, f"e{number}", stages[0], shard="pp0", boot_id="b") as one,
            engine(server, run, f"e{number}", stages[1], shard="pp1", boot_id="b", emptied=same)
            as two,
            client_of(server, run) as client,
        ):  # fmt: skip
            for e in (one, two):
                e.ask(f"first-{number}", [*PROMPT, 1], 256)
                e.ask(f"second-{number}", [*PROMPT, 4, 5], 256, 240)
            trace = client.get(f"second-{number}", missing="mask")
            assert trace.prefix_sources == (((0, 240, "first-0"),) if same else ())


def test_never_drafts_nor_what_was_not_computed(server):
    with engine(server, "drafts") as e, client_of(server, "drafts") as client:
        agent = e.agent
        # Runs: 150 rows of its prompt, and nothing of the rest yet.
        e.ask("first", [*PROMPT, 1], 256, end="", stop=150)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        trace = client.get("second", missing="mask")
        assert trace.prefix_sources == ((0, 150, "first"),)
        # An aborted one gives what it computed.
        e.ask("third", [*PROMPT[:192], 1, 2], 192, 128, end="abort")
        trace = client.get("second", missing="mask")
        assert trace.prefix_sources == ((0, 150, "first"), (150, 192, "third"))
        # Rows 192.. are of tokens that it sampled: 191 is the last of the prompt.
        assert client.get("third", missing="mask").prefix_sources == ((0, 128, "first"),)
        # Drafts behind a prompt of 100, then a prompt that holds these very tokens.
        run = agent.begin("drafter", prompt_len=100, block_ids=e.blocks(10),
                          prompt_token_ids=PROMPT[100:200])  # fmt: skip
        agent.step(rows_of(100, 1), [(run, 0, 100)])
        agent.step(rows_of(40, 2), [(run, 100, 40)])
        assert agent.flush(30)
        e.ask("reader", [*PROMPT[100:228], 4, 5], 128, 120)
        assert client.get("reader", missing="mask").prefix_sources == ((0, 64, "drafter"),)


def test_only_for_kv_that_was_restored(server):
    with engine(server, "aborted") as e, client_of(server, "aborted") as client:
        e.ask("first", [*PROMPT, 1], 256)
        # Ended in the middle of its prompt: what it never computed is missing.
        e.ask("second", [*PROMPT, 4, 5], 256, 64, end="abort", stop=150)
        trace = client.get("second", missing="mask")
        assert trace.prefix_sources == ((0, 64, "first"),)
        assert [gap[:2] for gap in gaps(trace)] == [(150, 257)]


def test_never_of_another_run_or_another_model(server):
    other = ModelLayout((1, 2, 4), 6, 300, 3, (1, 2, 4, 5))
    with (
        engine(server, "mine") as mine,
        engine(server, "theirs") as theirs,
        engine(server, "mine", "e1", other) as strange,
        engine(server, "mine", "e2", model="f" * 16) as teacher,
        engine(server, "mine", "e3", model="") as unnamed,
        client_of(server, "mine") as client,
    ):
        for number, one in enumerate((theirs, strange, teacher, unnamed)):
            one.ask(f"first-{number}", [*PROMPT, 1], 256)
        mine.ask("second", [*PROMPT, 4, 5], 256, 240)
        unnamed.ask("third", [*PROMPT, 4, 5], 256, 240)
        for policy in ("unique", "any"):
            for name in ("second", "third"):
                trace = client.get(name, missing="mask", prefix_rows=policy)
                assert trace.prefix_sources == ()
                assert gaps(trace)[0][:2] == (0, 240)


def test_a_run_may_forbid_them(server):
    with engine(server, "secret-1") as e, client_of(server, "secret-1") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        for policy in ("unique", "any", "never"):
            trace = client.get("second", missing="mask", prefix_rows=policy)
            assert (trace.prefix_sources, gaps(trace)[0][:2]) == ((), (0, 240))
        assert client.stat("second").state.value != "complete"


def test_rows_of_a_replica_and_of_a_stage(server):
    """Another engine's rows, of shards that are cut in another way."""
    stages = [LAYOUT.select((1,)), LAYOUT.select((2, 4))]
    with engine(server, "replica") as e, client_of(server, "replica") as client:
        agents = [
            CaptureAgent(AgentConfig(target=server.target, run="replica", engine_id="e1",
                                     shard=f"pp{i}", boot_id="b", layout=stage, model=MODEL,
                                     block_size=BLOCK, num_blocks=40, background="thread",
                                     external_kv_emptied=True, flush_interval_seconds=0.01))
            for i, stage in enumerate(stages)
        ]  # fmt: skip
        rows = rows_of(256, 3)
        for agent, stage in zip(agents, stages, strict=True):
            agent.set_weight_version(0)
            handle = agent.begin("first", prompt_len=256, block_ids=range(17),
                                 prompt_token_ids=PROMPT)  # fmt: skip
            agent.step(rows[:, LAYOUT.columns(stage.layer_ids)], [(handle, 0, 256)])
            agent.finish(handle, 257, token_ids=[*PROMPT, 1])
            agent.close()
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        trace = client.get("second", wait_for="end", timeout=20)
        assert_rows(trace, (0, rows[:240]), (240, e.rows["second"]))
        assert trace.prefix_sources == ((0, 240, "first"),)
        assert trace.engine_ids == ("e0", "e1")


def test_a_trace_that_is_deleted_takes_its_rows_along(server):
    with engine(server, "delete") as e, client_of(server, "delete") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        assert client.get("second", wait_for="end", timeout=20).complete
        client.delete("first")
        trace = client.get("second", missing="mask")
        assert (trace.state.value != "complete", gaps(trace)[0][:2]) == (True, (0, 240))
        # Computed again, under the same name: another trace.
        e.ask("first", [*PROMPT, 2], 256)
        assert_rows(client.get("second"), (0, e.rows["first"][:240]), (240, e.rows["second"]))


def test_another_request_of_the_trace_stands_in(server):
    """A prefill engine that named no hand-over: of all requests that is the most likely one."""
    with (
        engine(server, "own") as e,
        engine(server, "own", "e1") as prefill,
        client_of(server, "own") as client,
    ):
        e.ask("other", [*PROMPT, 1], 256)
        prefill.ask("prefill", [*PROMPT, 4], 256, trace_id="t", end="handoff", transfer_id="x")
        e.ask("decode", [*PROMPT, 4, 5], 256, 240, trace_id="t")
        trace = client.get("t", wait_for="end", timeout=20)
        assert trace.provenance == ((0, 240, "prefix"), (240, 257, "forward"))
        assert trace.prefix_sources == ((0, 240, "t"),)
        assert_rows(trace, (0, prefill.rows["prefill"][:240]), (240, e.rows["decode"]))
        # Two passes: neither is the only one.
        assert client.get("t", missing="mask", prefix_rows="unique").prefix_sources == ()


def test_each_turn_has_the_version_of_its_own_owner(server):
    """Positions of the first turn are of its KV, those after of the KV of the second one."""
    turn = [*PROMPT, *range(70_000, 70_064)]  # the first one sampled 64 tokens
    longer = [*turn, *range(80_000, 80_064)]
    with (
        engine(server, "turns") as e,
        engine(server, "turns", "e1", emptied=False) as other,
        client_of(server, "turns") as client,
    ):
        for version in (1, 2):
            e.ask(f"first-{version}", [*longer, 1], len(longer), version=version)
        e.ask("one", turn, 256, 240, trace_id="t", version=1)
        e.ask("two", [*longer, 5, 6], len(longer), 368, trace_id="t", version=2)
        trace = client.get("t")
        assert trace.prefix_sources == ((0, 240, "first-1"), (319, 368, "first-2"))
        assert trace.weight_versions == ((0, 319, 1), (319, 385, 2))
        # The KV of the second one is of no known version, that of the first one still is.
        e.ask("three", turn, 256, 240, trace_id="s", version=1)
        other.ask("four", [*longer, 5, 6], len(longer), 368, trace_id="s", version=2)
        trace = client.get("s", missing="mask")
        assert trace.prefix_sources == ((0, 240, "first-1"),)
        assert gaps(trace) == [(319, 368, "kv_unknown")]


def test_unique_is_lost_when_another_pass_comes(server):
    with engine(server, "unique") as e, client_of(server, "unique") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        for policy in ("unique", "any"):
            trace = client.get("second", prefix_rows=policy)
            assert trace.prefix_sources == ((0, 240, "first"),)
            assert (trace.proven, trace.coverage, len(trace)) == (17, 1.0, 257)
            assert trace.tokens(200, 250).proven == 10
            batch = MicroBatch.packed([Sample.of("second", num_tokens=258)])
            plan = FetchPlan.make(LAYOUT, batch, Rank((2, 4)))
            rows = client.fetch(plan, prefix_rows=policy)
            assert (rows.proven, rows.coverage) == (17, 1.0)
            assert rows.reads[0].prefix_sources == ((0, 240, "first"),)
        assert client.stat("second").proven == 17
        # One that shares a part of it, and computed the middle of that.
        e.ask("third", [*PROMPT[:192], 1, 2], 192, 128)
        trace = client.get("second", prefix_rows="unique", missing="mask")
        assert trace.prefix_sources == ((0, 128, "first"), (192, 240, "first"))
        assert gaps(trace) == [(128, 192, "kv_unknown")]
        assert client.get("second").prefix_sources == ((0, 240, "first"),)
        client.delete("third")
        trace = client.get("second", prefix_rows="unique")
        assert trace.prefix_sources == ((0, 240, "first"),)


def test_two_attempts_are_two_passes(server):
    with engine(server, "attempts") as e, client_of(server, "attempts") as client:
        agent = e.agent
        agent.set_weight_version(0)
        blocks = e.blocks(17)
        handle = agent.begin("first", prompt_len=256, block_ids=blocks, prompt_token_ids=PROMPT)
        one, two = rows_of(100, 1), rows_of(256, 2)
        agent.step(one, [(handle, 0, 100)])
        agent.preempt(handle, 100)
        agent.resume(handle, 0, block_ids=blocks)
        agent.step(two, [(handle, 0, 256)])
        agent.finish(handle, 257, token_ids=[*PROMPT, 1])
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        trace = client.get("second", prefix_rows="unique", missing="mask")
        assert trace.prefix_sources == ((100, 240, "first"),)
        assert_rows(client.get("second"), (0, one), (100, two[100:240]), (240, e.rows["second"]))


@pytest.mark.parametrize("size", [4, 8, 9, 16, 24, 64, 256])
def test_a_sample_of_a_group_whose_prompt_was_loaded(server, size):
    """One sample computed the prompt, the others hit it and computed its last block.

    The KV of one more was loaded by another engine (H6 of docs/bugs-found.md).
    """
    prompt, run = PROMPT[:128], f"group-{size}"
    with (
        engine(server, run) as e,
        engine(server, run, "e1") as other,
        client_of(server, run) as client,
    ):
        agent = e.agent
        agent.set_weight_version(3)
        shared = e.blocks(8)
        rows = [rows_of(128 if not i else 16, i) for i in range(size)]
        for i in range(size):
            blocks = shared if not i else [*shared[:7], *e.blocks(1)]
            handle = agent.begin(
                f"s{i}", prompt_len=128, prompt_token_ids=prompt, block_ids=blocks,
                num_computed_tokens=128 - len(rows[i]),
            )  # fmt: skip
            agent.step(rows[i], [(handle, 128 - len(rows[i]), len(rows[i]))])
            agent.finish(handle, 129, token_ids=[*prompt, 5])
        assert agent.flush(30)
        other.ask("x", [*prompt, 6], 128, 127, version=3)
        own = other.rows["x"]
        never = client.get("x", prefix_rows="never", missing="mask")
        assert (never.coverage, never.proven) == (1 / 128, 1)
        unique = client.get("x", prefix_rows="unique", missing="mask")
        assert (unique.coverage, unique.proven) == (113 / 128, 1)
        assert_rows(unique, (0, rows[0][:112]), (127, own))
        every = client.get("x")
        assert (every.coverage, every.proven) == (1.0, 1)
        assert_rows(every, (0, rows[0][:112]), (112, rows[-1][:15]), (127, own))
        assert every.prefix_sources == ((0, 112, "s0"), (112, 127, f"s{size - 1}"))
        if size == 256:  # of more than 256 there may be further passes
            e.ask("more", [*prompt, 5], 128, 112, version=3)
            unique = client.get("x", prefix_rows="unique", missing="mask")
            assert unique.coverage == 113 / 128
            e.ask("whole", [*prompt, 5], 128, version=3)
            unique = client.get("x", prefix_rows="unique", missing="mask")
            assert unique.coverage == 1 / 128
            assert client.get("x").equals(every)


def test_names_of_older_clients(server):
    """A client of 0.8 asks for SAME_VERSION by number, and for ANY_VERSION by another."""
    with engine(server, "old") as e, client_of(server, "old") as client:
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        for name in ("same_version", "any_version"):
            with pytest.warns(DeprecationWarning, match="0.10") as seen:
                trace = client.get("second", prefix_rows=name)
            assert len(seen) == 1
            assert trace.prefix_sources == ((0, 240, "first"),)
        with grpc.insecure_channel(server.target) as channel:
            read = pb_grpc.TraceServiceStub(channel).GetTrace
            for number in (1, 2):
                request = pb.GetTraceRequest(run="old", trace_id="second", prefix_rows=number)
                [*answers] = read(request)
                assert answers[-1].end.info.state == pb.TRACE_STATE_COMPLETE


def test_rows_are_waited_for(server):
    with (
        engine(server, "wait") as e,
        client_of(server, "wait") as client,
        client_of(server, "wait") as waiting,
    ):
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        traces = waiting.get_many(["second"], wait_for="rows", timeout=60, concurrency=1)
        with pytest.raises(Incomplete):
            client.get("second")
        e.ask("first", [*PROMPT, 1], 256)
        assert next(traces).prefix_sources == ((0, 240, "first"),)


@pytest.mark.slow
def test_what_stands_in_is_the_same_after_a_restart(tmp_path):
    with (
        run_server(data_dir=tmp_path) as server,
        engine(server, "again") as e,
        client_of(server, "again") as client,
    ):
        for name in ("zero", "first"):
            e.ask(name, [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        before = client.get("second", wait_for="end", timeout=20)
    with run_server(data_dir=tmp_path) as server, client_of(server, "again") as client:
        after = client.get("second")
        assert after.prefix_sources == before.prefix_sources == ((0, 240, "first"),)
        np.testing.assert_array_equal(after.topk_ids, before.topk_ids)


def test_an_expired_trace_takes_its_rows_along():
    with (
        run_server(sweep_interval_seconds=0.05) as server,
        engine(server, "ttl") as e,
        client_of(server, "ttl") as client,
    ):
        e.ask("first", [*PROMPT, 1], 256)
        e.ask("second", [*PROMPT, 4, 5], 256, 240)
        assert client.get("second", wait_for="end", timeout=20).complete
        client.renew(["first"], ttl_seconds=1)
        wait_for(lambda: not client.get("second", missing="mask").prefix_trace_ids)
        trace = client.get("second", missing="mask")
        assert gaps(trace)[0][:2] == (0, 240)


class AnonymousCall:
    """Context of a call without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("together", [False, True])
async def test_a_read_under_way_keeps_what_stands_in(together):
    core = Core(MemoryStore(), ServerConfig(store="memory"))
    state, digests = core.state, token_digests(np.array(PROMPT, np.uint32))
    size = 300_000  # so that each frame is a message
    for number in range(1, 6):
        core.store.append(Record(number, b"", bytes(size)))
        state.hold(number, Frames(np.array([0, size], np.uint32), LAYOUT, "run"))
    state.number = 5

    def begin(name: str, spans: list[Span]) -> Source:
        source = Source(WriterKey("run", "e", ""), 1, name, "b/0", LAYOUT, 256)
        source.ended, source.num_tokens, source.model, source.kv_version = True, 258, 1, 0
        source.loaded = 0, 240
        trace = state.traces.begin(("run", name), source, ttl=99, now=core.started)
        source.add_digests(digests)
        for span in spans:
            source.compute(span)
            state.traces.prefixes.computed(trace, span.weight_version, span.position)
        return source

    begin("first", [Span(64 * i, 64, refs.pack(1 + i, 0, 0), 0, 1) for i in range(4)])
    second = begin("second", [Span(240, 17, refs.pack(5, 0, 0), 0, 1)])
    second.not_know([(0, 240)])
    policy = pb.PREFIX_ROWS_ANY
    known = core.reader.find("run", "second", prefix_rows=policy)
    info = core.reader.describe(known)
    assert info.state == pb.TRACE_STATE_COMPLETE
    selection = core.reader.select(known, 0, 0, ())
    if together:
        reads = [pb.GetTraceRequest(run="run", trace_id="second", prefix_rows=policy)] * 2
        traces = core._traces
        context = AnonymousCall()
        at_once = lambda read: traces._answer_of(  # noqa: E731
            traces._finder.met(read, None), read, context
        )
        later = partial(traces._answer, context=context, owner="")
        turn, step = (partial(call, "") for call in (core.admission.turn, core.admission.pace.step))
        batch = Batch(reads, at_once, later, core.reader.frames.pinned, turn, step)
        messages = batch.messages()
    else:
        messages = core._traces._send(Answer(core.reader, info, known, selection), "")
    got = [await anext(messages)]
    state.forget(("run", "first"), Fate("deleted"))
    await core.retention._compact(at_once=True)
    got += [message async for message in messages]
    if together:
        parts = [part for m in got for part in pb.GetTracesResponse.FromString(m).parts]
        assert {part.read for part in parts} == {0, 1}
        answers = [part.message for part in parts if not part.read]
    else:
        answers = [pb.GetTraceResponse.FromString(message) for message in got]
    spans = [span for a in answers for span in np.frombuffer(a.spans, SPAN)]
    assert sum(int(span["count"]) for span in spans) == 257
    assert len(answers) > 2
    assert not answers[-1].end.missing
    # Nobody reads it any more, and it is of nobody: it goes.
    await core.retention._compact(at_once=True)
    assert [*state.frames] == [5]
    known = core.reader.find("run", "second", prefix_rows=policy)
    assert core.reader.describe(known).state != pb.TRACE_STATE_COMPLETE
