"""Sessions: their tokens, and the pass that computed each of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.simulation.plan import BLOCK_SIZE, Load
from routetrace.simulation.rows import mix

_VOCABULARY = 100_000
#: Stream of the system prompt; numbers of other streams contain their engine.
_SYSTEM = 1


@dataclass(frozen=True)
class Truth:
    """Expected result of a read in compact form; serializable as JSON."""

    name: str
    """Trace id."""
    num_tokens: int
    """0 if aborted before all rows were computed."""
    streams: tuple[tuple[int, int], ...]
    """(first position, token stream)."""
    segments: tuple[tuple[int, int, int], ...]
    """(first position, author, weight version) of the rows under `as_sampled`."""
    again: tuple[tuple[int, int, int, int], ...]
    """(start, stop, author, weight version) of later passes over the same positions: their rows
    replace those of the first pass where these were dropped."""
    ended: float
    """time.monotonic() at the end."""

    def tokens(self, stop: int) -> npt.NDArray[np.int64]:
        """Return token ids [stop]."""
        return tokens_of(self.streams, stop)

    def authors(self, stop: int) -> npt.NDArray[np.int64]:
        """Return the author of each row [stop]."""
        return _spread([(s[0], s[1]) for s in self.segments], stop)

    def versions(self, stop: int) -> npt.NDArray[np.int64]:
        """Return the weight version of each row [stop]."""
        return _spread([(s[0], s[2]) for s in self.segments], stop)


@dataclass(eq=False)
class Session:
    """State of a session in its engine. Its turns are requests of one trace."""

    name: str
    group: str
    streams: tuple[tuple[int, int], ...]
    turns: list[tuple[int, int]]
    """Prompt length and number of tokens of each turn, including all earlier turns."""
    turn: int = 0
    begun: bool = False
    """Whether this turn has begun."""
    handle: int = 0
    known: int = 0
    """Tokens so far of a preempted turn."""
    _segments: list[tuple[int, int, int]] = field(default_factory=list)
    _again: list[tuple[int, int, int, int]] = field(default_factory=list)
    _settled: int = 0
    """Positions before this one have their final row."""

    def mark(self, start: int, author: int, version: int) -> None:
        """Assign positions from `start` on to an author, again where settled."""
        if start < self._settled:
            self._again.append((start, self._settled, author, version))
            start = self._settled
        while self._segments and self._segments[-1][0] >= start:
            self._segments.pop()
        if not self._segments or self._segments[-1][1:] != (author, version):
            self._segments.append((start, author, version))

    def settle(self, stop: int) -> None:
        """Fix the rows of positions before `stop`: computed, or taken from the cache."""
        self._settled = max(self._settled, stop)

    def keys(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield cache keys of the blocks that end in (start, stop].

        A key is the last stream of tokens before the end of the block, and that end. Each stream
        begins at one position after one other stream, so this names all tokens before the end.
        """
        at = 0
        for end in range((start // BLOCK_SIZE + 1) * BLOCK_SIZE, stop + 1, BLOCK_SIZE):
            while at + 1 < len(self.streams) and self.streams[at + 1][0] < end:
                at += 1
            yield self.streams[at][1], end

    def tokens(self, stop: int) -> npt.NDArray[np.int64]:
        """Return token ids [stop]."""
        return tokens_of(self.streams, stop)

    def truth(self, num_tokens: int, now: float) -> Truth:
        """Return the truth so far."""
        segments, again = tuple(self._segments), tuple(self._again)
        return Truth(self.name, num_tokens, self.streams, segments, again, now)


def sessions(load: Load, engine: int) -> Iterator[Session]:
    """Yield the sessions of an engine without end, group by group."""
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
    """Return token ids [stop], each stream from its first position on."""
    keys = _spread(list(streams), stop) * 0x51_7CC1B7 + np.arange(stop)
    return (mix(keys.view(np.uint64)) % np.uint64(_VOCABULARY)).view(np.int64)


def _spread(values: list[tuple[int, int]], stop: int) -> npt.NDArray[Any]:
    """Return the value [stop] of the last start at or before each position, or -1."""
    spread = np.full(stop, -1, np.int64)
    for start, value in values:
        spread[start:] = value
    return spread
