"""Engines that are gone: what a server keeps of each, and how much memory that takes."""

from __future__ import annotations

import gc
import random
import tracemalloc

from routetrace.codec.records import OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.core import Core
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.record import (
    Sums,
    encode_chunk,
    encode_delete,
    encode_open,
)
from routetrace.server.index.session import Session
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.index.writer import DEDUP_WINDOW, Writer, dump_writer, load_writer
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.memory import MemoryStore
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb
from support.agents.feeder import ChunkMaker
from support.servers.client_server import rows_of

#: All layers of a large model, and a large pool of KV.
LAYOUT = ModelLayout(tuple(range(48)), 48, 128, 8)
NUM_BLOCKS = 100_000

#: Maximum bytes of an engine that has served one request, and of its chunk.
MOST = 4096


def connected(core: Core, number: int) -> None:
    """An engine connects, serves a request and leaves; its trace is deleted."""
    state, key = core.state, WriterKey("run", f"engine-{number:06}", "")
    opened = encode_open(
        1.0, key, epoch=1, boot_id=f"boot {number}", layout=LAYOUT, block_size=16,
        num_blocks=NUM_BLOCKS,
    )  # fmt: skip
    writer = apply_record(state, state.number + 1, opened)
    session = Session(writer)
    host = {"host": f"node{number}", "pid": f"{number}", "engine": "vllm 0.30", "version": "0.9"}
    core.agents.opened(session, host)
    chunk = ChunkMaker(LAYOUT)
    chunk.begins.append(pb.RequestBegin(prompt_len=2))
    chunk.op(OpKind.BEGIN, f"r{number}", blocks=[0, 1, 2])
    frame = chunk.frame(rows_of(LAYOUT, 40))
    chunk.op(OpKind.ROWS, f"r{number}", count=40, frame=frame, step=1)
    chunk.op(OpKind.FINISH, f"r{number}", count=41, arg=1)
    made = chunk.make(1)
    sums = Sums(made.header_crc32, made.payload_crc32)
    apply_record(state, state.number + 1, encode_chunk(key, 1, 1, sums, 2.0, made.header))
    report = pb.Heartbeat(offered_rows=40, acknowledged_rows=40, dropped_rows={"queue_full": 1})
    core.agents.heartbeat(session, report)
    core.agents.closed(session)
    deleted = encode_delete(3.0, "run", [f"r{number}"], "deleted")
    apply_record(state, state.number + 1, deleted)
    state.touched.clear()  # as the journal does


async def test_an_engine_that_is_gone_takes_little_memory() -> None:
    core = Core(MemoryStore(), ServerConfig())
    await core.start()
    for number in range(50):
        connected(core, number)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(50, 250):
            connected(core, number)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 200 * MOST
    # Its slots are known: the engine may come back, and requests reuse their KV.
    [writer] = core.state.engine_writers("run", "engine-000100")
    [run] = writer.slots.resolve([0, 1, 2], 0, 48)
    assert (run.position, run.length) == (0, 40)
    assert core.agents.describe(writer, None).report.dropped_rows == {"queue_full": 1}
    await core.stop()


def test_the_last_chunks_of_a_writer_are_recognized() -> None:
    rng = random.Random(1)
    key = WriterKey("run", "engine", "")
    writer = Writer(key, 1, "boot", 1, ModelLayout((0,), 8, 2, 1), SlotMap(0, 0))
    known: dict[int, Sums] = {}
    for _ in range(2000):
        if rng.random() < 0.005:  # damaged records of a replay: those before count no more
            writer.sequence += rng.randint(1, 9)
            known.clear()
        writer.sequence += 1
        known[writer.sequence] = Sums(rng.getrandbits(32), rng.getrandbits(32))
        known.pop(writer.sequence - DEDUP_WINDOW, None)
        writer.recent.add(writer.sequence, known[writer.sequence])
        if rng.random() < 0.05:
            message = stored.Writer()
            dump_writer(message, writer)
            writer = load_writer(message, {})
        asked = rng.randrange(max(0, writer.sequence - 300), writer.sequence + 5)
        assert writer.recent.get(asked) == known.get(asked)
