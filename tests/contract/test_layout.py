"""Layouts: numbers that contradict each other, wrong types, equality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

GOOD: dict[str, Any] = {
    "layer_ids": (1, 2),
    "num_hidden_layers": 4,
    "num_experts": 8,
    "top_k": 2,
    "moe_layer_ids": (1, 2, 3),
}


def test_sequences_and_numbers_of_numpy_make_the_same_layout() -> None:
    plain = ModelLayout(**GOOD)
    for changes in (
        {"layer_ids": [1, 2]},
        {"layer_ids": np.array([1, 2]), "moe_layer_ids": range(1, 4)},
        {"num_experts": np.int64(8), "top_k": np.uint8(2)},
    ):
        other = ModelLayout(**{**GOOD, **changes})
        assert other == plain
        assert hash(other) == hash(plain)
        assert other.to_proto() == plain.to_proto()
        assert all(type(i) is int for i in (*other.layer_ids, *other.moe_layer_ids, other.top_k))
    assert ModelLayout([0, 2], 3, 8, 2).moe_layer_ids == (0, 2)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *((name, "8") for name in ("num_experts", "top_k", "num_hidden_layers")),
        *((name, True) for name in ("num_experts", "top_k", "num_hidden_layers")),
        *((name, 2.0) for name in ("num_experts", "top_k", "num_hidden_layers")),
        *((name, None) for name in ("num_experts", "top_k", "num_hidden_layers")),
        *((name, 0) for name in ("num_experts", "top_k", "num_hidden_layers")),
        ("num_experts", 65537),
        ("top_k", 9),
        ("top_k", 1025),
        ("num_hidden_layers", 4097),
        *((name, "12") for name in ("layer_ids", "moe_layer_ids")),
        *((name, 5) for name in ("layer_ids", "moe_layer_ids")),
        *((name, [1, 2.5]) for name in ("layer_ids", "moe_layer_ids")),
        *((name, (2, 1)) for name in ("layer_ids", "moe_layer_ids")),
        *((name, (1, 1)) for name in ("layer_ids", "moe_layer_ids")),
        *((name, (1, 4)) for name in ("layer_ids", "moe_layer_ids")),
        *((name, (-1, 2)) for name in ("layer_ids", "moe_layer_ids")),
        ("layer_ids", ()),
        ("layer_ids", (0, 1)),
    ],
)
def test_what_is_wrong_is_named(field: str, wrong: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ModelLayout(**{**GOOD, field: wrong})
    assert caught.value.field.partition("[")[0] == field
    assert caught.value.expected
