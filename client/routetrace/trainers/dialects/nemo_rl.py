"""NeMo-RL (read: NVIDIA-NeMo/RL at 7ea279ab).

`routed_experts` is a signed [tokens, MoE layers, top_k] (all decoder layers are allowed too), in
batches [batch, seq, MoE layers, top_k] with padding on the right. A row of -1 is missing: the live
router decides for that token and layer. The last token and padding are `arange(top_k)`. A vLLM
worker sends it as a base64 envelope in `message.routed_experts`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.dialects._sample import array_of

MISSING = -1


def dtype_of(num_experts: int) -> np.dtype[np.signedinteger[Any]]:
    """Return the dtype of ids: int8 up to 128 experts, int16 up to 32768, else int32."""
    small = np.int8 if num_experts <= 2**7 else np.int16
    return np.dtype(small if num_experts <= 2**15 else np.int32)


def routed_experts(rows: Trace | SampleRows) -> npt.NDArray[np.signedinteger[Any]]:
    """Return `routed_experts` of a sample, one row per token.

    Returns:
        [N, MoE layers, top_k] of `dtype_of(num_experts)`: -1 where a cell is missing,
        `arange(top_k)` for the last token.
    """
    return _array(SampleRows.of(rows), None)


def envelope(rows: Trace | SampleRows) -> str:
    """Return `routed_experts` as in a chat message of a vLLM worker.

    The text is "nrlre1:int8:9x48x8:..." with the shape of `routed_experts`.
    """
    array = routed_experts(rows)
    shape = "x".join(map(str, array.shape))
    return f"nrlre1:{array.dtype.name}:{shape}:{base64.b64encode(array.data).decode('ascii')}"


def batch(
    samples: Sequence[Trace | SampleRows], seq_len: int
) -> npt.NDArray[np.signedinteger[Any]]:
    """Return `routed_experts` of a batch padded on the right.

    Returns:
        [batch, seq_len, MoE layers, top_k] of `dtype_of(num_experts)`: -1 where a cell is missing,
        `arange(top_k)` for last tokens and padding.

    Raises:
        InvalidArgument: if no sample is given, or one has more than seq_len tokens.
    """
    if not samples:
        raise InvalidArgument(field="samples", value=[], expected="one or more")
    return np.stack([_array(SampleRows.of(rows), seq_len) for rows in samples])


def _array(sample: SampleRows, seq_len: int | None) -> npt.NDArray[np.signedinteger[Any]]:
    if seq_len is None:
        seq_len = sample.num_tokens
    return array_of(
        sample,
        dtype_of(sample.layout.num_experts),
        "moe",
        num_rows=check.whole("seq_len", seq_len, sample.num_tokens),
        missing=MISSING,
        after=np.arange(sample.layout.top_k),
    )
