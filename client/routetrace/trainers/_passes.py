"""Checks of the passes in a block, for `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.trainers._force import Forcer
from routetrace.trainers._inputs import Inputs
from routetrace.trainers._seats import is_repeated


class Passes:
    """Checks that passes have the inputs of the plan, and that all routers run in each.

    Args:
        model: the model.
        forcers: those of its routers; empty if they need not run.
        inputs: the check of inputs, if there is a plan.
    """

    def __init__(self, model: Any, forcers: Sequence[Forcer], inputs: Inputs | None) -> None:
        self._model = model
        self._forcers = forcers
        self._inputs = inputs
        self._decoder = model.get_decoder()
        self._depth = 0
        self._has_begun = False
        self._runs: list[int] = []
        """Of each router, before the pass of the decoder."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose passes are checked, the outermost last."""
        if isinstance(self._model, nn.Module) and self._model is not self._decoder:
            return [self._decoder, self._model]
        return [self._decoder]

    def begin(self, module: nn.Module) -> None:
        """Note that a pass begins."""
        self._depth += 1
        self._has_begun = True
        if module is self._decoder:
            self._runs = [forcer.runs for forcer in self._forcers]

    def check(self, args: Any, kwargs: Any) -> None:
        """Compare the inputs of a pass with the plan."""
        if self._inputs and self._depth == 1:  # a multimodal model gives its decoder no token ids
            self._inputs.check(args, kwargs)

    def end(self, module: nn.Module, *, failed: bool) -> None:
        """Check that all routers ran in a pass."""
        self._depth -= 1
        if module is not self._decoder:
            return
        runs = [forcer.runs - n for forcer, n in zip(self._forcers, self._runs, strict=True)]
        for forcer, before in zip(self._forcers, self._runs, strict=True):
            forcer.runs = before  # leaves the runs outside of passes
        if not failed and not is_repeated():
            self._check_runs(runs)

    def settle(self, *, failed: bool) -> None:
        """Check what is not checked yet, at the end of the block; nothing if the block failed."""
        if failed:
            if self._inputs:
                self._inputs.forget()
            return
        if self._inputs:
            self._inputs.settle()
        runs = [forcer.runs for forcer in self._forcers]
        if any(runs) or not self._has_begun:
            self._check_runs(runs)

    def _check_runs(self, runs: Sequence[int]) -> None:
        """Refuse other numbers than those of whole passes, such as of a layer that ran alone."""
        skipped = [
            forcer.layer for forcer, n in zip(self._forcers, runs, strict=True) if n < max(1, *runs)
        ]
        if skipped:
            raise InvalidArgument(
                field="model",
                value=f"{type(self._model).__name__}: the routers of layers {skipped} did not run",
                expected="each router to run in each pass",
                remedy="replay in the model that computes the passes, whose layers have the "
                "library's own forward functions",
            )
