"""One experts module, served by a provider."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cached import CachedWeightProvider
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.transformers.modules import implementation_of, parameter_of
from routetrace.experts.transformers.stand_ins import Stand, WeightRows, gathered_rows, pairs_of
from routetrace.experts.weights import ExpertWave, ProviderStats

# Tokens of a pass that a forecast is computed from, which bounds its cost.
_ASKED_TOKENS = 64
_CACHE_LINE = 64


class ServedLayer:
    """One experts module whose forward takes its weights from a provider, until `close`."""

    def __init__(self, name: str, module: nn.Module, provider: CachedWeightProvider) -> None:
        self.name = name
        self.provider = provider
        self.ahead: Ahead | None = None
        self._module = module
        self._eager = inspect.unwrap(type(module).forward)
        self._signature = inspect.signature(self._eager)
        self._parameters = {n: parameter_of(module, n) for n in provider.host.weights}
        self._origin = next(iter(self._parameters.values())).device
        for key, parameter in self._parameters.items():
            parameter.data = provider.host.weights[key]
        self._versions = self._current_versions()
        self._final: ProviderStats | None = None  # after `close`
        # Attributes of the instance precede those of the class. Compiled code calls `forward`.
        forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        vars(module).update(forward=forward, _apply=self._apply)

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots on the device; 0 after `close`."""
        if self._final is not None:
            return 0
        return self.provider.capacity * self.provider.host.bytes_per_expert

    def stats(self) -> ProviderStats:
        """Return the provider's counts, after `close` the last ones."""
        return self.provider.stats() if self._final is None else self._final

    def invalidate(self) -> None:
        """Free the slots of all experts."""
        if self._final is None:
            for expert in range(self.provider.host.num_experts):
                self.provider.invalidate(expert)

    def close(self) -> None:
        """Restore the module: weights on their device, and the library's forward."""
        if self._final is not None:
            return
        # Frees the device's memory before the weights need it. A provider and its last batch
        # refer to each other.
        self.invalidate()
        self._final = self.provider.stats()
        del self.provider
        del vars(self._module)["forward"], vars(self._module)["_apply"]
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(self._origin)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the library's forward with the implementation that the config names."""
        _, *values = self._signature.bind(None, *args, **kwargs).arguments.values()
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in values
        ):
            raise InvalidArgument(
                field=self.name,
                value="called with gradients",
                expected="a call under torch.no_grad(): slots change their weights during a call",
            )
        self._notice_changes()
        implementation = implementation_of(self.name, self._module)
        if implementation != "eager":
            hidden, topk_ids, topk_weights = values
            return self._by_kernels(implementation, hidden, topk_ids, topk_weights)
        topk_ids = values[1]
        waves = BatchWaves(self, topk_ids.detach().cpu())
        rows = {name: WeightRows(partial(waves.row, name)) for name in self._parameters}
        output = self._eager(Stand(self._module, rows), *args, **kwargs)
        waves.finish()
        return output

    def _by_kernels(
        self,
        implementation: str,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Run the library's batched or grouped kernels over slots in place of all experts."""
        provider = self.provider
        if provider.whole:
            return self._kernels(provider.everything(), hidden, topk_ids, topk_weights)
        count = provider.host.num_experts
        ids = topk_ids.masked_fill(topk_ids >= count, -1)  # no expert, as in the eager loop
        batch = provider.prepare(ids)
        if batch.one:
            asked = ids if self.ahead is None else ids.cpu()  # before the wait for copies
            wave = next(batch)
            self.look_ahead(asked, len(wave.experts))
            output = self._kernels(wave.weights, hidden, wave.topk_ids, topk_weights)
            next(batch, None)  # returns the slots: the kernels are enqueued
            return output
        if implementation == "batched_mm":
            gathered = gathered_rows(batch, ids.numel())
            if not gathered:
                return torch.zeros_like(hidden)
            return self._kernels(gathered, hidden, ids, topk_weights)
        # In place of the kernel's last steps: weights and adds the outputs of a token's experts in
        # the order in which the token chose them, independent of their waves.
        num_tokens, top_k = ids.shape
        outputs = hidden.new_zeros(num_tokens * top_k, hidden.shape[-1])
        for wave in batch:
            pairs, places = pairs_of(wave)
            ones = hidden.new_ones(len(pairs), 1)
            outputs[pairs] = self._kernels(
                wave.weights, hidden[pairs // top_k], places[:, None], ones
            )
        weighted = outputs * topk_weights.reshape(-1, 1)
        return weighted.view(num_tokens, top_k, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)

    def _kernels(self, weights: Mapping[str, Any], *values: torch.Tensor) -> torch.Tensor:
        """Run the kernels that the library chooses by the config."""
        stand = Stand(self._module, {**weights, "num_experts": self.provider.capacity})
        output: torch.Tensor = type(self._module).forward(stand, *values)
        return output

    def look_ahead(self, topk_ids: torch.Tensor, count: int) -> None:
        """Copy the next layer's likely experts, after all copies of this layer.

        Called before the kernels that hide the copies are enqueued, and only where this layer's
        experts fit: otherwise those of the next do not fit either.

        Args:
            topk_ids: this layer's [n, K], on the CPU if there is a next layer.
            count: number of experts that this layer needs.
        """
        if self.ahead is not None:
            self.ahead.prefetch(topk_ids, count)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `fn` as `nn.Module._apply` does, except to the weights, which stay in place."""
        for key, parameter in self._parameters.items():
            dtype = fn(torch.empty(0, dtype=parameter.dtype)).dtype
            if dtype != parameter.dtype:
                raise InvalidArgument(
                    field=f"{self.name}.{key}",
                    value=str(dtype),
                    expected=f"{parameter.dtype}: the weights of served experts keep their dtype",
                )
        held = self._module._parameters
        vars(self._module)["_parameters"] = {
            key: value for key, value in held.items() if key not in self._parameters
        }
        try:
            type(self._module)._apply(self._module, fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            vars(self._module)["_parameters"] = held
        return self._module

    def _notice_changes(self) -> None:
        versions = self._current_versions()
        if versions != self._versions:
            self._versions = versions
            self.invalidate()

    def _current_versions(self) -> list[int]:
        versions: list[int] = []
        for key, parameter in self._parameters.items():
            host = self.provider.host.weights[key]
            now = self._module._parameters.get(key)
            if now is not parameter or parameter.data_ptr() != host.data_ptr():
                raise InvalidArgument(
                    field=f"{self.name}.{key}",
                    value="another tensor",
                    expected="the served tensor; call close() before you replace weights",
                )
            # Tensors of inference mode do not count their changes.
            versions.append(0 if parameter.is_inference() else parameter._version)
        return versions


class Ahead:
    """Copies of the likely experts of the next layer."""

    def __init__(
        self, forecast: ExpertForecast, column: int, provider: CachedWeightProvider
    ) -> None:
        self._forecast = forecast
        self._column = column
        self._provider = provider

    def prefetch(self, topk_ids: torch.Tensor, count: int) -> None:
        """Copy `count` experts, chosen by the ids [n, K] of this layer's tokens."""
        tokens = topk_ids.reshape(-1, topk_ids.shape[-1])
        asked = tokens[:: -(-len(tokens) // _ASKED_TOKENS)].numpy()
        scores = self._forecast.next_layer(self._column, asked)
        likely = (-scores).argsort(kind="stable")[:count]
        self._provider.prefetch(likely.tolist())


class BatchWaves:
    """The waves of one call, prepared as the loop over the experts reaches them."""

    def __init__(self, layer: ServedLayer, topk_ids: torch.Tensor) -> None:
        self._layer = layer
        # Ids at or above the number of experts name no expert, as in the library's loop.
        count = layer.provider.host.num_experts
        self._topk_ids = topk_ids.masked_fill(topk_ids >= count, -1)
        ids: torch.Tensor = torch.unique(self._topk_ids)
        self._needed = ids[ids >= 0]
        self._waves: Iterator[ExpertWave] | None = None
        self._wave: ExpertWave | None = None
        self._slots: dict[int, int] = {}

    def row(self, name: str, expert: int) -> torch.Tensor:
        """Return a weight [...] of an expert on the device, for the kernels enqueued next."""
        while expert not in self._slots:
            self._advance(expert)
        assert self._wave is not None
        row = self._wave.weights[name][self._slots[expert]]
        return _placed_as(self._layer.provider.host.weights[name][expert], row)

    def finish(self) -> None:
        """Return the slots of the last wave, whose kernels are enqueued."""
        if self._waves is not None:
            next(self._waves, None)

    def _advance(self, expert: int) -> None:
        if self._waves is None:
            self._waves = self._layer.provider.prepare(self._needed[None])
        self._wave = next(self._waves, None)
        if self._wave is None:
            raise InvalidArgument(
                field=self._layer.name,
                value=f"a loop that reaches expert {expert} out of turn",
                expected="the experts of top_k_index, each once, ascending",
            )
        self._slots = dict(zip(self._wave.experts, self._wave.slots, strict=True))
        if len(self._needed) <= self._layer.provider.capacity:
            self._layer.look_ahead(self._topk_ids, len(self._needed))


def _placed_as(original: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return a row at the original's offset in a cache line, which sets the order of sums.

    Kernels add in an order that depends on the address on CPUs only. Offsets differ only if a row
    is no multiple of a cache line; it is then copied once more.
    """
    apart = (original.data_ptr() - row.data_ptr()) % _CACHE_LINE
    if row.device.type != "cpu" or not apart:
        return row
    room = torch.empty(row.numel() + _CACHE_LINE, dtype=row.dtype)
    start = (original.data_ptr() - room.data_ptr()) % _CACHE_LINE // row.element_size()
    return room[start : start + row.numel()].view(row.shape).copy_(row)
