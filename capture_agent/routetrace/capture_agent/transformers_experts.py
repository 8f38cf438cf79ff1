"""Serves the experts of a transformers model from host memory, exactly.

    with serve_experts(model, capacity=16, device="cuda") as served:
        model.to("cuda")  # the rest of it: the experts stay where they are
        model.generate(...)
        print(served.stats())

Every experts module that follows the library's experts interface gives its weights to a
`CachedWeightProvider`, and keeps its eager loop. The library's own code runs as it is, over logical
ids in ascending order; only where it takes an expert's row of a weight, it gets the provider's,
wave after wave. So outputs are those of the eager implementation, bit for bit, at every capacity:
nothing is computed otherwise, or added in another order. Hooks on routers and experts see logical
ids, so that capture goes on as before.

Knows torch and transformers' experts interface; imports no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from routetrace.capture_agent.expert_policy import Lfu, Lru, Policy
from routetrace.capture_agent.expert_weights import (
    CachedWeightProvider,
    ExpertWave,
    ExpertWeights,
    ProviderStats,
)
from routetrace.v1.errors import InvalidArgument

if TYPE_CHECKING:
    from routetrace.capture_agent.expert_forecast import ExpertForecast

# What the interface's decorator sets on instances, in every version of the library that has it.
_MARKS = ("config", "has_bias", "is_transposed")
_FOLLOWS = "a module that follows the experts interface of transformers >= 5"
_CACHE_LINE = 64
# Tokens of a pass that are asked for the next layer's experts: what a forecast costs is bounded.
_ASKED_TOKENS = 64


def serve_experts(
    model: nn.Module,
    *,
    capacity: int | None = None,
    capacity_bytes: int | None = None,
    device: torch.device | str | None = None,
    policy: Literal["lru", "lfu"] = "lru",
    forecast: ExpertForecast | None = None,
) -> ServedExperts:
    """Moves the weights of all routed experts to host memory, and caches some on the device.

    Outputs of `forward` and `generate` are those of the model with the experts implementation
    "eager", bit for bit. The parameters stay in the model, in host memory: `state_dict` and
    `save_pretrained` are as before, and `model.to(device)` moves everything else. For inference
    only, by one thread at a time.

    Args:
        model: the model, or a part of it.
        capacity: experts of each layer that are on the device; all, where a layer has fewer.
        capacity_bytes: in its place, device memory for the experts of all layers, in bytes; every
            layer gets the same number.
        device: where experts compute; the default is where they are.
        policy: what a cache gives up, where there is no forecast.
        forecast: of this model's routing, a column for each layer in order. Caches are filled with
            what it says is hot and give up what it says is least needed, and while a layer
            computes, the likely experts of the next one are copied. Outputs do not depend on it.

    Returns:
        A handle, whose `close()` puts the model back.

    Raises:
        InvalidArgument: if experts cannot be served (the module is named), a capacity is not enough
            for one expert of each layer, or the forecast is of another model. The model is then as
            it was.
    """
    modules = _experts_modules(model)
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

    layers: list[_Layer] = []
    served = ServedExperts(layers)
    try:
        for column, (name, module) in enumerate(modules.items()):
            weights = _weights(name, module)
            provider = CachedWeightProvider(
                weights,
                capacity=capacity,
                capacity_bytes=capacity_bytes,
                device=device,
                policy=made(column, weights.num_experts),
            )
            layers.append(_Layer(name, module, provider))
            if forecast is not None:
                provider.warm(forecast.hot(column, provider.capacity).tolist())
                if column:
                    layers[-2].ahead = _Ahead(forecast, column - 1, provider)
    except BaseException:
        served.close()
        raise
    return served


class ServedExperts:
    """Experts of a model that are served; made by `serve_experts`. A context manager.

    Whoever changes weights, which are the model's parameters in host memory, calls `invalidate`
    after; what `load_state_dict` and other in-place operators of torch write is noticed.
    """

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers

    @property
    def modules(self) -> list[str]:
        """The names of the modules that are served, in the model's order."""
        return [layer.name for layer in self._layers]

    @property
    def device_bytes(self) -> int:
        """Bytes that the experts take on the device, of all layers; 0 after `close`."""
        return sum(layer.device_bytes for layer in self._layers)

    def stats(self) -> ProviderStats:
        """What the providers of all layers did so far, added up."""
        counts = [astuple(stats) for stats in self.layer_stats().values()]
        return ProviderStats(*(sum(column) for column in zip(*counts, strict=True)))

    def layer_stats(self) -> dict[str, ProviderStats]:
        """The same by module."""
        return {layer.name: layer.stats() for layer in self._layers}

    def invalidate(self) -> None:
        """Forgets what is cached, of all layers: weights have changed."""
        for layer in self._layers:
            layer.invalidate()

    def close(self) -> None:
        """Puts the model back: weights where they came from, and the library's own forward.

        Does nothing the second time.
        """
        for layer in self._layers:
            layer.ahead = None  # which holds the next layer's cache
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


class _Layer:
    """One experts module, from now on served by a provider."""

    def __init__(self, name: str, module: nn.Module, provider: CachedWeightProvider) -> None:
        self.name = name
        self.provider = provider
        self.ahead: _Ahead | None = None
        self._module = module
        self._eager = inspect.unwrap(type(module).forward)
        self._signature = inspect.signature(self._eager)
        self._parameters = {n: _parameter(module, n) for n in provider.host.weights}
        self._origin = next(iter(self._parameters.values())).device
        for key, parameter in self._parameters.items():
            parameter.data = provider.host.weights[key]
        self._versions = self._current_versions()
        self._final: ProviderStats | None = None  # once it is closed
        # Found before what the class has, by calls and by `model.to` alike. Compiled code calls it.
        forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        vars(module).update(forward=forward, _apply=self._apply)

    @property
    def device_bytes(self) -> int:
        if self._final is not None:
            return 0
        return self.provider.capacity * self.provider.host.bytes_per_expert

    def stats(self) -> ProviderStats:
        return self.provider.stats() if self._final is None else self._final

    def invalidate(self) -> None:
        if self._final is None:
            for expert in range(self.provider.host.num_experts):
                self.provider.invalidate(expert)

    def close(self) -> None:
        if self._final is not None:
            return
        # The device's memory is free before the weights want it back. A provider and its last batch
        # hold each other.
        self.invalidate()
        self._final = self.provider.stats()
        del self.provider
        del vars(self._module)["forward"], vars(self._module)["_apply"]
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(self._origin)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's eager forward."""
        _, *values = self._signature.bind(None, *args, **kwargs).arguments.values()
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in values
        ):
            raise InvalidArgument(
                field=self.name,
                value="called with gradients",
                expected="a call under torch.no_grad(): the weights of served experts come and go",
            )
        self._notice_changes()
        topk_ids: torch.Tensor = values[1]
        waves = _Waves(self, topk_ids.detach().cpu())
        output = self._eager(_Stand(self._module, waves, list(self._parameters)), *args, **kwargs)
        waves.finish()
        return output

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """As `nn.Module._apply`, for all but the weights: where they are is for us to say."""
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
                    expected="the one that is served: close() before weights are replaced",
                )
            # Tensors of inference mode do not count their changes.
            versions.append(0 if parameter.is_inference() else parameter._version)
        return versions


class _Ahead:
    """Copies the likely experts of the next layer."""

    def __init__(
        self, forecast: ExpertForecast, column: int, provider: CachedWeightProvider
    ) -> None:
        self._forecast = forecast
        self._column = column
        self._provider = provider

    def prefetch(self, topk_ids: torch.Tensor, count: int) -> None:
        """Copies as many as this layer needs, by the ids [n, K] of its tokens."""
        tokens = topk_ids.reshape(-1, topk_ids.shape[-1])
        asked = tokens[:: -(-len(tokens) // _ASKED_TOKENS)].numpy()
        scores = self._forecast.next_layer(self._column, asked)
        likely = (-scores).argsort(kind="stable")[:count]
        self._provider.prefetch(likely.tolist())


class _Waves:
    """The waves of one call, asked for as the loop over the experts comes to them."""

    def __init__(self, layer: _Layer, topk_ids: torch.Tensor) -> None:
        self._layer = layer
        # Ids from the number of experts on stand for nobody, as in the library's loop.
        count = layer.provider.host.num_experts
        self._topk_ids = topk_ids.masked_fill(topk_ids >= count, -1)
        ids: torch.Tensor = torch.unique(self._topk_ids)
        self._needed = ids[ids >= 0]
        self._waves: Iterator[ExpertWave] | None = None
        self._wave: ExpertWave | None = None
        self._slots: dict[int, int] = {}

    def row(self, name: str, expert: int) -> torch.Tensor:
        """A weight [...] of an expert, on the device, for the kernels that are enqueued next."""
        while expert not in self._slots:
            self._advance(expert)
        assert self._wave is not None
        row = self._wave.weights[name][self._slots[expert]]
        return _placed_as(self._layer.provider.host.weights[name][expert], row)

    def finish(self) -> None:
        """The kernels of the last wave are enqueued."""
        if self._waves is not None:
            next(self._waves, None)

    def _advance(self, expert: int) -> None:
        if self._waves is None:
            self._waves = self._layer.provider.prepare(self._needed[None])
        self._wave = next(self._waves, None)
        if self._wave is None:
            raise InvalidArgument(
                field=self._layer.name,
                value=f"a loop that comes to expert {expert} out of turn",
                expected="the experts of top_k_index, each once, ascending",
            )
        self._slots = dict(zip(self._wave.experts, self._wave.slots, strict=True))
        # Behind all copies of this layer, before the kernels that they hide behind. Where not even
        # this layer's experts fit, those of the next will not either.
        ahead, capacity = self._layer.ahead, self._layer.provider.capacity
        if ahead is not None and len(self._needed) <= capacity:
            ahead.prefetch(self._topk_ids, len(self._needed))


class _Stand:
    """What the library's loop has for `self`: the module, with rows in place of its weights."""

    def __init__(self, module: nn.Module, waves: _Waves, names: Sequence[str]) -> None:
        vars(self).update({name: _Rows(waves, name) for name in names}, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


class _Rows:
    """Stands for a weight [E, ...] that is indexed by an expert, and used in no other way."""

    def __init__(self, waves: _Waves, name: str) -> None:
        self._waves = waves
        self._name = name

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self._waves.row(self._name, int(expert))


def _placed_as(original: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """A row at an address like the original's, where kernels add in an order that depends on it.

    That is so on CPUs, and addresses differ only if a row is no multiple of a cache line: then it
    is copied once more.
    """
    apart = (original.data_ptr() - row.data_ptr()) % _CACHE_LINE
    if row.device.type != "cpu" or not apart:
        return row
    room = torch.empty(row.numel() + _CACHE_LINE, dtype=row.dtype)
    start = (original.data_ptr() - room.data_ptr()) % _CACHE_LINE // row.element_size()
    return room[start : start + row.numel()].view(row.shape).copy_(row)


def _experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a model by name, in order, all of which can be served."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        follows = all(mark in vars(module) for mark in _MARKS) and hasattr(
            type(module).forward, "__wrapped__"
        )
        last = name.rpartition(".")[2].lower()
        looks = last == "experts" or type(module).__name__.lower().endswith("experts")
        if follows or (looks and "shared" not in last):
            _check_module(name, module, follows)
            found[name] = module
    if not found:
        raise InvalidArgument(
            field="model", value=type(model).__name__, expected=f"experts, each {_FOLLOWS}"
        )
    return found


def _check_module(name: str, module: nn.Module, follows: bool) -> None:
    """Refuses what is not ours to serve."""
    kind = type(module).__name__
    if not follows:
        raise InvalidArgument(field=name, value=kind, expected=_FOLLOWS)
    if "forward" in vars(module):
        raise InvalidArgument(
            field=name, value=f"{kind} whose forward was replaced", expected="the class's own"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise InvalidArgument(field=name, value="some of the experts", expected="all of them")
    _weights(name, module)


def _weights(name: str, module: nn.Module) -> ExpertWeights:
    """The weights of an experts module, by the names of its parameters."""
    tensors: dict[str, torch.Tensor] = {}
    count = getattr(module, "num_experts", None)
    for key, parameter in module.named_parameters(recurse=False):
        tensor = parameter.data
        if type(parameter) is not nn.Parameter or type(tensor) is not torch.Tensor:
            problem = f"a {type(parameter).__name__} of {type(tensor).__name__}"
        elif tensors and tensor.device != next(iter(tensors.values())).device:
            problem = f"on {tensor.device}, others elsewhere"
        elif tensor.is_meta:
            problem = "on the device meta"
        elif tensor.dim() == 0 or tensor.shape[0] != count:
            problem = f"shape {tuple(tensor.shape)}"
        elif not tensor.is_contiguous():
            problem = f"strides {tensor.stride()}"
        elif parameter.grad is not None:
            problem = "with a gradient"
        else:
            tensors[key] = tensor
            continue
        raise InvalidArgument(
            field=f"{name}.{key}",
            value=problem,
            expected=f"a plain contiguous tensor [{count}, ...] without a gradient, on the device "
            "of the module's other parameters",
        )
    if not tensors:
        raise InvalidArgument(field=name, value="no parameters", expected="weights [experts, ...]")
    return ExpertWeights(tensors)


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


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
    """Experts of each layer for which there is memory."""
    least = sum(_weights(name, module).bytes_per_expert for name, module in modules.items())
    if capacity_bytes < least:
        raise InvalidArgument(
            field="capacity_bytes",
            value=capacity_bytes,
            expected=f"at least {least}, which is one expert of each of {len(modules)} layers",
        )
    return capacity_bytes // least
