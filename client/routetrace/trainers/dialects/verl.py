"""verl (read: 0.9.1 from PyPI).

`AgentLoopOutput.routed_experts` is [prompt + output - 1, num_hidden_layers, top_k]; the agent loop
casts it to int16 and pads it with rows of zeros to the number of tokens. Batches are
[batch, seq, num_hidden_layers, top_k] until `left_right_2_no_padding` makes them jagged.
`set_router_replay_data` indexes layers by absolute number if their count is `num_layers`, as here,
else by their ordinal among MoE layers.

The Megatron engine replays every row of a sample but the last (`build_r3_replay_mask`), so a
missing row would be expert 0, `top_k` times.

VeOmni uses the i-th column for the i-th router that runs. Only MoE layers have routers, so a model
with dense layers needs `axis="moe"`; after the forward pass the engine refuses another number of
columns. It routes rows with a repeated id live: zeros mark a missing row, unless top_k is 1, which
it refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.micro_batch import MicroBatch, Sample
from routetrace.client.rows import Rows
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace, ids_to_torch
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.dialects._sample import LayerAxis, array_of, require_valid

Missing = Literal["raise", "zeros"]


def routed_experts(
    rows: Trace | SampleRows, *, missing: Missing = "raise", axis: LayerAxis = "hidden"
) -> npt.NDArray[np.int16]:
    """Return `AgentLoopOutput.routed_experts` of a sample.

    Args:
        rows: rows of a sample of N tokens.
        missing: "zeros" leaves zeros in missing cells, which VeOmni routes live, as does Megatron
            if its mask is replaced by `replay_mask`.
        axis: "hidden", every decoder layer, or "moe", MoE layers only, for VeOmni with a model that
            has dense layers. Megatron accepts both.

    Returns:
        int16 [N - 1, num_hidden_layers, top_k], zeros in dense layers; or [N - 1, MoE layers,
        top_k].

    Raises:
        Incomplete: if a cell is missing, and `missing` is "raise".
        InvalidArgument: if ids exceed int16, or zeros cannot mark missing rows as top_k is 1.
    """
    sample = SampleRows.of(rows)
    check.choice("missing", missing, ("raise", "zeros"))
    layout = sample.layout
    if layout.num_experts > 2**15:
        raise InvalidArgument(
            field="num_experts", value=layout.num_experts, expected="at most 32768: verl has int16"
        )
    if missing == "raise":
        require_valid(sample, "verl")
    elif layout.top_k == 1:
        raise InvalidArgument(field="missing", value=missing, expected="'raise', as top_k is 1")
    check.choice("axis", axis, ("hidden", "moe"))
    return array_of(sample, np.int16, axis, missing=0)


def replay_mask(rows: Trace | SampleRows) -> npt.NDArray[np.bool_]:
    """Return the `replay_mask` of `set_router_replay_data` for a sample.

    Returns:
        bool [N], True where all layers of the token are present; False for the last token.
    """
    sample = SampleRows.of(rows)
    return np.append(sample.valid.all(axis=0), False)


def batch(
    samples: Sequence[Trace | SampleRows],
    starts: Sequence[int],
    seq_len: int,
    *,
    missing: Missing = "raise",
    axis: LayerAxis = "hidden",
) -> npt.NDArray[np.int16]:
    """Return `routed_experts` of a batch in the layout of `AgentLoopWorker`.

    Args:
        samples: samples in order.
        starts: column of the first token of each sample: `prompt_length` - tokens of its prompt, as
            prompts are padded on the left and answers on the right.
        seq_len: `prompt_length + response_length`.
        missing: as in `routed_experts`.
        axis: as in `routed_experts`.

    Returns:
        int16 [batch, seq_len, layers, top_k]; zeros for tokens without a row.

    Raises:
        Incomplete, InvalidArgument: as `routed_experts`, or if a sample does not fit.
    """
    check.whole("seq_len", seq_len, 1)
    arrays = [routed_experts(rows, missing=missing, axis=axis) for rows in samples]
    if not arrays or len(starts) != len(arrays):
        raise InvalidArgument(
            field="starts", value=list(starts), expected=f"one per sample: {len(arrays)} > 0"
        )
    out = np.zeros((len(arrays), seq_len, *arrays[0].shape[1:]), np.int16)
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        if seq_len <= len(array):
            count, most = len(array) + 1, f"at most seq_len = {seq_len}"
            raise InvalidArgument(
                f"samples[{number}] has {count} tokens; expected {most}",
                field=f"samples[{number}].num_tokens",
                value=count,
                expected=most,
            )
        check.whole(f"starts[{number}]", start, 0, seq_len - len(array) - 1)
        out[number, start : start + len(array)] = array
    return out


def micro_batch(samples: Iterable[Sample], tp_size: int = 1, cp_size: int = 1) -> MicroBatch:
    """Return a micro-batch in the layout of the Megatron engine.

    See `preprocess_thd_engine`, without fp8.

    Args:
        samples: samples in order.
        tp_size: tensor parallel ranks.
        cp_size: context parallel ranks; plan with `cp_layout="zigzag"`.

    Raises:
        InvalidArgument: if an argument is invalid.
    """
    check.whole("tp_size", tp_size, 1)
    align = tp_size * check.whole("cp_size", cp_size, 1) * (2 if cp_size > 1 else 1)
    return MicroBatch.packed(samples, align=align)


def set_targets(routers: Iterable[tuple[int, Any]], rows: Rows, *, device: Any = None) -> None:
    """Make routers replay the rows of this rank, or route live without a row.

    Args:
        routers: `iter_model_routers(model)`: layer numbers from 1, and their replay objects.
        rows: rows of these layers and of the tokens of this rank.
        device: device of the routers; None for the CPU.

    Raises:
        InvalidArgument: if the rows lack a layer.
    """
    import torch

    for number, router in routers:
        if number - 1 not in rows.layer_ids:
            raise InvalidArgument(
                field="routers", value=f"layer {number - 1}", expected=f"among {rows.layer_ids}"
            )
        index = rows.layer_ids.index(number - 1)
        ids = ids_to_torch(rows.topk_ids[index], rows.plan.layout.num_experts, device, torch.int64)
        valid = torch.from_numpy(rows.valid[index])
        router.set_target_indices(ids, replay_mask=valid if device is None else valid.to(device))
