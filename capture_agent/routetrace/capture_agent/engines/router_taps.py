"""Hooks that read the expert ids of a transformers model, pass by pass.

The library is not edited. Ids are read from the output of a layer's router where it returns them
(in almost all families, as an integer tensor beside logits and weights), otherwise from the call
of the layer's experts, or from scores that are 0 except for the chosen experts (Llama 4). A pass
over two tokens proves each hook before anything is captured.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from routetrace.capture_agent.engines.capturer import PendingRows, RoutingCapturer
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout, decoder_modules

logger = logging.getLogger(__name__)

_ROUTERS = ("router", "gate")
_EXPERTS = ("experts",)
_PROBE_TOKENS = 2


class PlaceUnknown(InvalidArgument):
    """The positions of a pass cannot be known: no row of the call would be right."""


class PassListener(Protocol):
    """Receiver of the rows of forward passes, which knows their tokens."""

    def before(self, inputs: Mapping[str, Any]) -> None:
        """Handle the start of a pass with these keyword arguments.

        Raises:
            PlaceUnknown: if its positions cannot be known; the caller of the model gets it.
        """

    def after(self, pending: PendingRows) -> None:
        """Handle the end of the pass; a row per token, in the order of `input_ids`."""

    def failed(self) -> None:
        """Handle a suppressed exception of the capture: later rows may be missing."""


@dataclass(frozen=True)
class _Tap:
    """Hook that reads the ids of one layer."""

    module: nn.Module
    reads_output: bool

    def attach(self, read: Callable[[Iterable[object]], None]) -> Any:
        if self.reads_output:

            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                read(output if isinstance(output, (tuple, list)) else (output,))

            return self.module.register_forward_hook(hook)

        def pre_hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            read((*args, *kwargs.values()))

        return self.module.register_forward_pre_hook(pre_hook, with_kwargs=True)


class RouterTaps:
    """Hooks of the routers of one model, which write to a `RoutingCapturer`.

    Args:
        model: a decoder model of transformers.
        layout: its layout.

    Raises:
        InvalidArgument: if the routers found are not those of `layout.moe_layer_ids` (the layers
            are named), or their ids do not fit the layout.
    """

    def __init__(self, model: Any, layout: ModelLayout) -> None:
        if model.config.is_encoder_decoder:
            raise InvalidArgument(
                field="model", value=type(model).__name__, expected="a decoder-only model"
            )
        self.failures = 0
        self._model = model
        self._layout = layout
        self._taps = _proven_taps(model, layout)
        self._growing: RoutingCapturer | None = None  # of passes that are not compiled
        self._compiled: dict[int, RoutingCapturer] = {}  # of compiled passes, by number of tokens
        self._capturer: RoutingCapturer | None = None  # of the pass that is under way
        # Tokens of the pass that is under way, and the columns read in it.
        self._num_tokens: int | None = None
        self._seen: set[int] = set()

    @contextmanager
    def attached(self, listener: PassListener) -> Iterator[None]:
        """Hook the model for the duration of the block.

        Exceptions of the listener and of the hooks, except `PlaceUnknown`, do not reach the model:
        they are counted in `failures`, the first is logged, and `listener.failed` is called.
        """

        def before(_model: nn.Module, _args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self.shield(listener, lambda: self._begin(listener, kwargs))

        def after(_model: nn.Module, _args: Any, _output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.shield(listener, lambda: self._end(listener))

        def read(column: int) -> Callable[[Iterable[object]], None]:
            def read_column(values: Iterable[object]) -> None:
                if torch.compiler.is_compiling():
                    self._capture_compiled(column, values)
                else:
                    self.shield(listener, lambda: self._capture(column, values))

            return read_column

        handles = [
            self._taps[layer].attach(read(column)) for layer, column in self._layout.column.items()
        ]
        handles.append(self._model.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(self._model.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # The next user of the device may need the memory.
            self._capturer = self._growing = self._num_tokens = None

    def shield(self, listener: PassListener, action: Callable[[], object]) -> None:
        """Run `action`; suppress and count its exceptions, except `PlaceUnknown`."""
        try:
            action()
        except PlaceUnknown:
            listener.failed()
            raise
        except Exception:
            if self.failures == 0:
                logger.exception(
                    "routing capture failed: rows will be missing from traces; if it fails at "
                    "once, pin a version of transformers that the documentation names as tested"
                )
            self.failures += 1
            listener.failed()

    def begin_compiled(self, listener: PassListener, inputs: Mapping[str, Any]) -> bool:
        """Begin a pass in compiled code, in which hooks of the model do nothing.

        The code keeps the capturer and the number of tokens that it was traced with, so each
        number of tokens has a capturer.

        Returns:
            False after an exception; the code must not be traced then.
        """
        self.shield(listener, lambda: self._begin(listener, inputs, compiled=True))
        return self._num_tokens is not None

    def end_compiled(self, listener: PassListener) -> None:
        """End the pass of `begin_compiled`."""
        self.shield(listener, lambda: self._end(listener))

    def _begin(
        self, listener: PassListener, inputs: Mapping[str, Any], compiled: bool = False
    ) -> None:
        self._num_tokens = None
        listener.before(inputs)
        num_tokens = inputs["input_ids"].numel()
        if compiled:
            if num_tokens not in self._compiled:
                self._compiled[num_tokens] = self._new_capturer(num_tokens)
            self._capturer = self._compiled[num_tokens]
        else:
            if self._growing is None or num_tokens > self._growing.max_num_tokens:
                # Hooks run in every such pass, so a larger buffer may take its place.
                self._growing = self._new_capturer(1 << max(num_tokens - 1, 255).bit_length())
            self._capturer = self._growing
        self._capturer.begin(num_tokens)
        self._num_tokens = num_tokens
        self._seen.clear()

    def _new_capturer(self, num_tokens: int) -> RoutingCapturer:
        return RoutingCapturer(self._layout, num_tokens, self._model.device)

    def _capture(self, column: int, values: Iterable[object]) -> None:
        if self._num_tokens is None or self._capturer is None:
            return  # a module called outside a pass of the model
        ids = _expert_ids(values, self._num_tokens, self._layout)
        if ids is None or column in self._seen:
            # Called for part of the tokens or more than once: rows have no certain token.
            ids = torch.full((self._num_tokens, self._layout.top_k), -1)
        self._seen.add(column)
        self._capturer.capture(column, ids)

    def _capture_compiled(self, column: int, values: Iterable[object]) -> None:
        """Trace the capture of a layer. The capturer marks cells not written exactly once."""
        if self._num_tokens is None or self._capturer is None:
            return
        ids = _expert_ids(values, self._num_tokens, self._layout)
        if ids is not None:
            self._capturer.capture(column, ids)

    def _end(self, listener: PassListener) -> None:
        if self._num_tokens is None or self._capturer is None:
            return
        num_tokens, self._num_tokens = self._num_tokens, None
        listener.after(self._capturer.snapshot(num_tokens))


def _expert_ids(
    values: Iterable[object], num_tokens: int, layout: ModelLayout
) -> torch.Tensor | None:
    """Return the ids [num_tokens, top_k] among `values`, or None."""
    rows = _rows_among(values, num_tokens)
    for value in rows:
        if not value.is_floating_point() and value.shape[1] == layout.top_k:
            return value
    floats = [value for value in rows if value.is_floating_point()]
    if [value.shape[1] for value in floats] != [layout.num_experts] * 2:
        return None
    scores, logits = floats
    ids = logits.masked_fill(scores == 0, -torch.inf).topk(layout.top_k).indices
    # A score may also be 0 as it is too small for its type: the choice is not known then.
    is_known = (scores != 0).sum(dim=1, keepdim=True) == layout.top_k
    return torch.where(is_known, ids, -1)


def _rows_among(values: Iterable[object], num_tokens: int) -> list[torch.Tensor]:
    """Return the tensors with a row of numbers for each token, as [num_tokens, width]."""
    return [
        value.reshape(num_tokens, -1)
        for value in values
        if isinstance(value, torch.Tensor)
        and value.dtype != torch.bool
        and value.dim() >= 2
        and value.numel() == num_tokens * value.shape[-1]
    ]


def _candidates(model: Any, num_hidden_layers: int) -> dict[int, list[_Tap]]:
    """Return modules of each decoder layer that may show its ids, routers before experts."""
    found: dict[int, list[_Tap]] = defaultdict(list)
    for layer, module in decoder_modules(model, num_hidden_layers):
        kind = type(module).__name__.lower()
        if kind.endswith(_ROUTERS) or kind.endswith(_EXPERTS):
            found[layer].append(_Tap(module, kind.endswith(_ROUTERS)))
    return {i: sorted(taps, key=lambda tap: not tap.reads_output) for i, taps in found.items()}


def _proven_taps(model: Any, layout: ModelLayout) -> dict[int, _Tap]:
    """Return the tap of each MoE layer that shows a row per token in a pass over a few tokens."""
    candidates = _candidates(model, layout.num_hidden_layers)
    shown: dict[_Tap, torch.Tensor] = {}
    widths: dict[_Tap, set[int]] = defaultdict(set)

    def reader(tap: _Tap) -> Callable[[Iterable[object]], None]:
        def read(values: Iterable[object]) -> None:
            values = list(values)
            ids = _expert_ids(values, _PROBE_TOKENS, layout)
            if ids is not None and bool((ids >= 0).all()):
                shown[tap] = ids
            rows = _rows_among(values, _PROBE_TOKENS)
            widths[tap] |= {row.shape[1] for row in rows if not row.is_floating_point()}

        return read

    handles = [tap.attach(reader(tap)) for taps in candidates.values() for tap in taps]
    try:
        with torch.no_grad():
            tokens = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=model.device)
            model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    taps = {layer: [tap for tap in taps if tap in shown] for layer, taps in candidates.items()}
    found = {layer: proven[0] for layer, proven in taps.items() if proven}
    expected = set(layout.moe_layer_ids)
    for layer in sorted(expected):
        _check_width(layer, candidates.get(layer, []), layer in found, widths, layout)
    if set(found) != expected:
        missing, unexpected = sorted(expected - set(found)), sorted(set(found) - expected)
        raise InvalidArgument(
            field="layer_ids",
            value=missing or unexpected,
            expected=f"routers that show their ids; {type(model).__name__} has them on layers "
            f"{sorted(found)}, the layout on {sorted(expected)}",
        )
    for layer, tap in found.items():
        twins = [t for t in taps[layer] if t.reads_output == tap.reads_output]
        ids = shown[tap]
        if len(twins) > 1 or int(ids.max()) >= layout.num_experts:
            raise InvalidArgument(
                field=f"layers.{layer}",
                value=f"{len(twins)} {type(tap.module).__name__}, ids {ids.tolist()}",
                expected=f"one router with ids in [0, {layout.num_experts})",
            )
    return found


def _check_width(
    layer: int,
    taps: list[_Tap],
    is_proven: bool,
    widths: Mapping[_Tap, set[int]],
    layout: ModelLayout,
) -> None:
    """Refuse a layer with another number of experts, in all or for each token, than the layout."""
    for tap in taps:
        kind = type(tap.module).__name__
        if not is_proven and widths[tap]:
            chosen = ", ".join(map(str, sorted(widths[tap])))
            value, expected = f"{kind}, which chooses {chosen}", f"{layout.top_k} for each token"
        else:
            # Of most routers: a row for each expert. Others keep it in a module below.
            weight = getattr(tap.module, "weight", None) if tap.reads_output else None
            if weight is None or weight.dim() != 2 or layout.num_experts in weight.shape:
                continue
            value = f"{kind} of {weight.shape[0]} experts"
            expected = f"{layout.num_experts} experts"
        raise InvalidArgument(
            field=f"layers.{layer}",
            value=value,
            expected=f"{expected}, as in the layout",
            remedy="give the model's own layout; one layout has the same numbers for all layers",
        )
