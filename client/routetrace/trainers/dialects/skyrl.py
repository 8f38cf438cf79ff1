"""SkyRL (read: NovaSky-AI/SkyRL at a9564572).

`GeneratorOutput["rollout_expert_indices"]` is a list of arrays [rows, num_hidden_layers, top_k], of
the canonical dtype: uint8, int16 or int32 by the largest id present. A batch is padded on the left.
Tokens without a row have `arange(top_k)`, and True in `router_padding_mask`: they use these
experts, but do not count in expert bias accounting. Only the end of a sample can lack rows.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.dialects._sample import array_of, require_valid

Indices = npt.NDArray[np.integer[Any]]


class Packed(TypedDict):
    """Result of `pack_routed_experts` in SkyRL's /skyrl/v1/generate."""

    data: str
    """base64 of C-contiguous ids."""
    shape: list[int]
    """[rows, num_hidden_layers, top_k]."""
    dtype: str
    """"uint8", "int16" or "int32"."""


def rollout_expert_indices(rows: Trace | SampleRows) -> Indices:
    """Return an entry of `rollout_expert_indices`.

    Returns:
        [N - 1, num_hidden_layers, top_k] of the canonical dtype, for a sample of N tokens; zeros in
        dense layers.

    Raises:
        Incomplete: if a cell is missing.
    """
    sample = SampleRows.of(rows)
    require_valid(sample, "SkyRL")
    largest = int(sample.topk_ids.max(initial=0))
    wide = np.int16 if largest < 2**15 else np.int32
    return array_of(sample, np.uint8 if largest < 2**8 else wide, "hidden")


def packed(rows: Trace | SampleRows) -> Packed:
    """Return `routed_experts` as in an answer of SkyRL's vLLM server.

    Raises:
        Incomplete: if a cell is missing.
    """
    array = rollout_expert_indices(rows)
    data = base64.b64encode(array.data).decode("ascii")
    return Packed(data=data, shape=list(array.shape), dtype=array.dtype.name)


def batch(
    samples: Sequence[Trace | SampleRows], seq_len: int
) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Return `rollout_expert_indices` and `router_padding_mask` of a training batch.

    Args:
        samples: samples in order.
        seq_len: columns of the batch, which is padded on the left.

    Returns:
        [batch, seq_len, num_hidden_layers, top_k] of the widest dtype of the samples, and bool
        [batch, seq_len], True for tokens without a row: padding and last tokens.

    Raises:
        Incomplete: if a cell is missing.
        InvalidArgument: if no sample is given, or one has more than seq_len tokens.
    """
    arrays = _one_dtype(samples)
    indices = np.empty((len(arrays), seq_len, *arrays[0].shape[1:]), arrays[0].dtype)
    indices[:] = np.arange(indices.shape[-1])
    mask = np.ones(indices.shape[:2], np.bool_)
    for number, array in enumerate(arrays):
        check.whole("seq_len", seq_len, len(array) + 1)
        there = slice(seq_len - len(array) - 1, seq_len - 1)
        indices[number, there] = array
        mask[number, there] = False
    return indices, mask


def packed_batch(
    samples: Sequence[Trace | SampleRows],
) -> tuple[Indices, npt.NDArray[np.int32]]:
    """Return `values` and `cu_seqlens` of a `PackedTensor`, in place of a batch.

    As of its pull request 2235, read at a later version than the rest.

    Returns:
        Concatenated samples [tokens, num_hidden_layers, top_k] of the widest dtype, with
        `arange(top_k)` for last tokens; int32 [samples + 1], the boundaries of samples.

    Raises:
        Incomplete: if a cell is missing.
        InvalidArgument: if no sample is given.
    """
    arrays = _one_dtype(samples)
    cu_seqlens = np.cumsum([0, *(len(array) + 1 for array in arrays)], dtype=np.int32)
    values = np.empty((cu_seqlens[-1], *arrays[0].shape[1:]), arrays[0].dtype)
    values[:] = np.arange(values.shape[-1])
    for array, start in zip(arrays, cu_seqlens, strict=False):
        values[start : start + len(array)] = array
    return values, cu_seqlens


def _one_dtype(samples: Sequence[Trace | SampleRows]) -> list[Indices]:
    arrays = [rollout_expert_indices(rows) for rows in samples]
    if not arrays:
        raise InvalidArgument(field="samples", value=[], expected="one or more")
    widest = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return [array.astype(widest, copy=False) for array in arrays]
