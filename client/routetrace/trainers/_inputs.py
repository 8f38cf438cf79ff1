"""Comparison of the tokens of a pass with those that a plan has rows for, for `replay`."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from routetrace.client.plan import FetchPlan, SampleSpan
from routetrace.common.errors import InvalidArgument

_REMEDY = (
    "lay the samples out as the model gets them: see padding_side of MicroBatch.padded, and the "
    "order of the samples"
)
# Minimum number of tokens of a sample that are looked for at other places of a pass.
_MIN_TOKENS = 8


class _Expected(NamedTuple):
    """Tokens of the plan on one device, one element for each."""

    token_ids: torch.Tensor
    """int64; -1 where the plan has no row or does not know the token."""
    has_row: torch.Tensor
    """bool."""
    is_known: torch.Tensor
    """bool: the token is of a sample with token ids."""
    is_padding: torch.Tensor
    """bool: the token is of no sample."""

    def masked(self, mask: torch.Tensor, *, beside_ids: bool) -> torch.Tensor:
        """Return where an attention mask is not that of the plan.

        Rows need a value other than 0. Padding needs 0 where the mask is 0 at any token of a
        sample: at the last one it may be, as `ids != pad_token_id` is at an end token that pads,
        but all tokens of a sample may also be one place off.

        Args:
            mask: one integer for each token.
            beside_ids: token ids are compared, too: samples that have them are left out.
        """
        is_judged = ~self.is_known if beside_ids else torch.ones_like(self.is_known)
        is_zero = mask == 0
        some_zero = (is_judged & is_zero & ~self.is_padding).any()
        return is_judged & torch.where(
            self.is_padding, ~is_zero & some_zero, is_zero & self.has_row
        )


class _Pass(NamedTuple):
    """Pass on a CUDA device that is not judged yet."""

    is_wrong: torch.Tensor
    """On the CPU, once `copied` has happened."""
    copied: torch.cuda.Event
    given: torch.Tensor | None
    wrong: torch.Tensor


class Inputs:
    """Compares the inputs of each pass with a plan, at the tokens that have rows.

    Token ids are compared where the plan knows them, elsewhere the attention mask. Passes with
    another number of tokens, or without either, are not judged. A CUDA device is not waited for;
    its passes are judged by later ones, or by `settle`.
    """

    def __init__(self, plan: FetchPlan) -> None:
        self._plan = plan
        token_ids = torch.full((plan.num_tokens,), -1, dtype=torch.int64, device="cpu")
        is_known = torch.zeros(plan.num_tokens, dtype=torch.bool, device="cpu")
        is_padding = torch.ones(plan.num_tokens, dtype=torch.bool, device="cpu")
        for span in plan.spans:
            local = slice(span.at, span.at + span.stop - span.start)
            is_padding[local] = False
            known = plan.samples[span.sample].token_ids
            if known is not None:
                ids = known[span.start : span.stop].astype("int64")
                token_ids[local] = torch.from_numpy(ids)
                is_known[local] = True
        has_row = torch.from_numpy(plan.planned.copy())
        token_ids[~has_row] = -1
        self._expected = _Expected(token_ids, has_row, is_known, is_padding)
        self._on = {token_ids.device: self._expected}
        self._pending: deque[_Pass] = deque()

    def settle(self) -> None:
        """Judge the passes that are not judged yet.

        Raises:
            InvalidArgument: if the inputs of one are not those of the plan; names the sample.
        """
        while self._pending:
            self._pending[0].copied.synchronize()
            self._judge(self._pending.popleft())

    def forget(self) -> None:
        """Drop the passes that are not judged yet."""
        self._pending.clear()

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs of a pass.

        Raises:
            InvalidArgument: if they, or those of a pass before, are not those of the plan.
        """
        while self._pending and self._pending[0].copied.query():  # type: ignore[no-untyped-call]
            self._judge(self._pending.popleft())
        given = self._fitting(kwargs.get("input_ids", args[0] if args else None))
        mask = self._fitting(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
        source = mask if given is None else given
        if source is None:
            return
        expected = self._for(source.device)
        wrong = torch.zeros_like(expected.has_row)
        if given is not None:
            wrong |= (expected.token_ids >= 0) & (given != expected.token_ids)
        if mask is not None and mask.device == source.device:
            wrong |= expected.masked(mask, beside_ids=given is not None)
        if not wrong.is_cuda:
            if bool(wrong.any()):
                raise self._error(given, wrong)
            return
        is_wrong = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
        is_wrong.copy_(wrong.any(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(wrong.device))
        self._pending.append(_Pass(is_wrong, copied, given, wrong))

    def _for(self, device: torch.device) -> _Expected:
        if device not in self._on:
            self._on[device] = _Expected(*(part.to(device) for part in self._expected))
        return self._on[device]

    def _fitting(self, tensor: Any) -> torch.Tensor | None:
        """Return a tensor that has one integer for each token of the plan, flat; else None."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return None
        if hasattr(tensor, "to_local"):  # shards of one tensor: those of this rank are not known
            return None
        fits = tensor.dim() in (1, 2) and tensor.numel() == self._plan.num_tokens
        return tensor.flatten() if fits else None

    def _judge(self, one: _Pass) -> None:
        if bool(one.is_wrong):
            raise self._error(one.given, one.wrong)

    def _error(self, given: torch.Tensor | None, wrong: torch.Tensor) -> InvalidArgument:
        token = int(wrong.nonzero()[0])
        if self._expected.is_padding[token]:
            return InvalidArgument(
                field="attention_mask",
                value=f"not 0 at token {token} of the batch",
                expected="0, as the plan has padding there, and the mask has it elsewhere",
                remedy=_REMEDY,
            )
        span = next(s for s in self._plan.spans if s.at <= token < s.at + s.stop - s.start)
        place, planned = f"token {token} of the batch", int(self._expected.token_ids[token])
        position = f"position {span.start + token - span.at} of samples[{span.sample}]"
        if given is None or planned < 0:
            return InvalidArgument(
                field="attention_mask",
                value=f"0 at {place}",
                expected=f"another value: the plan has the row of {position} there",
                remedy=_REMEDY,
            )
        ids = given.cpu()
        return InvalidArgument(
            field="input_ids",
            value=f"{int(ids[token])} at {place}",
            expected=f"{planned}, {position}{self._shift(span, ids)}",
            remedy=_REMEDY,
        )

    def _shift(self, span: SampleSpan, ids: torch.Tensor) -> str:
        """Say where the tokens of a span are in a pass, if they are."""
        planned = self._expected.token_ids[span.at : span.at + span.stop - span.start]
        planned = planned[planned >= 0]
        if len(planned) < _MIN_TOKENS:
            return ""
        for at in (ids == planned[0]).nonzero().flatten().tolist():
            if torch.equal(ids[at : at + len(planned)].long(), planned):
                later = at - span.at
                return f", which begins {abs(later)} {'later' if later > 0 else 'earlier'} there"
        return ""
