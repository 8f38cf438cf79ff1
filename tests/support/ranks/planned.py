"""Random micro-batches and ranks, and where a trainer has their tokens: by cutting arrays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from routetrace.client import MicroBatch, Rank, Sample, Segment

PADDING = -1

# Every token is a number: sample * MANY + position. What trainers do to arrays of token ids is done
# to arrays of these, one array operation at a time.
MANY = 1 << 20

MakeSample = Callable[[random.Random, int], Sample]


@dataclass
class Drawn:
    """A micro-batch as a plan takes it, and as a trainer would make it."""

    batch: MicroBatch
    rank: Rank
    lengths: list[int] | None
    """Padded length of each sample of a packed batch; None: padded to `seq_len`."""
    seq_len: int
    side: str

    def serials(self, rank: Rank | None = None) -> np.ndarray:
        """The number of every local token of a rank, in its order; PADDING where there is none."""
        rank = rank or self.rank
        batch = self.batch
        if self.lengths is None:
            rows = [_numbers(batch, i, self.seq_len) for i in range(len(batch.samples))]
            if self.side == "left":
                rows = [np.roll(r, int((r == PADDING).sum())) for r in rows]
            tokens = np.stack([on_rank(row, rank) for row in rows], axis=1)  # [seq, batch]
        else:
            rows = [_numbers(batch, i, n) for i, n in enumerate(self.lengths)]
            rows.append(np.full(self.seq_len - sum(self.lengths), PADDING))
            if rank.cp_layout == "ulysses":
                rows = [np.concatenate(rows)]
            tokens = np.concatenate([on_rank(row, rank) for row in rows])[:, None]
        tokens = np.split(tokens, rank.sp_size)[rank.sp_rank]
        return (tokens if rank.flatten == "sequence" else tokens.T).reshape(-1)

    def row_of(self, serial: int) -> tuple[str, int] | None:
        """The request and the position in it whose row a token takes."""
        if serial == PADDING:
            return None
        sample, position = divmod(serial, MANY)
        for segment in self.batch.samples[sample].segments:
            if segment.at <= position < segment.at + segment.stop - segment.start:
                return segment.trace_id, segment.start + position - segment.at
        return None


def _numbers(batch: MicroBatch, number: int, length: int) -> np.ndarray:
    count = batch.samples[number].num_tokens
    return np.concatenate([number * MANY + np.arange(count), np.full(length - count, PADDING)])


def on_rank(row: np.ndarray, rank: Rank) -> np.ndarray:
    """A sequence's tokens on a context-parallel rank."""
    if rank.cp_layout != "zigzag":
        return np.split(row, rank.cp_size)[rank.cp_rank]
    if rank.cp_size == 1:
        return row
    # Megatron's get_batch_on_this_cp_rank: the rank's chunk and its mirror's.
    chunks = row.reshape(2 * rank.cp_size, -1)
    return np.concatenate([chunks[rank.cp_rank], chunks[2 * rank.cp_size - 1 - rank.cp_rank]])


def made_up(rng: random.Random, number: int) -> Sample:
    """A sample with rows of some requests, some positions without any."""
    num_tokens = rng.randint(0, 40)
    kind = rng.choice(["of", "turns", "segments"])
    if kind == "of" and num_tokens:
        return Sample.of(f"r{number}", num_tokens)
    if kind == "turns" and num_tokens > 2:
        ends = sorted({*rng.sample(range(1, num_tokens), rng.randint(1, 2)), num_tokens})
        return Sample.turns([(f"r{number}-{i}", end) for i, end in enumerate(ends)])
    segments, at = [], 0
    while at < num_tokens:
        stop = rng.randint(at + 1, num_tokens)
        if rng.random() < 0.8:
            start = rng.randrange(50)
            request = f"r{number}-{rng.randrange(2)}"
            segments.append(Segment(request, start, start + stop - at, at=at))
        at = stop
    return Sample(num_tokens, tuple(segments))


def drawn(rng: random.Random, layer_ids: tuple[int, ...], sample: MakeSample = made_up) -> Drawn:
    """Any batch, split in any way."""
    cp_size, sp_size = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 4])
    rank = Rank(
        sorted(rng.sample(layer_ids, rng.randint(1, len(layer_ids)))),
        cp_size,
        rng.randrange(cp_size),
        rng.choice(["zigzag", "contiguous", "ulysses"]),
        sp_size,
        rng.randrange(sp_size),
        rng.choice(["sequence", "batch"]),
    )
    unit = 2 * cp_size * sp_size
    samples = [sample(rng, i) for i in range(rng.randint(1, 5))]
    side = rng.choice(["left", "right"])
    if rng.random() < 0.5:
        seq_len = -(-max(s.num_tokens for s in samples) // unit) * unit + unit * rng.randrange(2)
        batch = MicroBatch.padded(samples, seq_len, padding_side=side)
        return Drawn(batch, rank, None, seq_len, side)
    lengths = [-(-s.num_tokens // unit) * unit for s in samples]
    if rng.random() < 0.5:  # said by each sample, not by `align`
        lengths = [n + unit * rng.randrange(2) for n in lengths]
        samples = [replace(s, padded_len=n) for s, n in zip(samples, lengths, strict=True)]
    total = sum(lengths) + unit * rng.randrange(2)
    batch = MicroBatch.packed(samples, align=unit, total_len=rng.choice([None, total]))
    return Drawn(batch, rank, lengths, batch.lane_len, side)
