"""A known version of SGLang's weights is a number that a trainer gave to weights of one generation.

Weights that are not torn are all of one generation, with or without a version.

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
        request = SimpleNamespace()
        if self.session is not None and not whole:
            request.abort = True
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
def test_weights_that_are_not_torn_are_whole_and_their_version_is_told(
    monkeypatch, numbered, deferred
):
    whole = 0
    for seed in range(200):
        rng, weights = random.Random(seed), Weights()
        monkeypatch.setattr(plugin, "_capture", SimpleNamespace(weights=weights))
        updater = Updater(rng, numbered, deferred)
        for _ in range(60):
            getattr(updater, rng.choice(OPERATIONS))()
            if weights.torn:
                assert weights.version is None
                continue
            whole += 1
            (generation,) = set(updater.parts)
            assert generation >= 0
            # The weights that SGLang starts with have no version either.
            assert weights.version == (generation if numbered and generation else None)
    assert whole > 500


@pytest.mark.parametrize("version", [None, "4", "default"])
def test_whole_updates_mend_torn_weights(monkeypatch, version):
    weights = Weights()
    monkeypatch.setattr(plugin, "_capture", SimpleNamespace(weights=weights))
    told = 4 if version == "4" else None

    def states():
        return weights.torn, weights.version

    def update(success, whole):
        result = SimpleNamespace(success=success)
        request = SimpleNamespace(weight_version=version)
        plugin._update(lambda *_: result, None, request, whole=whole)

    def session(*parts, end=True, abort=False):
        plugin._session_begun(SimpleNamespace(success=True))
        for success in parts:
            update(success, whole=False)
        request = SimpleNamespace(abort=True) if abort else SimpleNamespace()  # 0.5.23 has none
        plugin._session_ended(SimpleNamespace(success=end), None, request)

    update(False, whole=True)
    assert states() == (True, None)
    update(True, whole=False)  # a part proves nothing of the others
    assert states() == (True, None)
    update(True, whole=True)
    assert states() == (False, told)
    session(True, True, True)  # one update
    assert states() == (False, told)
    session(False, True, True)
    assert states() == (True, None)
    session(True)
    assert states() == (False, told)
    session(True, abort=True)
    assert states() == (True, None)
    session()  # others wrote them, and named no version
    assert states() == (False, None)
    session(True, end=False)
    assert states() == (True, None)
    update(True, whole=True)
    assert states() == (False, told)


def test_the_last_number_that_a_part_of_a_session_was_given_is_that_of_its_end():
    weights = Weights()
    weights.begin_session()
    weights.report("6")
    weights.report("7")
    weights.report(None)
    weights.end_session(success=True)
    assert weights.version == 7


NO_NUMBERS = ["--1", "²", "1" * 5000, "9" * 19, "v3", "", " 5", 1.5, None, str(-(1 << 63))]


@pytest.mark.parametrize("version", NO_NUMBERS)
def test_an_update_whose_version_is_no_number_makes_it_unknown(version):
    """It is not counted: the next number may be that of other weights on another engine."""
    weights = Weights(version="3")
    assert weights.version == 3
    weights.report(version)
    assert not weights.torn
    assert weights.version is None
    weights.report("4")
    assert weights.version == 4


@pytest.mark.parametrize("version", ["-9223372036854775807", "9223372036854775807", "0012", 7])
def test_a_version_that_is_a_number_is_taken(version):
    weights = Weights()
    weights.report(version)
    assert weights.version == int(version)


@pytest.mark.parametrize(("given", "known"), [("default", None), (None, None), ("12", 12)])
def test_the_first_version_is_what_the_server_was_started_with(given, known, caplog):
    weights = Weights("e", given)
    weights.check_told()
    assert weights.version == known
    assert not caplog.records  # nothing has changed


def test_one_warning_names_the_engine_whose_new_weights_have_no_version(caplog):
    weights = Weights("rollout-3")
    for _ in range(3):
        weights.begin_session()
        weights.report(None)
        weights.check_told()
        weights.end_session(success=True)
        weights.check_told()
    (record,) = caplog.records
    assert "'rollout-3'" in record.getMessage()
    assert "give `weight_version`, a 64-bit integer, in the update request" in record.getMessage()


def test_a_version_that_comes_before_the_next_pass_needs_no_warning(caplog):
    weights = Weights()
    weights.report(None)
    weights.rename("7")
    weights.check_told()
    assert not caplog.records


@pytest.mark.parametrize(
    ("tags", "keeps", "known"),
    [
        (None, False, None),
        ([], False, None),
        (["weights"], False, None),
        (["kv_cache"], False, 3),
        (None, True, 3),
    ],
)
def test_weights_whose_memory_was_given_back_without_a_copy_have_no_version(
    monkeypatch, tags, keeps, known
):
    weights = Weights(version=3)
    monkeypatch.setattr(plugin, "_capture", SimpleNamespace(weights=weights))
    monkeypatch.setattr(plugin, "_keeps_weights", keeps)
    plugin._released(None, None, SimpleNamespace(tags=tags))
    assert weights.version == known
    assert not weights.torn
    weights.report("4")
    assert weights.version == 4


def test_a_session_whose_parts_are_lost_has_no_version():
    weights = Weights()
    weights.begin_session()
    weights.report("4")
    weights.lose()
    weights.end_session(success=True)
    assert weights.version is None
