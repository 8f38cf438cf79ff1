"""prime-rl (read: PrimeIntellect-ai/prime-rl at 559b4477).

`TrainingSample.routed_experts` is a `RoutedExperts(data, shape, dtype)` with one row per token,
[tokens, num_hidden_layers, top_k]. prime-rl pads the last token and the batch with zeros, and has
no mask. Samples packed together must have equal dtypes, so the dtype depends on the number of
experts of the model, not on the largest id of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.trainers.dialects._sample import array_of, require_valid


class RoutedExperts(NamedTuple):
    """The fields of prime-rl's `RoutedExperts`, in order."""

    data: bytes
    """C-contiguous ids."""
    shape: list[int]
    """[tokens, num_hidden_layers, top_k]."""
    dtype: str
    """"uint8" up to 256 experts, "uint16" above."""


def routed_experts(rows: Trace | SampleRows) -> RoutedExperts:
    """Return `TrainingSample.routed_experts`: `RoutedExperts(*routed_experts(trace))`.

    Returns:
        N rows, the last one zeros, for a sample of N tokens.

    Raises:
        Incomplete: if a cell is missing.
    """
    sample = SampleRows.of(rows)
    require_valid(sample, "prime-rl")
    array = array_of(sample, sample.layout.dtype, "hidden", num_rows=sample.num_tokens)
    return RoutedExperts(array.tobytes(), list(array.shape), array.dtype.name)
