"""Version of the weights in one worker, from the calls that change them.

It is known where a trainer gave a number for the weights that are there, and unknown otherwise.
vLLM's own calls are not the only way: verl and TRL call `load_weights` of the model itself, for
each bucket or parameter. So that method is watched, on the model object alone.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from routetrace.codec.records import UNKNOWN_VERSION

_log = logging.getLogger(__name__)

#: Method of our workers that takes a version which vLLM was given.
FOLLOW = "routetrace_follow_weight_version"

_NUMBER = re.compile(r"-?[0-9]{1,19}")

#: Sleep discards the weights from this level on; level 1 restores the same ones.
_DISCARDS = 2


def number_of(version: object) -> int | None:
    """Return the integer that a version spells; None for a label, and for one beyond 64 bits."""
    text = "" if isinstance(version, bool) else str(version)
    if _NUMBER.fullmatch(text) and UNKNOWN_VERSION < int(text) < -UNKNOWN_VERSION:
        return int(text)
    return None


@dataclass(slots=True)
class _Session:
    """Several calls that replace the weights part by part."""

    draft: bool
    """It replaces those of a model that drafts, whose routing is not captured."""
    failures: int
    """Calls that had failed when it began."""
    number: int | None = None
    """Version that was given before its end."""
    failed: bool = False
    """A part or the end failed: vLLM may have closed it."""


class Weights:
    """Version of the weights that compute the passes from now on.

    They are torn while a call or a session replaces them, and after one that failed, when some of
    them may be new: until all of them are replaced, or a trainer names them.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.updates = 0
        """Calls so far after which layers may have other kernels."""
        self._changed = False  # and nobody has given a number since
        self._torn = False  # a call failed, and weights of it may still be there
        self._failures = 0
        self._calls = 0  # under way
        self._session: _Session | None = None
        # Engines load weights in their own thread; a trainer in the same process may not.
        self._lock = threading.RLock()

    @property
    def torn(self) -> bool:
        """Whether they may be a mixture of two versions."""
        session = self._session
        return self._torn or self._calls > 0 or (session is not None and not session.draft)

    @property
    def untold(self) -> bool:
        """Whether they have changed, and nobody told their version."""
        return self._changed and self.version is None

    def tell(self, version: object) -> None:
        """Take the version that a trainer gives to the weights, as a number or as a label.

        The weights are known again after a failed call: the trainer vouches for them. In a session
        it is the version of its end.
        """
        number = number_of(version)
        with self._lock:
            if self._session is not None and not (self._session.failed or self._session.draft):
                self._session.number = number
                return
            if self._session is not None and self._session.failed:
                self._session = None
            self._changed = number is None and (self._changed or self.version is not None)
            self.version, self._torn = number, False

    def change(self) -> None:
        """Note that the weights have changed, and that nobody has told their version."""
        with self._lock:
            self.version, self._changed = None, True
            self.updates += 1

    def sleep(self, level: int = 1) -> None:
        """Note that the engine has gone to sleep, which may discard the weights."""
        if level >= _DISCARDS:
            self.change()

    def discard(self, tags: Collection[str]) -> None:
        """Note that the engine has discarded memory."""
        if "weights" in tags:
            self.change()

    @contextmanager
    def replacing(self, *, whole: bool = False) -> Iterator[None]:
        """Surround a call that replaces weights.

        Args:
            whole: whether it replaces all of them.
        """
        with self._lock:
            self._calls += 1
            failures = self._failures
        try:
            yield
        except BaseException:
            self._fail("a call that loads weights")
            raise
        finally:
            with self._lock:
                self._calls -= 1
                self.version, self._changed = None, True
                self.updates += 1
                if whole and failures == self._failures:
                    self._torn = False
                    if self._session is not None and self._session.failed:
                        self._session = None

    # ------------------------------------------------------------------ sessions

    @contextmanager
    def beginning(self, *, draft: bool = False, possible: bool = True) -> Iterator[None]:
        """Surround the call that begins a session.

        Args:
            draft: whether the session is that of a model that drafts.
            possible: whether the engine can have sessions; else the call touches no weights.
        """
        try:
            yield
        except BaseException:
            with self._lock:
                if possible and not draft and self._session is None:
                    self._fail("the begin of a weight update")
            raise
        with self._lock:
            self._session = _Session(draft, self._failures)

    @contextmanager
    def continuing(self, *, possible: bool = True) -> Iterator[None]:
        """Surround a call that replaces a part of the weights.

        Args:
            possible: whether the engine takes it outside of a session; else it fails there, and
                touches no weights.
        """
        session = self._session
        if session is not None and session.draft:
            yield
        elif session is not None or possible:
            with self.replacing():
                yield
        else:
            yield
            self.change()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Surround the call that ends a session."""
        try:
            yield
        except BaseException:
            if self._session is not None and not self._session.draft:
                self._fail("the end of a weight update")
            raise
        with self._lock:
            self.updates += 1
            session, self._session = self._session, None
            if session is None or session.draft:
                return
            number = session.number
            self.version, self._changed = number, number is None
            self._torn = session.failures != self._failures

    def _fail(self, what: str) -> None:
        with self._lock:
            self._failures += 1
            self._torn = True
            if self._session is not None and not self._session.draft:
                self._session.failed = True
        _log.warning(
            "routetrace: %s failed: rows are missing (not_captured) until all weights are "
            "replaced, or their version is told",
            what,
        )


def watch(worker: Any, model: Any, weights: Weights) -> None:
    """Watch all calls that change the weights of a worker.

    Methods that a version of vLLM lacks do not change weights in it.

    Args:
        worker: vLLM's worker.
        model: its model, loaded: what has loaded it is no update.
        weights: gets the calls.
    """
    sessions = hasattr(worker, "start_weight_update")

    def reload(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        # Weights that are given may be a part.
        return weights.replacing(whole=not args and kwargs.get("weights_iterator") is None)

    def begin(*_: Any, **__: Any) -> AbstractContextManager[None]:
        # Workers of others may lack it: then the call may touch the weights.
        return weights.beginning(possible=getattr(worker, "weight_transfer_engine", 0) is not None)

    _surround(model, "load_weights", lambda *_, **__: weights.replacing())
    for owner in (worker, worker.model_runner):
        _surround(owner, "reload_weights", reload)
    _surround(worker, "start_weight_update", begin)
    _surround(worker, "start_draft_weight_update", lambda *_, **__: weights.beginning(draft=True))
    _surround(worker, "update_weights", lambda *_, **__: weights.continuing(possible=not sessions))
    _surround(worker, "finish_weight_update", lambda *_, **__: weights.ending())
    _after(worker, "sleep", weights.sleep, weights.change)
    _after(worker, "discard", weights.discard, weights.change)


def _surround(owner: Any, name: str, context: Callable[..., AbstractContextManager[None]]) -> None:
    """Surround the calls of a method of this object, not of its class."""
    inner = getattr(owner, name, None)
    if inner is None:
        return

    @functools.wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return inner(*args, **kwargs)

    setattr(owner, name, method)


def _after(owner: Any, name: str, note: Callable[..., None], otherwise: Callable[[], None]) -> None:
    """Call a function with the arguments of a method of this object, when that has returned.

    Args:
        owner: of the method.
        name: of the method.
        note: takes its arguments.
        otherwise: is called where they are others than those that are known.
    """
    inner = getattr(owner, name, None)
    if inner is None:
        return

    @functools.wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        try:
            note(*args, **kwargs)
        except TypeError:
            otherwise()
        return result

    setattr(owner, name, method)


def follow_engine_core(module: str = "vllm.v1.engine.core") -> None:
    """Pass versions that vLLM's engine core is given to its workers; idempotent.

    `finish_weight_update(weight_version=)`, `update_weight_version` and their HTTP routes end
    there. The call reaches the workers in the order in which they get steps and updates.

    Args:
        module: that of the engine core, which is there where a scheduler is made.
    """
    core = getattr(sys.modules.get(module), "EngineCore", None)
    inner = getattr(core, "set_weight_version", None)
    if inner is None or hasattr(inner, "routetrace"):
        return

    @functools.wraps(inner)
    def set_weight_version(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        _pass_on(self, next(iter((*args, *kwargs.values())), None))
        return result

    set_weight_version.routetrace = True  # type: ignore[attr-defined]
    core.set_weight_version = set_weight_version  # type: ignore[union-attr]


def _pass_on(core: Any, version: Any) -> None:
    from routetrace.capture_agent.engines.vllm.settings import settings_of

    try:
        if settings_of(core.vllm_config) is not None:
            core.model_executor.collective_rpc(FOLLOW, args=(str(version),))
    except Exception:
        _log.exception("routetrace: the workers were not told weight version %r", version)
