"""Serve the experts of a transformers model from host memory, exactly.

    with serve_experts(model, capacity=16, device="cuda") as served:
        model.to("cuda")  # all but the experts, which stay in place
        model.generate(...)
        print(served.stats())

Every experts module that follows the library's experts interface takes its weights from a
`CachedWeightProvider`, and runs the library's own code of the implementation that the model's
config names at the time. Hooks on routers and experts see logical ids, so capture is unaffected.

"eager", a loop over the experts, runs over logical ids in ascending order; an expert's row of a
weight is the provider's, wave after wave. Outputs equal those without serving bit for bit, at every
capacity: computation and order of sums are the same.

"grouped_mm" and "batched_mm", a few kernels for all experts, run over the slots as if these were
all experts. With a slot for each expert the kernels get the same inputs as without serving, and
the ids are not read: no call waits for the device. With fewer slots, a batch whose experts fit is
one call; results of several waves are combined as the kernel would combine them. An expert's rows
are multiplied by its weights as without serving, but at another place in memory: outputs are equal
where the device's product does not depend on the place. On CPUs it does not where an expert's
sizes are multiples of 64.

Depends on torch and the experts interface of transformers; imports no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from types import TracebackType
from typing import Literal

import torch
from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.experts.cached import CachedWeightProvider
from routetrace.experts.forecast import ExpertForecast
from routetrace.experts.policy import Lfu, Lru, Policy
from routetrace.experts.transformers.layer import Ahead, ServedLayer
from routetrace.experts.transformers.modules import experts_modules, weights_of
from routetrace.experts.weights import ProviderStats


def serve_experts(
    model: nn.Module,
    *,
    capacity: int | None = None,
    capacity_bytes: int | None = None,
    device: torch.device | str | None = None,
    policy: Literal["lru", "lfu"] = "lru",
    forecast: ExpertForecast | None = None,
) -> ServedExperts:
    """Move the weights of all routed experts to host memory, and cache some on the device.

    Outputs of `forward` and `generate` are those of the model with its experts implementation
    ("eager", "grouped_mm" or "batched_mm": `model.set_experts_implementation`, at any time); this
    module's docstring says how exactly. The parameters stay in the model, in host memory:
    `state_dict` and `save_pretrained` are unchanged, and `model.to(device)` moves all the rest. For
    inference only, by one thread at a time.

    Args:
        model: the model, or a part of it.
        capacity: experts of each layer that are on the device; all, where a layer has fewer.
        capacity_bytes: alternatively, device memory for the experts of all layers, in bytes; every
            layer gets the same number.
        device: where experts compute; the default is where they are.
        policy: eviction without a forecast.
        forecast: of this model's routing, a column for each layer in order. Caches are filled with
            its hottest experts and evict by its policy, and while a layer computes, the likely
            experts of the next one are copied; in each layer as far as that pays (`GuardedCache`).
            Outputs do not depend on it.

    Returns:
        A handle, whose `close()` restores the model.

    Raises:
        InvalidArgument: if experts cannot be served (the module is named), a capacity is not enough
            for one expert of each layer, or the forecast is of another model. The model is then
            unchanged.
    """
    modules = experts_modules(model)
    if policy not in ("lru", "lfu"):
        raise InvalidArgument(field="policy", value=policy, expected='"lru" or "lfu"')
    if forecast is not None:
        _check_forecast(forecast, modules)
    if capacity_bytes is not None and capacity is None:
        capacity, capacity_bytes = _share(capacity_bytes, modules), None

    def made(column: int, num_experts: int) -> Policy:
        if forecast is not None:
            return forecast.policy(column)
        return Lru(num_experts) if policy == "lru" else Lfu(num_experts)

    layers: list[ServedLayer] = []
    served = ServedExperts(layers)
    try:
        for column, (name, module) in enumerate(modules.items()):
            weights = weights_of(name, module)
            provider = CachedWeightProvider(
                weights,
                capacity=capacity,
                capacity_bytes=capacity_bytes,
                device=device,
                policy=made(column, weights.num_experts),
                guarded=forecast is not None,
            )
            layers.append(ServedLayer(name, module, provider))
            if forecast is not None:
                provider.warm(forecast.hot(column, provider.capacity).tolist())
                if column:
                    layers[-2].ahead = Ahead(forecast, column - 1, provider)
    except BaseException:
        served.close()
        raise
    return served


class ServedExperts:
    """Served experts of a model, from `serve_experts`. A context manager.

    Call `invalidate` after a change of weights, which are the model's parameters in host memory.
    Writes of `load_state_dict` and other in-place operators of torch are detected.
    """

    def __init__(self, layers: Sequence[ServedLayer]) -> None:
        self._layers = layers

    @property
    def modules(self) -> list[str]:
        """Names of the served modules, in the model's order."""
        return [layer.name for layer in self._layers]

    @property
    def device_bytes(self) -> int:
        """Bytes of the experts of all layers on the device; 0 after `close`."""
        return sum(layer.device_bytes for layer in self._layers)

    def stats(self) -> ProviderStats:
        """Return the counts of all providers, added up."""
        counts = [astuple(stats) for stats in self.layer_stats().values()]
        return ProviderStats(*(sum(column) for column in zip(*counts, strict=True)))

    def layer_stats(self) -> dict[str, ProviderStats]:
        """Return the counts by module."""
        return {layer.name: layer.stats() for layer in self._layers}

    def invalidate(self) -> None:
        """Empty the caches of all layers: weights have changed."""
        for layer in self._layers:
            layer.invalidate()

    def close(self) -> None:
        """Restore the model: weights on their device, and the library's forward. Idempotent."""
        for layer in self._layers:
            layer.ahead = None  # it refers to the next layer's cache
        for layer in self._layers:
            layer.close()

    def __enter__(self) -> ServedExperts:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_forecast(forecast: ExpertForecast, modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        if module.num_experts != forecast.num_experts:
            raise InvalidArgument(
                field="forecast",
                value=f"of {forecast.num_experts} experts",
                expected=f"of {module.num_experts}, as {name} has",
            )
    if forecast.num_layers != len(modules):
        raise InvalidArgument(
            field="forecast",
            value=f"of {forecast.num_layers} layers",
            expected=f"of {len(modules)}, as the model has",
        )


def _share(capacity_bytes: int, modules: dict[str, nn.Module]) -> int:
    """Return the number of experts of each layer that fit."""
    least = sum(weights_of(name, module).bytes_per_expert for name, module in modules.items())
    if capacity_bytes < least:
        raise InvalidArgument(
            field="capacity_bytes",
            value=capacity_bytes,
            expected=f"at least {least}, which is one expert of each of {len(modules)} layers",
        )
    return capacity_bytes // least
