"""The compiled loops give what numpy gives, bytes and errors; how a process comes to use them."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.fuzz.mutate import mutate_frame
from routetrace.capture_agent.config import AgentConfig
from routetrace.client import RouteClient
from routetrace.codec import native
from routetrace.codec.frame import (
    Codec,
    decode_frame,
    decode_frames,
    encode_frame,
    encode_frames,
    invalid_rows,
    read_header,
    slice_frame,
)
from routetrace.codec.native import TRANSITIONS, Loader, State
from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.common.layout import ModelLayout
from support.native_loops import loader, loops
from support.waiting import wait_for

HERE = Path(__file__).parent

needs_numba = pytest.mark.skipif(not native.installed(), reason="numba is not installed")


def both(function: Any) -> tuple[Any, Any]:
    """Return the results of numpy and of the compiled loops: a value, or an error with its text."""
    found = []
    for choice in ("off", "on"):
        with loops(choice):
            try:
                found.append(function())
            except RouteTraceError as error:
                found.append((type(error), str(error)))
    return found[0], found[1]


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    experts = draw(st.integers(2, 512))
    top_k = draw(st.integers(1, min(16, experts)))
    layers = draw(st.integers(1, 13))
    return ModelLayout(tuple(range(2, 2 + layers)), 20, experts, top_k)


def rows_of(rng: np.random.Generator, layout: ModelLayout, n: int) -> Any:
    """Any ids below the number of experts."""
    shape = n, len(layout.layer_ids), layout.top_k
    return rng.integers(0, layout.num_experts, shape).astype(layout.dtype)


@settings(max_examples=150)
@given(layouts(), st.integers(1, 1024), st.integers(0, 2**32 - 1), st.data())
def test_bytes_and_ids_are_those_of_numpy(
    layout: ModelLayout, n: int, seed: int, data: st.DataObject
) -> None:
    ids = rows_of(np.random.default_rng(seed), layout, n)
    cuts = sorted(data.draw(st.sets(st.integers(1, n), max_size=3)) | {0, n})
    parts = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    plain, swift = both(lambda: encode_frames(parts, layout, codec=Codec.PACK, validate=False))
    assert plain == swift
    wanted = data.draw(st.lists(st.sampled_from(layout.layer_ids), min_size=1, max_size=5))
    columns = [layout.column[layer] for layer in wanted]
    for choice in ("off", "on"):
        with loops(choice):
            for frame, part in zip(swift, parts, strict=True):
                major = part.transpose(1, 0, 2)
                np.testing.assert_array_equal(decode_frame(frame), major)
                some = decode_frame(frame, layer_ids=wanted)
                np.testing.assert_array_equal(some, major[columns])
                cut = slice_frame(frame, wanted)
                np.testing.assert_array_equal(decode_frame(cut, layer_ids=wanted), some)
            # Into parts of one array, and into arrays of other strides; what is beside them stays.
            whole = np.full((len(wanted), n + 2, layout.top_k), 7, layout.dtype)
            rows = np.full((n, len(wanted), layout.top_k), 7, layout.dtype).transpose(1, 0, 2)
            every = np.full((len(wanted), 2 * n, layout.top_k), 7, layout.dtype)
            for out in (whole[:, 1:-1], rows, every[:, ::2]):
                places = [out[:, a:b] for a, b in itertools.pairwise(cuts)]
                asked = [(f, wanted, place) for f, place in zip(swift, places, strict=True)]
                for got, place in zip(decode_frames(asked), places, strict=True):
                    assert got is place
                np.testing.assert_array_equal(out, ids.transpose(1, 0, 2)[columns])
            assert (whole[:, [0, -1]] == 7).all()
            assert (every[:, 1::2] == 7).all()


@settings(max_examples=200)
@given(layouts(), st.integers(1, 1024), st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_invalid_rows_are_those_of_numpy(
    layout: ModelLayout, n: int, seed: int, wrong: int
) -> None:
    rng = np.random.default_rng(seed)
    experts, top_k = layout.num_experts, layout.top_k
    shape = n, len(layout.layer_ids), 1
    first, step = rng.integers(0, experts, shape), rng.integers(1, experts // top_k + 1, shape)
    ids = ((first + step * np.arange(top_k)) % experts).astype(layout.dtype)
    for _ in range(wrong):
        row, layer = rng.integers(n), rng.integers(shape[1])
        at, to = rng.integers(top_k), rng.integers(top_k)
        ids[row, layer, at] = rng.choice(
            [ids[row, layer, to], experts - 1, np.iinfo(ids.dtype).max]
        )
    for given_ids in (ids, ids[::2], ids[:, :1]):
        plain, swift = both(lambda given_ids=given_ids: invalid_rows(given_ids, experts).tolist())
        assert plain == swift
        assert plain == [
            any(max(cell) >= experts or len(set(cell)) < top_k for cell in row)
            for row in given_ids.tolist()
        ]


@pytest.mark.parametrize("top_k", [2, 4, 8])
@pytest.mark.parametrize("num_experts", [9, 127, 128, 129, 255, 256, 257, 512, 65536])
def test_every_pair_and_every_limit(top_k: int, num_experts: int) -> None:
    """Each pair of ranks, in each layer, and the first id out of range in each place."""
    layout = ModelLayout(tuple(range(5)), 5, num_experts, top_k)
    valid = np.tile(np.arange(num_experts - top_k, num_experts), (5, 1)).astype(layout.dtype)
    rows, expected = [valid], [False]
    for layer in range(5):
        for one, other in itertools.combinations(range(top_k), 2):
            rows.append(valid.copy())
            rows[-1][layer, other] = valid[layer, one]
            expected.append(True)
        for rank in range(top_k):
            if num_experts < np.iinfo(layout.dtype).max:
                rows.append(valid.copy())
                rows[-1][layer, rank] = num_experts
                expected.append(True)
    plain, swift = both(lambda: invalid_rows(np.stack(rows), num_experts).tolist())
    assert plain == swift == expected


def test_the_loops_are_what_works() -> None:
    """Else all of these tests compare numpy with itself."""
    calls: list[str] = []

    def named(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    made = loader("on")
    kernels = made._kernels
    assert kernels
    layout = ModelLayout((0, 1, 2), 3, 128, 8)
    ids = rows_of(np.random.default_rng(0), layout, 9)
    counting = Loader("on", present=True)
    counting.state = State.READY
    counting._kernels = kernels._replace(
        **{name: named(name, getattr(kernels, name)) for name in kernels._fields}
    )
    before = native.use(counting)
    try:
        invalid_rows(ids, 128)
        decode_frame(encode_frame(ids, layout, codec=Codec.PACK, validate=False))
    finally:
        native.use(before)
    assert calls == ["check", "pack", "unpack"]


# Hostile bytes


def small_frames() -> list[bytes]:
    rng, frames = np.random.default_rng(3), []
    for experts, top_k, n in [(100, 8, 40), (16, 4, 5), (300, 7, 33), (129, 1, 600), (65536, 9, 3)]:
        layout = ModelLayout((0, 3, 9), 12, experts, top_k)
        ids = rows_of(rng, layout, n)
        frames.append(encode_frame(ids, layout, codec=Codec.PACK, validate=False))
    return frames


@pytest.mark.parametrize("seed", range(12))
def test_hostile_bytes_give_the_same_errors(seed: int) -> None:
    """Fields of headers, tables and groups, with checksums that are right."""
    rng, frames, errors = random.Random(seed), small_frames(), 0
    for _ in range(150):
        frame = rng.choice(frames)
        for _ in range(rng.randint(1, 2)):
            frame = mutate_frame(rng, frame)
        for layer_ids in (None, (3,), (9, 0)):

            def decode(frame: bytes = frame, layer_ids: Any = layer_ids) -> Any:
                return decode_frame(frame, layer_ids=layer_ids)

            plain, swift = both(decode)
            if isinstance(plain, tuple):
                assert plain == swift
                errors += 1
            else:
                np.testing.assert_array_equal(plain, swift, strict=True)
                assert int(swift.max()) < read_header(frame).num_experts
    assert errors > 50


@pytest.mark.long
@needs_numba
def test_no_byte_beside_an_array_is_touched(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),  # loops with checks are for this process alone
    }
    command = [sys.executable, str(HERE / "native_bounds.py"), "5", "150"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


# How a process comes to use them


def test_every_pair_of_states() -> None:
    for before, after in itertools.product(State, State):
        made = Loader("off", present=False)
        made.state = before
        if after in TRANSITIONS[before]:
            made._enter(after)
            assert made.state is after
        else:
            with pytest.raises(AssertionError):
                made._enter(after)


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_without_numba_it_is_numpy(choice: native.Choice) -> None:
    made = Loader(choice, present=False)
    assert made.kernels(10**9) is None
    assert made.state is State.NUMPY


@needs_numba
def test_auto_loads_in_the_background_after_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    build = native._build
    monkeypatch.setattr(native, "_build", lambda: (go.wait(60), build())[1])
    made = Loader("auto", present=True)
    assert made.kernels(native.AUTO_ROWS - 1) is None
    assert made.state is State.COUNTING
    assert made.kernels(1) is None
    assert made.state is State.LOADING
    assert made.kernels(10**9) is None, "nothing waits for it"
    go.set()
    wait_for(lambda: made.state is State.READY, 100)
    assert made.kernels(0) is not None


def broken(**changed: Any) -> Any:
    kernels = loader("on")._kernels
    assert kernels
    return kernels._replace(**changed)


@needs_numba
@pytest.mark.parametrize(
    ("name", "broken_loop"),
    [
        ("check", lambda *args: args[-1].fill(False) or True),
        ("check", lambda *args: False),
        ("pack", lambda *args: args[-1].fill(0) or True),
        ("unpack", lambda *args: args[-1].fill(0) or 1),
    ],
)
def test_loops_that_differ_from_numpy_are_not_used(
    name: str, broken_loop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = broken(**{name: broken_loop})
    monkeypatch.setattr(native, "_build", lambda: kernels)
    made = Loader("on", present=True)
    assert made.kernels(1) is None
    assert made.state is State.FAILED
    assert "other bytes than numpy's" in made.reason
    assert "compiled loops are not used" in caplog.text


def test_loops_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise RuntimeError("no LLVM\nfor this CPU")

    monkeypatch.setattr(native, "_build", fails)
    made = Loader("on", present=True)
    assert made.kernels(1) is None
    assert made.kernels(1) is None
    assert made.state is State.FAILED
    assert made.reason == "RuntimeError: no LLVM for this CPU"
    assert len(caplog.records) == 1


def test_no_thread_to_compile_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = Loader("auto", present=True)
    assert made.kernels(native.AUTO_ROWS) is None
    assert made.state is State.FAILED
    assert made.kernels(1) is None


@needs_numba
def test_no_directory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from routetrace.codec import kernels

    build, asked = kernels.build, []

    def without(*, cache: bool) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'check': no locator available")
        return loader("on")._kernels

    monkeypatch.setattr(kernels, "build", without)
    made = Loader("on", present=True)
    assert made.kernels(1)
    assert asked == [True, False]
    assert build is not without


def test_a_fork_while_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Loader("auto", present=True)
    made._enter(State.LOADING)
    monkeypatch.setattr(native, "_of_process", made)
    child = os.fork()
    if not child:
        os._exit(0 if native.kernels(10**9) is None and native.state() is State.FAILED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.state is State.LOADING


def test_a_choice_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ModelLayout((0,), 1, 8, 2)
    for given_value, present in (("yes", True), ("on", False)):
        monkeypatch.setenv(native.VARIABLE, given_value)
        monkeypatch.setattr(native, "installed", lambda present=present: present)
        for make in (
            lambda: AgentConfig(target="localhost", run="r", engine_id="e", layout=layout),
            lambda: RouteClient("localhost:1", run="r"),
        ):
            with pytest.raises(InvalidArgument, match=f"ROUTETRACE_NATIVE is {given_value}") as got:
                make()
            assert ("pip install numba" in str(got.value)) == (given_value == "on")
        monkeypatch.setattr(native, "_of_process", None)
        assert native.kernels(1) is None, "what needs neither goes on"
        assert native.state() is State.NUMPY


def test_nothing_loads_numba_before_there_are_many_rows() -> None:
    code = (
        "import sys; import numpy as np\n"
        "import routetrace.client, routetrace.capture_agent\n"
        "from routetrace.codec.frame import *; from routetrace.common.layout import ModelLayout\n"
        "ids = np.zeros((9, 1, 1), np.uint8)\n"
        "decode_frame(encode_frame(ids, ModelLayout((0,), 1, 9, 1), codec=Codec.PACK))\n"
        "sys.exit('numba' in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != native.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
