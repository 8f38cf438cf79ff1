"""The functions of a transformers model that choose experts, for `replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout, decoder_modules

# The function that chooses experts, and the module that it is in. Up to 5.10 many routers compute
# logits alone, and the block around them chooses; that of DBRX does in all versions.
_OF_BLOCKS = "route_tokens_to_experts"
_CHOOSERS: tuple[tuple[str, Callable[[nn.Module], bool]], ...] = (
    (_OF_BLOCKS, lambda module: hasattr(module, _OF_BLOCKS)),
    ("forward", lambda module: type(module).__name__.lower().endswith("router")),
    ("forward", lambda module: type(module).__name__.lower().endswith("gate")),
)


def choosers_of(model: Any, layout: ModelLayout) -> dict[int, tuple[nn.Module, str]]:
    """Return what chooses the experts of each MoE layer: a module and the name of its function."""
    modules: dict[int, list[nn.Module]] = {layer: [] for layer in layout.moe_layer_ids}
    for layer, module in decoder_modules(model, layout.num_hidden_layers):
        if layer in modules:
            modules[layer].append(module)
    found: dict[int, tuple[nn.Module, str]] = {}
    for layer, candidates in modules.items():
        for function, fits in _CHOOSERS:
            fitting = [module for module in candidates if fits(module)]
            if len(fitting) > 1:
                raise InvalidArgument(
                    field=f"layers.{layer}",
                    value=[type(module).__name__ for module in fitting],
                    expected="one router in the layer",
                )
            if fitting:
                found[layer] = fitting[0], function
                break
    missing = sorted(set(modules) - set(found))
    if missing:
        raise InvalidArgument(
            field="model",
            value=type(model).__name__,
            expected=f"a model with a router on each MoE layer; none found on layers {missing}",
        )
    return found


def refuse_whole_graphs(model: nn.Module, owners: Iterable[nn.Module]) -> None:
    """Refuse what was compiled with fullgraph=True around the modules that choose.

    torch itself refuses what is not seen here, in the pass.
    """
    for name, module in model.named_modules():
        compiled = vars(module).get("_compiled_call_impl") or vars(module).get("dynamo_ctx")
        cells = [compiled, *(cell.cell_contents for cell in getattr(compiled, "__closure__", ()))]
        if any(getattr(cell, "fullgraph", False) for cell in cells) and not set(owners).isdisjoint(
            module.modules()
        ):
            raise InvalidArgument(
                field="model",
                value=f"a {type(module).__name__}{name and f' at {name}'} that was compiled with "
                "fullgraph=True",
                expected="graphs that may break at routers, as replay keeps these out",
                remedy="compile without fullgraph=True",
            )
