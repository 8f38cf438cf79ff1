"""Records of a simulated engine, as the server stores them."""

from __future__ import annotations

from routetrace.common.layout import ModelLayout
from routetrace.server.index.records.record import (
    Sums,
    encode_chunk,
    encode_delete,
    encode_open,
    encode_renew,
)
from routetrace.server.index.state import State
from routetrace.server.index.traces.refs import CHUNK_SHIFT
from routetrace.simulation.small_engine import SmallEngine
from support.agents.feeder import ChunkMaker, Feeder

LAYOUT = ModelLayout((0, 2), 3, 16, 2)
WRITER = ("run", "engine", "")


class Recorder(Feeder):
    """A feeder that writes records in place of sending chunks."""

    def __init__(
        self,
        layout: ModelLayout = LAYOUT,
        shard: str = "",
        *,
        model: int = 0,
        says_unknown_versions: bool = True,
    ) -> None:
        self.layout = layout
        self.writer = ("run", "engine", shard)
        self.names: list[str] = []
        self.version = 0
        self.step_number = 0
        self.sequence = 1
        self.chunk = ChunkMaker(layout)
        opened = encode_open(
            0,
            self.writer,
            epoch=1,
            boot_id="boot",
            layout=layout,
            block_size=4,
            num_blocks=14,
            model=model,
            says_unknown_versions=says_unknown_versions,
        )
        self.records = [opened]

    def flush(self) -> None:
        if self.chunk.ops:
            chunk = self.chunk.make(self.sequence)
            sums = Sums(chunk.header_crc32, chunk.payload_crc32)
            self.records.append(
                encode_chunk(self.writer, 1, self.sequence, sums, len(self.records), chunk.header)
            )
            self.sequence += 1
            self.chunk = ChunkMaker(self.layout)


def records(seed: int) -> list[bytes]:
    recorder = Recorder()
    sim = SmallEngine(recorder, LAYOUT, seed, num_blocks=14)
    for i in range(15):
        prompt = [sim.rng.randrange(4) for _ in range(sim.rng.randint(1, 9))]
        sim.submit(f"r{i}", prompt, 8)
    while sim.step():
        if sim.rng.random() < 0.3:
            recorder.flush()
        if sim.rng.random() < 0.1:
            victim = f"r{sim.rng.randrange(15)}"
            if sim.rng.choice(["delete", "renew"]) == "delete":
                record = encode_delete(0, "run", [victim, "none"], "deleted")
            else:
                record = encode_renew(0, "run", [victim, "none"], 5)
            recorder.records.append(record)
    recorder.flush()
    return recorder.records


def pointed_into(state: State) -> set[int]:
    """Chunks that a row of a trace, or a slot, is in; span by span, run by run."""
    sources = (s for trace in state.traces.traces.values() for s in trace.sources)
    found = {span.ref >> CHUNK_SHIFT for s in sources for a in s.attempts for span in a}
    for writer in state.writers.values():
        slots, every = writer.slots, range(writer.slots.num_blocks)
        runs = slots.resolve(every, 0, len(every) * slots.block_size)
        found |= {run.ref >> CHUNK_SHIFT for run in runs}
    return found
