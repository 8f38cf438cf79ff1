"""Comparison of the tokens of a pass with those that a plan has rows for, for `replay`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from routetrace.client.plan import FetchPlan, SampleSpan
from routetrace.common.errors import InvalidArgument

_REMEDY = (
    "lay the samples out as the model gets them: see padding_side of MicroBatch.padded, and the "
    "order of the samples"
)


class _Pending(NamedTuple):
    """Result that is under way from a CUDA device."""

    is_wrong: torch.Tensor
    copied: torch.cuda.Event
    field: str
    given: torch.Tensor
    wrong: torch.Tensor


class Inputs:
    """Forward pre-hooks that compare the inputs of each pass with a plan.

    Token ids are compared where the plan knows them, else the attention mask: a sample's tokens
    must be attended. Passes with another number of tokens, or with neither of both, are not judged.
    A CUDA device is not waited for: its passes are judged at the next pass, or in `settle`.
    """

    def __init__(self, plan: FetchPlan) -> None:
        self._plan = plan
        token_ids = torch.full((plan.num_tokens,), -1, dtype=torch.int64)
        is_token = torch.zeros(plan.num_tokens, dtype=torch.bool)
        for span in plan.spans:
            local = slice(span.at, span.at + span.stop - span.start)
            is_token[local] = True
            known = plan.samples[span.sample].token_ids
            if known is not None:
                ids = known[span.start : span.stop].astype("int64")
                token_ids[local] = torch.from_numpy(ids)
        self._is_known = bool((token_ids >= 0).any())
        self._on = {token_ids.device: (token_ids, is_token)}
        self._pending: list[_Pending] = []

    def before(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs of a pass.

        Raises:
            InvalidArgument: if they are not those of the plan; names the sample.
        """
        self.settle()
        given = self._fitting(kwargs.get("input_ids", args[0] if args else None))
        mask = self._fitting(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
        if self._is_known and given is not None:
            expected, _ = self._expected(given.device)
            self._judge("input_ids", given, (expected >= 0) & (given != expected))
        elif mask is not None:
            _, is_token = self._expected(mask.device)
            self._judge("attention_mask", mask, is_token & (mask == 0))

    def settle(self) -> None:
        """Judge the passes that were not judged yet.

        Raises:
            InvalidArgument: as `before`.
        """
        while self._pending:
            pending = self._pending.pop(0)
            pending.copied.synchronize()
            if pending.is_wrong:
                raise self._error(pending.field, pending.given, pending.wrong)

    def forget(self) -> None:
        """Drop the passes that were not judged yet."""
        self._pending.clear()

    def _expected(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids, -1 where unknown, and whether tokens are of samples, on a device."""
        if device not in self._on:
            token_ids, is_token = self._on[torch.device("cpu")]
            self._on[device] = token_ids.to(device), is_token.to(device)
        return self._on[device]

    def _fitting(self, tensor: Any) -> torch.Tensor | None:
        """Return a tensor that has one integer for each token of the plan, flat; else None."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return None
        fits = tensor.dim() in (1, 2) and tensor.numel() == self._plan.num_tokens
        return tensor.flatten() if fits else None

    def _judge(self, field: str, given: torch.Tensor, wrong: torch.Tensor) -> None:
        if not wrong.is_cuda:
            if bool(wrong.any()):
                raise self._error(field, given, wrong)
            return
        is_wrong = torch.empty((), dtype=torch.bool, pin_memory=True)
        is_wrong.copy_(wrong.any(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(wrong.device))
        self._pending.append(_Pending(is_wrong, copied, field, given, wrong))

    def _error(self, field: str, given: torch.Tensor, wrong: torch.Tensor) -> InvalidArgument:
        token = int(wrong.nonzero()[0])
        span = next(s for s in self._plan.spans if s.at <= token < s.at + s.stop - s.start)
        position = span.start + token - span.at
        place = f"token {token} of the batch"
        sample = f"samples[{span.sample}]"
        if field == "attention_mask":
            value = f"0 at {place}"
            expected = f"1, as that is position {position} of {sample} in the plan of the rows"
        else:
            ids = given.cpu()
            value = f"{int(ids[token])} at {place}"
            planned, _ = self._expected(ids.device)
            expected = (
                f"{int(planned[token])}, position {position} of {sample} in the plan of the "
                f"rows{self._shift(span, ids)}"
            )
        return InvalidArgument(field=field, value=value, expected=expected, remedy=_REMEDY)

    def _shift(self, span: SampleSpan, ids: torch.Tensor) -> str:
        """Say by how much all tokens of a span are shifted, if they are."""
        count = span.stop - span.start
        planned = self._expected(ids.device)[0][span.at : span.at + count]
        for at in range(len(ids) - count + 1):
            if torch.equal(ids[at : at + count].long(), planned):
                shift = at - span.at
                return f", whose tokens stand {abs(shift)} {'later' if shift > 0 else 'earlier'}"
        return ""
