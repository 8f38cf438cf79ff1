"""What the scheduler run must read back, worked out from the fake model alone.

The fake model leaves the number of each row in the KV entry that it writes. So the entries that a
request reuses name the rows which computed them, whoever moved them to wherever they are: no rule
of the product about slots, pages, loads or flushes is needed to know what is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from routetrace.client import Trace
from routetrace.common.layout import ModelLayout

LAYOUT = ModelLayout((1, 2, 4), 6, 16, 2)
VOCABULARY = 4096

Ints = npt.NDArray[np.int64]


class Rows:
    """Every row that the fake model chose, by its number from 1."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.ids = np.zeros((1 << 16, len(LAYOUT.layer_ids), LAYOUT.top_k), np.uint8)
        self.versions = np.zeros(1 << 16, np.int64)
        self.hidden: set[int] = set()
        """Numbers of rows that are not captured, or computed for the last token of a request."""
        self.size = 1

    def new(self, n: int, version: int) -> Ints:
        """Numbers [n] of new rows, computed with a weight version."""
        first, self.size = self.size, self.size + n
        while self.size > len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.versions = np.concatenate([self.versions, np.zeros_like(self.versions)])
        layers, experts = len(LAYOUT.layer_ids), LAYOUT.num_experts
        ids = self.ids[first : self.size]
        ids[..., 0] = self._rng.integers(experts, size=(n, layers))
        ids[..., 1] = (ids[..., 0] + self._rng.integers(1, experts, size=(n, layers))) % experts
        self.versions[first : self.size] = version
        return np.arange(first, self.size)


@dataclass
class Attempt:
    """One pass over the positions of a request."""

    numbers: dict[int, int] = field(default_factory=dict)
    """Position -> row."""
    sampled: dict[int, int] = field(default_factory=dict)
    """Position -> token that its row sampled."""
    unknown: set[int] = field(default_factory=set)
    """Positions whose KV was computed by a hidden row."""
    end: int = 0


@dataclass
class Life:
    """One request."""

    rid: str
    prompt: list[int]
    captured: bool = True
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer, once it has ended."""
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)

    def pass_from(self, position: int) -> tuple[Attempt, bool]:
        """The attempt of a pass that starts at a position, and whether it is a new one."""
        if self.attempts and self.attempts[-1].end == position:
            return self.attempts[-1], False
        self.attempts.append(Attempt())
        return self.attempts[-1], True

    def samples_at(self, position: int) -> set[int]:
        """Tokens that its attempts have sampled at a position."""
        return {a.sampled[position] for a in self.attempts if position in a.sampled}

    @property
    def that_sampled(self) -> list[Attempt]:
        """The attempts that sampled a token of the answer; the last if none did.

        What an attempt samples in the pass in which it is retracted is thrown away.
        """
        answer = dict(enumerate(self.tokens[len(self.prompt) :], len(self.prompt) - 1))
        sampled = [a for a in self.attempts if a.sampled.items() & answer.items()]
        return sampled or self.attempts[-1:]

    def expected(self, position: int) -> tuple[list[int], bool]:
        """Rows that may be served for a position, and whether none may be."""
        if position >= len(self.prompt) - 1:
            token = self.tokens[position + 1]
            numbers = [
                a.numbers[position] for a in self.attempts if a.sampled.get(position) == token
            ]
            return numbers, not numbers
        numbers = []
        for attempt in self.that_sampled:
            if position in attempt.numbers:
                numbers.append(attempt.numbers[position])
                if position not in attempt.unknown:
                    return numbers, False
        return numbers, True


@dataclass
class Tally:
    """Counts of comparisons and findings."""

    rows: int = 0
    wrong: int = 0
    lost: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def compare(tally: Tally, rows: Rows, life: Life, trace: Trace) -> None:
    """Compare what is served for a request that has ended."""
    num_rows = len(life.tokens) - 1
    if trace.num_tokens != num_rows + 1 or len(trace) != num_rows:
        tally.faults.append(f"{life.rid}: {trace!r} of {num_rows + 1} tokens")
        return
    trace.verify_tokens(life.tokens)
    reasons = [""] * num_rows
    for missing in trace.missing:
        reasons[missing.start : missing.stop] = [missing.reason] * (missing.stop - missing.start)
    versions = np.full(num_rows, -1)
    # Nobody gives a version to the weights that the model starts with, which it calls 0.
    for start, stop, version in trace.weight_versions:
        versions[start:stop] = {None: 0, 0: -1}.get(version, version)
    valid = trace.valid.all(axis=1)
    partly = trace.valid.any(axis=1) & ~valid
    if partly.any():
        tally.faults.append(f"{life.rid}: rows {np.flatnonzero(partly)} have some layers")
    for position in range(num_rows):
        numbers, may_lack = life.expected(position)
        if not valid[position]:
            tally.missing[reasons[position]] += 1
            if not may_lack:
                tally.lost += 1
                tally.faults.append(f"{life.rid}: row {position} is missing: {reasons[position]}")
            elif reasons[position] != ("kv_unknown" if numbers else "aborted"):
                tally.faults.append(f"{life.rid}: row {position} is {reasons[position]}")
            continue
        tally.rows += 1
        served = [n for n in numbers if np.array_equal(rows.ids[n], trace.topk_ids[position])]
        if not served:
            tally.wrong += 1
            tally.faults.append(f"{life.rid}: row {position} is not one of {numbers}")
        elif versions[position] not in rows.versions[served]:
            tally.faults.append(f"{life.rid}: row {position} has version {versions[position]}")


def config() -> dict[str, object]:
    """Configuration of a model with the layout."""
    dense: Sequence[int] = [i for i in range(LAYOUT.num_hidden_layers) if i not in LAYOUT.layer_ids]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYOUT.num_hidden_layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": LAYOUT.num_experts,
        "num_experts_per_tok": LAYOUT.top_k,
        "mlp_only_layers": list(dense),
        "decoder_sparse_step": 1,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
