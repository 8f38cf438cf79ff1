"""Parameters of a load: model, mix of requests, engines, readers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from routetrace.common.errors import InvalidArgument
from routetrace.simulation.models import MODELS, Model, custom_model

BLOCK_SIZE = 16
#: Probability that a draft is accepted if all before it are.
ACCEPTED = 0.7

Reads = Literal["whole", "rank"]


class Lengths(NamedTuple):
    """Distribution of a number of tokens."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    """Length, minimum or median."""
    b: float = 0.0
    """Maximum of "uniform", sigma of "lognormal"."""

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse "512", "uniform:50:900" or "lognormal:MEDIAN:SIGMA".

        Raises:
            InvalidArgument: if the text has another form.
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

    def __str__(self) -> str:
        if self.kind == "uniform":
            return f"{self.a:,.0f} to {self.b:,.0f}"
        return f"about {self.a:,.0f}" if self.kind == "lognormal" else f"{self.a:,.0f}"

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a length, at least 1."""
        if self.kind == "uniform":
            return int(rng.integers(int(self.a), int(self.b) + 1))
        if self.kind == "lognormal":
            return max(1, round(self.a * math.exp(self.b * rng.normal())))
        return int(self.a)

    @property
    def mean(self) -> float:
        """Mean length."""
        if self.kind == "uniform":
            return (self.a + self.b) / 2
        return self.a * math.exp(self.b**2 / 2) if self.kind == "lognormal" else self.a


class Mix(NamedTuple):
    """Shape of sessions: system prompt, prompt, answer, further turns."""

    system: int
    """Tokens shared by all prompts of an engine."""
    prompt: Lengths
    answer: Lengths
    group: int
    """Samples per prompt."""
    turns: int
    """Maximum turns of a session."""
    turn: Lengths
    """Tokens that a further turn adds before its answer: a question or the output of a tool."""


_LOGNORMAL: Literal["lognormal"] = "lognormal"
_FIXED: Literal["fixed"] = "fixed"

#: By name: plausible medians and spreads, not measured ones.
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
    """All parameters of a process; serializable as JSON."""

    target: str
    run: str
    security: dict[str, Any] = field(repr=False)
    """Fields of `Security`."""
    timeout: float
    """Seconds for a call, and for sending the backlog at the end."""
    model: str
    """Name in MODELS; "" to use `shape`."""
    shape: tuple[int, int, int]
    """Layers, experts and top_k without a named model."""
    mix: Mix
    max_tokens: int
    """Maximum length of a session; the first turn is cut to it, further turns are left out."""
    agents: int
    """Engines, one process each."""
    batch: int
    """Maximum concurrent requests of an engine."""
    prefill: int
    """Maximum prompt tokens per step."""
    kv_blocks: int
    """KV blocks of an engine; 0: room for one and a half batches of average sessions."""
    steps_per_second: float
    """Steps per second of each engine; 0: as fast as acknowledgements arrive."""
    seconds: float
    """Duration; 0: until `tokens` are computed."""
    tokens: int
    """Tokens to sample by all engines; 0: until `seconds` have passed."""
    drafts: int
    """Draft tokens per decoding request and step."""
    preemptions: float
    """Preemptions per thousand steps, in addition to those for lack of blocks."""
    update_seconds: float
    """Seconds between weight versions; 0: a single version."""
    readers: int
    reads: Reads
    followers: int
    ttl: int
    """Lease of a trace in seconds."""
    keep: bool
    seed: int

    def __post_init__(self) -> None:
        if self.model and self.model not in MODELS:
            raise InvalidArgument(
                field="model", value=repr(self.model), expected=" or ".join(MODELS)
            )
        if not (self.seconds or self.tokens):
            raise InvalidArgument(
                field="seconds", value=0, expected="a duration, or tokens above 0"
            )
        self.shape_of()  # raises on an invalid shape
        first = self.mix.system + 2
        if self.max_tokens <= first:
            raise InvalidArgument(
                field="max_tokens", value=self.max_tokens, expected=f"more than {first}"
            )

    def shape_of(self) -> Model:
        """Return the model."""
        return MODELS[self.model] if self.model else custom_model(*self.shape)

    @property
    def num_blocks(self) -> int:
        """KV blocks of an engine; the longest session always fits."""
        mix = self.mix
        turns = (mix.answer.mean + mix.turn.mean) * (mix.turns - 1)
        mean = min(self.max_tokens, mix.system + mix.prompt.mean + mix.answer.mean + turns)
        wanted = self.kv_blocks or int(1.5 * self.batch * (mean / BLOCK_SIZE + 1))
        return max(wanted, -(-(self.max_tokens + self.drafts + 1) // BLOCK_SIZE))

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Load:
        """Parse the result of `to_json`."""
        values = json.loads(text)
        system, prompt, answer, group, turns, turn = values["mix"]
        lengths = (Lengths(*prompt), Lengths(*answer), Lengths(*turn))
        values["mix"] = Mix(system, lengths[0], lengths[1], group, turns, lengths[2])
        values["shape"] = tuple(values["shape"])
        return cls(**values)

    def facts(self) -> dict[str, Any]:
        """Return all parameters except credentials."""
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
