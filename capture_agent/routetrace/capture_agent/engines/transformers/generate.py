"""Rows and positions of one call of `generate()` of transformers, sequence by sequence.

Positions are proven, not assumed. A pass has a start column in the batch (the length of the KV
cache) and input tokens; after the sampling step `generate` shows the sequences. A row is reported
only where the inputs up to it equal the sequence, which excludes padding, rejected candidates of
assisted decoding and sequences that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import Cache, StoppingCriteria

from routetrace.capture_agent.engines.capturer import PendingRows, Rows
from routetrace.capture_agent.engines.router_taps import PlaceUnknown, RouterTaps

if TYPE_CHECKING:
    from routetrace.capture_agent import CaptureAgent


#: The KV cache among the inputs of a pass: since transformers 5.24, and before.
_CACHE_NAMES = ("cache", "past_key_values")


def cache_among(inputs: Mapping[str, Any]) -> Any:
    """Return the KV cache among keyword arguments of a model or of `generate`, or None.

    It is found by its names, then by its type, since releases of transformers rename it.
    """
    for name in _CACHE_NAMES:
        if inputs.get(name) is not None:
            return inputs[name]
    return next((value for value in inputs.values() if isinstance(value, Cache)), None)


class _Pass(NamedTuple):
    start: int
    """Column of the batch at which the pass starts."""
    tokens: torch.Tensor
    """Input tokens, [batch, width]."""
    pending: PendingRows


class GenerateCall(StoppingCriteria):  # type: ignore[misc]
    """Listener of the passes of one call, and stopping criterion that reads their results.

    `generate` keeps a grid of tokens [batch, columns]. A pass computes some columns of all rows of
    the grid. The library calls the last stopping criterion, this one, with the grid after every
    sampling step.

    Args:
        agent: takes requests and rows.
        taps: of the model.
        prompts: token ids [batch, columns], padding included.
        mask: False at padding, [batch, columns].
        own: criteria called here in place of the library, each once per step.
        mirrored: criteria that the library calls too, and that end single sequences.
        tells_tokens: whether tokens determine the rows, and are reported.
    """

    def __init__(
        self,
        agent: CaptureAgent,
        taps: RouterTaps,
        prompts: npt.NDArray[np.integer[Any]],
        mask: npt.NDArray[np.bool_],
        own: list[StoppingCriteria],
        mirrored: list[StoppingCriteria],
        *,
        tells_tokens: bool,
    ) -> None:
        self._agent = agent
        self._taps = taps
        self._prompts = [row[real].tolist() for row, real in zip(prompts, mask, strict=True)]
        self._tells_tokens = tells_tokens
        self._mask = mask
        self._positions = mask.cumsum(axis=1) - 1
        self._own = own
        self._mirrored = mirrored
        # The library stops sampling for a sequence that has ended only with an end token.
        self._freezes = any(hasattr(c, "eos_token_id") for c in (*own, *mirrored))
        if any(hasattr(c, "eos_token_id") for c in own):
            self.eos_token_id = True  # the library looks for the attribute, too
        self._handles: list[int] = []
        self._running = np.ones(len(mask), dtype=bool)
        self._stopped = np.zeros(len(mask), dtype=bool)
        self._committed = 0
        self._starting: tuple[int, torch.Tensor] | None = None
        self._passes: list[_Pass] = []
        self._grid: torch.Tensor | None = None
        self._lost = False

    def begin(
        self,
        request_ids: Sequence[str],
        labels: Sequence[Mapping[str, str]] | None,
        num_cached_columns: int,
    ) -> None:
        """Begin the requests at the agent.

        Columns in the caller's KV cache are not computed again: their rows are missing here, and
        are in the traces of the calls that computed them.
        """
        self._committed = num_cached_columns
        for i, request_id in enumerate(request_ids):
            handle = self._agent.begin(
                request_id,
                prompt_len=len(self._prompts[i]),
                labels=None if labels is None else dict(labels[i]),
                prompt_token_ids=self._prompts[i] if self._tells_tokens else None,
            )
            self._handles.append(handle)

    def before(self, inputs: Mapping[str, Any]) -> None:
        """Store the input tokens of the pass and its start column."""
        self._starting = None
        tokens, cache = inputs.get("input_ids"), cache_among(inputs)
        known = self._mask.shape[1] if self._grid is None else self._grid.shape[1]
        if tokens is None:
            raise _unknown(inputs, "a pass without token ids", "input_ids among its inputs")
        if len(tokens) != len(self._mask):
            raise ValueError(f"a pass over {len(tokens)} sequences, expected {len(self._mask)}")
        if cache is None and tokens.shape[1] < known:
            # Without a cache a pass computes all columns again.
            given = f"a pass over {tokens.shape[1]} of {known} columns without a KV cache"
            raise _unknown(
                inputs, given, "a transformers.Cache among its inputs, or use_cache=False"
            )
        self._starting = (0 if cache is None else int(cache.get_seq_length()), tokens)

    def after(self, pending: PendingRows) -> None:
        """Keep the rows until the next sampling step."""
        if self._starting is not None:
            self._passes.append(_Pass(*self._starting, pending))

    def failed(self) -> None:
        """Report no more rows: the rest of the traces is missing."""
        self._lost = True
        self._passes.clear()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences of the grid `input_ids` have ended, after a sampling step."""
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for criterion in self._own:
            ended = ended | criterion(input_ids, scores, **kwargs)
        self._taps.shield(self, lambda: self._advance(input_ids, ended, scores, kwargs))
        return ended

    def _advance(self, grid: Any, ended: torch.Tensor, scores: Any, kwargs: dict[str, Any]) -> None:
        """Report the rows of the passes since the last call; finish sequences that have ended."""
        self._grid = grid
        for criterion in self._mirrored:
            ended = ended | criterion(grid, scores, **kwargs)
        passes, self._passes = self._passes, []
        for one in passes:
            self._commit(one, grid)
        self._stopped |= ended.cpu().numpy()
        if self._freezes:
            for i in np.flatnonzero(self._running & self._stopped):
                self._finish(int(i), "stop", grid)

    def _commit(self, one: _Pass, grid: torch.Tensor) -> None:
        # The last column was sampled and not yet forwarded: N tokens have N - 1 rows.
        batch, stop = len(grid), min(one.start + one.tokens.shape[1], grid.shape[1] - 1)
        columns = np.arange(one.start, stop)
        same = one.tokens[:, : len(columns)].to(grid.device) == grid[:, one.start : stop]
        keep = same.cumprod(dim=1).bool().cpu().numpy()
        keep &= self._running[:, None] & (columns >= self._committed)
        self._committed = max(self._committed, stop)
        width = self._mask.shape[1]
        prompt = columns < width
        keep[:, prompt] &= self._mask[:, columns[prompt]]
        counts = keep.sum(axis=1)
        if self._lost or not counts.any():
            return
        first = columns[keep.argmax(axis=1)]
        generated = self._positions[:, -1] + 1 + first - width
        in_prompt = self._positions[np.arange(batch), np.minimum(first, width - 1)]
        positions = np.where(first < width, in_prompt, generated)
        spans = np.stack([self._handles, positions, counts], axis=1)[counts > 0]

        def step(rows: Rows) -> None:
            ids = rows.reshape(batch, one.tokens.shape[1], *rows.shape[1:])[:, : len(columns)]
            self._agent.step(ids[keep], spans)

        one.pending.hand_to(step)

    def finish(self, reason: str, sequences: torch.Tensor | None) -> None:
        """Finish the requests that still run."""
        grid = self._grid if sequences is None else sequences
        for i in np.flatnonzero(self._running[: len(self._handles)]):
            why = "stop" if self._stopped[i] and reason != "abort" else reason
            self._taps.shield(self, partial(self._finish, int(i), why, grid))

    def _finish(self, i: int, reason: str, grid: torch.Tensor | None) -> None:
        self._running[i] = False
        tokens = self._prompts[i]
        if grid is not None:
            tokens = tokens + grid[i, self._mask.shape[1] :].tolist()
        told = tokens if self._tells_tokens else None
        self._agent.finish(self._handles[i], len(tokens), reason=reason, token_ids=told)


def _unknown(inputs: Mapping[str, Any], given: str, expected: str) -> PlaceUnknown:
    names = ", ".join(sorted(inputs))
    return PlaceUnknown(
        field="model",
        value=f"{given} (inputs: {names}; transformers {transformers.__version__})",
        expected=f"{expected}; pin a version of transformers that is documented as tested",
    )
