"""Finds the routers of a transformers model, and reads what they choose, pass by pass.

Nothing in the library is edited: the ids are read by forward hooks. Where a layer's router returns
them (almost all families do, as an integer tensor beside logits and weights), they are read there;
otherwise from the call of the layer's experts. Both are proven by a pass over two tokens before
anything is captured.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from routetrace.capture_agent.capturer import PendingRows, RoutingCapturer
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

logger = logging.getLogger(__name__)

# A module of decoder layer <i>, by its name below the decoder.
_LAYER = re.compile(r"(?:layers|blocks|h)\.(\d+)\.")
_ROUTERS = ("router", "gate")
_EXPERTS = ("experts",)
_PROBE_TOKENS = 2


class PlaceUnknown(InvalidArgument):
    """The positions of a pass cannot be known: no row of the call would be right."""


class PassListener(Protocol):
    """Whoever knows what the tokens of a forward pass are."""

    def before(self, inputs: Mapping[str, Any]) -> None:
        """A pass with these keyword arguments begins.

        Raises:
            PlaceUnknown: if its positions cannot be known; the caller of the model gets it.
        """

    def after(self, pending: PendingRows) -> None:
        """The pass has ended; a row per token, in the order of `input_ids`."""

    def failed(self) -> None:
        """An exception of ours was swallowed: rows may be missing from now on."""


@dataclass(frozen=True)
class _Tap:
    """Where the ids of one layer are read."""

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
    """Reads the routers of one model into a `RoutingCapturer`.

    Args:
        model: a decoder model of transformers.
        layout: its layout.

    Raises:
        InvalidArgument: if the routers found are not those of `layout.moe_layer_ids`, naming the
            layers, or choose otherwise than the layout says.
    """

    def __init__(self, model: Any, layout: RoutingLayout) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise InvalidArgument(
                field="model", value=type(model).__name__, expected="a decoder-only model"
            )
        self.failures = 0
        self._model = model
        self._layout = layout
        self._taps = _proven_taps(model, layout)
        self._capturer: RoutingCapturer | None = None
        # Tokens of the pass that is under way, and the columns seen in it.
        self._num_tokens: int | None = None
        self._seen: set[int] = set()

    @contextmanager
    def attached(self, listener: PassListener) -> Iterator[None]:
        """Hooks the model for the duration of the block.

        Exceptions of the listener and of ours, but for `PlaceUnknown`, do not reach the model:
        they are counted in `failures`, the first is logged, and `listener.failed()` is called.
        """

        def before(_model: nn.Module, _args: Any, kwargs: Any) -> None:
            self.shield(listener, lambda: self._begin(listener, kwargs))

        def after(_model: nn.Module, _args: Any, _output: Any) -> None:
            self.shield(listener, lambda: self._end(listener))

        def read(column: int) -> Callable[[Iterable[object]], None]:
            return lambda values: self.shield(listener, lambda: self._capture(column, values))

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
            self._capturer = self._num_tokens = None  # the next user of the device may need room

    def shield(self, listener: PassListener, action: Callable[[], object]) -> None:
        """Run `action`; of its exceptions only `PlaceUnknown` reaches the engine."""
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

    def _begin(self, listener: PassListener, inputs: Mapping[str, Any]) -> None:
        self._num_tokens = None
        listener.before(inputs)
        num_tokens = inputs["input_ids"].numel()
        if self._capturer is None or num_tokens > self._capturer.max_num_tokens:
            # Hooks run in every pass, so the buffer may move: it grows with the largest pass.
            size = 1 << max(num_tokens - 1, 255).bit_length()
            self._capturer = RoutingCapturer(self._layout, size, self._model.device)
        self._capturer.begin()
        self._num_tokens = num_tokens
        self._seen.clear()

    def _capture(self, column: int, values: Iterable[object]) -> None:
        if self._num_tokens is None or self._capturer is None:
            return  # a module called on its own, not in a pass of the model
        ids = _expert_ids(values, self._num_tokens, self._layout.top_k)
        if ids is None or column in self._seen:
            # Called for part of the tokens or more than once: nobody knows which row is whose.
            ids = torch.full((self._num_tokens, self._layout.top_k), -1)
        self._seen.add(column)
        self._capturer.capture(column, ids)

    def _end(self, listener: PassListener) -> None:
        if self._num_tokens is None or self._capturer is None:
            return
        num_tokens, self._num_tokens = self._num_tokens, None
        listener.after(self._capturer.snapshot(num_tokens))


def _expert_ids(values: Iterable[object], num_tokens: int, top_k: int) -> torch.Tensor | None:
    """The tensor among `values` that can be ids [num_tokens, top_k or more]."""
    for value in values:
        if (
            isinstance(value, torch.Tensor)
            and not value.is_floating_point()
            and value.dtype != torch.bool
            and value.dim() >= 2
            and value.shape[-1] >= top_k
            and value.numel() == num_tokens * value.shape[-1]
        ):
            return value.reshape(num_tokens, -1)
    return None


def _candidates(model: Any, num_hidden_layers: int) -> dict[int, list[_Tap]]:
    """Modules of each decoder layer that might tell its ids, routers before experts."""
    found: dict[int, list[_Tap]] = defaultdict(list)
    # Vision towers and MTP heads stand beside the decoder, or in it under a name or number of
    # their own.
    for name, module in model.get_decoder().named_modules():
        match = _LAYER.match(name)
        if match is None or int(match[1]) >= num_hidden_layers or "mtp" in name.lower():
            continue
        kind = type(module).__name__.lower()
        if kind.endswith(_ROUTERS) or kind.endswith(_EXPERTS):
            found[int(match[1])].append(_Tap(module, kind.endswith(_ROUTERS)))
    return {i: sorted(taps, key=lambda tap: not tap.reads_output) for i, taps in found.items()}


def _proven_taps(model: Any, layout: RoutingLayout) -> dict[int, _Tap]:
    """One tap per MoE layer: the one that shows a row per token in a pass over a few tokens."""
    candidates = _candidates(model, layout.num_hidden_layers)
    shown: dict[_Tap, torch.Tensor] = {}

    def reader(tap: _Tap) -> Callable[[Iterable[object]], None]:
        def read(values: Iterable[object]) -> None:
            ids = _expert_ids(values, _PROBE_TOKENS, layout.top_k)
            if ids is not None:
                shown[tap] = ids[:, : layout.top_k]

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
    if set(found) != expected:
        missing, strange = sorted(expected - set(found)), sorted(set(found) - expected)
        raise InvalidArgument(
            field="layer_ids",
            value=missing or strange,
            expected=f"routers that show their ids; {type(model).__name__} has them on layers "
            f"{sorted(found)}, the layout on {sorted(expected)}",
        )
    for layer, tap in found.items():
        twins = [t for t in taps[layer] if t.reads_output == tap.reads_output]
        ids = shown[tap]
        if len(twins) > 1 or int(ids.min()) < 0 or int(ids.max()) >= layout.num_experts:
            raise InvalidArgument(
                field=f"layers.{layer}",
                value=f"{len(twins)} {type(tap.module).__name__}, ids {ids.tolist()}",
                expected=f"one router with ids in [0, {layout.num_experts})",
            )
    return found
