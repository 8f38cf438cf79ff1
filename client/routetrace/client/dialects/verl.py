"""verl (read: 0.9.1 from PyPI).

`AgentLoopOutput.routed_experts` is [prompt + output - 1, num_hidden_layers, top_k]; the agent loop
casts it to int16, and adds rows of zeros up to the number of tokens. Batches are
[batch, seq, num_hidden_layers, top_k] until `left_right_2_no_padding` makes them jagged.
`set_router_replay_data` looks layers up by their absolute number if there are as many as
`num_layers`, as here, and by their ordinal among MoE layers else.

The Megatron engine replays every row but the last of a sample (`build_r3_replay_mask`), so a
missing one would be expert 0, `top_k` times. VeOmni routes a row with an id twice live: zeros are
how it is told of a missing one, unless top_k is 1, which it refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.dialects._sample import SampleRows
from routetrace.client.micro_batch import MicroBatch, Sample
from routetrace.client.rows import RankRows
from routetrace.client.trace import RoutingTrace, ids_to_torch
from routetrace.v1.errors import InvalidArgument

Missing = Literal["raise", "zeros"]


def routed_experts(
    rows: RoutingTrace | SampleRows, *, missing: Missing = "raise"
) -> npt.NDArray[np.int16]:
    """`AgentLoopOutput.routed_experts` of a sample.

    Args:
        rows: of a sample of N tokens.
        missing: "zeros" leaves zeros in cells that are missing, which VeOmni routes live, as does
            Megatron if its mask is replaced by `replay_mask`.

    Returns:
        int16 [N - 1, num_hidden_layers, top_k]; zeros in dense layers.

    Raises:
        Incomplete: if a cell is missing, and `missing` is "raise".
        InvalidArgument: if the ids do not fit int16, or zeros are no filler since top_k is 1.
    """
    sample = SampleRows.of(rows)
    check.choice("missing", missing, ("raise", "zeros"))
    layout = sample.layout
    if layout.num_experts > 2**15:
        raise InvalidArgument(
            field="num_experts", value=layout.num_experts, expected="at most 32768: verl has int16"
        )
    if missing == "raise":
        sample.require_valid("verl")
    elif layout.top_k == 1:
        raise InvalidArgument(field="missing", value=missing, expected="'raise', as top_k is 1")
    return sample.array(np.int16, "hidden", missing=0)


def replay_mask(rows: RoutingTrace | SampleRows) -> npt.NDArray[np.bool_]:
    """Which tokens can be replayed: the `replay_mask` of `set_router_replay_data` for a sample.

    Returns:
        bool [N]: whether all layers of the token are there; False for the last one.
    """
    sample = SampleRows.of(rows)
    return np.append(sample.valid.all(axis=0), False)


def batch(
    samples: Sequence[RoutingTrace | SampleRows],
    starts: Sequence[int],
    seq_len: int,
    *,
    missing: Missing = "raise",
) -> npt.NDArray[np.int16]:
    """The batch's `routed_experts`, as `AgentLoopWorker` lays it out.

    Args:
        samples: in order.
        starts: the column of each one's first token: prompts are padded on the left, answers on
            the right, so it is `prompt_length` - tokens of its prompt.
        seq_len: `prompt_length + response_length`.
        missing: as in `routed_experts`.

    Returns:
        int16 [batch, seq_len, num_hidden_layers, top_k]; zeros where there is no row.

    Raises:
        Incomplete, InvalidArgument: as `routed_experts`; and if a sample does not fit.
    """
    arrays = [routed_experts(rows, missing=missing) for rows in samples]
    if not arrays or len(starts) != len(arrays):
        raise InvalidArgument(
            field="starts", value=list(starts), expected=f"as many as samples: {len(arrays)} > 0"
        )
    out = np.zeros((len(arrays), seq_len, *arrays[0].shape[1:]), np.int16)
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        check.whole(f"starts[{number}]", start, 0, seq_len - len(array) - 1)
        out[number, start : start + len(array)] = array
    return out


def micro_batch(samples: Iterable[Sample], tp_size: int = 1, cp_size: int = 1) -> MicroBatch:
    """A micro-batch as the Megatron engine lays it out (`preprocess_thd_engine`, without fp8).

    Args:
        samples: in order.
        tp_size: tensor parallel ranks.
        cp_size: context parallel ranks. Plan with `cp_layout="zigzag"`.

    Raises:
        InvalidArgument: naming what is wrong.
    """
    check.whole("tp_size", tp_size, 1)
    align = tp_size * check.whole("cp_size", cp_size, 1) * (2 if cp_size > 1 else 1)
    return MicroBatch.packed(samples, align=align)


def set_targets(routers: Iterable[tuple[int, Any]], rows: RankRows, *, device: Any = None) -> None:
    """Has routers replay this rank's rows, and route live where one is missing.

    Args:
        routers: `iter_model_routers(model)`: layer numbers, from 1, and what replays there.
        rows: of these layers and the rank's tokens.
        device: where the routers run; the CPU if None.

    Raises:
        InvalidArgument: if a layer is not among the rows.
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
