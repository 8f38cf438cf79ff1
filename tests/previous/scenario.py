"""What happens on the server whose directory is the fixture, and what it answers then."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import grpc
import numpy as np
import pytest

from previous.serving import BEGINNING, Serving
from routetrace.codec.records import UNKNOWN_VERSION, OpKind, token_digests
from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.common.layout import ModelLayout
from routetrace.simulation.small_engine import SmallEngine
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import Feeder
from support.reads import Reads

LAYOUT = ModelLayout((1, 2, 4), 6, 40, 3)
WIDE = ModelLayout((0, 3), 4, 300, 2)
STAGES = (ModelLayout((1, 2), 6, 40, 3, (1, 2, 4)), ModelLayout((4,), 6, 40, 3, (1, 2, 4)))
TOKENS = np.arange(100, 200)
#: Time at which the directory is opened again: a lease has ended meanwhile.
AGAIN = BEGINNING + 300


def rows(layout: ModelLayout, count: int, seed: int) -> np.ndarray:
    """Ids [count, layers, top_k] that a router could have chosen."""
    order = np.random.default_rng(seed).random((count, len(layout.layer_ids), layout.num_experts))
    return order.argsort(axis=2)[:, :, : layout.top_k].astype(layout.dtype)


class Script:
    """Engines of the scenario, by name; each a Feeder."""

    def __init__(self, target: str, known: dict[str, Any] | None = None) -> None:
        self.target = target
        self.known = known or {}
        """Writers of an earlier server: epoch and names of their requests."""
        self.engines: dict[str, Feeder] = {}
        self.reads = Reads(target)
        self.seed = 0

    def open(self, name: str, layout: ModelLayout, **hello: Any) -> Feeder:
        known = self.known.get(name, {"epoch": 0, "names": [], "step": 0})
        feeder = Feeder(self.target, layout, epoch=known["epoch"], **hello)
        feeder.names, feeder.step_number = list(known["names"]), known["step"]
        self.engines[name] = feeder
        return feeder

    def open_all(self) -> None:
        self.paged = self.open("paged", LAYOUT, run="a", block_size=4, num_blocks=24)
        self.slots = self.open(
            "slots", WIDE, run="a", engine_id="s0", block_size=4, num_blocks=8
        )  # fmt: skip
        self.stages = [
            self.open(
                shard, layout, run="b", engine_id="e1", shard=shard, block_size=4, num_blocks=16
            )
            for shard, layout in zip(("pp0", "pp1"), STAGES, strict=True)
        ]

    def writers(self) -> dict[str, Any]:
        """Return what an agent keeps of its writers."""
        return {
            name: {
                "epoch": feeder.stream.welcome.epoch,
                "names": feeder.names,
                "step": feeder.step_number,
                "last": base64.b64encode(feeder.last).decode(),
            }
            for name, feeder in self.engines.items()
        }

    def close(self) -> None:
        for feeder in self.engines.values():
            feeder.close()
        self.reads.close()

    def step(self, feeder: Feeder, handle: int, position: int, count: int, drafts: int = 0) -> None:
        self.seed += 1
        feeder.step(rows(feeder.layout, count, self.seed), [(handle, position, count)], drafts)

    def simulate(self, prefix: str, seed: int) -> None:
        """Run requests with prefix hits, drafts, preemptions and aborts to their ends."""
        sim = SmallEngine(self.paged, LAYOUT, seed, num_blocks=16)  # type: ignore[arg-type]
        prompts = [[sim.rng.randrange(4) for _ in range(13)] for _ in range(3)]
        for i in range(12):
            sim.submit(f"{prefix}{i}", prompts[i % 3][: sim.rng.randint(4, 13)], 7)
        while sim.step():
            if sim.rng.random() < 0.2:
                self.paged.flush()
        self.paged.flush()
        assert all(sim.counts[kind] for kind in ("cached", "rewinds", "preemptions"))

    def staged(self, name: str, stages: int = 2, count: int = 6, **begin: Any) -> None:
        """Run a request to its end, reported by some of the stages."""
        for feeder in self.stages[stages:]:
            feeder.names.append("")  # both count it
        for feeder in self.stages[:stages]:
            handle = feeder.begin(
                name, prompt_len=count, prompt_token_ids=TOKENS[:count], block_ids=[0, 1], **begin
            )
            self.step(feeder, handle, 0, count)
            feeder.finish(handle, count + 1, token_ids=TOKENS[: count + 1])
            feeder.flush()

    def bind(self, name: str, blocks: list[int], num_tokens: int, step: int) -> None:
        self.reads.ingest.BindRequest(
            pb.BindRequestRequest(
                run="a", engine_id="s0", request_id=name, block_ids=blocks, num_tokens=num_tokens,
                step=step, token_digests=token_digests(TOKENS[:num_tokens]).tobytes(),
                begin=pb.RequestBegin(trace_id=name, prompt_len=5, labels={"bound": name}),
            ),
            timeout=60,
        )  # fmt: skip

    def fill(self, slots: range) -> None:
        self.seed += 1
        self.slots.step_slots(rows(WIDE, len(slots), self.seed), slots)
        self.slots.flush()


def happen(serving: Serving) -> dict[str, Any]:
    """Play the scenario up to the stop of the server; return the writers."""
    script = Script(serving.target)
    script.open_all()
    script.simulate("r", 3)
    script.staged("gone", stages=1)
    script.staged("retired", stages=1)
    script.staged("kept", labels={"group": "g", "sample": "7"})
    script.fill(range(4, 14))
    script.bind("bound", [1, 2, 3], 11, 1)
    trace_service = script.reads.stub
    trace_service.DeleteTrace(pb.DeleteTraceRequest(run="b", trace_id="gone"))
    for feeder in script.stages:
        feeder.set_weight_version(3)
    script.staged("newer")
    serving.now = BEGINNING + 30
    trace_service.RenewLease(
        pb.RenewLeaseRequest(run="b", trace_ids=["kept", "newer"], ttl_seconds=1 << 21)
    )
    retired = trace_service.RetireTraces(pb.RetireTracesRequest(run="b", through_weight_version=0))
    assert retired.num_retired == 2, "retired and kept"
    script.staged("kept", labels={"group": "h"})
    script.staged("short", stages=1, ttl_seconds=60)
    script.staged("half", stages=1)
    # In the snapshot: drafts that nothing has confirmed, an erased block, a preempted request, one
    # whose trace is deleted while it runs, and slots of a restored prefix.
    script.paged.chunk.op(OpKind.EXTERNAL, blocks=[16, 17])
    draft = script.paged.begin("draft", prompt_len=6, block_ids=[16, 17], prompt_token_ids=[7] * 6)
    script.step(script.paged, draft, 0, 8, drafts=2)
    erased = script.paged.begin("erased", prompt_len=4, block_ids=[18, 19])
    script.step(script.paged, erased, 0, 7, drafts=3)
    script.paged.chunk.op(OpKind.EXTERNAL, blocks=[19])
    waiting = script.paged.begin("waiting", prompt_len=4, block_ids=[20])
    script.step(script.paged, waiting, 0, 4)
    script.paged.preempt(waiting, 3)
    ghost = script.paged.begin("ghost", prompt_len=4, block_ids=[21])
    script.step(script.paged, ghost, 0, 3)
    script.paged.names.append("lost")  # its begin never came
    lost = len(script.paged.names) - 1
    script.step(script.paged, lost, 0, 4)
    restored = script.paged.begin(
        "restored", prompt_len=6, block_ids=[22, 23], num_computed_tokens=4, num_external_tokens=4,
        prompt_token_ids=[7] * 6,
    )  # fmt: skip
    script.step(script.paged, restored, 4, 2)
    script.paged.flush()
    trace_service.DeleteTrace(pb.DeleteTraceRequest(run="a", trace_id="ghost"))
    serving.now = BEGINNING + 100
    serving.sweep()
    # Records after the last snapshot, one of each kind.
    script.simulate("later", 5)
    script.staged("gone2", stages=1)
    trace_service.DeleteTrace(pb.DeleteTraceRequest(run="b", trace_id="gone2"))
    trace_service.RenewLease(
        pb.RenewLeaseRequest(run="b", trace_ids=["newer"], ttl_seconds=1 << 22)
    )
    script.staged("away", ttl_seconds=150)
    script.fill(range(13, 20))
    script.bind("bound", [1, 2, 3], 11, 1)
    script.bind("bound2", [3, 4], 8, 2)
    script.open("fresh", WIDE, run="c", engine_id="e9")
    script.step(script.paged, ghost, 3, 1)
    script.paged.resume(waiting, 0, block_ids=[20])
    script.step(script.paged, waiting, 0, 4)
    script.paged.flush()
    serving.now = BEGINNING + 200
    writers = script.writers()
    script.close()
    return writers


def go_on(serving: Serving, writers: dict[str, Any]) -> None:
    """Play what happens after a restart, by the writers of before."""
    script = Script(serving.target, writers)
    script.open_all()
    script.seed = 10_000
    paged = script.paged
    # An epoch before the newest is fenced.
    with pytest.raises(grpc.RpcError, match="epoch"):
        Feeder(script.target, LAYOUT, run="a", epoch=writers["paged"]["epoch"] - 1)
    # Of the last chunk of before, the server knows the content.
    again = pb.Chunk.FromString(base64.b64decode(writers["paged"]["last"]))
    paged.stream.send(again)
    assert paged.stream.receive().ack.sequence == again.sequence
    again.header_crc32 ^= 1
    paged.stream.send(again)
    assert paged.stream.receive().reject.error.kind == pb.ERROR_KIND_INVALID_ARGUMENT
    names = {name: handle for handle, name in enumerate(paged.names)}
    # The last chunk comes a second time, and the drafts are confirmed.
    script.step(paged, names["draft"], 8, 1)
    chunk = paged.chunk.make(paged.sequence)
    paged.flush()
    paged.stream.send(chunk)
    assert paged.stream.receive().ack.sequence == chunk.sequence
    script.step(paged, names["erased"], 7, 1)
    for name, count in (("draft", 9), ("erased", 8), ("waiting", 5), ("ghost", 4)):
        paged.finish(names[name], count + 1, token_ids=[7] * (count + 1))
    paged.flush()
    script.paged.add_blocks(names["lost"], [6])  # not all that it has
    script.step(paged, names["lost"], 4, 2)
    paged.flush()
    # Requests over slots that were written before the restart.
    hits = {"hit": [16, 17, 3], "hit2": [18, 19, 1], "hit3": [2, 5, 7], "hit4": [6, 6, 0]}
    for name, blocks in hits.items():
        handle = paged.begin(name, prompt_len=10, block_ids=blocks, num_computed_tokens=8)
        script.step(paged, handle, 8, 2)
        paged.finish(handle, 11)
    paged.flush()
    # The slow stage reports what was deleted long ago, and one request that was not.
    fast, slow = (feeder.names for feeder in script.stages)
    late = script.stages[1]
    for name in [name for name, known in zip(fast, slow, strict=True) if not known]:
        late.names = fast[: fast.index(name)]
        handle = late.begin(name, prompt_len=3)
        script.step(late, handle, 0, 3)
        late.finish(handle, 4)
    late.flush()
    script.bind("bound2", [3, 4], 8, 2)  # again: it replaces the request of before
    script.bind("bound3", [2, 3, 4], 12, 0)
    script.close()


def answers(target: str) -> dict[str, Any]:
    """Return the answers of a server about every trace of the scenario, with rows by digest."""
    reads = Reads(target)
    found: dict[str, Any] = {}
    names = {"a": ["ghost", "none"], "b": ["gone", "gone2", "retired", "short", "away"]}
    for run in ("a", "b", "c"):
        listed = reads.stub.ListTraces(pb.ListTracesRequest(run=run)).traces
        for trace_id in sorted({*names.get(run, ()), *(info.trace_id for info in listed)}):
            answer = _answer(reads, run, trace_id, pb.READ_POLICY_AS_SAMPLED)
            latest = _answer(reads, run, trace_id, pb.READ_POLICY_LATEST)
            found[f"{run}/{trace_id}"] = {**answer, "latest": _digest(repr(latest).encode())}
    for run, engine_id, blocks in (("a", "e0", range(24)), ("a", "s0", range(8)), ("b", "e1", [0])):
        # One block each: the slots that are unknown are missing.
        for block in blocks:
            got = reads.blocks(engine_id, run, block_ids=[block], num_tokens=4)
            found[f"{run}/{engine_id}/block {block}"] = described(*got)
    reads.close()
    return found


def _answer(reads: Reads, run: str, trace_id: str, policy: int) -> dict[str, Any]:
    try:
        answer = reads.get(trace_id, run, policy=policy)
    except grpc.RpcError as error:
        details = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
        detail = pb.ErrorDetail.FromString(details[ERROR_METADATA_KEY])
        assert detail.kind == pb.ERROR_KIND_NOT_FOUND
        reasons = ("deleted", "retired", "expired")
        return {"gone": next((reason for reason in reasons if reason in detail.message), "")}
    return described(*answer)


def described(cells: dict[Any, Any], end: pb.ReadEnd, first: pb.TraceInfo) -> dict[str, Any]:
    """Return the answer to a read as JSON holds it.

    A weight version that is unknown is 0, as 0.8 said it.
    """
    rows = [
        (position, layer, ids.tolist(), 0 if version == UNKNOWN_VERSION else version, attempt)
        for (position, layer), (ids, version, attempt) in sorted(cells.items(), key=lambda c: c[0])
    ]
    info = end.info
    return {
        "cells": len(cells),
        "rows": _digest(repr(rows).encode()),
        "missing": [[m.start, m.stop, [*m.layer_ids], m.reason] for m in end.missing],
        "state": pb.TraceState.Name(info.state),
        "tokens": [info.num_tokens, info.prompt_len, info.num_rows],
        "labels": dict(sorted(info.labels.items())),
        "incarnations": [info.incarnation, info.num_incarnations, info.num_attempts],
        "finish": info.finish_reason,
        "engines": [*info.engine_ids],
        "times": [info.created_ms, info.updated_ms, info.expires_ms] if info.trace_id else [],
        "digests": _digest(first.token_digests),
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
