"""The rule for a prompt whose KV one engine hands over by name (docs/rows.md, 5).

Written from the page alone, for tests that know which engine computed which positions.
"""

from __future__ import annotations

from typing import Literal

Side = Literal["prefill", "decode"]


def handed_over(prompt_len: int, num_tokens: int, decode_from: int) -> list[Side]:
    """Whose row a reader gets at each position: that of the pass behind the decode engine's KV.

    Args:
        prompt_len: tokens of the prompt that the prefill engine computed.
        num_tokens: of the whole trace.
        decode_from: first position that the decode engine computed itself; `prompt_len` if it does
            not compute the last token of the prompt again.
    """
    first = min(decode_from, prompt_len)
    return ["prefill" if p < first else "decode" for p in range(num_tokens - 1)]


def version_spans(sides: list[Side], prefill: int, decode: int) -> tuple[tuple[int, int, int], ...]:
    """The same as a trace tells it: (start, stop, weight version).

    Args:
        sides: of `handed_over`.
        prefill: weight version of that engine.
        decode: weight version of that one.
    """
    first = sides.count("prefill")
    if prefill == decode:
        return ((0, len(sides), prefill),)
    return ((0, first, prefill), (first, len(sides), decode))
