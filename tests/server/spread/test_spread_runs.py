"""A run in all workers of a server answers as a run in one: the same calls, answer by answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle.harness import RUN, InlineWorld
from oracle.sharded import ShardedWorld
from oracle.world import EngineSpec, Shard
from routetrace.common.errors import DeadlineExceeded, NotFound, RouteTraceError, Unavailable
from routetrace.common.layout import ModelLayout
from support.seeds import seeds

LAYOUT = ModelLayout((0, 1, 2), 3, 16, 2)
ENGINES = [EngineSpec(f"e{i}", 4, 64, (Shard("", LAYOUT.layer_ids),)) for i in range(5)]
SHARDED = EngineSpec("tp", 4, 64, (Shard("a", (0, 1)), Shard("b", (2,))))
TTL_S = 100
GONE = f"trace 't0' of run '{RUN}' was deleted"


def rows_of(serial: int, count: int) -> np.ndarray:
    """Rows that differ from those of all other serials, position by position."""
    chosen = np.random.default_rng(serial).permuted(
        np.broadcast_to(np.arange(16), (count, 3, 16)), axis=2
    )
    return chosen[:, :, :2].astype(np.uint8)


class Both:
    """One worker and several workers that receive the same calls."""

    def __init__(self, seed: int) -> None:
        self.one, self.all = InlineWorld(LAYOUT, seed), ShardedWorld(LAYOUT, seed)
        self.worlds = (self.one, self.all)
        self.agents = {
            (world, spec.engine_id, shard.name): world.connect(spec, shard, "boot")
            for world in self.worlds
            for spec in (*ENGINES, SHARDED)
            for shard in spec.shards
        }
        self.requests = 0

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self.worlds:
            world.close()

    def turn(
        self, engine: str, trace: str, prompt: int, tokens: int, version: int, *, ends: bool = True
    ) -> None:
        """One request of a trace, all of whose rows are computed."""
        self.requests += 1
        spec = next(s for s in (*ENGINES, SHARDED) if s.engine_id == engine)
        rows = rows_of(self.requests, tokens - 1)
        ids = np.arange(tokens) + 1000 * int(trace[1:])  # the tokens of a trace are the same
        for world in self.worlds:
            for shard in spec.shards:
                agent = self.agents[world, engine, shard.name]
                agent.set_weight_version(version)
                handle = agent.begin(
                    f"r{self.requests}",
                    trace_id=trace,
                    prompt_len=prompt,
                    prompt_token_ids=ids[:prompt],
                    labels={"turn": str(self.requests % 3), "trace": trace},
                    ttl_seconds=TTL_S,
                )
                agent.step(rows[:, list(shard.layer_ids)], [(handle, 0, tokens - 1)])
                if ends:
                    agent.finish(handle, tokens, token_ids=ids)
        self.settle()

    def settle(self) -> None:
        for world in self.worlds:
            for engine in (*ENGINES, SHARDED):
                world.flush(engine.engine_id)
            world._server_clock.advance(1)

    def sleep(self, seconds: float) -> None:
        for world in self.worlds:
            world._server_clock.advance(seconds)
        self.sweep()

    def sweep(self) -> None:
        self.one.server.run(self.one.server.core.sweep())
        for server in self.all.servers:
            server.run(server.core.sweep())

    def call(self, ask: Callable[[Any], Any]) -> Any:
        """The answer of both to a client's call; asserts that they are the same."""
        one, of_all = (_outcome(ask, world.client) for world in self.worlds)
        assert one == of_all
        return one

    def compare(self, traces: list[str]) -> None:
        """Compare all that can be read."""
        for trace in traces:
            self.call(lambda client, t=trace: facts(client.get(t, missing="mask")))
            self.call(lambda client, t=trace: told(client.stat(t)))
        self.call(lambda client: [told(stat) for stat in client.find()])
        self.call(lambda client: [told(stat) for stat in client.find(labels={"turn": "1"})])
        self.call(lambda client: [stat.trace_id for stat in client.find(states=["complete"])])


def _outcome(ask: Callable[[Any], Any], client: Any) -> Any:
    """The answer to a call, or its error without the time in it."""
    try:
        return ask(client)
    except RouteTraceError as error:
        return type(error), str(error).split(" at ")[0]


def facts(trace: Any) -> Any:
    return (
        trace.topk_ids.tolist(),
        trace.valid.tolist(),
        [*trace.weight_versions],
        trace.num_tokens,
        trace.incarnation,
        trace.num_incarnations,
        trace.labels,
        str(trace.state),
    )


def told(stat: Any) -> Any:
    return (
        stat.trace_id,
        str(stat.state),
        stat.num_tokens,
        stat.num_incarnations,
        dict(stat.labels),
        stat.created_at,
        stat.updated_at,
        stat.expires_at,
        tuple(stat.engine_ids),
    )


@pytest.mark.parametrize("seed", seeds(5, 16))
def test_any_order_of_calls_is_answered_as_by_one_worker(seed: int):
    rng = random.Random(seed)
    traces = [f"t{i}" for i in range(6)]
    lengths = dict.fromkeys(traces, 0)
    with Both(seed) as both:
        for _ in range(40):
            name = rng.choice(traces)
            both.sweep()  # a lease that ran out ends at a sweep, not before
            kind = rng.choices(
                ("turn", "delete", "retire", "renew", "sleep", "restart"),
                (12, 1, 1, 2, 2, 2),
            )[0]
            if kind == "turn":
                prompt = lengths[name] + rng.randint(1, 9)
                lengths[name] = prompt + rng.randint(2, 9)
                both.turn(
                    rng.choice([*ENGINES, SHARDED]).engine_id,
                    name,
                    prompt,
                    lengths[name],
                    rng.randrange(4),
                    ends=rng.random() < 0.8,
                )
            elif kind == "delete":
                both.call(lambda client, t=name: client.delete(t))
            elif kind == "retire":
                version = rng.randrange(4)
                both.call(lambda client, v=version: client.retire_through(v))
            elif kind == "renew":
                some = rng.sample(traces, 3)
                ttl = rng.choice((30, 300))
                both.call(lambda client, s=some, t=ttl: client.renew(s, ttl_seconds=t))
            elif kind == "sleep":
                both.sleep(rng.choice((10, 60)))
            else:
                for world in both.worlds:
                    world.restart(snapshot=rng.random() < 0.5)
            both.settle()
            both.sweep()
            if rng.random() < 0.4:
                both.compare(traces)
        both.sweep()
        both.compare(traces)


# ---------------------------------------------------------------------------- one trace in several


def engines_of(both: Both) -> list[str]:
    """Engines of the workers 0, 1, 0, 2, 1."""
    of: dict[int, list[str]] = {}
    for spec in ENGINES:
        number = both.all.servers.index(both.all.server_of(spec.engine_id))
        of.setdefault(number, []).append(spec.engine_id)
    assert sorted(of) == [0, 1, 2]
    return [of[number][0] for number in (0, 1, 0, 2, 1)]


def grown(both: Both) -> list[Any]:
    """Let a trace grow over all workers; the answers of its first turns, from none on."""
    answers = [both.call(lambda client: facts(client.get("t0", missing="mask")))]
    for turn, engine in enumerate(engines_of(both)):
        both.turn(engine, "t0", 5 + 10 * turn, 12 + 10 * turn, turn)
        answers.append(both.call(lambda client: facts(client.get("t0", missing="mask"))))
    return answers


def test_the_turns_of_the_trace_differ():
    with Both(1) as both:
        answers = [repr(answer) for answer in grown(both)]
    assert len({*answers}) == 6
    assert "NotFound" in answers[0]


def answer(world: Any) -> Any:
    """Return the answer to a read of the trace, or its error."""
    return _outcome(lambda client: facts(client.get("t0", missing="mask")), world.client)


@pytest.mark.parametrize("entry", range(3))
@pytest.mark.parametrize("done", range(4))
def test_a_deletion_that_breaks_off_leaves_what_the_trace_once_was(entry: int, done: int):
    with Both(1) as both:
        answers, left = grown(both), done
        server = both.all.servers[entry]
        forget = server.core.retention.everywhere.forget

        async def on_call(worker: int, method: str) -> None:
            nonlocal left
            if method == "Forget":
                left -= 1
                if left < 0:
                    raise Unavailable(f"worker {worker} is away")

        both.all.on_call = on_call  # type: ignore[method-assign]
        broken = False
        try:
            server.run(forget(RUN, ["t0"], "deleted"))
        except Unavailable:
            broken = True
        del both.all.on_call
        read = answer(both.all)
        assert read in (answers[1:] if broken else [(NotFound, GONE)])
        assert done or read == answers[5 if entry != 1 else 4]  # worker 1 has the newest itself
        server.run(forget(RUN, ["t0"], "deleted"))
        assert answer(both.all) == (NotFound, GONE)
        assert not any(s.core.state.traces.traces for s in both.all.servers)


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_who_reads_during_a_deletion_reads_what_the_trace_once_was(seed: int):
    rng = random.Random(seed)
    with Both(1) as both:
        grown(both)
        servers = both.all.servers
        gathered = servers[0].run(servers[0].core.gathering.trace(RUN, "t0"))
        whole = [source.name for source in gathered.trace.sources]
        assert len(whole) == 5

        async def on_call(worker: int, method: str) -> None:
            for _ in range(rng.choice((0, 1, 3, 10, 30))):
                await asyncio.sleep(0)

        both.all.on_call = on_call  # type: ignore[method-assign]
        seen: set[int] = set()
        begun = asyncio.Event()

        async def read(core: Any) -> None:
            for _ in range(30):
                found = await core.gathering.trace(RUN, "t0")
                names = [source.name for source in found.trace.sources] if found.trace else []
                assert names == whole[: len(names)]
                seen.add(len(names))
                begun.set()

        async def delete(core: Any) -> None:
            await begun.wait()
            await core.retention.everywhere.forget(RUN, ["t0"], "deleted")

        async def everything() -> None:
            reads = [read(server.core) for server in servers]
            await asyncio.gather(*reads, delete(rng.choice(servers).core))
            assert not (await servers[0].core.gathering.trace(RUN, "t0")).trace

        servers[0].run(everything())
        assert 5 in seen


def test_a_shard_that_reports_late_does_not_bring_a_deleted_request_back():
    with Both(1) as both:
        world, home = both.all, both.all.server_of("tp")
        near = next(e.engine_id for e in ENGINES if world.server_of(e.engine_id) is home)
        far = next(e.engine_id for e in ENGINES if world.server_of(e.engine_id) is not home)
        both.turn(near, "t0", 5, 12, 0)
        both.turn(far, "t0", 15, 22, 0)
        rows = rows_of(100, 31)

        def tell(shard: Shard) -> None:
            agent = both.agents[world, "tp", shard.name]
            handle = agent.begin("late", trace_id="t0", prompt_len=25)
            agent.step(rows[:, list(shard.layer_ids)], [(handle, 0, 31)])
            agent.finish(handle, 32)
            world.flush("tp")
            world._server_clock.advance(1)

        tell(SHARDED.shards[0])
        assert len(world.client.get("t0", incarnation=3, missing="mask")) == 31
        home.run(home.core.retention.everywhere.forget(RUN, ["t0"], "deleted"))
        tell(SHARDED.shards[1])
        assert answer(world) == (NotFound, GONE)


# ---------------------------------------------------------------------------- a worker is away


def test_a_run_is_known_to_all_workers_where_one_has_it():
    world = ShardedWorld(LAYOUT, 1)
    try:
        for known in (False, True):
            if known:
                agent = world.connect(ENGINES[0], ENGINES[0].shards[0], "boot")
                agent.finish(agent.begin("t0", prompt_len=1), 1)
                world.flush("e0")
            for server in world.servers:
                world.asked = lambda *_, at=server: at  # type: ignore[method-assign]
                with pytest.raises(NotFound, match="is not in run" if known else "no run 'oracle'"):
                    world.client.get("t1")
        assert [bool(server.core.state.runs()) for server in world.servers].count(True) == 1
    finally:
        world.close()


CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda client: client.get("t0", timeout=0.1),
    lambda client: [*client.get_many(["t0"], timeout=0.1)],
    lambda client: client.stat("t0", timeout=0.1),
    lambda client: [*client.find(timeout=0.1)],
    lambda client: client.delete("t0", timeout=0.1),
    lambda client: client.retire_through(9, timeout=0.1),
    lambda client: client.renew(["t0"], ttl_seconds=TTL_S, timeout=0.1),
    lambda client: [*client.agents(timeout=0.1)],
)


def test_no_answer_lacks_the_part_of_a_worker_that_is_away():
    with Both(1) as both:
        answers = grown(both)

        async def on_call(worker: int, method: str) -> None:
            if worker == 2:
                raise Unavailable("worker 2 is away", retry_after=0.01)

        both.all.on_call = on_call  # type: ignore[method-assign]
        for entry in (0, 1):
            both.all.asked = lambda *_, at=entry: both.all.servers[at]  # type: ignore[method-assign]
            for call in CALLS:
                with pytest.raises((Unavailable, DeadlineExceeded)):
                    call(both.all.client)
        del both.all.on_call
        assert answer(both.all) == answers[5]


def test_a_lease_does_not_end_while_a_worker_is_away(caplog: pytest.LogCaptureFixture):
    with Both(1) as both:
        answers = grown(both)

        async def on_call(worker: int, method: str) -> None:
            raise Unavailable("all are away", retry_after=0.01)

        both.all.on_call = on_call  # type: ignore[method-assign]
        logger = logging.getLogger("routetrace")
        logger.addHandler(caplog.handler)  # the worlds keep its records from the root
        both.sleep(2 * TTL_S)
        logger.removeHandler(caplog.handler)
        assert "expired traces of spread runs are kept" in caplog.text
        del both.all.on_call
        assert answer(both.all) == answers[5]
        both.sweep()
        assert answer(both.all) == answer(both.one)
