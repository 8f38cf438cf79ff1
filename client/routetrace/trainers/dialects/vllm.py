"""vLLM's inline answers (read: 0.32.0, `--enable-return-routed-experts`).

`choices[i].routed_experts` is base64 of an .npy file, [tokens - 1, layers, top_k] of uint8, uint16
or int32, without rows of prompt tokens before `routed_experts_prompt_start` of the request.
"""

from __future__ import annotations

import base64
import binascii
import io
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.trainers.dialects._sample import array_of, as_array, require_valid


def routed_experts(rows: Trace | SampleRows, *, prompt_start: int = 0) -> str:
    """Return the rows as in an answer of vLLM.

    Args:
        rows: rows of a sample of N tokens.
        prompt_start: first row, `routed_experts_prompt_start`.

    Returns:
        base64 of an .npy of [N - 1 - prompt_start, num_hidden_layers, top_k], uint8 up to 256
        experts, uint16 above; zeros in dense layers.

    Raises:
        Incomplete: if a cell is missing.
        InvalidArgument: if the sample has fewer rows.
    """
    sample = SampleRows.of(rows)
    require_valid(sample, "vLLM's answer")
    check.whole("prompt_start", prompt_start, 0, sample.num_tokens - 1)
    file = io.BytesIO()
    array = array_of(sample, sample.layout.dtype, "hidden")
    np.save(file, array[prompt_start:], allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def read_routed_experts(
    text: str, layout: ModelLayout, *, num_rows: int | None = None
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Decode an answer of vLLM, for comparison with `Trace.topk_ids`.

    Args:
        text: `choices[i].routed_experts`.
        layout: layout of the model.
        num_rows: required number of rows; None for any.

    Returns:
        [rows, MoE layers, top_k], uint8 up to 256 experts, uint16 above.

    Raises:
        InvalidArgument: if the text is malformed or does not fit the layout.
    """
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        data = file.read()
        if dtype.hasobject or len(data) != prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes of {dtype} {shape}")
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(
            field="text", value=str(error), expected="base64 of an .npy array of integers"
        ) from error
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    return as_array(array, layout, num_rows)
