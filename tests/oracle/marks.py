"""Labels that are part of token digests, as marks on a prompt's first token.

To engines and models a marked token is another token: KV and rows behind it are never those of the
same tokens with another mark. Agents get the token without its mark, and the labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Labels of a request, by the mark of its first token.
MARKS: tuple[dict[str, str], ...] = ({}, {"adapter": "math"}, {"kv_cache_dtype": "fp8"})

#: Bits of a token below its mark.
_BITS = 40


def marked(tokens: Iterable[int], mark: int) -> list[int]:
    """Tokens with another mark."""
    first, *rest = tokens
    return [first % (1 << _BITS) | mark << _BITS, *rest]


def unmarked(tokens: Iterable[int]) -> list[int]:
    """Tokens without their marks, as agents get them."""
    return [token % (1 << _BITS) for token in tokens]


class Unmarked:
    """Passes tokens to an agent without marks, and with their labels."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def begin(
        self,
        request_id: str,
        *,
        prompt_token_ids: Any = None,
        labels: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> int:
        if prompt_token_ids is not None:
            labels = {**(labels or {}), **MARKS[int(prompt_token_ids[0]) >> _BITS]}
            prompt_token_ids = unmarked(prompt_token_ids)
        handle: int = self._agent.begin(
            request_id, prompt_token_ids=prompt_token_ids, labels=labels, **facts
        )
        return handle

    def finish(self, handle: int, num_tokens: int, *, token_ids: Any = None, **facts: Any) -> None:
        told = None if token_ids is None else unmarked(token_ids)
        self._agent.finish(handle, num_tokens, token_ids=told, **facts)
