"""Megatron-Core's routers, replayed: each row of each pass is the one that it must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from trainer_runs import megatron_cpu  # isort: skip  # first of all

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from routetrace.client.plan import FetchPlan, MicroBatch, Sample
from routetrace.client.rows import Rows
from routetrace.common.layout import ModelLayout
from routetrace.trainers.megatron import local_rank, replay
from support.ranks.gloo_ranks import run_ranks
from trainer_runs.megatron_model import (
    EXPERTS,
    LAYERS,
    MOE_LAYERS,
    TOP_K,
    VOCABULARY,
    Observer,
    make_chunks,
    make_config,
)

MICRO_BATCHES = 4
_SLOTS, _SLOT_LEN = 4, 64  # of a micro-batch, for samples
_PADDED_LEN, _PACKED_LEN = 64, 192
_LAYOUT = ModelLayout(MOE_LAYERS, LAYERS, EXPERTS, TOP_K)


@dataclass(frozen=True)
class Layout:
    """Layout of a model and its tokens over ranks; remaining ranks are data parallel."""

    ranks: int = 4
    tp: int = 1
    """Tensor parallel, with sequence parallelism."""
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    packed: bool = False
    recompute: str = ""
    """"full": whole layers; "moe": MoE layers."""

    @property
    def name(self) -> str:
        sizes = {n: getattr(self, n) for n in ("tp", "pp", "vpp", "cp", "ep")}
        sizes["dp"] = self.ranks // (self.tp * self.pp * self.cp)
        words = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1]
        words.append("packed" if self.packed else "padded")
        if self.recompute:
            words.append(f"recompute {self.recompute}")
        return f"Megatron {' '.join(words)}"


LAYOUTS = (
    Layout(),
    Layout(ep=4, packed=True, recompute="full"),
    Layout(tp=2),
    Layout(tp=4, packed=True, recompute="moe"),
    Layout(pp=2, recompute="moe"),
    Layout(pp=2, vpp=2, recompute="full"),
    Layout(tp=2, pp=2, vpp=2, packed=True),
    Layout(cp=2, recompute="full"),
    Layout(cp=4, packed=True),
    Layout(tp=2, cp=2, packed=True, recompute="full"),
    Layout(pp=2, cp=2, recompute="moe"),
    Layout(tp=2, ep=2, recompute="full"),
    Layout(ranks=8, tp=2, pp=2, vpp=2, cp=2, packed=True, recompute="full"),
)


def run() -> Iterator[tuple[str, int, int, int, int]]:
    """(layout, ranks, rows compared, wrong, live rows) of each layout."""
    for world, group in groupby(LAYOUTS, key=lambda layout: layout.ranks):
        layouts = list(group)
        for layout, ranks in zip(
            layouts, zip(*run_ranks(world, _rank, layouts, timeout=200), strict=True), strict=True
        ):
            _check_complete(layout, ranks)
            rows, wrong, live = (sum(found[i] for found in ranks) for i in range(3))
            yield layout.name, world, rows, wrong, live


def _check_complete(layout: Layout, ranks: Any) -> None:
    """Each token came to each layer in each pass, on one rank: nothing was left out."""
    passes = 3 if layout.recompute else 2
    for replica in {number for _, _, _, number, _, _ in ranks}:
        seen = sum(counts for _, _, _, number, counts, _ in ranks if number == replica)
        due = next(tokens for _, _, _, number, _, tokens in ranks if number == replica)
        for layer in MOE_LAYERS:
            if not np.array_equal(seen[layer, 1:], passes * due[1:]):
                raise AssertionError(f"{layout.name}: layer {layer} did not see each token")


def _rank(_rank: int, layouts: list[Layout]) -> list[Any]:
    results = []
    with megatron_cpu.OnCpu():
        for layout in layouts:
            initialize(layout)
            results.append(_check(layout))
            parallel_state.destroy_model_parallel()
    return results


def initialize(layout: Layout) -> None:
    """Make the groups of ranks of a layout."""
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
    )


def model_of(layout: Layout) -> Any:
    """Return the model chunks of this rank."""
    config = make_config(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # Else an interleaved schedule wants more than two stages: its messages would get mixed up.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        # Streams would keep what is being sent; gloo sends what is there by then.
        deallocate_pipeline_outputs=layout.vpp == 1,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        **{
            "": {},
            "full": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        }[layout.recompute],
    )
    return make_chunks(config, own_tokens=layout.packed or layout.cp > 1)


def _check(layout: Layout) -> Any:
    torch.manual_seed(1)
    replica = parallel_state.get_data_parallel_rank()
    chunks = model_of(layout)
    observer = Observer(chunks)
    truth = Truth(np.random.default_rng([7, replica]))
    batches = [Batch(layout, truth, number) for number in range(MICRO_BATCHES)]
    rank = local_rank(chunks)
    rows = [truth.rows(FetchPlan.make(_LAYOUT, b.described, rank), b.number) for b in batches]
    for forward_only in (True, False):
        with replay(chunks, iter(rows) if forward_only else rows):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in chunks],
                model=chunks,
                num_microbatches=MICRO_BATCHES,
                seq_length=batches[0].tokens.shape[1],
                micro_batch_size=batches[0].tokens.shape[0],
                forward_only=forward_only,
            )
    for chunk in chunks:
        for name, weight in chunk.decoder.named_parameters():
            if name.endswith("router.weight") and not weight.grad.abs().sum() > 0:
                raise AssertionError(f"{layout.name}: no gradient at {name}")
    return *truth.compare(observer), replica, truth.counts(observer), truth.given


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    later = torch.ones(1, 1, _PADDED_LEN, _PADDED_LEN, dtype=torch.bool).triu(1)
    output = model(batch.local, batch.local, later, packed_seq_params=batch.packed)
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return output.float().pow(2).mean(), {}


class Truth:
    """Made-up rows of every token, by its serial number."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        order = rng.random((VOCABULARY, LAYERS, EXPERTS)).argsort(-1)
        self.ids = order[..., :TOP_K].astype(np.uint8)
        self.valid = rng.random((VOCABULARY, LAYERS)) < 0.9
        self.given = np.zeros(VOCABULARY, np.int64)
        self.valid[0] = False  # padding

    def serial(self, batch: int, slot: Any, position: Any) -> Any:
        return 1 + (batch * _SLOTS + slot) * _SLOT_LEN + position

    def rows(self, plan: FetchPlan, batch: int) -> Rows:
        """Return the answer of a server with these rows; random ids for missing rows."""
        serials = np.where(plan.planned, self.serial(batch, plan.sample_of, plan.position_of), 0)
        layers = list(plan.layer_ids)
        valid = self.valid[serials][:, layers].T
        ids = np.where(valid[..., None], self.ids[serials][:, layers].swapaxes(0, 1), 255)
        return Rows(
            plan=plan,
            topk_ids=ids.astype(np.uint8),
            valid=np.ascontiguousarray(valid),
            layer_ids=tuple(layers),
        )

    def compare(self, observer: Observer) -> tuple[int, int, int]:
        """(rows, wrong, live)."""
        rows = wrong = live = 0
        for seen in observer.seen:
            serials = seen.serials.numpy()
            valid = self.valid[serials, seen.layer]
            chosen = np.zeros((len(serials), EXPERTS), bool)
            np.put_along_axis(chosen, self.ids[serials, seen.layer], True, axis=1)
            expected = np.where(valid[:, None], chosen, seen.live.numpy())
            wrong += int((expected != seen.used.numpy()).any(axis=1).sum())
            rows += len(serials)
            live += int((~valid).sum())
        return rows, wrong, live

    def counts(self, observer: Observer) -> np.ndarray:
        """[layers, serials]: how often a layer has seen a token."""
        counts = np.zeros((LAYERS, VOCABULARY), np.int64)
        for seen in observer.seen:
            counts[seen.layer] += np.bincount(seen.serials.numpy(), minlength=VOCABULARY)
        return counts


class Batch:
    """A micro-batch, as a trainer makes it: token ids are serial numbers, 0 is padding."""

    def __init__(self, layout: Layout, truth: Truth, number: int) -> None:
        self.number = number
        lengths = truth.rng.integers(1, (40 if layout.packed else _PADDED_LEN) + 1, _SLOTS)
        samples = [Sample.of(f"s{slot}", int(n)) for slot, n in enumerate(lengths)]
        self.texts = texts = [
            truth.serial(number, slot, np.arange(n)) for slot, n in enumerate(lengths)
        ]
        for text in texts:
            truth.given[text] += 1
            truth.valid[text[-1]] = False  # the last token was never forwarded
        cp, rank = layout.cp, parallel_state.get_context_parallel_rank()
        if layout.packed:
            align = 2 * cp * layout.tp
            self.described = MicroBatch.packed(samples, align=align, total_len=_PACKED_LEN)
            ends = np.cumsum([0, *(-(-lengths // align) * align)])
            self.tokens = np.zeros((1, _PACKED_LEN), np.int64)
            for start, text in zip(ends[:-1], texts, strict=True):
                self.tokens[0, start : start + len(text)] = text
            bounds = sorted({*ends.tolist(), _PACKED_LEN})
            self.local = torch.from_numpy(self.tokens)[:, _packed_part(bounds, cp, rank)]
            cu = torch.tensor(bounds, dtype=torch.int32)
            self.packed = PackedSeqParams("thd", cu, cu, cu, cu, _PACKED_LEN, _PACKED_LEN)
        else:
            self.described = MicroBatch.padded(samples, _PADDED_LEN, padding_side="right")
            self.tokens = np.zeros((_SLOTS, _PADDED_LEN), np.int64)
            for lane, text in zip(self.tokens, texts, strict=True):
                lane[: len(text)] = text
            whole = {"tokens": torch.from_numpy(self.tokens)}
            self.local = get_batch_on_this_cp_rank(whole)["tokens"]
            self.packed = None


def _packed_part(bounds: list[int], cp: int, rank: int) -> torch.Tensor:
    """Which tokens of packed sequences a context parallel rank has, written out: Megatron asks
    Transformer Engine for it, which needs a GPU."""
    kept = []
    for start, stop in pairwise(bounds):
        parts = np.array_split(np.arange(start, stop), 2 * cp)
        kept += [parts[rank], parts[2 * cp - 1 - rank]]
    return torch.from_numpy(np.concatenate(kept)) if cp > 1 else torch.arange(bounds[-1])
