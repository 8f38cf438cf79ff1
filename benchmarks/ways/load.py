"""The load that every way from an engine to a trainer is given: planned steps of an engine.

Sessions of one or more turns run side by side. A step has the prompts' next tokens, 2048 at most,
and one token of each request that samples, as engines that batch continuously have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from measure import QWEN3

SHAPE = QWEN3
BLOCK = 16
_STEP_TOKENS = 2048
_LIVES = 331  # rows that lie between the first ones of two sessions


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    Attributes:
        session: whose.
        number: of the turn, from 0.
        cached: leading tokens that the engine's prefix cache has.
        prompt: tokens of the prompt; the session so far, and what is new.
        tokens: of prompt and answer.
        last: whether the session ends with it.
    """

    session: int
    number: int
    cached: int
    prompt: int
    tokens: int
    last: bool

    @property
    def name(self) -> str:
        """Of the request, within a round."""
        return f"{self.session}-{self.number}"

    @property
    def rows(self) -> int:
        """The last token is never forwarded."""
        return self.tokens - 1


@dataclass(frozen=True)
class Step:
    """One forward pass.

    Attributes:
        begun: requests that begin before it.
        runs: [m, 3] of (session, first position, count).
        rows: [n] which of the recorded rows its tokens have.
        slots: [n] where their KV is.
        ended: requests that end with it.
    """

    begun: tuple[Turn, ...]
    runs: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    ended: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """One configuration of the load.

    Attributes:
        sessions: side by side.
        prompt: tokens of the first turn's prompt.
        answer: tokens of an answer, on average; half of it to one and a half.
        turns: of each session.
        more: tokens that are new in the prompts of later turns.
    """

    sessions: int
    prompt: int
    answer: int
    turns: int = 1
    more: int = 0

    @cached_property
    def all_turns(self) -> list[list[Turn]]:
        """Of each session, in order."""
        rng = np.random.default_rng(7)
        spread = rng.integers(self.answer // 2, self.answer * 3 // 2 + 1, (self.sessions, 1))
        answers = np.repeat(spread, self.turns, axis=1).tolist()
        return [self._session(number, each) for number, each in enumerate(answers)]

    def _session(self, session: int, answers: Sequence[int]) -> list[Turn]:
        turns: list[Turn] = []
        tokens, rows = 0, 0
        for number, answer in enumerate(answers):
            prompt = tokens + (self.more if number else self.prompt)
            cached = rows // BLOCK * BLOCK
            tokens = prompt + answer
            rows = tokens - 1
            turns.append(Turn(session, number, cached, prompt, tokens, number == len(answers) - 1))
        return turns

    @property
    def requests(self) -> int:
        """Of one round."""
        return self.sessions * self.turns

    @cached_property
    def tokens(self) -> int:
        """Rows of all sessions, each once."""
        return sum(turns[-1].rows for turns in self.all_turns)

    @cached_property
    def answered(self) -> int:
        """Rows of all answers that repeat what came before."""
        return sum(turn.rows for turns in self.all_turns for turn in turns)

    @cached_property
    def blocks(self) -> int:
        """KV blocks that a session has for itself."""
        return max(-(-turns[-1].tokens // BLOCK) for turns in self.all_turns)

    def block_ids(self, turn: Turn) -> range:
        """The KV blocks of a request."""
        first = turn.session * self.blocks
        return range(first, first + -(-turn.tokens // BLOCK))

    def token_ids(self, session: int) -> npt.NDArray[np.uint32]:
        """The tokens of a session."""
        rng = np.random.default_rng(session)
        return rng.integers(0, 150_000, self.all_turns[session][-1].tokens, np.uint32)

    def steps(self) -> list[Step]:
        """The engine's steps."""
        steps = []
        waiting = deque(deque(turns) for turns in self.all_turns)
        fresh: deque[tuple[Turn, deque[Turn]]] = deque((s.popleft(), s) for s in waiting)
        prefill: list[list[Any]] = []  # [turn, rest of its session, position]
        decode: list[list[Any]] = []
        while fresh or prefill or decode:
            begun, ended, runs = [], [], []
            room = _STEP_TOKENS - len(decode)
            for each in decode:
                runs.append((each[0].session, each[2], 1))
                each[2] += 1
            still: list[list[Any]] = []
            sampling: list[list[Any]] = []
            while room > 0 and (prefill or fresh):
                if not prefill:
                    turn, rest = fresh.popleft()
                    begun.append(turn)
                    prefill.append([turn, rest, turn.cached])
                each = prefill[0]
                count = min(room, each[0].prompt - each[2])
                runs.append((each[0].session, each[2], count))
                each[2] += count
                room -= count
                if each[2] == each[0].prompt:
                    sampling.append(prefill.pop(0))
            for each in decode + sampling:
                if each[2] < each[0].rows:
                    still.append(each)
                    continue
                ended.append(each[0])
                if each[1]:
                    fresh.append((each[1].popleft(), each[1]))
            decode = still
            steps.append(self._step(begun, runs, ended))
        return steps

    def _step(
        self, begun: Iterable[Turn], runs: list[tuple[int, int, int]], ended: Iterable[Turn]
    ) -> Step:
        table = np.array(runs, np.int64)
        sessions, starts, counts = table.T
        of = np.repeat(sessions, counts)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(firsts - starts, counts)
        rows = (of * _LIVES + positions) % len(recorded())
        return Step(tuple(begun), table, rows, of * self.blocks * BLOCK + positions, tuple(ended))


_recorded: list[npt.NDArray[Any]] = []


def recorded() -> npt.NDArray[Any]:
    """The rows that tokens have, over and over: [1024, L, K], as narrow as they are."""
    if not _recorded:
        _recorded.append(SHAPE.rows(1024))
    return _recorded[0]


def is_true(rows: npt.NDArray[Any], session: int, start: int = 0) -> bool:
    """Whether these are the rows of a session's tokens from position `start` on."""
    twice = np.concatenate([recorded()] * 2)
    size = len(twice) // 2
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        first = (session * _LIVES + start + at) % size
        if not np.array_equal(part, twice[first : first + len(part)]):
            return False
    return True
