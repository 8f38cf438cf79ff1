"""Scenarios: requests to an engine, and the expected traces."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from vllm_runs.engine import BLOCK, STEP_TOKENS, Answer, Ask, Engine
from vllm_runs.reference import change_weights

Scenario = Callable[[Engine], list[Answer]]

GREEDY = {"temperature": 0.0}


def concurrent(engine: Engine) -> list[Answer]:
    """Requests of many lengths at a time: around a block, around a step, of one token."""
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, STEP_TOKENS, STEP_TOKENS + 1, 90, 20)
    labels = ({"group": f"g{i % 2}", "sample": i, "label.kind": "test"} for i in range(8))
    return engine.run(
        Ask(f"concurrent-{i}", engine.prompts.make(n), max_tokens=1 + 5 * i, words=words)
        for i, (n, words) in enumerate(zip(lengths, labels, strict=True))
    )


def prefix(engine: Engine) -> list[Answer]:
    """The same prompt again, longer ones, turns of a session, and samples that start together."""
    hits = engine.count("prefix_cache_hits")
    prompt = engine.prompts.make(100)
    done = engine.run([Ask("prefix-first", prompt)])
    done += engine.run([Ask("prefix-again", prompt), Ask("prefix-part", prompt[:70])])
    done += engine.run([Ask("prefix-longer", prompt + engine.prompts.make(30))])
    conversation = done[0].tokens
    for turn in range(2):
        asked = conversation + engine.prompts.make(10)
        done += engine.run([Ask(f"prefix-turn-{turn}", asked, words={"session": "s"})])
        conversation = done[-1].tokens
    shared = engine.prompts.make(75)
    done += engine.run(
        Ask(f"prefix-sample-{i}", shared, words={"group": "shared", "sample": i}) for i in range(3)
    )
    expect(engine.count("prefix_cache_hits") > hits, "no prefix was hit")
    return done


def one_trace(engine: Engine) -> list[Answer]:
    """A rollout that goes on in a second request under the same trace id."""
    (first,) = engine.run([Ask("one-trace", engine.prompts.make(50))])
    return engine.run([Ask("one-trace", first.tokens, max_tokens=20)])


def chunked(engine: Engine) -> list[Answer]:
    """Prompts of several steps, while others decode."""
    engine.add(Ask("chunked-short", engine.prompts.make(10), max_tokens=40))
    done = engine.step()
    return done + engine.run(
        Ask(f"chunked-{n}", engine.prompts.make(n), max_tokens=10) for n in (150, 129, 230)
    )


def stop(engine: Engine) -> list[Answer]:
    """A stop token that comes within the answer."""
    prompts = [engine.prompts.make(n) for n in (30, 45)]
    asks = [Ask(f"stop-no-{i}", p, sampling=GREEDY) for i, p in enumerate(prompts)]
    free = sorted(engine.run(asks), key=lambda a: a.trace_id)
    done = []
    for i, (prompt, answer) in enumerate(zip(prompts, free, strict=True)):
        output = answer.tokens[len(prompt) :]
        word = output[9]
        sampling = {**GREEDY, "stop_token_ids": [word]}
        done += engine.run([Ask(f"stop-{i}", prompt, sampling=sampling)])
        came = len(done[-1].tokens) - len(prompt)
        expect(came == output.index(word) + 1, f"stopped after {came} tokens")
    return free + done


def several(engine: Engine) -> list[Answer]:
    """Two completions of one request."""
    return engine.run(
        Ask(f"several-{i}", engine.prompts.make(40 + i), sampling={"n": 2}) for i in range(2)
    )


def abort(engine: Engine) -> list[Answer]:
    """Aborted while it decodes, in the middle of its prompt, and before it began."""
    engine.add(Ask("abort-stays", engine.prompts.make(30), max_tokens=30))
    engine.add(Ask("abort-decode", engine.prompts.make(35), max_tokens=60))
    for _ in range(8):
        engine.step()
    gone = [engine.abort("abort-decode")]
    for _ in range(2):
        engine.step()
    engine.add(Ask("abort-prompt", engine.prompts.make(200)))
    engine.step()
    gone.append(engine.abort("abort-prompt"))
    engine.add(Ask("abort-early", engine.prompts.make(20)))
    gone.append(replace(engine.abort("abort-early"), optional=True))
    return gone + engine.drain()


def retry(engine: Engine) -> list[Answer]:
    """Aborted in the middle of its answer, and repeated under its id, with other weights.

    The first repetition hits what the aborted one computed; the second one computes all again.
    """
    update_weights(engine, 31)
    ask = Ask("retry", engine.prompts.make(100), max_tokens=60)
    engine.add(ask)
    for _ in range(8):
        engine.step()
    gone = engine.abort("retry")
    gone.versions = ((0, len(gone.tokens) - 1, 31),)
    update_weights(engine, 32)
    (hit,) = engine.run([replace(ask, words={"sample": 1})])
    engine.llm.reset_prefix_cache()
    (whole,) = engine.run([replace(ask, words={"sample": 2})])
    cached, end = len(ask.prompt) // BLOCK * BLOCK, len(hit.tokens) - 1
    hit.versions = ((0, cached, 31), (cached, end, 32))
    hit.sources = ((0, cached, "slot"), (cached, end, "forward"))
    whole.versions, whole.sources = ((0, end, 32),), ((0, end, "forward"),)
    gone.changed = hit.changed = (31,)
    return _repeated(engine, [gone, hit, whole])


def epochs(engine: Engine) -> list[Answer]:
    """An id and its prompt come again in each epoch, and the answers are of one length.

    Their handles tell them apart, at once: the newest is read first.
    """
    engine.rpc("routetrace_set_weight_version", 41)
    ask = Ask("epochs", engine.prompts.make(40))
    done: list[Answer] = []
    for number in range(3):
        if number:
            engine.llm.reset_prefix_cache()
            update_weights(engine, 41 + number)
        (answer,) = engine.run([replace(ask, words={"label.epoch": number})])
        answer.versions = ((0, len(answer.tokens) - 1, 41 + number),)
        answer.changed = (42,)
        done.append(answer)
    expect(len({tuple(a.tokens) for a in done}) == 3, "two epochs sampled the same tokens")
    expect(len({len(a.tokens) for a in done}) == 1, "the answers are of several lengths")
    return _repeated(engine, done)


def _repeated(engine: Engine, done: list[Answer]) -> list[Answer]:
    """Return answers under one trace id, in the order of their begin, the newest first.

    Where there are no handles nothing tells them apart before all of them are told.
    """
    for number, answer in enumerate(done, 1):
        answer.incarnation, answer.newest = number, number == len(done)
    if done[-1].handle is None:
        engine.rpc("routetrace_flush", 10.0)
    return done[::-1]


def preemption(engine: Engine) -> list[Answer]:
    """More requests than the KV cache holds."""
    before = engine.count("num_preemptions")
    shared = engine.prompts.make(40)
    done = engine.run(
        Ask(f"preemption-{i}", shared[: 40 * (i % 2)] + engine.prompts.make(n), max_tokens=90)
        for i, n in enumerate((60, 40, 70, 35))
    )
    expect(engine.count("num_preemptions") > before, "nothing was preempted")
    return done


def mixed(engine: Engine) -> list[Answer]:
    """All at once, in a small cache: shared prefixes, chunks, samples, preemptions, aborts."""
    chance = random.Random(3)
    roots = [engine.prompts.make(n) for n in (96, 64, 33)]
    waiting, running, gone = list(range(20)), [], []
    done: list[Answer] = []
    while waiting or engine.busy:
        while waiting and chance.random() < 0.4:
            number = waiting.pop()
            root = chance.choice(roots)
            prompt = root[: chance.randint(1, len(root))] + engine.prompts.make(
                chance.randint(0, 60)
            )
            sampling = {"n": 2} if chance.random() < 0.2 else {}
            running.append(f"mixed-{number}")
            engine.add(Ask(running[-1], prompt, chance.randint(1, 60), sampling))
        finished = engine.step()
        done += finished
        ended = {answer.trace_id for answer in finished}
        running = [name for name in running if name not in ended]
        if running and chance.random() < 0.03:
            name = running.pop(chance.randrange(len(running)))
            if name in engine.delivered:
                gone.append(engine.abort(name))
    return done + gone


def speculative(engine: Engine) -> list[Answer]:
    """Drafts, of which some are rejected; from what the prompt repeats."""
    phrase = engine.prompts.make(7)
    return _drafted(engine, [(phrase * 12)[i : i + 50] for i in range(4)])


def drafted(engine: Engine) -> list[Answer]:
    """Drafts by another model, of which some are rejected."""
    return _drafted(engine, [engine.prompts.make(n) for n in (20, 33, 64, 90)])


def _drafted(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    drafts, taken = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    before = engine.count(drafts), engine.count(taken)
    done = engine.run(
        Ask(f"speculative-{i}", prompt, max_tokens=60, sampling=GREEDY)
        for i, prompt in enumerate(prompts)
    )
    offered, accepted = engine.count(drafts) - before[0], engine.count(taken) - before[1]
    expect(0 < accepted < offered, f"{accepted} of {offered} drafts accepted")
    return done


def opt_out(engine: Engine) -> list[Answer]:
    """A request that is not to be captured, and one that hits what it computed."""
    prompt = engine.prompts.make(80)
    out = engine.run([Ask("opt-out", prompt, words={"capture": False})])
    hit = engine.run([Ask("opt-out-hit", prompt), Ask("opt-out-other", engine.prompts.make(20))])
    for answer in hit:
        if answer.trace_id == "opt-out-hit":
            answer.may_lack = ("not_captured", "kv_unknown")
    return [replace(answer, absent=True) for answer in out] + hit


def pause(engine: Engine) -> list[Answer]:
    """Capture is off for some steps in the middle of a request."""
    engine.add(Ask("pause", engine.prompts.make(40), max_tokens=20))
    for _ in range(3):  # the prompt, and two tokens
        engine.step()
    engine.rpc("routetrace_pause")
    for _ in range(4):
        engine.step()
    engine.rpc("routetrace_resume")
    (done,) = engine.drain()
    done.may_lack, done.must_lack = ("not_captured", "kv_unknown"), (42, 46)
    return [done, *engine.run([Ask("pause-after", engine.prompts.make(40))])]


def weights(engine: Engine) -> list[Answer]:
    """The weights change while a request runs; cached rows keep the version that computed them."""
    prompt = engine.prompts.make(STEP_TOKENS + 6)
    engine.rpc("routetrace_set_weight_version", 1)
    engine.add(Ask("weights-during", prompt, max_tokens=20))
    for _ in range(4):  # two chunks of the prompt, and two tokens
        engine.step()
    update_weights(engine, 2)
    (during,) = engine.drain()
    changed = len(prompt) + 2
    during.versions = ((0, changed, 1), (changed, len(during.tokens) - 1, 2))
    (hit,) = engine.run([Ask("weights-hit", prompt)])
    hit.versions = ((0, STEP_TOKENS, 1), (STEP_TOKENS, len(hit.tokens) - 1, 2))
    update_weights(engine, 3)
    (after,) = engine.run([Ask("weights-after", engine.prompts.make(40))])
    after.versions = ((0, len(after.tokens) - 1, 3),)
    during.changed = hit.changed = (2,)
    return [during, hit, after]


def told(engine: Engine) -> list[Answer]:
    """Versions that vLLM is given, and updates whose version nobody tells."""
    core = engine.llm.llm_engine

    def tell(version: str) -> None:
        if hasattr(core, "set_weight_version"):
            core.set_weight_version(version)
        else:  # before 0.27 vLLM has none
            number = int(version) if version.isdecimal() else None
            engine.rpc("routetrace_set_weight_version", number)

    updates: tuple[tuple[Callable[[], Any], int | None], ...] = (
        (lambda: tell("21"), 21),
        # Past the worker, as trainers do. On CPU vLLM packs weights, and cannot load others.
        (lambda: engine.llm.apply_model(_load_nothing), None),
        (lambda: tell("22"), 22),
        (lambda: tell("default"), None),
    )
    done = []
    for number, (update, version) in enumerate(updates):
        update()
        (answer,) = engine.run([Ask(f"told-{number}", engine.prompts.make(40))])
        answer.versions = ((0, len(answer.tokens) - 1, version),)
        done.append(answer)
    return done


def _load_nothing(model: Any) -> None:
    model.load_weights(iter(()))


def late(engine: Engine) -> list[Answer]:
    """The engine has nothing to do after the request, so that no step tells of its end."""
    done = engine.run([Ask("late", engine.prompts.make(33), max_tokens=7)])
    time.sleep(0.2)
    return done


def reset(engine: Engine) -> list[Answer]:
    """New weights with the KV cache emptied under running requests, which are computed again.

    They keep the rows that their tokens were sampled with.
    """
    engine.rpc("routetrace_set_weight_version", 10)
    lengths = (40, 20)
    for i, length in enumerate(lengths):
        engine.add(Ask(f"reset-{i}", engine.prompts.make(length)))
    for _ in range(4):  # the prompts, and three tokens
        engine.step()
    engine.llm.reset_prefix_cache(reset_running_requests=True)
    update_weights(engine, 11)
    done = sorted(engine.drain(), key=lambda a: a.trace_id)
    for answer, length in zip(done, lengths, strict=True):
        begun = length + 3
        answer.versions = ((0, begun, 10), (begun, len(answer.tokens) - 1, 11))
        answer.changed, answer.recomputed = (11,), True
    update_weights(engine, 12)
    return done


def refits(engine: Engine) -> list[Answer]:
    """At each update a reset of cache and connector under a running request, sleep, and wake-up."""
    done, prompt = [], engine.prompts.make(STEP_TOKENS + 6)
    for level in (1, 2):
        engine.add(Ask(f"refits-{level}", engine.prompts.make(40), max_tokens=20))
        for _ in range(4):  # the prompt, and three tokens
            engine.step()
        emptied = engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        expect(emptied, "the reset of cache and connector is refused")
        done += engine.drain()
        engine.llm.sleep(level)
        engine.llm.wake_up()
        version = 50 + level
        engine.rpc("routetrace_set_weight_version", version)
        for i in range(2):  # the second one hits what the first one computed
            (answer,) = engine.run([Ask(f"refits-{level}-{i}", prompt)])
            answer.versions = ((0, len(answer.tokens) - 1, version),)
            done.append(answer)
    return done


def control(engine: Engine) -> list[Answer]:
    """Calls reach the workers wherever they are."""
    engine.rpc("routetrace_set_weight_version", 7)
    (done,) = engine.run([Ask("control", engine.prompts.make(40))])
    done.versions = ((0, len(done.tokens) - 1, 7),)
    expect(all(engine.rpc("routetrace_flush", 10.0)), "not everything was sent in time")
    return [done]


def ranks(engine: Engine) -> list[Answer]:
    """Capture is off, or breaks, in one of two tensor-parallel ranks while a request runs.

    Rank 0 sends: of the other one's faults no trace may show anything.
    """
    done = []
    for rank in (1, 0):
        for what in ("pause", "break"):
            name = f"ranks-{what}-{rank}"
            engine.add(Ask(name, engine.prompts.make(40), max_tokens=20))
            for _ in range(3):  # the prompt, and two tokens
                engine.step()
            engine.rpc(_at_rank, rank, what)
            for _ in range(4):
                engine.step()
            engine.rpc(_at_rank, rank, "resume")
            (answer,) = engine.drain()
            if rank == 0 and what == "pause":
                answer.may_lack, answer.must_lack = ("not_captured", "kv_unknown"), (42, 46)
            elif rank == 0:  # another agent took over, which does not know the request
                answer.broken = True
            done += [answer, *engine.run([Ask(f"{name}-after", engine.prompts.make(40))])]
    return done


def _at_rank(worker: Any, rank: int, what: str) -> None:
    """Runs in each worker: does something to capture in one of them."""
    from routetrace.capture_agent.engines.vllm import attach

    if worker.rank != rank:
        return
    if what != "break":
        getattr(worker, f"routetrace_{what}")()
        return
    capturer: Any = attach._last._capturer  # type: ignore[union-attr]

    def fail(*_: Any) -> None:
        del capturer.begin
        raise MemoryError("on purpose")

    capturer.begin = fail


def expect(fact: bool, otherwise: str) -> None:
    """A scenario in which nothing happened proves nothing.

    Raises:
        AssertionError: if `fact` does not hold.
    """
    if not fact:
        raise AssertionError(otherwise)


def update_weights(engine: Engine, version: int) -> None:
    """Push other weights; twice is as before."""
    engine.llm.apply_model(change_weights)
    engine.rpc("routetrace_set_weight_version", version)


def named(scenarios: Iterable[Scenario]) -> dict[str, Scenario]:
    """Scenarios by name."""
    return {scenario.__name__: scenario for scenario in scenarios}
