"""Compiled loops of the frame codec, where numba is installed; else, and until then, numpy's.

The environment's ROUTETRACE_NATIVE chooses:

* `auto` (default): once a process has worked on `AUTO_ROWS` rows, a thread compiles the loops
  (kernels.py); numpy goes on until they are ready. A process that works on fewer never loads numba.
* `on`: the first use compiles and waits. Without numba agents and clients refuse to start.
* `off`: never.

Rows and bytes are the same either way. Loops that cannot be compiled, or that differ from numpy on
samples, are not used: a warning says why, and `state()` is FAILED.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from routetrace.codec import bit_pack
from routetrace.common.errors import InvalidArgument

if TYPE_CHECKING:
    from routetrace.codec.kernels import Kernels

VARIABLE = "ROUTETRACE_NATIVE"

Choice = Literal["auto", "on", "off"]

_Ids = npt.NDArray[np.unsignedinteger[Any]]

#: Rows after which a process compiles the loops: short commands and tests never do. Loading them
#: from numba's cache takes as much CPU as they save on about half a million rows.
AUTO_ROWS = 1 << 17

_log = logging.getLogger(__name__)


class State(Enum):
    """State of the loops in this process; `TRANSITIONS` has its changes."""

    NUMPY = "numpy"
    """Not used: switched off, or not installed."""
    COUNTING = "counting"
    """Not loaded; numpy works."""
    LOADING = "loading"
    """A thread compiles them; numpy works."""
    READY = "ready"
    """They work."""
    FAILED = "failed"
    """They could not be used; numpy works."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.NUMPY: frozenset(),
    State.COUNTING: frozenset({State.LOADING}),
    State.LOADING: frozenset({State.READY, State.FAILED}),
    State.READY: frozenset(),
    State.FAILED: frozenset(),
}


def chosen() -> Choice:
    """Return the environment's choice.

    Raises:
        InvalidArgument: if there is no such choice.
    """
    given = os.environ.get(VARIABLE) or "auto"
    for choice in get_args(Choice):
        if given == choice:
            return choice  # type: ignore[no-any-return]
    raise InvalidArgument(field=VARIABLE, value=given, expected="auto, on or off")


def installed() -> bool:
    """Return whether the loops could be compiled here."""
    return sys.byteorder == "little" and find_spec("numba") is not None


def require() -> None:
    """Refuse a choice that cannot be had.

    Raises:
        InvalidArgument: if the environment has another value, or `on` without numba.
    """
    if chosen() == "on" and not installed():
        raise InvalidArgument(
            field=VARIABLE,
            value="on",
            expected="numba beside it (pip install numba), or auto or off",
        )


class Loader:
    """The loops of a process, from the first rows to the compiled ones."""

    def __init__(self, choice: Choice, present: bool) -> None:
        self._choice = choice
        use = present and choice != "off"
        self.state = State.COUNTING if use else State.NUMPY
        self.reason = ""
        """Cause of FAILED; "" in other states."""
        self._rows = 0
        self._kernels: Kernels | None = None
        self._lock = threading.Lock()

    def kernels(self, rows: int) -> Kernels | None:
        """Return the loops for work on so many rows; None: numpy does it."""
        if self.state is State.COUNTING:
            self._count(rows)
        return self._kernels

    def _count(self, rows: int) -> None:
        self._rows += rows
        if self._choice == "on":
            with self._lock:
                if self.state is State.COUNTING:
                    self._enter(State.LOADING)
                    self._load()
        elif self._rows >= AUTO_ROWS and self._lock.acquire(blocking=False):
            try:
                if self.state is State.COUNTING:
                    self._enter(State.LOADING)
                    # No daemon: a process does not end in the middle of LLVM.
                    threading.Thread(target=self._load, name="routetrace-native").start()
            except RuntimeError as error:  # no more threads, or the process is ending
                self._fail(str(error))
            finally:
                self._lock.release()

    def forget_in_child(self) -> None:
        """After a fork, in the child: the thread that loads is not there."""
        if self.state is State.LOADING:
            self._fail("the process was forked while they were compiled")

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.state} to {state}")
        self.state = state

    def _load(self) -> None:
        try:
            kernels = _build()
            _try_out(kernels)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._kernels = kernels
            self._enter(State.READY)

    def _fail(self, reason: str) -> None:
        self.reason = " ".join(reason.split())
        self._enter(State.FAILED)
        _log.warning(
            "routetrace: compiled loops are not used, numpy does the same: %s; %s=off hides this",
            self.reason,
            VARIABLE,
        )


def _build() -> Kernels:
    """Import and compile the loops; with numba's cache where it has a directory."""
    from routetrace.codec.kernels import build

    try:
        return build(cache=True)
    except Exception:  # no directory can be written, or the cache is damaged
        return build(cache=False)


def _try_out(kernels: Kernels) -> None:
    """Compare the loops with numpy on a few rows.

    Raises:
        RuntimeError: if anything differs.
    """
    rng = np.random.default_rng(0)
    for num_experts, n, top_k in (
        (128, 70, 8), (20, 9, 6), (256, 3, 4), (384, 65, 8), (1000, 9, 4), (5, 130, 2),
    ):  # fmt: skip
        dtype: Any = np.uint8 if num_experts <= 256 else np.uint16
        ids: _Ids = rng.integers(0, num_experts, (n, 5, top_k)).astype(dtype)
        if not (_checks(kernels, ids, num_experts) and _packs(kernels, ids, num_experts)):
            raise RuntimeError(f"other bytes than numpy's for {num_experts} experts")


def _checks(kernels: Kernels, ids: _Ids, num_experts: int) -> bool:
    """Whether rows with an id twice, and a row with one out of range, are found."""
    ids = ids.copy()
    ids[0, 0, 0] = num_experts - 1
    n, layers, top_k = ids.shape
    ranks = np.sort(ids, axis=2)
    expected = (ranks[:, :, 1:] == ranks[:, :, :-1]).any(axis=(1, 2))
    expected[(ids == num_experts - 1).any(axis=(1, 2))] = True
    bad, size = np.empty(n, np.bool_), top_k * ids.itemsize
    rows = ids.reshape(-1).view(np.uint8)
    done = kernels.check(rows, size, layers, ids.itemsize, num_experts - 1, bad)
    return bool(np.array_equal(bad, expected) if done else size not in (2, 4, 8))


def _packs(kernels: Kernels, ids: _Ids, num_experts: int) -> bool:
    """Whether ids become the bytes that numpy makes of them, and ids again."""
    n, layers, top_k = ids.shape
    count, bits = n * top_k, (num_experts - 1).bit_length()
    words, width, shift = -(-count // 8), min(8, bits), max(0, bits - 8)
    major = ids.transpose(1, 0, 2).reshape(layers, count)
    plane = np.zeros((layers, 8 * words), np.uint8)
    plane[:, :count] = major >> shift
    expected = bit_pack.pack(plane.reshape(-1), width).tobytes()
    for row in major:
        for bit in range(shift):
            expected += np.packbits(row >> bit & 1, bitorder="little").tobytes()
    places = np.arange(layers, dtype=np.int64) * words
    planes, low_planes = places * width, layers * words * width + places * shift
    frame, found = np.empty(len(expected), np.uint8), np.empty_like(major)
    item = ids.itemsize
    done = kernels.pack(
        ids.reshape(-1).view(np.uint8), top_k * item, layers, item,
        width, shift, planes, low_planes, frame,
    )  # fmt: skip
    largest = kernels.unpack(
        frame, planes, low_planes, count, item, width, shift, found.view(np.uint8)
    )
    same = frame.tobytes() == expected and np.array_equal(found, major)
    return bool(done and same and largest == ids.max())


_of_process: Loader | None = None


def _loader() -> Loader:
    """Return the loader of this process, by the environment at its first use."""
    global _of_process  # noqa: PLW0603
    if _of_process is None:
        try:
            _of_process = Loader(chosen(), installed())
        except InvalidArgument:  # which agents and clients raise
            _of_process = Loader("off", present=False)
    return _of_process


def kernels(rows: int) -> Kernels | None:
    """Return the compiled loops for work on so many rows; None: numpy does it."""
    return (_of_process or _loader()).kernels(rows)


def use(loader: Loader) -> Loader:
    """Have this process use another loader; return the one before. For tests and benchmarks."""
    global _of_process
    before, _of_process = _loader(), loader
    return before


def state() -> State:
    """Return the state of the loops in this process."""
    return _loader().state


def reason() -> str:
    """Return why the loops FAILED, else ""."""
    return _loader().reason


def _forget_in_child() -> None:
    if _of_process:
        _of_process.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
