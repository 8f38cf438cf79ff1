"""Graphs of operators on the CPU: recorded once, replayed without the Python that made them.

As a CUDA graph does, a replay runs the same operators on the same memory, in the same order: an
operator's result lies where it lay when it was recorded. Before each replay that memory is
scribbled over, as another graph of the same pool would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routetrace.capture_agent.engines import cells as capture_cells

_CAPTURE = torch.ops.routetrace.capture.default


class Operators(TorchDispatchMode):
    """Notes each operator that runs, those within `routetrace::capture` included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _CAPTURE:
            with self:
                return capture_cells.write(*args)
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @property
    def kernels(self) -> list[str]:
        """Names of the operators that compute something: views are not among them."""
        return [str(func) for func, *_ in self.calls if not func.is_view]


class Graph:
    """The operators of a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        with Operators() as operators:
            function()
        self._operators = operators

    def replay(self) -> None:
        """Run the operators again, on the memory that they ran on."""
        calls = [(f, a, k, _made(f, a, k, r)) for f, a, k, r in self._operators.calls]
        for *_, made in calls:
            for tensor in made:
                tensor.fill_(-77)
        for func, args, kwargs, made in calls:
            result = func(*args, **kwargs)
            for tensor, again in zip(made, tree_leaves(result) if made else (), strict=True):
                tensor.copy_(again)


def _made(func: Any, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """Return tensors that an operator allocated."""
    if func.is_view or func._schema.is_mutable:
        return []
    return [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]


@contextmanager
def counted() -> Iterator[Operators]:
    """Note the operators of the block."""
    with Operators() as operators:
        yield operators
