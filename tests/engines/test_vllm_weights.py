"""Versions of weights in vLLM: told by a number, or unknown; never guessed, and never kept."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest

from routetrace.capture_agent.engines.vllm.weights import (
    FOLLOW,
    Weights,
    follow_engine_core,
    number_of,
    watch,
)


class Model:
    """Fails where it is given a bad weight."""

    def __init__(self):
        self.loaded = []

    def load_weights(self, weights, *, prefix=""):
        """As vLLM's models do: from an iterator."""
        for name in weights:
            if name == "bad":
                raise ValueError(name)
            self.loaded.append(prefix + name)
        return set(self.loaded)


class Worker:
    """Methods of vLLM's worker that change weights; its session is as vLLM 0.32's."""

    weight_transfer_engine = "nccl"

    def __init__(self):
        self.model = Model()
        self.model_runner = SimpleNamespace(reload_weights=self.model.load_weights)
        self.active = False

    def reload_weights(self, weights_iterator=None):
        self.model_runner.reload_weights(weights_iterator or ["a"])

    def start_weight_update(self):
        if self.active or self.weight_transfer_engine is None:
            raise RuntimeError("no")
        self.active = True

    def start_draft_weight_update(self):
        self.start_weight_update_of_draft = True
        self.active = True

    def update_weights(self, update_info):
        if not self.active:
            raise RuntimeError("no")
        if "bad" in update_info:
            self.active = False
            raise ValueError("bad")

    def finish_weight_update(self):
        if not self.active:
            raise RuntimeError("no")
        self.active = False

    def sleep(self, level=1):
        return level

    def discard(self, tags):
        return tags


@pytest.fixture
def world():
    worker = Worker()
    weights = Weights()
    watch(worker, worker.model, weights)
    return SimpleNamespace(worker=worker, model=worker.model, weights=weights)


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("77", 77),
        (77, 77),
        ("-3", -3),
        ("0", 0),
        ("007", 7),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None),
        (str(1 - 2**63), 1 - 2**63),
        (str(-(2**63)), None),  # stands for unknown on the wire
        ("²", None),
        ("٣", None),
        ("1_000", None),
        (" 7", None),
        ("+7", None),
        ("7\n", None),
        ("1.0", None),
        ("default", None),
        ("", None),
        (None, None),
        (True, None),
    ],
)
def test_a_version_is_the_64_bit_integer_that_it_spells(version, number):
    assert number_of(version) == number


def test_nobody_has_told_the_version_of_the_first_weights(world):
    assert (world.weights.version, world.weights.torn, world.weights.untold) == (None, False, False)


def test_a_label_leaves_the_version_unknown(world):
    world.weights.tell("5")
    world.weights.tell("default")
    assert world.weights.version is None
    assert world.weights.untold


@pytest.mark.parametrize("by", ["model", "reload", "update"])
def test_weights_that_nobody_told_of_are_of_no_version(world, by):
    world.weights.tell("5")
    if by == "model":
        assert world.model.load_weights(iter(["a", "b"]), prefix="m.") == {"m.a", "m.b"}
    elif by == "reload":
        world.worker.reload_weights()
    else:
        world.worker.start_weight_update()
        world.worker.update_weights({})
        world.worker.finish_weight_update()
    assert (world.weights.version, world.weights.torn, world.weights.untold) == (None, False, True)
    world.weights.tell("6")
    assert (world.weights.version, world.weights.untold) == (6, False)


def test_the_models_method_is_called_as_before(world):
    with pytest.raises(ValueError, match="bad"):
        world.model.load_weights(["a", "bad"])
    with pytest.raises(TypeError):
        world.model.load_weights()
    assert world.model.load_weights(weights=["b"]) == {"a", "b"}
    given = inspect.signature(world.model.load_weights)
    assert given == inspect.signature(Model().load_weights)
    assert "routetrace" not in str(type(world.model).load_weights)  # other models are not watched
    assert world.model.load_weights.__doc__ == Model.load_weights.__doc__


def test_versions_without_these_methods_are_left_alone():
    weights = Weights()
    watch(SimpleNamespace(model_runner=object()), SimpleNamespace(), weights)
    weights.tell(1)
    assert weights.version == 1


@pytest.mark.parametrize(("level", "version"), [(0, 5), (1, 5), (2, None), (3, None)])
@pytest.mark.parametrize("named", [True, False])
def test_sleep_discards_weights_from_level_2_on(world, level, version, named):
    world.weights.tell("5")
    slept = world.worker.sleep(level=level) if named else world.worker.sleep(level)
    assert slept == level
    assert world.weights.version == version


def test_sleep_without_a_level_keeps_the_weights(world):
    world.weights.tell("5")
    world.worker.sleep()
    assert world.weights.version == 5


@pytest.mark.parametrize(("tags", "version"), [(("kv_cache",), 5), (("kv_cache", "weights"), None)])
def test_weights_that_are_discarded_have_no_version(world, tags, version):
    world.weights.tell("5")
    assert world.worker.discard(tags) == tags
    assert world.weights.version == version


def test_arguments_that_are_not_known_may_change_the_weights():
    worker = SimpleNamespace(sleep=lambda **given: given, model_runner=object())
    weights = Weights()
    watch(worker, SimpleNamespace(), weights)
    weights.tell("5")
    assert worker.sleep(deep=True) == {"deep": True}
    assert weights.version is None


# ---------------------------------------------------------------------------- torn


def test_weights_are_torn_while_they_are_replaced(world):
    world.weights.tell("5")
    seen = []

    def weights():
        seen.append(world.weights.torn)
        yield "a"

    world.model.load_weights(weights())
    assert seen == [True]
    assert not world.weights.torn
    world.worker.start_weight_update()
    assert world.weights.torn
    world.worker.update_weights({})
    assert world.weights.torn
    world.worker.finish_weight_update()
    assert not world.weights.torn


@pytest.mark.parametrize("healed_by", ["a number", "a label", "all weights", "a session"])
@pytest.mark.parametrize("failed", ["model", "reload", "runner", "part"])
def test_weights_of_a_call_that_failed_are_torn_until_all_are_replaced(world, failed, healed_by):
    call, given = {
        "model": (world.model.load_weights, ["a", "bad"]),
        "reload": (world.worker.reload_weights, ["a", "bad"]),
        "runner": (world.worker.model_runner.reload_weights, ["a", "bad"]),
        "part": (world.worker.update_weights, {"bad": 1}),  # vLLM closes the session
    }[failed]
    if failed == "part":
        world.worker.start_weight_update()
    with pytest.raises(ValueError, match="bad"):
        call(given)
    assert world.weights.torn
    world.model.load_weights(["a"])  # a part, as this may be
    world.worker.reload_weights(weights_iterator=["a"])
    assert world.weights.torn
    if healed_by == "a session":
        world.worker.start_weight_update()
        world.worker.update_weights({})
        world.worker.finish_weight_update()
    elif healed_by == "all weights":
        world.worker.reload_weights()
    else:
        world.weights.tell("8" if healed_by == "a number" else "step 8")
    assert not world.weights.torn
    assert world.weights.version == (8 if healed_by == "a number" else None)


def test_a_session_in_which_a_part_failed_does_not_heal(world):
    world.worker.start_weight_update()
    with suppress(ValueError):
        world.worker.update_weights({"bad": 1})
    world.worker.active = True  # a version that keeps it open
    world.worker.update_weights({})
    world.worker.finish_weight_update()
    assert world.weights.torn
    world.weights.tell("8")  # finish_weight_update(weight_version="8")
    assert (world.weights.version, world.weights.torn) == (8, False)


def test_a_version_that_is_told_in_a_session_is_that_of_its_end(world):
    world.weights.tell("5")
    world.worker.start_weight_update()
    world.weights.tell("6")
    assert world.weights.torn
    world.worker.update_weights({})
    world.worker.finish_weight_update()
    assert (world.weights.version, world.weights.torn) == (6, False)


@pytest.mark.parametrize("why", ["not configured", "active"])
def test_a_session_that_cannot_begin_changes_nothing(world, why):
    world.weights.tell("5")
    if why == "active":
        world.worker.start_weight_update()
    else:
        world.worker.weight_transfer_engine = None
    with pytest.raises(RuntimeError):
        world.worker.start_weight_update()
    if why == "active":
        world.worker.finish_weight_update()
        assert (world.weights.version, world.weights.torn) == (None, False)
    else:
        assert (world.weights.version, world.weights.torn) == (5, False)


@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_calls_that_vllm_refuses_change_nothing(world, call):
    world.weights.tell("5")
    with pytest.raises(RuntimeError):
        getattr(world.worker, call)(*[{}] * (call == "update_weights"))
    assert (world.weights.version, world.weights.torn) == (5, False)


@pytest.mark.parametrize("failed", [False, True])
def test_a_version_without_sessions_replaces_weights_in_one_call(failed):
    def update_weights(info):
        if failed:
            raise ValueError(info)

    worker = SimpleNamespace(update_weights=update_weights, model_runner=object())
    weights = Weights()
    watch(worker, SimpleNamespace(), weights)
    weights.tell("5")
    with suppress(ValueError):
        worker.update_weights({})
    assert (weights.version, weights.torn) == (None, failed)


def test_weights_of_a_model_that_drafts_do_not_count(world):
    world.weights.tell("5")
    world.worker.start_draft_weight_update()
    world.worker.update_weights({})
    assert not world.weights.torn
    world.worker.finish_weight_update()
    assert (world.weights.version, world.weights.torn) == (5, False)


# ---------------------------------------------------------------------------- the engine core


@pytest.fixture
def core(monkeypatch):
    """An engine core of vLLM with a worker, and the class it is of."""

    class EngineCore:
        def __init__(self, settings=None):
            self.vllm_config = SimpleNamespace(
                kv_transfer_config=None,
                additional_config={"routetrace": settings} if settings is not None else {},
                instance_id="boot",
                parallel_config=SimpleNamespace(
                    data_parallel_index=0, nnodes=1, data_parallel_size=1
                ),
            )
            self.called = []
            self.model_executor = SimpleNamespace(collective_rpc=self._rpc)
            self.version = "default"

        def _rpc(self, name, args):
            self.called.append((name, args))

        def set_weight_version(self, weight_version):
            if not isinstance(weight_version, str):
                raise TypeError(weight_version)
            self.version = weight_version
            return "done"

    module = ModuleType("core_of_vllm")
    module.EngineCore = EngineCore
    monkeypatch.setitem(sys.modules, "core_of_vllm", module)
    return EngineCore


def test_versions_that_vllm_is_given_reach_its_workers(core):
    for _ in range(2):  # each scheduler asks for it
        follow_engine_core("core_of_vllm")
    one = core({})
    assert one.set_weight_version("77") == "done"
    assert one.set_weight_version(weight_version="default") == "done"
    assert one.version == "default"
    assert one.called == [(FOLLOW, ("77",)), (FOLLOW, ("default",))]
    with pytest.raises(TypeError):
        one.set_weight_version(7)
    assert len(one.called) == 2


def test_an_engine_that_is_not_captured_is_left_alone(core, monkeypatch):
    monkeypatch.delenv("ROUTETRACE_VLLM", raising=False)
    follow_engine_core("core_of_vllm")
    one = core()
    one.set_weight_version("77")
    assert (one.version, one.called) == ("77", [])


def test_workers_that_cannot_be_told_do_not_fail_the_call(core, caplog):
    follow_engine_core("core_of_vllm")
    one = core({})
    one.model_executor = None
    assert one.set_weight_version("77") == "done"
    assert "were not told weight version '77'" in caplog.text


def test_an_engine_core_that_has_no_versions_is_left_alone(core):
    del core.set_weight_version
    follow_engine_core("core_of_vllm")
    follow_engine_core("no.such.module")
    assert not hasattr(core, "set_weight_version")
