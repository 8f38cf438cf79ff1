"""The compiled loops of the frame codec, on or off within a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from routetrace.codec import native


@cache
def loader(choice: native.Choice) -> native.Loader:
    if choice == "on" and not native.installed():
        pytest.skip("numba is not installed")
    made = native.Loader(choice, present=True)
    made.kernels(0)
    assert made.state is (native.State.READY if choice == "on" else native.State.NUMPY), made.reason
    return made


@contextmanager
def loops(choice: native.Choice) -> Iterator[None]:
    """Have the codec of this process use them, or numpy alone."""
    before = native.use(loader(choice))
    try:
        yield
    finally:
        native.use(before)
