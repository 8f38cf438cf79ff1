"""Capture inside the library's compiled decoding on a static cache.

torch.compile keeps programs by code object, and does not check later whether hooks were added or
removed. A captured call therefore compiles functions whose code is not the library's: a program
with capture serves captured calls only, and the library's own program stays without. Each input
shape has a function, so that the number of tokens is constant in a program, as its check needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import CompileConfig

from routetrace.capture_agent.engines.router_taps import PassListener, RouterTaps

logger = logging.getLogger(__name__)

# Shapes that are compiled; passes of any other run uncompiled. As torch's own recompile limit.
_MOST_SHAPES = 8

_Program = Callable[[Any, dict[str, Any]], Any]


class CompiledCalls:
    """Compiled forward passes of one model with capture inside.

    Args:
        model: the model.
        taps: hooks of the model.
    """

    def __init__(self, model: Any, taps: RouterTaps) -> None:
        self._model = model
        self._taps = taps
        # By input shape and options; None where the compiler refused.
        self._programs: dict[tuple[torch.Size, str], _Program | None] = {}

    @contextmanager
    def attached(self, listener: PassListener) -> Iterator[None]:
        """Replace the model's `get_compiled_call` for the duration of the block."""

        def get_compiled_call(config: CompileConfig | None) -> Callable[..., Any]:
            options = (config or self._model._default_compile_config()).to_dict()
            return lambda **inputs: self._call(listener, options, inputs)

        vars(self._model)["get_compiled_call"] = get_compiled_call
        try:
            yield
        finally:
            del vars(self._model)["get_compiled_call"]

    def _call(self, listener: PassListener, options: dict[str, Any], inputs: dict[str, Any]) -> Any:
        key = inputs["input_ids"].shape, repr(options)
        if key not in self._programs and len(self._programs) < _MOST_SHAPES:
            # One graph: code behind a break would be compiled under the library's code objects.
            self._programs[key] = torch.compile(_own_code(), **{**options, "fullgraph": True})
        program = self._programs.get(key)
        if program is None or not self._taps.begin_compiled(listener, inputs):
            return self._model(**inputs)
        try:
            output = program(self._model, inputs)
        except TorchDynamoException:
            # Raised before any part of the pass has run, as the program is one graph.
            logger.warning("captured decoding runs uncompiled", exc_info=True)
            self._programs[key] = None
            return self._model(**inputs)
        self._taps.end_compiled(listener)
        return output


def _forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def _own_code() -> _Program:
    """Return `_forward` with a code object of its own."""
    return FunctionType(_forward.__code__.replace(), globals())
