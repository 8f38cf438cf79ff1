"""Requests of the engine as the framer tracks them: states, and the transitions between them.

Two life cycles run side by side. The phase follows the calls of the engine, the recording follows
the memory of the agent; each changes in any state of the other one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import DIGEST

Digests = npt.NDArray[Any]  # of records.DIGEST
NO_DIGESTS: Digests = np.empty(0, DIGEST)

#: Bytes that a running request takes, beside its blocks and digests.
_REQUEST_BYTES = 1024


class Phase(Enum):
    """Phase of a request in the engine."""

    STARTING = "starting"
    """It has cached tokens, and inherits their rows right before its own first ones."""
    RUNNING = "running"
    """Its rows are its own."""
    PREEMPTED = "preempted"
    """It holds no blocks; rows are late."""
    FINISHED = "finished"
    """Its handle is void; rows are late."""


#: Phases that may follow each phase. An engine may repeat a preemption or a resume. Every end of
#: STARTING passes through RUNNING, where the rows of the cached tokens are inherited.
PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.STARTING, Phase.RUNNING}),
    Phase.RUNNING: frozenset(Phase),
    Phase.PREEMPTED: frozenset(Phase),
    Phase.FINISHED: frozenset(),
}


class Recording(Enum):
    """Part of a request that the server gets."""

    KEPT = "kept"
    """All rows."""
    DROPPED = "dropped"
    """Rows up to some position; later ones are dropped for lack of memory."""
    UNNAMED = "unnamed"
    """Nothing yet: it began without memory for its name, which may still be reported."""
    NAMED = "named"
    """Name and end alone; it began or resumed without memory for its rows."""
    UNSEEN = "unseen"
    """Nothing: only a background that died saw its begin."""


#: Recordings that may follow each recording. Rows that were dropped once stay dropped.
RECORDINGS: dict[Recording, frozenset[Recording]] = {
    Recording.KEPT: frozenset({Recording.DROPPED}),
    Recording.DROPPED: frozenset({Recording.NAMED}),
    Recording.UNNAMED: frozenset({Recording.NAMED}),
    Recording.NAMED: frozenset(),
    Recording.UNSEEN: frozenset(),
}


@dataclass(slots=True)
class Request:
    """A request between its begin and its end."""

    request_id: str
    lane: int
    trace_id: str = ""
    digest_key: str = ""
    """Part of its token digests that comes from its labels."""
    phase: Phase = Phase.RUNNING
    recording: Recording = Recording.KEPT
    order: int = 0
    """Its number, in the order of begins; 0 if it began without memory."""
    blocks: array[int] = field(default_factory=lambda: array("I"))
    emitted: int = 0
    """Positions below were emitted."""
    owned_from: int = 0
    """Index of the first of its blocks that names it as the writer."""
    alone: bool = True
    """Whether no other request wrote into its blocks while it held them."""
    digests: Digests = field(default_factory=lambda: NO_DIGESTS)
    """Digests that were emitted."""
    name: Callable[[], None] | None = None
    """Emits begin and loss of an UNNAMED request."""
    counted: int = 0
    """Bytes as they were counted last."""

    def enter(self, phase: Phase) -> bool:
        """Change the phase; return False, and stay, where `PHASES` has no such change."""
        if phase not in PHASES[self.phase]:
            return False
        self.phase = phase
        return True

    def record(self, recording: Recording) -> bool:
        """Change the recording; return False, and stay, where `RECORDINGS` has no such change."""
        if recording not in RECORDINGS[self.recording]:
            return False
        self.recording = recording
        return True

    @property
    def kept(self) -> bool:
        """Whether its rows are recorded."""
        return self.recording is Recording.KEPT

    @property
    def takes_rows(self) -> bool:
        """Whether rows that continue it need no other look."""
        return self.phase is Phase.RUNNING and self.recording is Recording.KEPT and self.alone

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return _REQUEST_BYTES + 4 * len(self.blocks) + self.digests.nbytes
