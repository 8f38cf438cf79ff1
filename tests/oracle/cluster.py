"""Several simulated engines and their users."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oracle import stand_ins, truth
from oracle.engine import VOCABULARY, Chances, Engine
from oracle.marks import MARKS, marked
from oracle.request import Request
from oracle.truth import Bound, Expected, Policy, PrefixRows, Record, RowStore
from oracle.world import Empties, EngineSpec, Role, Shard, World
from routetrace.common.layout import ModelLayout

COUNTS = (
    *("requests", "samples", "turns", "branches", "retries", "continued", "resubmitted"),
    *("beams", "handoffs", "aborts", "crashes", "preemptions", "resumes", "rows", "late_rows"),
    *("rewinds", "rejected_rows", "reused_blocks", "cached_rows", "unknown_rows"),
    *("shared_in_part", "skipped_rows", "redone", "draft_branches", "marked"),
    *("external_loads", "external_rows", "weight_updates", "resets", "binds", "barriers"),
    *("stalled", "relayed", "failed_transfers", "transfers_that_gave_nothing", "decoded_again"),
    *("transfer_ids_used_twice", "siblings", "cut_short", "host_writes", "host_loads"),
    *("emptied", "late_versions", "kv_versions", "loaded_samples", "lost_late"),
)

GROUPS = (*(2, 3, 4, 5) * 3, 8, 16, 64)
"""How many samples of one prompt there may be."""

_BRANCH = "filled"
"""Traces of requests that go on from what drafts filled are called so."""

Stores = Literal["apart", "together", "own"]
"""Of KV outside of the engines' blocks: one that many engines fill, each with its own weights; one
that many fill, which is emptied when all of them get new weights at once; or one of each engine."""

Job = Generator["Ask", Request, None]
"""What a user does: asks engines, one after the other."""
Answer = Generator["Ask", Request, Request | None]
"""The part of a job that ends with the last request of an answer; None if it was given up."""


@dataclass
class Ask:
    """A request, and the engine that is asked."""

    engine: Engine
    request: Request
    next_one: bool = False
    """Whether it does not queue behind others."""


class Cluster:
    """Engines, and a workload that a seed determines.

    Args:
        layout: of all rows.
        seed: of everything that happens.
        world: gives agents to the engines.
        specs: the engines; a mix that the seed draws if None.
        chances: what happens how often.
        stores: what the engines' stores outside are; as the seed says if None.
    """

    def __init__(
        self,
        layout: ModelLayout,
        seed: int,
        world: World,
        specs: Sequence[EngineSpec] | None = None,
        chances: Chances | None = None,
        stores: Stores | None = None,
    ) -> None:
        self.rng = rng = random.Random(f"cluster {seed}")
        specs = [_with_had(spec, seed) for spec in specs or random_specs(rng, layout)]
        choice = rng.choice(("apart", "together", "own"))
        self.stores = stores or choice
        if stores is None and choice == "own" and any(s.role != "both" for s in specs):
            self.stores = "together"
        self.orderly = rng.random() < 0.5
        """Whether one trace is at the server before the next one begins."""
        self.world = world
        self.chances = chances or Chances()
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.store = RowStore(layout, seed)
        self.records: dict[str, list[Record]] = {}
        """Requests of each trace, in order of arrival."""
        self.bound: dict[str, list[Bound]] = {}
        self.engines = [
            Engine(
                spec,
                layout,
                self.store,
                world,
                random.Random(f"engine {seed} {i}"),
                self.chances,
                self.counts,
                self._before_begin,
                self._on_bind,
                self._elsewhere,
            )
            for i, spec in enumerate(map(self._with_store, specs))
        ]
        self._unsettled: set[Record] = set()
        """Records that the server may not know yet, or not all of them."""
        self._capacity = min(engine.capacity for engine in self.engines)
        self._jobs: list[Job] = []
        self._asked: dict[Request, Job] = {}
        self._names = 0
        self._prompts: list[list[int]] = []
        """The last ones."""
        self._version = 0
        self._updates = 0
        """Of all engines at once."""
        self._transfers: dict[str, str] = {}
        """The last transfer id of each trace."""

    # ------------------------------------------------------------------ what happens

    def submit_workload(self, num_requests: int) -> None:
        """Adds sessions, groups and single requests; about so many engine requests in all."""
        planned = 0
        while planned < num_requests:
            job, size = self._draw_job(num_requests - planned)
            self._jobs.append(job)
            planned += size

    def step(self) -> bool:
        """One step of some engine; False when the workload is done."""
        rng = self.rng
        while self._jobs and len(self._asked) < 4 * len(self.engines):
            self._go_on(self._jobs.pop(0), None)
        busy = [engine for engine in self.engines if not engine.idle]
        if not busy:
            self.barrier()
            return False
        engine = rng.choice(busy)
        self._disturb(engine)
        engine.step()
        if self.chances.branch:
            self._branch(engine)
        for engine in self.engines:
            done, engine.done = engine.done, []
            for request in done:
                self._go_on(self._asked.pop(request), request)
        return True

    def barrier(self) -> None:
        """Everything that has happened is at the server once this returns."""
        for engine in self.engines:
            engine.deliver()
        self.world.barrier()
        self.counts["barriers"] += 1
        for record in self._unsettled:
            record.begin_settled = True
            record.settled = bool(record.reason)
        self._unsettled = {r for r in self._unsettled if not r.settled}

    def _disturb(self, engine: Engine) -> None:
        """Something happens to an engine between two steps."""
        rng, chances = self.rng, self.chances
        if rng.random() < chances.update:
            if self.stores == "together":
                self._update_all()
            else:
                # Not all engines get new weights at once.
                self._version += rng.random() < 0.7
                if self._version > engine.version:
                    engine.set_weight_version(
                        self._version,
                        reset=rng.random() < chances.update_resets,
                        empty=self.stores == "own" and rng.random() < chances.update_resets,
                        abort=rng.random() < chances.update_aborts,
                    )
        if rng.random() < chances.late_version:
            engine.tell_late_version()
        if rng.random() < chances.reset:
            engine.reset_prefix_cache()
        if self.stores == "own" and rng.random() < chances.reset:
            engine.reset_external_kv()
        if rng.random() < chances.crash:
            boot_id = engine.boot_id
            engine.crash()
            # What it had told since the last barrier may have died with it.
            self._unsettled = {r for r in self._unsettled if r.boot_id != boot_id}

    def _with_store(self, spec: EngineSpec) -> EngineSpec:
        """What its agents learn when stores are emptied: of those that other engines fill while
        they have other weights, nothing."""
        rng = self.rng
        choices: dict[Stores, tuple[Empties, ...]] = {
            "apart": ("untold",),
            "together": ("declared", "told", "declared", "told", "untold"),
            "own": ("told", "told", "untold"),
        }
        own = self.stores == "own" and not spec.host_blocks
        offload = spec.offload or (own and rng.random() < 0.6)
        return replace(spec, empties=rng.choice(choices[self.stores]), offload=offload)

    def _update_all(self) -> None:
        """All engines get new weights at once, and nothing is left of the old ones."""
        self._version += 1
        self._updates += 1
        for engine in self.engines:
            engine.set_weight_version(self._version, reset=True, empty=True, abort=True)
        for engine in self.engines:
            for request in engine.waiting:
                self._expire(request)

    def _expire(self, request: Request) -> None:
        """KV that was to be handed over is gone with the old weights."""
        source = request.source and request.source.record
        if source and self.stores == "together" and source.updates < self._updates:
            request.remote, request.source = 0, None

    def _elsewhere(self) -> int:
        """The weights of KV in a store that many engines fill."""
        return self._version if self.stores == "together" else self.rng.randint(0, self._version)

    def _before_begin(self, engine: Engine, record: Record) -> None:
        """Requests of a trace arrive in the order in which they begin."""
        earlier = self.records.setdefault(record.trace_id, [])
        new = not earlier and self.orderly and any(not r.begin_settled for r in self._unsettled)
        if new or any(r in self._unsettled and r.boot_id != engine.boot_id for r in earlier):
            self.barrier()
        earlier.append(record)
        record.serial, record.updates = self.counts["requests"], self._updates
        record.barriers = self.counts["barriers"]
        self._unsettled.add(record)

    def _on_bind(self, trace_id: str, bound: Bound) -> None:
        self.bound.setdefault(trace_id, []).append(bound)

    # ------------------------------------------------------------------ what is true

    def traces(self) -> list[str]:
        """Ids of all traces so far."""
        return [*self.records, *self.bound]

    def expected(
        self,
        trace_id: str,
        policy: Policy,
        weight_version: int | None = None,
        prefix_rows: PrefixRows = "never",
    ) -> list[Expected]:
        """Every incarnation of a trace, absorbed ones too, in order of arrival."""
        if bound := self.bound.get(trace_id):
            return [b.expected(i + 1, self.store, weight_version) for i, b in enumerate(bound)]
        records = self.records[trace_id]
        answers = truth.expected(records, self.store, policy, weight_version)
        if prefix_rows != "never" and self.world.stand_ins:
            if policy == "latest":
                sampled = self.expected(trace_id, "as_sampled", None, prefix_rows)
                stand_ins.take(answers, sampled, self.store, weight_version)
            else:
                stand_ins.add(
                    answers, trace_id, self.records, self.store, prefix_rows, weight_version
                )
        return answers

    # ------------------------------------------------------------------ users

    def _go_on(self, job: Job, answer: Request | None) -> None:
        """A job gets an answer, and asks the next thing or ends."""
        try:
            ask = next(job) if answer is None else job.send(answer)
        except StopIteration:
            return
        self._asked[ask.request] = job
        self._expire(ask.request)
        ask.engine.submit(ask.request, next_one=ask.next_one)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _request_id(self, trace_id: str) -> str:
        """Engines use names again."""
        kind = self.rng.choice(("trace", "new", "old"))
        if kind == "trace":
            return trace_id
        return self._name("request") if kind == "new" else f"again{self.rng.randrange(8)}"

    def _tokens(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(low, high))]

    def _prompt(self) -> list[int]:
        """Mostly short; some are long enough for several token digests."""
        rng = self.rng
        high = max(2, min(rng.choice((24, 80, 150, 300)), self._capacity - 4))
        prompt = self._tokens(2, high)
        if self._prompts and rng.random() < 0.4:
            # As another one begins: a system prompt, a few examples.
            shared = rng.choice(self._prompts)
            prompt = [*shared[: rng.choice((64, 100, 128, len(shared)))], *prompt][:high]
        self._prompts = [*self._prompts[-4:], prompt]
        return prompt

    def _draw_job(self, num_requests: int) -> tuple[Job, int]:
        """A job, and about how many engine requests it makes."""
        rng = self.rng
        kinds = ("single", "group", "session", "session", "session", "again", "beam", "warm up")
        kind = rng.choice(kinds)
        if kind == "single" or num_requests < 2:
            return self._single(self._name("trace"), self._prompt()), 1
        if kind == "group":
            n = min(rng.choice(GROUPS), num_requests)
            name, prompt = self._name("group"), self._prompt()
            self.counts["samples"] += n
            one_trace = rng.random() < 0.3
            names = [name if one_trace else f"{name}/{i}" for i in range(n)]
            samples = [self._sample(trace_id, prompt) for trace_id in names]
            self._jobs += samples[1:]
            return samples[0], n
        if kind == "again":
            return self._again(self._name("trace"), self._prompt()), 2
        whole = [engine for engine in self.engines if engine.spec.role == "both"]
        if kind == "warm up" and whole:
            name, prompt, engine = self._name("warm"), self._prompt(), rng.choice(whole)
            first = prompt[: -rng.randint(1, min(6, len(prompt) - 1))]
            self._jobs.append(self._ask(engine, name, first, 1))
            return self._ask(engine, name, prompt, 12), 2
        if kind == "beam":
            return self._beam(self._name("beam")), 1
        turns = rng.randint(2, 5)
        one_trace = rng.random() < 0.7
        return self._session(self._name("session"), self._prompt(), turns, one_trace), turns

    def _single(self, trace_id: str, prompt: list[int]) -> Job:
        yield from self._answer(trace_id, prompt)

    def _sample(self, trace_id: str, prompt: list[int]) -> Job:
        """One of a group: some load the KV of the prompt."""
        whole = [engine for engine in self.engines if engine.spec.role == "both"]
        if self.stores == "own" or not whole or self.rng.random() < 0.6:
            yield from self._answer(trace_id, prompt)
            return
        self.counts["loaded_samples"] += 1
        most = min(self.rng.randint(1, 8), self._capacity - len(prompt))
        remote = self.rng.randint(1, len(prompt))
        request = Request(self._name("request"), trace_id, prompt, most, remote=remote)
        yield Ask(self.rng.choice(whole), request)

    def _just(self, engine: Engine, request: Request) -> Job:
        """Runs a request and ignores its outcome."""
        yield Ask(engine, request)

    def _ask(
        self,
        engine: Engine,
        trace_id: str,
        tokens: list[int],
        most: int,
        *,
        next_one: bool = False,
    ) -> Job:
        """One request to that engine, for at most so many tokens."""
        most = min(most, self._capacity - len(tokens))
        request = Request(self._name("request"), trace_id, tokens, self.rng.randint(1, most))
        yield Ask(engine, request, next_one)

    def _again(self, trace_id: str, prompt: list[int]) -> Job:
        """The same prompt under the same id once more, though nothing was wrong."""
        self.counts["resubmitted"] += 1
        if self.rng.random() < 0.5:
            self._jobs.insert(0, self._single(trace_id, prompt))  # meanwhile, at any stage
        else:
            yield from self._answer(trace_id, prompt)
        yield from self._answer(trace_id, prompt)

    def _branch(self, engine: Engine) -> None:
        """Go on from blocks that accepted drafts have filled, in the pass that confirms them."""
        for request in engine.filled:
            own = not request.trace_id.startswith(_BRANCH)
            if own and self.rng.random() < self.chances.branch:
                full = request.computed // engine.spec.block_size * engine.spec.block_size
                tokens = [*request.tokens[:full], *self._tokens(1, 4)]
                if len(tokens) < self._capacity:
                    self.counts["draft_branches"] += 1
                    job = self._ask(engine, self._name(_BRANCH), tokens, 8, next_one=True)
                    self._go_on(job, None)

    def _beam(self, name: str) -> Job:
        """Continue the tokens of a running request on its engine, as a tree search does."""
        running = [(e, r) for e in self.engines if e.spec.role == "both" for r in e.running]
        short = [(e, r) for e, r in running if len(r.tokens) + 8 < self._capacity]
        if not short:
            yield from self._answer(name, self._prompt())
            return
        self.counts["beams"] += 1
        engine, parent = self.rng.choice(short)
        tokens = [*parent.tokens, *self._tokens(1, 4)]
        yield from self._ask(engine, name, tokens, 12)

    def _session(
        self,
        name: str,
        tokens: list[int],
        turns: int,
        one_trace: bool,
        before: Request | None = None,
    ) -> Job:
        """A conversation: each prompt is everything before and something new."""
        rng = self.rng
        for turn in range(turns):
            trace_id = name if one_trace else f"{name}/{turn}"
            said = yield from self._turn(trace_id, tokens, before)
            if said is None:
                return
            before, answer = said, said.tokens
            if rng.random() < 0.1:
                answer = answer[: rng.randint(1, len(answer))]  # the user edits
            if turn + 1 < turns and rng.random() < 0.2:
                # Somebody else goes on from here, too.
                self.counts["branches"] += 1
                other = name if one_trace else f"{name}/{turn}+{self._name('fork')}"
                other_tokens = [*answer, *self._tokens(0, 20)]
                if len(other_tokens) + 4 < self._capacity:
                    rest = turns - turn - 1
                    job = self._session(other, other_tokens, rest, one_trace, before)
                    self._jobs.insert(0, job)
            tokens = [*answer, *self._tokens(0, 40)]
            if len(tokens) + 4 >= self._capacity:
                return
            self.counts["turns"] += turn + 1 < turns

    def _turn(self, trace_id: str, prompt: list[int], before: Request | None) -> Answer:
        """One answer; or two that say the same, of which one goes on, as with greedy sampling."""
        if self.rng.random() > 0.25:
            return (yield from self._answer(trace_id, prompt, before))
        self.counts["siblings"] += 1
        says = self._tokens(1, min(12, self._capacity - len(prompt)))
        answers = []
        for _ in range(2):
            answer = yield from self._answer(trace_id, prompt, before, says)
            answers += [answer] if answer else []
        return self.rng.choice(answers) if answers else None

    def _answer(
        self,
        trace_id: str,
        prompt: list[int],
        before: Request | None = None,
        says: Sequence[int] = (),
    ) -> Answer:
        """One answer, whatever happens to the engines.

        Args:
            trace_id: of all its requests.
            prompt: of the first one.
            before: the request that sampled tokens of it.
            says: all of the answer; empty: what chance says.
        """
        rng = self.rng
        start = len(prompt)
        most = min(rng.choice((1, 8, 24, 60)), self._capacity - start)
        stop = start + (len(says) or rng.randint(1, max(1, most)))
        request_id = self._request_id(trace_id)
        while True:
            asked = Request(
                request_id,
                trace_id,
                prompt,
                stop - len(prompt),
                says=[*says[len(prompt) - start :]],
                continues=before,
            )
            request = yield from self._try(asked)
            if request.outcome in {"stop", "length"}:
                return request
            # It was aborted, or died. Gone on from where it was, begun again, or given up.
            choice = rng.random()
            if choice < 0.1:
                return None
            # The engine may have had tokens that the caller did not get.
            got = request.tokens[: max(start, len(request.tokens) - rng.choice((0, 0, 1, 2, 3)))]
            if choice < 0.6 and len(got) < stop:
                self.counts["continued"] += 1
                self.counts["cut_short"] += len(got) < len(request.tokens)
                before = request if len(got) > len(request.prompt) else request.continues
                prompt = got
            else:
                self.counts["retries"] += 1
            if rng.random() < 0.5:
                request_id = self._request_id(trace_id)

    def _try(self, asked: Request) -> Generator[Ask, Request, Request]:
        """One request to one engine, or to a pair of which one computes the prompt."""
        rng = self.rng
        if rng.random() < self.chances.mark:
            self.counts["marked"] += 1
            asked = replace(asked, prompt=marked(asked.prompt, rng.randrange(len(MARKS))))
        of_role: dict[str, list[Engine]] = {}
        for engine in self.engines:
            of_role.setdefault(engine.spec.role, []).append(engine)
        pairs = bool(of_role.get("prefill") and of_role.get("decode"))
        whole = of_role.get("both", []) if pairs else self.engines
        if pairs and (not whole or rng.random() < 0.5):
            first = yield from self._prefill(of_role["prefill"], asked)
            if first.outcome != first.end or asked.max_tokens < 2:
                return first
            return (yield from self._decode(of_role["decode"], asked, first))
        # KV of some of the prompt comes from a store that other engines fill, too.
        shared = self.stores != "own" and rng.random() < 0.15
        restored = rng.randint(1, len(asked.prompt)) if shared else 0
        return (yield Ask(rng.choice(whole), replace(asked, remote=restored)))

    def _prefill(self, engines: list[Engine], asked: Request) -> Generator[Ask, Request, Request]:
        """The first token, by an engine that hands its KV over; or by one after the other."""
        rng = self.rng
        first = replace(asked, max_tokens=1, end="handoff" if rng.random() < 0.8 else "length")
        if rng.random() < 0.2:
            # It stalls, and is repeated; it may still come, at any time.
            self.counts["stalled"] += 1
            gives = self._transfer_id(asked.trace_id)
            stalled = replace(first, request_id=self._name("stalled"), gives=gives)
            self._jobs.insert(
                rng.choice((0, len(self._jobs))), self._just(rng.choice(engines), stalled)
            )
        first = replace(first, gives=self._transfer_id(asked.trace_id))
        first = yield Ask(rng.choice(engines), first)
        if first.outcome == first.end and rng.random() < 0.15:
            self.counts["relayed"] += 1
            gives = self._transfer_id(asked.trace_id)
            first = yield Ask(rng.choice(engines), replace(self._taking(first), gives=gives))
        return first

    def _decode(
        self, engines: list[Engine], asked: Request, first: Request
    ) -> Generator[Ask, Request, Request]:
        """The rest of an answer, from the KV of the request that computed its prompt."""
        rng, sampled = self.rng, first.tokens[len(asked.prompt) :]
        how = rng.choice(("sampled again", "given", "in the prompt"))
        while True:
            request = replace(self._taking(first), max_tokens=asked.max_tokens, end="", gives=None)
            if how == "given":
                request = replace(request, given=sampled)
            elif how == "in the prompt":
                request = replace(
                    request,
                    prompt=first.tokens,
                    max_tokens=asked.max_tokens - 1,
                    says=asked.says[1:],
                    continues=first,
                )
            if (trouble := rng.random()) < 0.1:
                self.counts["transfers_that_gave_nothing"] += 1
                request = replace(request, remote=0, source=None)
            request = yield Ask(rng.choice(engines), replace(request, fails=trouble > 0.85))
            if request.outcome in {"stop", "length"} or rng.random() < 0.6:
                return request
            self.counts["decoded_again"] += 1

    def _taking(self, first: Request) -> Request:
        """A request with the same prompt, that takes another one's KV of it."""
        takes = None if self.rng.random() < 0.05 else first.gives
        return replace(first, given=[], remote=len(first.prompt), source=first, takes=takes)

    def _transfer_id(self, trace_id: str) -> str | None:
        """That of a hand-over: mostly a new one; or none, or one that was used before."""
        choice = self.rng.random()
        if choice < 0.1:
            return None
        if choice < 0.2 and trace_id in self._transfers:
            self.counts["transfer_ids_used_twice"] += 1
            return self._transfers[trace_id]
        self._transfers[trace_id] = self._name("transfer")
        return self._transfers[trace_id]


def random_specs(rng: random.Random, layout: ModelLayout) -> list[EngineSpec]:
    """A mix of engines, of one to five."""
    specs = [_random_spec(rng, layout, f"engine{i}") for i in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        roles: list[Role] = ["prefill", "decode", *(["prefill"] if rng.random() < 0.5 else [])]
        specs += [
            replace(_random_spec(rng, layout, f"{role}{i}"), role=role)
            for i, role in enumerate(roles)
        ]
    return specs


def _with_had(spec: EngineSpec, seed: int) -> EngineSpec:
    """One engine in four never tells at a resume how many tokens a request has.

    The choice has a generator of its own, so that all else that a seed means stays.
    """
    tells = random.Random(f"had {spec.engine_id} {seed}").random() >= 0.25
    return replace(spec, tells_had=spec.tells_had and tells)


def _random_spec(rng: random.Random, layout: ModelLayout, name: str) -> EngineSpec:
    block_size = rng.choice((4, 8, 16))
    shards = _random_shards(rng, layout)
    spec = EngineSpec(
        engine_id=name,
        block_size=block_size,
        num_blocks=rng.randint(400, 700) // block_size,
        shards=shards,
        chunk_tokens=rng.choice((16, 32, 64, 128)),
        max_running=rng.randint(2, 8),
        draft_tokens=rng.choice((0, 0, 1, 3)),
        asynchronous=rng.random() < 0.5,
        tells_tokens=rng.random() < 0.85,
        tells_versions=rng.random() < 0.85,
        slot_only_twin=shards[0].size == 1 and rng.random() < 0.4,
    )
    memory = rng.random()
    if not 0.3 <= memory < 0.55 or spec.slot_only_twin:
        return replace(spec, offload=memory < 0.3)
    few = spec.num_blocks * 2 // 5  # so that blocks are evicted, and come back
    return replace(spec, num_blocks=few, host_blocks=few // 2)


def _random_shards(rng: random.Random, layout: ModelLayout) -> tuple[Shard, ...]:
    """One shard, or pipeline stages, or context-parallel ranks, or ranks of each stage."""
    layers = layout.layer_ids
    if rng.random() < 0.4:
        return (Shard("", layers),)
    cut = rng.randrange(1, len(layers)) if len(layers) > 1 and rng.random() < 0.6 else 0
    stages = [layers[:cut], layers[cut:]] if cut else [layers]
    size = rng.choice((2, 3)) if len(stages) == 1 or rng.random() < 0.3 else 1
    return tuple(
        Shard(f"pp{i}cp{rank}", stage, rank, size)
        for i, stage in enumerate(stages)
        for rank in range(size)
    )
