"""Experts modules of a model that follow the library's experts interface."""

from __future__ import annotations

import torch
from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.experts.weights import ExpertWeights

# Instance attributes that the interface's decorator sets, in every version that has it.
_MARKS = ("config", "has_bias", "is_transposed")
_FOLLOWS = "a module that follows the experts interface of transformers"
_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of a model by name, in order; refuse any that cannot be served."""
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
    """Refuse a module that cannot be served."""
    kind = type(module).__name__
    if not follows:
        raise InvalidArgument(field=name, value=kind, expected=_FOLLOWS)
    if "forward" in vars(module):
        raise InvalidArgument(
            field=name, value=f"{kind} whose forward was replaced", expected="the class's own"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise InvalidArgument(field=name, value="some of the experts", expected="all of them")
    implementation_of(name, module)
    weights_of(name, module)


def implementation_of(name: str, module: nn.Module) -> str:
    """Return the experts implementation that the library would choose now."""
    chosen: str = getattr(module.config, "_experts_implementation", None) or "eager"
    if chosen not in _IMPLEMENTATIONS:
        raise InvalidArgument(
            field=f"{name}.config.experts_implementation",
            value=chosen,
            expected=f"one of {_IMPLEMENTATIONS}: see set_experts_implementation()",
        )
    return chosen


def weights_of(name: str, module: nn.Module) -> ExpertWeights:
    """Return the weights of an experts module, by the names of its parameters."""
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


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter of a module."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter
