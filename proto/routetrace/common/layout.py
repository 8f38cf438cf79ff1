"""Layout of rows: layers, number of experts, width of an id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from routetrace.common.checks import items, whole
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K
from routetrace.common.model_map import routing_of
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb

# A module of decoder layer <i>, by its name below the decoder. `get_decoder` of Llama 4 returns the
# causal model, one level above.
_LAYER = re.compile(r"(?:model\.)?(?:layers|blocks|h)\.(\d+)\.")


def decoder_modules(model: Any, num_hidden_layers: int) -> Iterator[tuple[int, Any]]:
    """Yield the modules of the decoder layers of a transformers model, each with its layer id.

    Vision towers and MTP layers are left out: they are outside the decoder, or have other names,
    or numbers behind those of its layers.
    """
    for name, module in model.get_decoder().named_modules():
        match = _LAYER.match(name)
        if match and int(match[1]) < num_hidden_layers and "mtp" not in name.lower():
            yield int(match[1]), module


def id_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest dtype that holds the ids 0 .. num_experts - 1: uint8 or uint16."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class ModelLayout(Values):
    """Columns of a row.

    Raises:
        InvalidArgument: if the numbers contradict each other.
    """

    layer_ids: tuple[int, ...]
    """Absolute decoder layer ids of the columns, strictly ascending."""
    num_hidden_layers: int
    """Decoder layers of the model, dense ones included."""
    num_experts: int
    """Logical experts per layer that a router can choose: without shared ones, before any remap."""
    top_k: int
    """Experts chosen per token and layer."""
    moe_layer_ids: tuple[int, ...] = ()
    """Absolute ids of every MoE layer of the model; `layer_ids` if empty."""

    def __post_init__(self) -> None:
        for name, high in (
            ("num_experts", MAX_EXPERTS),
            ("top_k", MAX_TOP_K),
            ("num_hidden_layers", MAX_LAYERS),
        ):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, high))
        whole("top_k", self.top_k, 1, self.num_experts)
        for name in ("layer_ids", "moe_layer_ids"):
            ids = _ids(name, getattr(self, name))
            if name == "moe_layer_ids":
                ids = ids or self.layer_ids
            object.__setattr__(self, name, ids)
            if not ids:
                raise InvalidArgument(field=name, value=ids, expected="at least one layer")
            if any(b <= a for a, b in pairwise(ids)):
                raise InvalidArgument(field=name, value=ids, expected="strictly ascending ids")
            if ids[0] < 0 or ids[-1] >= self.num_hidden_layers:
                raise InvalidArgument(
                    field=name, value=ids, expected=f"ids in [0, {self.num_hidden_layers})"
                )
        unknown = set(self.layer_ids) - set(self.moe_layer_ids)
        if unknown:
            raise _not_moe(sorted(unknown), self.moe_layer_ids)

    @classmethod
    def from_config(cls, config: object) -> ModelLayout:
        """Return the layout of all MoE layers of a model.

        Args:
            config: a config object of transformers (or of anything that has `to_dict()` or plain
                attributes), or a mapping as in `config.json`. Multi-modal models may give their
                whole config; the language model's is found in it.

        Returns:
            Columns for every MoE layer by absolute decoder layer id. `num_experts` counts the ids
            that a router can choose: the zero-computation experts of LongCat are among them, shared
            experts are not.

        Raises:
            ModelNotSupported: if the model is dense, or the config does not say which layers are
                MoE, names no expert count or top-k, or contradicts itself.
            InvalidArgument: if the numbers do not make a layout (top_k above num_experts).
        """
        return cls(*routing_of(config))

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Dtype of an id: uint8 up to 256 experts, uint16 above."""
        return id_dtype(self.num_experts)

    @property
    def row_bytes(self) -> int:
        """Bytes of one uncompressed row."""
        return len(self.layer_ids) * self.top_k * self.dtype.itemsize

    @cached_property
    def column(self) -> dict[int, int]:
        """Column by absolute layer id."""
        return {layer: i for i, layer in enumerate(self.layer_ids)}

    def columns(self, layer_ids: tuple[int, ...] | list[int]) -> list[int]:
        """Return the columns of the given layers.

        Raises:
            InvalidArgument: if one of them is not among `layer_ids`.
        """
        unknown = [i for i in layer_ids if i not in self.column]
        if unknown:
            raise _not_moe(unknown, self.layer_ids)
        return [self.column[i] for i in layer_ids]

    def select(self, layer_ids: tuple[int, ...]) -> ModelLayout:
        """Return the layout of the same model with `layer_ids` alone."""
        if layer_ids == self.layer_ids:
            return self
        return ModelLayout(
            layer_ids, self.num_hidden_layers, self.num_experts, self.top_k, self.moe_layer_ids
        )

    def to_proto(self) -> pb.RoutingLayout:
        """Return the message for the wire."""
        return pb.RoutingLayout(
            layer_ids=self.layer_ids,
            moe_layer_ids=self.moe_layer_ids,
            num_hidden_layers=self.num_hidden_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            id_type=pb.ID_TYPE_UINT8 if self.dtype.itemsize == 1 else pb.ID_TYPE_UINT16,
        )

    @classmethod
    def from_proto(cls, message: pb.RoutingLayout) -> ModelLayout:
        """Read the message from the wire.

        Raises:
            InvalidArgument: if the numbers contradict each other.
        """
        for name in ("layer_ids", "moe_layer_ids"):
            whole(f"number of {name}", len(getattr(message, name)), 0, MAX_LAYERS)
        layout = cls(
            tuple(message.layer_ids),
            message.num_hidden_layers,
            message.num_experts,
            message.top_k,
            tuple(message.moe_layer_ids),
        )
        expected = layout.to_proto().id_type
        if message.id_type != expected:
            raise InvalidArgument(
                field="id_type",
                value=message.id_type,
                expected=f"{pb.IdType.Name(expected)} for num_experts = {layout.num_experts}",
            )
        return layout


def _not_moe(unknown: list[int], known: tuple[int, ...]) -> InvalidArgument:
    """Return the error for layers that the layout does not have."""
    shown, remedy = unknown[:8], "ids count dense layers"
    expected = f"ids among {list(known)}"
    return InvalidArgument(
        f"layer_ids {shown} are not MoE layers; expected {expected}; {remedy}",
        field="layer_ids",
        value=shown,
        expected=expected,
        remedy=remedy,
    )


def _ids(field: str, values: Any) -> tuple[int, ...]:
    """Return whole numbers as a tuple, so that a layout can be hashed."""
    listed = items(field, values, "a sequence of int")
    return tuple(whole(f"{field}[{i}]", value, 0, MAX_LAYERS - 1) for i, value in enumerate(listed))
