"""Actions of a scheduler, and the events that an agent gets.

First a scheduler as small as can be does all of it at random, and every row that comes back is
compared with what its router chose: `vllm_runs.scheduler` does the same to vLLM's own. Then single
moments, with an agent that only listens.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.capturer import RoutingCapturer
from routetrace.capture_agent.engines.vllm import worker as worker_module
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.worker import WorkerSide
from routetrace.client import RouteClient, TraceState
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
BLOCK = 4
NOBODY = -1


class Request:
    """Fields of vLLM's Request that the plug-in reads."""

    def __init__(self, request_id: str, prompt: list[int], **options: Any) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.prompt_embeds, self.mm_features, self.lora_request = None, [], None
        given = {f"routetrace.{key}": value for key, value in options.items()}
        self.sampling_params = SimpleNamespace(extra_args=given)
        self.status = SimpleNamespace(name="RUNNING")
        self.num_stale_output_tokens, self.drop_stale_output = 0, False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def output_of(new=(), cached=(), resumed=(), preempted=(), counts=None, **more):
    """Fields of vLLM's SchedulerOutput that the plug-in reads.

    Args:
        new: (request, first position, blocks) of each.
        cached: the same; blocks are those that are new.
        resumed: ids of those among the cached that start over.
        preempted: ids.
        counts: rows by id, in the order of the scheduler.
    """
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request.request_id,
                sampling_params=request.sampling_params,
                num_computed_tokens=start,
                block_ids=(list(blocks),),
            )
            for request, start, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request, _, _ in cached],
            num_computed_tokens=[start for _, start, _ in cached],
            new_block_ids=[(list(blocks),) if blocks else None for _, _, blocks in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=counts or {},
        preempted_req_ids=set(preempted),
        **more,
    )


# ---------------------------------------------------------------------------- a small scheduler


@dataclass(eq=False)
class Life:
    """A request and what is true of it."""

    request: Request
    trace_id: str
    max_tokens: int
    kept: bool
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    preempted: bool = False
    attempts: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    """By position: token, and number of the row that was computed for it."""


class Engine:
    """Schedules at random over a pool with a prefix cache; the halves of the capture are real."""

    num_blocks = 22

    def __init__(self, seed: int, target: str, protocol: str, drafts: int, late: bool) -> None:
        self.rng = random.Random(seed)
        self.protocol, self.most_drafts = protocol, drafts
        self.counts: Counter[str] = Counter()
        engine_id = f"{seed} {protocol} {drafts} {late}"
        self.schedule = Schedule("r", engine_id, 0, drafts=drafts > 0)
        config = AgentConfig(
            target, engine_id, LAYOUT, run="r", background="thread", block_size=BLOCK,
            num_blocks=self.num_blocks, frame_rows=self.rng.choice((3, 40)), linger_seconds=0.05,
        )  # fmt: skip
        self.capturer = RoutingCapturer(LAYOUT, 64, "cpu")
        if late:
            self.capturer.device = torch.device("cuda")  # from where rows come with the next step
        self.side = WorkerSide(self.capturer, config, self.schedule.take_finished)
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.ended: list[Life] = []
        self.refs = Counter()
        self.free = list(range(self.num_blocks))
        self.cache: dict[tuple[int, ...], int] = {}
        self.slots: dict[int, int] = {}
        self.rows: list[np.ndarray] = []
        self.past: list[list[int]] = [[]]
        self.names = count()
        self.tokens = count(1)

    def close(self) -> None:
        self.side.close()

    def ask(self) -> None:
        rng, name = self.rng, f"t{next(self.names)}"
        prompt = list(rng.choice(self.past))[: rng.randrange(20)]
        prompt += [next(self.tokens) for _ in range(rng.randrange(1, 14))]
        options: dict[str, Any] = {"trace_id": f"{self.side._config.engine_id}/{name}"}
        if rng.random() < 0.15:
            options["capture"] = False
        life = Life(
            Request(f"{name}-0123abcd", prompt, **options), options["trace_id"],
            rng.randrange(1, 25), "capture" not in options,
        )  # fmt: skip
        self.waiting.append(life)

    def end(self, life: Life, status: str) -> None:
        (self.running if life in self.running else self.waiting).remove(life)
        self.give_back(life)
        life.request.status.name = status
        self.schedule.finish(life.request)
        self.past.append(life.request.all_token_ids)
        if life.attempts:
            self.ended.append(life)

    # ------------------------------------------------------------------ blocks

    def give_back(self, life: Life) -> None:
        for block in reversed(life.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
        life.blocks = []

    def allocate(self, life: Life, stop: int) -> list[int] | None:
        """Blocks for the positions before `stop`, beyond those that it has."""
        missing = -(-stop // BLOCK) - len(life.blocks)
        if missing > len(self.free):
            return None
        taken, self.free = self.free[: max(0, missing)], self.free[max(0, missing) :]
        for block in taken:
            self.refs[block] += 1
            self.counts["blocks handed on"] += block * BLOCK in self.slots
            for key in [key for key, other in self.cache.items() if other == block]:
                del self.cache[key]
        life.blocks += taken
        return taken

    def remember(self, life: Life, stop: int) -> None:
        """Full blocks of tokens that stay can be found from now on, before they are computed."""
        tokens = tuple(life.request.all_token_ids)
        for i in range(min(stop, len(tokens)) // BLOCK):
            self.cache.setdefault(tokens[: (i + 1) * BLOCK], life.blocks[i])

    def hit(self, life: Life) -> int:
        tokens, found = tuple(life.request.all_token_ids), 0
        while (found + 1) * BLOCK < len(tokens):
            block = self.cache.get(tokens[: (found + 1) * BLOCK])
            if block is None:
                break
            self.refs[block] += 1
            if block in self.free:
                self.free.remove(block)
            life.blocks.append(block)
            found += 1
        return found * BLOCK

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        rng = self.rng
        preempted, new, cached, resumed, counts = [], [], [], [], {}
        for life in list(self.running):
            if life not in self.running:
                continue
            request, start = life.request, life.request.num_computed_tokens
            n = min(rng.randrange(1, 9), request.num_tokens - start)
            drafts = life.drafts if start + n == request.num_tokens else []
            while (blocks := self.allocate(life, start + n + len(drafts))) is None:
                victim = self.running.pop()
                self.give_back(victim)
                victim.preempted, victim.request.num_computed_tokens = True, 0
                self.waiting.insert(0, victim)
                preempted.append(victim.request.request_id)
                if victim is life:
                    break
            if blocks is None:
                break
            life.drafts = drafts
            counts[request.request_id] = n + len(drafts)
            cached.append((request, start, blocks))
            self.remember(life, start + n)
        while self.waiting and not preempted and len(self.running) < 6:
            life = self.waiting[0]
            request, start = life.request, self.hit(life)
            self.schedule.lookup(request, start)
            n = min(rng.randrange(1, 12), request.num_tokens - start)
            if self.allocate(life, start + n) is None:
                self.give_back(life)
                break
            self.running.append(self.waiting.pop(0))
            life.drafts, request.num_computed_tokens = [], start
            counts[request.request_id] = n
            self.remember(life, start + n)
            entry = request, start, list(life.blocks)
            if life.preempted and self.protocol == "resumed":
                resumed.append(request.request_id)
                cached.append(entry)
            elif life.preempted:
                new.append(entry)
            else:
                new.insert(0, entry)  # as vLLM does: those that come back are appended to them
            self.counts["resumes"] += life.preempted
            self.counts["hits"] += start > 0
            life.preempted = False
            life.attempts.append({})
        self.counts["preemptions"] += len(preempted)
        output = output_of(new, cached, resumed, preempted, counts)
        plan = pickle.loads(pickle.dumps(self.schedule.step(output)))
        starts = {r.request_id: (start, False) for r, start, _ in cached}
        starts |= {r.request_id: (start, True) for r, start, _ in new}
        starts |= {i: (starts[i][0], True) for i in resumed}
        self.forward(plan, starts, counts)

    def forward(self, plan: Any, starts: dict[str, tuple[int, bool]], counts: dict[str, int]):
        rng, order = self.rng, list(counts)
        rng.shuffle(order)
        lives = {life.request.request_id: life for life in self.running}
        self.side.begin_step()
        first = len(self.rows)
        for _ in range(sum(counts.values())):
            self.rows.append(np.array([rng.sample(range(16), 2) for _ in LAYOUT.layer_ids]))
        if counts:
            ids = torch.from_numpy(np.stack(self.rows[first:]))
            for column in range(len(LAYOUT.layer_ids)):
                self.capturer.capture(column, ids[:, column])
        self.side.end_step(plan, lambda: order)
        for request_id in order:
            life, (start, _) = lives[request_id], starts[request_id]
            fed = life.request.all_token_ids + life.drafts
            for p in range(start, start + counts[request_id]):
                number = first if life.kept else NOBODY
                life.attempts[-1][p] = fed[p], number
                self.slots[life.blocks[p // BLOCK] * BLOCK + p % BLOCK] = number
                first += 1
        for request_id in order:
            life, (start, begins) = lives[request_id], starts[request_id]
            for p in range(start if begins else 0):
                number = self.slots[life.blocks[p // BLOCK] * BLOCK + p % BLOCK]
                life.attempts[-1][p] = life.request.all_token_ids[p], number
            self.sample(life, start + counts[request_id])

    def sample(self, life: Life, stop: int) -> None:
        request, rng = life.request, self.rng
        life.request.num_computed_tokens = stop
        if stop < request.num_tokens:
            return  # a chunk of a prompt
        accepted = rng.randint(0, len(life.drafts))
        self.counts["rejected"] += len(life.drafts) - accepted
        request.num_computed_tokens -= len(life.drafts) - accepted
        sampled = [*life.drafts[:accepted], next(self.tokens)]
        for token in sampled:
            request.all_token_ids.append(token)
            if request.num_tokens - request.num_prompt_tokens == life.max_tokens:
                self.end(life, "FINISHED_LENGTH_CAPPED")
                return
        life.drafts = [next(self.tokens) for _ in range(rng.randint(0, self.most_drafts))]

    def expected(self, life: Life) -> list[int]:
        """Of each position the first row that was computed for the token that is there.

        Attempts before the first one that reached the end of the prompt sampled nothing.
        """
        numbers = []
        tokens, last = life.request.all_token_ids, life.request.num_prompt_tokens - 1
        sampled = [
            any(last <= p < len(tokens) and token == tokens[p] and number != NOBODY
                for p, (token, number) in attempt.items())
            for attempt in life.attempts
        ]  # fmt: skip
        attempts = life.attempts[sampled.index(True) if True in sampled else -1 :]
        for p, token in enumerate(tokens[:-1]):
            found = [a[p][1] for a in attempts if a.get(p, (None,))[0] == token]
            numbers.append(next((n for n in found if n != NOBODY), NOBODY))
        return numbers


@pytest.fixture(scope="module")
def server():
    with run_server() as one:
        yield one


@pytest.mark.parametrize("late", [False, True], ids=["rows at once", "rows a step later"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("protocol", ["resumed", "new"])
def test_whatever_a_scheduler_does_every_row_is_the_one_of_its_token(
    server, protocol, drafts, late
):
    engine = Engine(7, server.target, protocol, drafts, late)
    rng = engine.rng
    with RouteClient(server.target, run="r") as client:
        while len(engine.rows) < 4000:
            if len(engine.running) + len(engine.waiting) < 9:
                engine.ask()
            if rng.random() < 0.03 and (lives := engine.running + engine.waiting):
                engine.end(rng.choice(lives), "FINISHED_ABORTED")
            engine.step()
        while engine.running or engine.waiting:
            engine.step()
        for life in engine.ended:
            if not life.kept:
                continue
            numbers = engine.expected(life)
            trace = client.get(life.trace_id, wait_for="end", timeout=20, missing="mask")
            known = np.array(numbers) != NOBODY
            assert len(trace) == len(numbers)
            assert trace.state is (TraceState.COMPLETE if known.all() else TraceState.INCOMPLETE)
            assert np.array_equal(trace.valid, np.stack([known, known], axis=1))
            for p in np.flatnonzero(known):
                assert np.array_equal(trace.topk_ids[p], engine.rows[numbers[p]]), (life, p)
        assert not list(client.find(states=["running"]))
    assert engine.side.faults == 0
    engine.close()
    # It did all that it is for.
    wanted = {"preemptions", "resumes", "hits", "blocks handed on"} | (
        {"rejected"} if drafts else set()
    )
    assert all(engine.counts[name] > 10 for name in wanted), engine.counts


# ---------------------------------------------------------------------------- single moments


class Listener:
    """In place of a CaptureAgent: keeps what it is told."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.config = config
        self.told: list[tuple[Any, ...]] = []
        self._handles = count(100)

    def begin(self, request_id: str, **facts: Any) -> int:
        self.told.append(("begin", facts))
        return next(self._handles)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **named: Any) -> None:
            given = (*args, *named.values())
            plain = (a.tolist() if isinstance(a, np.ndarray) else a for a in given)
            self.told.append((name, *plain))

        return call

    def take(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the events since the last call, of these kinds if any are named."""
        told, self.told = self.told, []
        return [call for call in told if not names or call[0] in names]


class Halves:
    """Both halves, driven by hand."""

    def __init__(self, monkeypatch, *, drafts=False, late=False, group=0) -> None:
        monkeypatch.setattr(worker_module, "CaptureAgent", Listener)
        self.schedule = Schedule("r", "e", group, drafts=drafts)
        self.capturer = RoutingCapturer(LAYOUT, 64, "cpu")
        if late:
            self.capturer.device = torch.device("cuda")
        sizes = {"block_size": BLOCK, "num_blocks": 99} if group is not None else {}
        self.side = WorkerSide(self.capturer, AgentConfig("localhost:1", "e", LAYOUT, **sizes))
        self.side._courier.close()  # all happens in this thread, and nothing by itself
        self.agent: Any = self.side._agent

    def step(self, new=(), cached=(), resumed=(), preempted=(), counts=None, local=None, **more):
        """Arguments as for `output_of`; `local` overrides how many cached tokens are local."""
        for request, start, _ in new:
            self.schedule.lookup(request, (local or {}).get(request.request_id, start))
        plan = self.schedule.step(output_of(new, cached, resumed, preempted, counts, **more))
        counts = counts or {}
        self.side.begin_step()
        for column in range(len(LAYOUT.layer_ids)):
            self.capturer.capture(column, torch.tensor([[1, 2]]).expand(sum(counts.values()), 2))
        self.side.end_step(plan, lambda: list(counts))
        assert self.side.faults == 0


@pytest.fixture
def halves(monkeypatch):
    return lambda **settings: Halves(monkeypatch, **settings)


def kinds(told):
    return [call[0] for call in told]


def test_blocks_that_are_exchanged_under_way_are_unknown(halves):
    h, a = halves(), Request("a-0123abcd", [1] * 6)
    h.step(new=[(a, 0, [1, 2])], counts={"a-0123abcd": 6})
    h.agent.take()
    h.step(
        cached=[(a, 6, [])], counts={"a-0123abcd": 1},
        block_table_updates={"a-0123abcd": ([7, 8],)},
    )  # fmt: skip
    told = h.agent.take("resume", "step")
    assert told[0] == ("resume", 100, 6, [7, 8], 6, 6)  # all its tokens are from elsewhere
    assert kinds(told) == ["resume", "step"]


def test_the_end_of_a_request_that_a_step_left_out_is_known(halves):
    h, a, b = halves(), Request("a-0123abcd", [1] * 5), Request("b-0123abcd", [1] * 3)
    both = dict.fromkeys(("a-0123abcd", "b-0123abcd"), 1)
    h.step(new=[(a, 0, [1, 2]), (b, 0, [3])], counts={"a-0123abcd": 5, "b-0123abcd": 3})
    h.step(cached=[(a, 5, []), (b, 3, [])], counts=both)
    a.all_token_ids += [2, 3]
    h.step(cached=[(b, 4, [])], counts={"b-0123abcd": 1})
    h.step(preempted=["a-0123abcd"])
    assert h.agent.take("preempt") == [("preempt", 100, 6)]


def test_an_engine_without_a_group_to_follow_tells_no_blocks(halves):
    h, a = halves(group=None), Request("a-0123abcd", [1] * 6)
    h.step(new=[(a, 0, [1, 2])], counts={"a-0123abcd": 6})
    h.step(cached=[(a, 6, [3])], counts={"a-0123abcd": 1})
    ((_, facts),) = [call for call in h.agent.told if call[0] == "begin"]
    assert facts["block_ids"] == []
    assert kinds(h.agent.take()) == ["begin", "step", "step"]


def test_blocks_of_a_step_go_to_those_who_are_followed_and_are_forgotten_else(halves):
    h = halves()
    a, b = Request("a-0123abcd", [1] * 4), Request("b-0123abcd", [1] * 4)
    out = Request("out-0123abcd", [1] * 4, capture=False)
    one = dict.fromkeys(("a-0123abcd", "out-0123abcd", "b-0123abcd"), 1)
    h.step(new=[(a, 0, [1]), (out, 0, [2]), (b, 0, [3])], counts=dict.fromkeys(one, 4))
    h.agent.take()
    h.step(cached=[(a, 4, [4, 5]), (out, 4, [6]), (b, 4, [7])], counts=one)
    h.step(cached=[(a, 5, []), (out, 5, [8]), (b, 5, [])], counts=one)
    told = h.agent.take("mark_external", "add_blocks", "step")
    assert [call[:3] for call in told if call[0] != "step"] == [
        ("mark_external", [6]),
        ("add_blocks", [100, 100, 101], [4, 5, 7]),
        ("mark_external", [8]),
    ]
    assert kinds(told) == ["mark_external", "add_blocks", "step", "mark_external", "step"]


def test_the_same_requests_in_another_order_with_other_counts_or_under_the_same_names(halves):
    h, names = halves(), ("a-0123abcd", "b-0123abcd")
    a, b = (Request(name, [1] * 4) for name in names)
    h.step(new=[(a, 0, [1]), (b, 0, [2])], counts=dict.fromkeys(names, 4))

    def tables(*, cached=(), **more):
        h.step(cached=[(request, at, []) for request, at in cached], **more)
        return [call[2] for call in h.agent.take("step")]

    h.agent.take()
    one, flipped = dict.fromkeys(names, 1), dict.fromkeys(reversed(names), 1)
    assert tables(cached=[(a, 4), (b, 4)], counts=one) == [[[100, 4, 1], [101, 4, 1]]]
    assert tables(cached=[(a, 5), (b, 5)], counts=one) == [[[100, 5, 1], [101, 5, 1]]]
    assert tables(cached=[(a, 6), (b, 6)], counts=flipped) == [[[101, 6, 1], [100, 6, 1]]]
    assert tables(cached=[(b, 7), (a, 7)], counts=flipped) == [[[101, 7, 1], [100, 7, 1]]]
    twice = {names[1]: 2, names[0]: 1}
    assert tables(cached=[(b, 8), (a, 8)], counts=twice) == [[[101, 8, 2], [100, 8, 1]]]
    assert tables(cached=[(a, 9)], counts={names[0]: 1}) == [[[100, 9, 1]]]
    ended = [a, b]
    for first, those in ((102, names), (104, names), (106, names[:1]), (107, names[:1])):
        for request in ended:
            h.schedule.finish(request)
        ended = [Request(name, [1] * 4) for name in those]
        new = [(request, i, [1]) for i, request in enumerate(ended)]
        expected = [[first + i, i, 1] for i in range(len(those))]
        assert tables(new=new, counts=dict.fromkeys(those, 1)) == [expected]


def test_a_lane_is_never_two_requests_at_a_time(halves):
    """Rows go by lanes: handles in what is told must be those of the requests that ran."""
    h, rng = halves(), random.Random(1)
    alive: dict[str, tuple[Request, int]] = {}
    handles: dict[str, int] = {}
    names = count()
    for _ in range(200):
        for name in [name for name in alive if rng.random() < 0.3]:
            h.schedule.finish(alive.pop(name)[0])
        new = [Request(f"{next(names)}-0123abcd", [1]) for _ in range(rng.randrange(4))]
        cached = [(request, at, []) for request, at in alive.values()]
        order = [r.request_id for r, _, _ in cached] + [r.request_id for r in new]
        rng.shuffle(order)
        h.step(
            new=[(r, 0, [1]) for r in new], cached=cached, counts=dict.fromkeys(order, 1)
        )  # fmt: skip
        told = h.agent.take()
        begun = [r.request_id for r in sorted(new, key=lambda r: order.index(r.request_id))]
        for name in begun:
            handles[name] = 100 + len(handles)
        alive = {r.request_id: (r, at + 1) for r, at, _ in cached}
        alive |= {r.request_id: (r, 1) for r in new}
        if order:
            (table,) = [call[2] for call in told if call[0] == "step"]
            assert table == [[handles[name], alive[name][1] - 1, 1] for name in order]


@pytest.mark.parametrize("goes_on", [True, False])
def test_more_input_of_a_session_takes_the_place_of_rejected_drafts(halves, goes_on):
    h, a = halves(drafts=True), Request("a-0123abcd", [1] * 5)
    h.step(new=[(a, 0, [1, 2, 3])], counts={"a-0123abcd": 5})
    a.all_token_ids.append(9)
    h.step(cached=[(a, 5, [])], counts={"a-0123abcd": 4})  # a token, and three drafts
    a.all_token_ids.append(9)  # all drafts are rejected, and the answer is done
    a.num_computed_tokens = 6
    h.agent.take()
    # vLLM gives up the token that was sampled last, and makes the rest the prompt.
    a.all_token_ids[6:] = [4, 5, 6]
    a.num_prompt_tokens = 9
    if goes_on:
        h.step(new=[(a, 6, [1, 2, 3])], counts={"a-0123abcd": 3})
        assert h.agent.take()[:2] == [("preempt", 100, 6), ("resume", 100, 6, [1, 2, 3], 0, 9)]
    else:
        a.status.name = "FINISHED_ABORTED"
        h.schedule.finish(a)
        h.step()
        told = h.agent.take()
        assert told[0] == ("preempt", 100, 6)
        assert told[1][:4] == ("finish", 100, 9, "abort")


def test_rows_on_their_way_are_told_as_of_their_step(halves):
    h, a = halves(late=True), Request("a-0123abcd", [1] * 5)
    h.side.set_weight_version(3)
    h.step(new=[(a, 0, [1, 2])], counts={"a-0123abcd": 5})
    told = h.agent.take()
    assert kinds(told) == ["set_weight_version", "begin"]
    assert told[0][1] == 3
    h.side.set_weight_version(4)
    assert h.agent.take() == []  # the rows of version 3 are on their way
    h.step(cached=[(a, 5, [])], counts={"a-0123abcd": 1})
    told = h.agent.take()
    assert kinds(told) == ["step", "set_weight_version"]
    assert told[1][1] == 4
    h.side.pause()
    h.step(cached=[(a, 6, [])], counts={"a-0123abcd": 1})
    h.side.resume()
    h.step(preempted=["a-0123abcd"])
    told = h.agent.take()
    # The row that was under way when the pause began, the one of the pause; then what came after.
    assert kinds(told) == ["step", "skip", "preempt"]
    assert (told[0][2], told[1][1]) == ([[100, 5, 1]], [[100, 6, 1]])


def test_the_row_behind_a_stop_token_comes_before_the_end(halves):
    h, a = halves(late=True), Request("a-0123abcd", [1] * 5)
    h.step(new=[(a, 0, [1, 2])], counts={"a-0123abcd": 5})
    h.step(cached=[(a, 5, [])], counts={"a-0123abcd": 1})  # before the stop token is known
    a.all_token_ids.append(2)
    a.status.name = "FINISHED_STOPPED"
    assert h.schedule.finish(a)["num_tokens"] == 6
    b = Request("b-0123abcd", [1] * 3)
    h.agent.take()
    h.step(new=[(b, 0, [1])], counts={"b-0123abcd": 3})
    told = h.agent.take()
    assert kinds(told) == ["step", "finish", "begin"]
    assert told[0][2] == [[100, 5, 1]]
    assert told[1][1:4] == (100, 6, "stop")


def test_all_blocks_that_are_forgotten_come_before_all_that_are_read(halves):
    h = halves()
    out, a, b, c = (Request(f"{n}-0123abcd", [1] * 9) for n in ("out", "a", "b", "c"))
    out.sampling_params.extra_args["routetrace.capture"] = False
    h.step(new=[(out, 0, [1]), (a, 0, [2, 3])], counts={"out-0123abcd": 4, "a-0123abcd": 5})
    h.step(preempted=["a-0123abcd"])
    h.agent.take()
    h.schedule.lookup(a, 4)
    # Scheduled in this order: what runs, what comes back, what is new; told in another one.
    h.step(
        new=[(c, 4, [6, 8]), (b, 4, [5, 6]), (a, 4, [5, 7])],
        cached=[(out, 4, [9])],
        counts={"out-0123abcd": 1, "a-0123abcd": 5, "b-0123abcd": 5, "c-0123abcd": 5},
    )
    told = h.agent.take()
    assert kinds(told) == ["mark_external", "resume", "begin", "begin", "step"]
    assert [call[1]["block_ids"] for call in told if call[0] == "begin"] == [[5, 6], [6, 8]]


def test_what_another_connector_loads_is_from_elsewhere(halves):
    h = halves()
    a, out = Request("a-0123abcd", [1] * 9), Request("o-0123abcd", [1] * 9, capture=False)
    h.step(
        new=[(a, 8, [1, 2, 3]), (out, 8, [4, 5, 6])],
        local={"a-0123abcd": 4, "o-0123abcd": 4},
        counts={"a-0123abcd": 1, "o-0123abcd": 1},
    )
    told = h.agent.take()
    assert told[0] == ("mark_external", [5, 6])
    facts = told[1][1]
    assert (facts["num_computed_tokens"], facts["num_external_tokens"]) == (8, 4)


def test_a_trace_that_another_engine_goes_on_with_is_handed_over(halves):
    h, a = halves(), Request("a-0123abcd", [1] * 5, handoff=True)
    h.step(new=[(a, 0, [1, 2])], counts={"a-0123abcd": 5})
    a.status.name = "FINISHED_LENGTH_CAPPED"
    h.schedule.finish(a)
    h.step()
    assert h.agent.take("finish")[0][3] == "handoff"


def test_a_request_that_never_ran_begins_with_its_end(halves):
    """Otherwise its reader waits for an end that is never reported."""
    h, a = halves(), Request("a-0123abcd", [1] * 5)
    out = Request("out-0123abcd", [1] * 5, capture=False)
    runs = Request("b-0123abcd", [1] * 4)
    h.step(new=[(runs, 0, [1])], counts={"b-0123abcd": 4})
    h.agent.take()
    h.schedule.lookup(a, 0)
    a.status.name = "FINISHED_ABORTED"
    handle = h.schedule.finish(a)
    assert handle is not None
    assert (handle["trace_id"], handle["num_tokens"]) == ("a", 5)
    assert h.schedule.finish(out) is None
    h.schedule.finish_all(["a-0123abcd", "unheard of"])
    h.step(new=[(Request("c-0123abcd", [1] * 4), 0, [2])], counts={"c-0123abcd": 4})
    begin, finish, later, step = h.agent.take()
    assert (begin[1]["trace_id"], begin[1]["num_computed_tokens"]) == ("a", 0)
    assert (begin[1]["block_ids"], begin[1]["nonce"]) == ([], handle["nonce"])
    assert finish[:4] == ("finish", 101, 5, "abort")
    assert (later[1]["trace_id"], step[2]) == ("c", [[102, 0, 4]])
    assert not h.schedule._waiting


def test_an_end_that_cannot_be_told_raises_nothing_in_the_engine(halves, caplog):
    h, a = halves(), Request("a-0123abcd", [1] * 5)
    b = Request("b-0123abcd", [1] * 4)
    h.step(new=[(b, 0, [1])], counts={"b-0123abcd": 4})
    del a.num_prompt_tokens
    assert h.schedule.finish(a) is None
    assert "the end of request a-0123abcd is lost" in caplog.text
    h.step(new=[(Request("c-0123abcd", [1]), 0, [2])], counts={"c-0123abcd": 1})
    assert h.agent.take("step")[-1][2] == [[101, 0, 1]]
