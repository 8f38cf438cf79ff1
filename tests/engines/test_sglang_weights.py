"""A known version of SGLang's weights is that of weights which are all of one generation.

A simulated updater has weights in parts, each with the generation that it is of; calls on it fail
at any part, raise, are refused, or cannot flush the cache, as those of SGLang do. Trainers end a
session once they have sent each part, whatever came of it, or give up, or leave it open.
"""

from __future__ import annotations

import random
from contextlib import suppress
from types import SimpleNamespace

import pytest

from routetrace.capture_agent.engines.sglang import plugin
from routetrace.capture_agent.engines.sglang.weights import Weights

PARTS = 3


class Updater:
    """SGLang's updater, whose calls are hooked as `plugin` hooks them.

    Args:
        numbered: whether trainers give versions; they are the generations.
        deferred: whether SGLang reports the version of a session at its end alone.
    """

    def __init__(self, rng: random.Random, numbered: bool, deferred: bool) -> None:
        self.rng, self.numbered, self.deferred = rng, numbered, deferred
        self.reports = deferred or rng.random() < 0.7  # not all versions of SGLang do
        self.parts = [0] * PARTS
        self.generation = 0
        self.session: set[int] | None = None  # parts that were sent
        self.pending: str | None = None

    def version(self) -> str | None:
        return str(self.generation) if self.numbered else None

    def _report(self, version: str | None) -> None:
        if self.session is not None and self.deferred:
            self.pending = version
        plugin._recorded(None, self, weight_version=version)

    def _load(self, parts: list[int]) -> bool:
        """Load parts, or fail in the middle of one."""
        for part in parts:
            outcome = self.rng.choice(["ok"] * 6 + ["fails", "raises"])
            if outcome == "ok":
                self.parts[part] = self.generation
                continue
            self.parts[part] = -1 if self.rng.random() < 0.7 else self.parts[part]
            if outcome == "raises":
                raise RuntimeError("out of memory")
            return False
        return True

    def _call(self, parts: list[int], whole: bool) -> None:
        """One of update_weights_from_*."""

        def original(_: object, request: SimpleNamespace) -> SimpleNamespace:
            if not self._load(parts):
                return SimpleNamespace(success=False)
            if self.reports:
                self._report(request.weight_version)
                return SimpleNamespace(success=self.rng.random() < 0.8)  # False: no flush
            return SimpleNamespace(success=True)

        request = SimpleNamespace(weight_version=self.version())
        with suppress(RuntimeError):
            plugin._update(original, self, request, whole=whole)

    def from_disk(self) -> None:
        self.generation += 1
        self._call([*range(PARTS)], whole=True)

    def begin(self) -> None:
        success = self.session is None
        if success:
            self.session = set()
            self.generation += 1
        plugin._session_begun(SimpleNamespace(success=success), self)

    def part(self) -> None:
        if self.session is None:  # refused before anything is loaded
            refused = SimpleNamespace(success=False)
            request = SimpleNamespace(weight_version=self.version())
            plugin._update(lambda *_: refused, self, request, whole=False)
            return
        part = self.rng.randrange(PARTS)
        self._call([part], whole=False)
        self.session.add(part)

    def peers(self) -> None:
        """Other processes write all parts, in a session alone; the trainer names them."""
        if self.session is not None:
            if self.numbered:
                self._rename()
            self.parts = [self.generation] * PARTS
            self.session = set(range(PARTS))

    def end(self) -> None:
        """End the session, once each part was sent; or give it up."""
        whole = self.session == set(range(PARTS))
        success = self.session is not None and self.rng.random() < 0.9
        request = SimpleNamespace(abort=self.session is not None and not whole)
        if self.session is not None and success and self.deferred and whole:
            plugin._recorded(None, self, weight_version=self.pending)
        self.session = self.pending = None  # also by an end that fails
        plugin._session_ended(SimpleNamespace(success=success), self, request)

    def rename(self) -> None:
        """The trainer repairs all weights itself, and names them."""
        if self.session is None and self.numbered:
            self.generation += 1
            self.parts = [self.generation] * PARTS
            self._rename()

    def _rename(self) -> None:
        plugin._renamed(None, None, SimpleNamespace(new_version=str(self.generation)))


OPERATIONS = ("from_disk", "begin", "part", "part", "part", "part", "peers", "end", "end", "rename")


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_known_version_is_that_of_whole_weights(monkeypatch, numbered, deferred):
    known = 0
    for seed in range(200):
        rng, weights = random.Random(seed), Weights()
        monkeypatch.setattr(plugin, "_capture", SimpleNamespace(weights=weights))
        updater = Updater(rng, numbered, deferred)
        named: dict[int, int] = {}
        for _ in range(60):
            getattr(updater, rng.choice(OPERATIONS))()
            if (version := weights.version) is None:
                continue
            known += 1
            (generation,) = set(updater.parts)
            assert generation >= 0
            assert named.setdefault(version, generation) == generation
            assert not numbered or version == generation
    assert known > 500


@pytest.mark.parametrize("numbered", [False, True])
def test_whole_updates_make_the_version_known(monkeypatch, numbered):
    weights = Weights()
    monkeypatch.setattr(plugin, "_capture", SimpleNamespace(weights=weights))
    version = "4" if numbered else None

    def update(success, whole):
        result = SimpleNamespace(success=success)
        request = SimpleNamespace(weight_version=version)
        plugin._update(lambda *_: result, None, request, whole=whole)

    def session(*parts, end=True, abort=False):
        plugin._session_begun(SimpleNamespace(success=True))
        for success in parts:
            update(success, whole=False)
        plugin._session_ended(SimpleNamespace(success=end), None, SimpleNamespace(abort=abort))

    update(False, whole=True)
    assert weights.version is None
    update(True, whole=False)  # a part proves nothing of the others
    assert weights.version is None
    update(True, whole=True)
    assert weights.version == (4 if numbered else 2)
    session(True, True, True)  # one update
    assert weights.version == (4 if numbered else 3)
    session(False, True, True)
    assert weights.version is None
    session(True)
    known = weights.version
    assert known == 4
    session(True, abort=True)
    assert weights.version is None
    session()  # others wrote them
    assert weights.version == known + 1
    session(True, end=False)
    assert weights.version is None
    update(True, whole=True)
    assert weights.version == (4 if numbered else known + 2)


@pytest.mark.parametrize("version", ["--1", "²", "1" * 5000, "9" * 19, "v3", "", " 5", 1.5, None])
def test_a_version_that_is_no_number_is_counted(version):
    weights = Weights()
    weights.report(version)
    assert weights.version == 1


@pytest.mark.parametrize("version", ["-9223372036854775808", "9223372036854775807", "0012", 7])
def test_a_version_that_is_a_number_is_taken(version):
    weights = Weights()
    weights.report(version)
    assert weights.version == int(version)
