"""SGLang's inline answers (read: `state_capturer/routed_experts.py` at 024911f2).

`meta_info["routed_experts"]` is base64 of flat int32 in C order, [tokens - 1, num_hidden_layers,
top_k], without rows before `routed_experts_start_len` of the request.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.dialects._sample import array_of, as_array, require_valid


def routed_experts(rows: Trace | SampleRows, *, start_len: int = 0) -> str:
    """Return the rows as in an answer of SGLang.

    Args:
        rows: rows of a sample of N tokens.
        start_len: first row, `routed_experts_start_len`.

    Returns:
        base64 of little-endian int32 [N - 1 - start_len, num_hidden_layers, top_k]; zeros in dense
        layers.

    Raises:
        Incomplete: if a cell is missing.
        InvalidArgument: if the sample has fewer rows.
    """
    sample = SampleRows.of(rows)
    require_valid(sample, "SGLang's answer")
    check.whole("start_len", start_len, 0, sample.num_tokens - 1)
    return base64.b64encode(array_of(sample, "<i4", "hidden")[start_len:].data).decode("ascii")


def read_routed_experts(
    text: str, layout: ModelLayout, *, num_rows: int | None = None
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Decode an answer of SGLang, for comparison with `Trace.topk_ids`.

    Args:
        text: `meta_info["routed_experts"]`.
        layout: layout of the model.
        num_rows: required number of rows; None for any.

    Returns:
        [rows, MoE layers, top_k], uint8 up to 256 experts, uint16 above.

    Raises:
        InvalidArgument: if the text is malformed or does not fit the layout.
    """
    row = layout.num_hidden_layers * layout.top_k
    try:
        data = base64.b64decode(text, validate=True)
        if len(data) % (4 * row):
            raise ValueError(f"{len(data)} bytes")
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(
            field="text",
            value=str(error),
            expected=f"base64 of int32, a multiple of {layout.num_hidden_layers} layers x "
            f"{layout.top_k} = {row} ids",
        ) from error
    shape = (-1, layout.num_hidden_layers, layout.top_k)
    return as_array(np.frombuffer(data, "<i4").reshape(shape), layout, num_rows)
