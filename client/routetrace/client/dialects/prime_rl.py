"""prime-rl (read: PrimeIntellect-ai/prime-rl at 559b4477).

`TrainingSample.routed_experts` is a `RoutedExperts(data, shape, dtype)` of one row for each token,
[tokens, num_hidden_layers, top_k]. prime-rl pads the last token and the batch with zeros, and has
no mask. Samples that are packed together must have one dtype: it goes by the model's experts here,
not by the largest id of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

from routetrace.client.dialects._sample import SampleRows
from routetrace.client.trace import RoutingTrace


class RoutedExperts(NamedTuple):
    """The fields of prime-rl's `RoutedExperts`, in order."""

    data: bytes
    """C-contiguous ids."""
    shape: list[int]
    """[tokens, num_hidden_layers, top_k]."""
    dtype: str
    """"uint8" up to 256 experts, "uint16" above."""


def routed_experts(rows: RoutingTrace | SampleRows) -> RoutedExperts:
    """`TrainingSample.routed_experts`: `RoutedExperts(*routed_experts(trace))`.

    Returns:
        N rows, the last one zeros, for a sample of N tokens.

    Raises:
        Incomplete: if a cell is missing.
    """
    sample = SampleRows.of(rows)
    sample.require_valid("prime-rl")
    array = sample.array(sample.layout.dtype, "hidden", num_rows=sample.num_tokens)
    return RoutedExperts(array.tobytes(), list(array.shape), array.dtype.name)
