"""What was asked for: the model, the mix of requests, how engines step, who reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from routetrace.cli.models import MODELS, Model, made_up
from routetrace.v1.errors import InvalidArgument

BLOCK_SIZE = 16
#: Share of drafts that are right, each if those before it were.
ACCEPTED = 0.7

Reads = Literal["whole", "rank"]


class Lengths(NamedTuple):
    """How many tokens something has."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    """The length; the least; the median."""
    b: float = 0.0
    """The most of "uniform"; the sigma of "lognormal"."""

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "512", "uniform:50:900" or "lognormal:MEDIAN:SIGMA".

        Raises:
            InvalidArgument: if it is none of these.
        """
        kind, *words = text.split(":") if ":" in text else ("fixed", text)
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = []
        wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        low = numbers[0] if numbers else 0.0
        if len(numbers) == wanted and 1 <= low < 1e9:
            found = cls(kind, *numbers)  # type: ignore[arg-type]
            if kind == "fixed" or (kind == "uniform" and low <= found.b < 1e9):
                return found
            if kind == "lognormal" and 0 <= found.b <= 4:
                return found
        raise InvalidArgument(
            field="lengths",
            value=repr(text),
            expected="512, uniform:50:900, or lognormal:MEDIAN:SIGMA with a sigma up to 4",
        )

    def draw(self, rng: np.random.Generator) -> int:
        """A length, 1 or more."""
        if self.kind == "uniform":
            return int(rng.integers(int(self.a), int(self.b) + 1))
        if self.kind == "lognormal":
            return max(1, round(self.a * math.exp(self.b * rng.normal())))
        return int(self.a)

    @property
    def mean(self) -> float:
        """The length that they have on average."""
        if self.kind == "uniform":
            return (self.a + self.b) / 2
        return self.a * math.exp(self.b**2 / 2) if self.kind == "lognormal" else self.a


class Mix(NamedTuple):
    """What sessions are like: a system prompt, a prompt, an answer, and more turns after it."""

    system: int
    """Tokens that all prompts of an engine begin with."""
    prompt: Lengths
    answer: Lengths
    group: int
    """Samples of each prompt."""
    turns: int
    """Most turns of a session."""
    turn: Lengths
    """What a turn adds to what is there, before its answer: a question, or a tool's output."""


_LOGNORMAL: Literal["lognormal"] = "lognormal"
_FIXED: Literal["fixed"] = "fixed"

#: By name: medians and spreads of what such jobs do, none of them a measurement of anyone's.
MIXES: Mapping[str, Mix] = {
    "chat": Mix(
        256, Lengths(_LOGNORMAL, 300, 0.8), Lengths(_LOGNORMAL, 250, 0.7), 1, 3,
        Lengths(_LOGNORMAL, 60, 0.7),
    ),
    "reasoning": Mix(
        64, Lengths(_LOGNORMAL, 200, 0.5), Lengths(_LOGNORMAL, 3000, 0.8), 8, 1,
        Lengths(_FIXED, 1),
    ),
    "agentic": Mix(
        2048, Lengths(_LOGNORMAL, 800, 0.5), Lengths(_LOGNORMAL, 300, 0.6), 4, 8,
        Lengths(_LOGNORMAL, 700, 0.9),
    ),
    "quick": Mix(
        32, Lengths("uniform", 50, 200), Lengths("uniform", 50, 300), 4, 2,
        Lengths("uniform", 20, 60),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """All that a process has to know. Travels as JSON."""

    target: str
    run: str
    security: dict[str, Any] = field(repr=False)
    """Fields of a `Security`."""
    timeout: float
    """Seconds that a call, and the sending of what is left, may take."""
    model: str
    """Of MODELS; "" for a shape of its own."""
    shape: tuple[int, int, int]
    """Layers, experts, top_k, where no model is named."""
    mix: Mix
    max_tokens: int
    """Longest session; turns that exceed it are left out, and a first one is cut."""
    agents: int
    """Engines, each in a process of its own."""
    batch: int
    """Most requests that an engine computes at a time."""
    prefill: int
    """Most prompt tokens of a step."""
    kv_blocks: int
    """KV blocks of an engine; 0: enough for one and a half batches of average sessions."""
    steps_per_second: float
    """Of each engine; 0: as fast as acknowledgements come in."""
    seconds: float
    """How long; 0: until all tokens are there."""
    tokens: int
    """How many tokens, of all engines; 0: until the time is up."""
    drafts: int
    """Draft tokens of a decoding request and step."""
    preemptions: float
    """Of a thousand steps, how many preempt a request, beside those that lack blocks."""
    update_seconds: float
    """From one weight version to the next; 0: there is one."""
    readers: int
    reads: Reads
    followers: int
    ttl: int
    """Seconds that a trace lives, were nobody to forget it."""
    keep: bool
    seed: int

    def __post_init__(self) -> None:
        if self.model and self.model not in MODELS:
            raise InvalidArgument(
                field="model", value=repr(self.model), expected=" or ".join(MODELS)
            )
        if not (self.seconds or self.tokens):
            raise InvalidArgument(
                field="seconds", value=0, expected="a time, or a number of tokens"
            )
        self.shape_of()  # refuses a shape that can not be
        first = self.mix.system + 2
        if self.max_tokens <= first:
            raise InvalidArgument(
                field="max_tokens", value=self.max_tokens, expected=f"more than {first}"
            )

    def shape_of(self) -> Model:
        """The model."""
        return MODELS[self.model] if self.model else made_up(*self.shape)

    @property
    def num_blocks(self) -> int:
        """KV blocks of an engine: the longest session fits in any case."""
        mix = self.mix
        turns = (mix.answer.mean + mix.turn.mean) * (mix.turns - 1)
        mean = min(self.max_tokens, mix.system + mix.prompt.mean + mix.answer.mean + turns)
        wanted = self.kv_blocks or int(1.5 * self.batch * (mean / BLOCK_SIZE + 1))
        return max(wanted, -(-(self.max_tokens + self.drafts + 1) // BLOCK_SIZE))

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Load:
        """What `to_json` wrote."""
        values = json.loads(text)
        system, prompt, answer, group, turns, turn = values["mix"]
        lengths = (Lengths(*prompt), Lengths(*answer), Lengths(*turn))
        values["mix"] = Mix(system, lengths[0], lengths[1], group, turns, lengths[2])
        values["shape"] = tuple(values["shape"])
        return cls(**values)

    def facts(self) -> dict[str, Any]:
        """What may be shown: all but the credentials."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "security"}
        mix = {
            name: value._asdict() if isinstance(value, Lengths) else value
            for name, value in self.mix._asdict().items()
        }
        layout = self.shape_of().layout
        shape = {
            "layers": len(layout.layer_ids),
            "experts": layout.num_experts,
            "top_k": layout.top_k,
            "row_bytes": layout.row_bytes,
        }
        return {**shown, "mix": mix, "shape": shape, "kv_blocks": self.num_blocks}
