"""Sessions: what their tokens are, and which pass computed each of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.cli.load.blocks import Key
from routetrace.cli.load.plan import BLOCK_SIZE, Load
from routetrace.cli.load.rows import mix

_VOCABULARY = 100_000
#: The stream of the system prompt; others have numbers of their engine.
_SYSTEM = 1


@dataclass(frozen=True)
class Truth:
    """What a reader must get, in few numbers. Travels as JSON."""

    name: str
    """Trace id."""
    num_tokens: int
    """0: it was aborted before all its rows were computed."""
    streams: tuple[tuple[int, int], ...]
    """(first position, stream of tokens)."""
    segments: tuple[tuple[int, int, int], ...]
    """(first position, author, weight version) of the rows that `as_sampled` gives."""
    again: tuple[tuple[int, int, int, int], ...]
    """(start, stop, author, weight version) of those that computed, or found, positions once more:
    their rows stand in where those of the first were dropped."""
    ended: float
    """time.monotonic() of its end."""

    def tokens(self, stop: int) -> npt.NDArray[np.int64]:
        """[stop] token ids."""
        return tokens_of(self.streams, stop)

    def authors(self, stop: int) -> npt.NDArray[np.int64]:
        """[stop] who computed each row."""
        return _spread([(s[0], s[1]) for s in self.segments], stop)

    def versions(self, stop: int) -> npt.NDArray[np.int64]:
        """[stop] the weight version that did."""
        return _spread([(s[0], s[2]) for s in self.segments], stop)


@dataclass(eq=False)
class Session:
    """A session as its engine sees it. Its turns are requests of one trace."""

    name: str
    group: str
    streams: tuple[tuple[int, int], ...]
    turns: list[tuple[int, int]]
    """Prompt length and number of tokens of each turn, everything before it included."""
    turn: int = 0
    begun: bool = False
    """Whether this turn was running before; it was preempted since."""
    handle: int = 0
    known: int = 0
    """Tokens so far of a turn that was preempted."""
    _segments: list[tuple[int, int, int]] = field(default_factory=list)
    _again: list[tuple[int, int, int, int]] = field(default_factory=list)
    _settled: int = 0
    """Positions before have the row that they will always have."""

    def mark(self, start: int, author: int, version: int) -> None:
        """Positions from `start` on, if nobody was before, have rows of this author."""
        if start < self._settled:
            self._again.append((start, self._settled, author, version))
            start = self._settled
        while self._segments and self._segments[-1][0] >= start:
            self._segments.pop()
        if not self._segments or self._segments[-1][1:] != (author, version):
            self._segments.append((start, author, version))

    def settle(self, stop: int) -> None:
        """Positions before `stop` have been computed, or taken from the cache."""
        self._settled = max(self._settled, stop)

    def keys(self, start: int, stop: int) -> Iterator[Key]:
        """Of the blocks that end in (start, stop]."""
        at = 0
        for end in range((start // BLOCK_SIZE + 1) * BLOCK_SIZE, stop + 1, BLOCK_SIZE):
            while at + 1 < len(self.streams) and self.streams[at + 1][0] < end:
                at += 1
            yield self.streams[at][1], end

    def tokens(self, stop: int) -> npt.NDArray[np.int64]:
        """[stop] token ids."""
        return tokens_of(self.streams, stop)

    def truth(self, num_tokens: int, now: float) -> Truth:
        """As it stands."""
        segments, again = tuple(self._segments), tuple(self._again)
        return Truth(self.name, num_tokens, self.streams, segments, again, now)


def sessions(load: Load, engine: int) -> Iterator[Session]:
    """What an engine is asked for, without end: group after group, sample after sample."""
    rng = np.random.default_rng([load.seed, engine])
    mix_ = load.mix
    streams = (engine << 40 | number for number in count(2))
    number = 0
    for group in count():
        room = load.max_tokens - mix_.system - 1
        prompt = mix_.system + min(mix_.prompt.draw(rng), room)
        of_group = next(streams)
        for _ in range(mix_.group):
            starts = [(0, _SYSTEM), (mix_.system, of_group), (prompt, next(streams))]
            yield Session(
                f"e{engine}-s{number}",
                f"e{engine}-g{group}",
                tuple(s for s in starts if mix_.system or s[1] != _SYSTEM),
                _turns(load, prompt, rng),
            )
            number += 1


def _turns(load: Load, prompt: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    mix_ = load.mix
    turns = [(prompt, min(prompt + mix_.answer.draw(rng), load.max_tokens))]
    for _ in range(1, int(rng.integers(1, mix_.turns + 1))):
        prompt = turns[-1][1] + mix_.turn.draw(rng)
        num_tokens = prompt + mix_.answer.draw(rng)
        if num_tokens > load.max_tokens:
            break
        turns.append((prompt, num_tokens))
    return turns


def tokens_of(streams: tuple[tuple[int, int], ...], stop: int) -> npt.NDArray[np.int64]:
    """[stop] token ids: those of each stream from where it begins."""
    keys = _spread(list(streams), stop) * 0x51_7CC1B7 + np.arange(stop)
    return (mix(keys.view(np.uint64)) % np.uint64(_VOCABULARY)).view(np.int64)


def _spread(values: list[tuple[int, int]], stop: int) -> npt.NDArray[Any]:
    """[stop] the value of the last start at or before each position; -1 before the first."""
    spread = np.full(stop, -1, np.int64)
    for start, value in values:
        spread[start:] = value
    return spread
