"""Rows of a forward pass: taken from SGLang's own capturer, on its own streams.

SGLang's `RoutedExpertsCapturer` collects the ids of all layers in one device buffer, before they
are mapped to physical experts, also where CUDA graphs are replayed. Its slicing for data-parallel
attention and DeepEP is kept; its table of all slots in host memory is not, unless SGLang's own
return of routed experts is on. A tap copies the rows of the capturer after a pass: one copy on the
stream of the pass. SGLang brings the copy to the host with the sampled tokens of the pass.

After the copy the buffer is poisoned, so that a layer which does not write in a later pass is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.engines.sglang import seams
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

#: Id of a cell that no router wrote, as a signed integer.
UNWRITTEN = -1

#: Dtypes that torch computes with, of the size of an id. Ids of 16 bits are read as unsigned later.
_DTYPES = {1: torch.uint8, 2: torch.int16}


class PassRows:
    """Tensors of one pass, on their way to the host as SGLang's own output would be.

    SGLang calls `map_device_tensors`, or `copy_to_cpu` before 0.5.15, where it copies, and
    `finalize` once the copies have arrived, in the order of the passes.

    Args:
        rows: [n, L, K] ids.
        slots: [n] KV slots of the rows.
        indexes: other index tensors that the plan of the pass refers to.
        native: output of SGLang's own capture.
        deliver: called with this object by `finalize`.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        indexes: list[torch.Tensor],
        native: Any,
        deliver: Callable[[PassRows], None],
    ) -> None:
        self._tensors = [rows, slots, *indexes]
        self._outcome: torch.Tensor | None = None
        self._native = native
        self._deliver = deliver

    def accept(self, accepted: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the rows of accepted drafts, in a pass that verified trees of one size.

        Args:
            accepted: [m, d] rows on the accepted path of each request, -1 behind its end.
            firsts: [m] positions of the roots.
            counts: [m] numbers of accepted tokens, roots included.
        """
        rows, slots = self._tensors[:2]
        requests, depth = accepted.shape
        self._tensors[0] = rows.index_select(0, accepted.clamp(min=0).flatten().long())
        # The KV of the path moves to the front.
        self._tensors[1] = slots.view(requests, -1)[:, :depth].reshape(-1)
        self._outcome = torch.stack([firsts.long(), counts.long()])

    def map_device_tensors(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Start copies to the host."""
        if self._native is not None:
            _map_tensors(self._native, copy)
        self._tensors = [copy(tensor) for tensor in self._tensors]
        if self._outcome is not None:
            self._outcome = copy(self._outcome)

    def copy_to_cpu(self) -> None:
        """Start copies to the host on the stream of the pass."""
        self.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def finalize(self) -> None:
        """Deliver the pass: its copies have arrived."""
        if self._native is not None:
            self._native.finalize()
        self._deliver(self)

    def fetch(self) -> None:
        """Wait for tensors that no `map_device_tensors` has copied, on the stream of the pass."""
        if not self._tensors[0].is_cpu:
            self._tensors = [tensor.cpu() for tensor in self._tensors]
            if self._outcome is not None:
                self._outcome = self._outcome.cpu()

    def outcome(self) -> npt.NDArray[np.int64] | None:
        """Return [2, m] positions of roots and numbers of accepted tokens; None without drafts."""
        return None if self._outcome is None else self._outcome.numpy()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return rows, slots and the other indexes, which are on the host."""
        return [tensor.numpy() for tensor in self._tensors]


class Tap:
    """Access to the capturer of one model runner.

    Args:
        runner: SGLang's `ModelRunner`, its capturer made, its graphs not.
        layout: columns of the rows.
        num_drafts: tokens that a pass verifies of one request, 1 without speculation.

    Raises:
        InvalidArgument: if the capturer and the layout contradict each other.
    """

    def __init__(self, runner: Any, layout: ModelLayout, num_drafts: int = 1) -> None:
        module = seams.found(seams.CAPTURER.places[0])
        capturer = module.get_global_experts_capturer()
        self.native = capturer is not None
        if capturer is None:
            capturer = _without_table(module.RoutedExpertsCapturer, runner)
            module.set_global_experts_capturer(capturer)
        if capturer.topk_size != layout.top_k or capturer.num_layers <= max(layout.layer_ids):
            raise InvalidArgument(
                field="model",
                value=f"{capturer.num_layers} layers of {capturer.topk_size} experts a token",
                expected=f"{layout.num_hidden_layers} of {layout.top_k}, as its configuration says",
            )
        self._capturer = capturer
        self._layer_ids = layout.layer_ids
        self._inner = capturer.on_forward_end
        self._num_tokens = seams.NUM_TOKENS.attribute
        self._dtype = _DTYPES[layout.dtype.itemsize]
        if not self.native:
            # Its int32 holds nothing more, and would be copied four times as long.
            buffer = capturer.device_cache.buffer
            capturer.device_cache.buffer = torch.empty_like(buffer, dtype=self._dtype)
        self._make_room(int(runner.max_running_requests) * num_drafts)
        kind = capturer.device_cache.buffer.dtype
        self._unwritten = UNWRITTEN if kind.is_signed else torch.iinfo(kind).max
        self.poison()
        every = layout.layer_ids == tuple(range(capturer.num_layers))
        self._layers = None if every else torch.tensor(layout.layer_ids, device=runner.device)
        if layout.top_k == 1 and layout.num_experts > np.iinfo(layout.dtype).max:
            # Otherwise an unwritten cell has an id out of range, or one repeated in its top-k.
            raise InvalidArgument(
                field="model",
                value=f"{layout.num_experts} experts, one a token",
                expected="an id that marks cells which no router wrote",
            )

    def _make_room(self, num_rows: int) -> None:
        """Have room for the rows of a pass: SGLang does not count drafts."""
        buffer = self._capturer.device_cache.buffer
        if len(buffer) < num_rows:
            self._capturer.device_cache.buffer = buffer.new_zeros((num_rows, *buffer.shape[1:]))

    def on_forward_end(self, hook: Callable[[Any, torch.Tensor, torch.Tensor, Any], Any]) -> None:
        """Call `hook` after each pass, on its stream.

        Args:
            hook: called with SGLang's `ForwardBatch`, the ids [n, L, K] and slots [n] of its
                tokens, both private, and the output of SGLang's own capture (or None); returns the
                output that SGLang carries to `finalize`.
        """

        def on_forward_end(
            forward_batch: Any,
            can_run_graph: bool,
            cuda_graph_batch: int | None,
            no_copy_to_cpu: bool = False,
        ) -> Any:
            native = None
            if self.native:
                native = self._inner(forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu)
                if native is not None and self._is_part(native):
                    _map_tensors(native, torch.clone)  # before the buffer is poisoned
            # SGLang 0.5.16 and older have slots of one kind.
            slots = getattr(forward_batch, "out_cache_loc_virtual", None)
            if slots is None:
                slots = forward_batch.out_cache_loc
            if slots is not None:
                # Without that number ranks that pad are refused.
                slots = slots[: getattr(forward_batch, self._num_tokens, None)]
            if slots is None or slots.numel() == 0:
                self.poison()  # a pass of other ranks may have written
                return native
            rows = self._capturer._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)
            rows = rows[: len(slots)]  # batches of kernels may be padded, too
            if self._layers is not None:
                rows = rows.index_select(1, self._layers)
            rows = rows.to(self._dtype, copy=True)
            self.poison()
            return hook(forward_batch, rows, slots.clone(), native)

        self._capturer.on_forward_end = on_forward_end

    def _is_part(self, native: Any) -> bool:
        """Whether SGLang's output is a part of the buffer, as in 0.5.15, and no copy of it."""
        buffer = self._capturer.device_cache.buffer.untyped_storage().data_ptr()
        return any(
            isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == buffer
            for value in vars(native).values()
        )

    def unwritten_layers(self) -> list[int]:
        """Return the MoE layers none of whose cells was written since `poison`; waits for them."""
        buffer = self._capturer.device_cache.buffer
        written = (buffer != self._unwritten).any(dim=2).any(dim=0).tolist()
        return [layer for layer in self._layer_ids if not written[layer]]

    def ignore(self) -> None:
        """Take no rows, on a rank that captures for the others alone."""
        if not self.native:
            # SGLang's own method would write into the table that was left out.
            self._capturer.on_forward_end = lambda *_, **__: None

    def poison(self) -> None:
        """Mark all cells as not written."""
        self._capturer.device_cache.buffer.fill_(self._unwritten)


def _map_tensors(native: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the tensors of SGLang's own output by copies."""
    for name, value in list(vars(native).items()):
        if isinstance(value, torch.Tensor):
            setattr(native, name, copy(value))


def _without_table(kind: Any, runner: Any) -> Any:
    """Return a capturer whose table in host memory has one slot, so that it costs nothing."""
    shared = getattr(runner.model, "shared_experts_config", None)  # not before 0.5.23
    if shared is not None:
        num_shared = shared.num_fused_shared_experts
    elif runner.server_args.disable_shared_experts_fusion:
        num_shared = 0
    else:
        num_shared = getattr(runner.model, "num_fused_shared_experts", 0)  # few models have it
    return kind(
        runner.model_config,
        num_tokens=1,
        max_running_requests=runner.max_running_requests,
        num_fused_shared_experts=num_shared,
        device=runner.device,
    )
