"""Arrays that frameworks build from SGLang's own answers, and the same from routetrace.

Each function restates a framework's code, as read at the version that docs/trainers.md names.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import Trace
from routetrace.trainers.dialects import areal, miles, sglang, slime, verl

Array = npt.NDArray[Any]


def _flat(answer: str) -> Array:
    return np.frombuffer(base64.b64decode(answer), np.int32)


def _by_token(answer: str, shape: tuple[int, ...]) -> Array:
    """slime's and miles' `rollout_routed_experts`: [tokens - 1, layers, k]."""
    return _flat(answer).reshape(shape)


def _verl(answer: str, shape: tuple[int, ...]) -> Array:
    """The rows of `AgentLoopOutput.routed_experts`, as the batch has them: int16, zeros behind."""
    rows = _flat(answer).reshape(-1, *shape[1:])
    batch = np.zeros((1, len(rows) + 3, *shape[1:]), np.int16)
    batch[0, : len(rows)] = rows
    return batch


def _areal(answer: str, shape: tuple[int, ...]) -> Array:
    """`routed_experts` of a trajectory: the row before the last token stands for it, too."""
    rows = _flat(answer).reshape(shape[0], -1).reshape(shape)
    return np.concatenate([rows, rows[-1:]])[None]


_FRAMEWORKS: tuple[tuple[str, Callable[..., Array], Callable[[Trace], Array]], ...] = (
    ("slime", _by_token, slime.rollout_routed_experts),
    ("miles", _by_token, miles.rollout_routed_experts),
    ("verl", _verl, lambda trace: verl.batch([trace], [0], len(trace) + 3)),
    (
        "AReaL",
        _areal,
        lambda trace: areal.routed_experts([trace], len(trace) + 1)["routed_experts"].numpy(),
    ),
)


def differing(answer: str, trace: Trace) -> list[str]:
    """Return the frameworks that get other arrays from a trace than from SGLang's answer.

    Args:
        answer: `meta_info["routed_experts"]`, all of it right.
        trace: of the same request, complete.
    """
    layout = trace.layout
    shape = (len(trace), layout.num_hidden_layers, layout.top_k)
    names = [] if sglang.routed_experts(trace) == answer else ["SGLang"]
    for name, theirs, ours in _FRAMEWORKS:
        expected, array = theirs(answer, shape), ours(trace)
        if array.dtype != expected.dtype or not np.array_equal(array, expected):
            names.append(name)
    return names
