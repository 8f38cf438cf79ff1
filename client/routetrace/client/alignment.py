"""Whether rows belong to the tokens and the model that a trainer takes them for, said in words."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client.micro_batch import Sample
from routetrace.client.segments import Segment
from routetrace.client.stat import TraceFacts
from routetrace.codec.records import TokenDigest, digest_key
from routetrace.common.errors import InvalidArgument, counted
from routetrace.common.layout import ModelLayout

# Tokens that a sample may have too many at its start, where they are looked for.
_MAX_SHIFT = 64


def check_layout(name: str, actual: ModelLayout, planned: ModelLayout) -> None:
    """Checks that a trace is of the model that a plan was made for.

    Args:
        name: of the trace, for the message.
        actual: the trace's layout.
        planned: the plan's.

    Raises:
        InvalidArgument: if not; says how they differ.
    """
    for field in ("num_experts", "top_k", "num_hidden_layers", "moe_layer_ids"):
        is_, was = getattr(actual, field), getattr(planned, field)
        if is_ == was:
            continue
        why = ""
        if field == "moe_layer_ids" and len(is_) == len(was):
            shift = was[0] - is_[0]
            if shift and tuple(i + shift for i in is_) == was:
                why = (
                    f"; the plan's layers are numbered {abs(shift)} too "
                    f"{'high' if shift > 0 else 'low'}: decoder layers count from 0, dense ones too"
                )
        raise InvalidArgument(
            f"plan has {field} {was}, {name} has {is_}{why}",
            field=f"layout.{field}",
            value=was,
            expected=f"{is_}, as {name} was captured with",
        )


def check_tokens(number: int, sample: Sample, segment: Segment, facts: TraceFacts) -> int:
    """Checks that a request's tokens are those of the sample that takes its rows.

    Args:
        number: of the sample, for the message.
        sample: the sample.
        segment: the part of the request that it takes.
        facts: facts of the request.

    Returns:
        How many of the request's token digests confirmed the sample's token ids; 0 if they prove
        nothing of the answer.

    Raises:
        InvalidArgument: if the tokens differ, or are another number; says how.
    """
    confirmed, proof = 0, Proof.NONE
    token_ids = tokens_of(sample, segment)
    if token_ids is not None:
        compared = compare_tokens(token_ids, facts)
        confirmed, agreed, differs = compared
        proof = Proof.of(compared, len(token_ids), facts)
        if differs is not None:
            raise InvalidArgument(
                field=f"samples[{number}].token_ids",
                value=f"{len(token_ids)} tokens",
                expected=f"the {facts.num_tokens or 'first'} tokens of trace "
                f"{facts.trace_id!r}: {_explain(confirmed, agreed, token_ids, facts)}"
                f"{_others(segment, facts)}",
            )
    count = segment.num_tokens
    # The start of a request is enough where it is proven to be that.
    known = facts.num_tokens
    cut_short = confirmed and count is not None and known is not None and count < known
    if count is not None and known not in (None, count) and not cut_short:
        raise InvalidArgument(
            field=f"samples[{number}].num_tokens",
            value=count,
            expected=f"{known}, the tokens of trace {facts.trace_id!r} (prompt "
            f"{facts.prompt_len or 'unknown'}): its rows may be shifted against other tokens"
            f"{_others(segment, facts) if token_ids is not None else ''}. Of a "
            "sample that was cut short, give its token_ids, or the segment that it takes",
        )
    return confirmed if proof in (Proof.PROMPT, Proof.BEGINS, Proof.WHOLE) else 0


class Compared(NamedTuple):
    """How far tokens are those of a request."""

    confirmed: int
    """Digests that agree, the first ones of the request."""
    agreed: int
    """Tokens that they stand for."""
    differs: int | None
    """Position of the next digest, if that differs; None if none of the tokens' digests does."""


def compare_tokens(token_ids: npt.NDArray[np.integer[Any]], facts: TraceFacts) -> Compared:
    """Compare tokens, from position 0 on, with the token digests of a request."""
    digest = TokenDigest(digest_key(facts.labels))
    confirmed = 0
    for position, value in facts.token_digests.tolist():
        if position > len(token_ids):
            break
        agreed = digest.position
        if digest.update(token_ids[agreed:position]) != value:
            return Compared(confirmed, agreed, position)
        confirmed += 1
    return Compared(confirmed, digest.position, None)


class Proof(IntEnum):
    """How far digests prove that tokens are those of a request, or its first ones."""

    DIFFERS = 0
    """They are another request's."""
    SHORT = 1
    """The request has fewer tokens."""
    NONE = 2
    """No digest differs, and none behind its prompt agrees."""
    PROMPT = 3
    """The digest of all the tokens agrees, and its prompt holds them: it sampled none of them.
    Whether they are proven depends on the other requests, which may have sampled them."""
    BEGINS = 4
    """A digest behind its prompt agrees, and none stands at the end of the tokens."""
    WHOLE = 5
    """The digest of all the tokens agrees."""

    @classmethod
    def of(cls, compared: Compared, count: int, facts: TraceFacts) -> Proof:
        """Return how far `count` tokens are proven, which were compared with a request's."""
        if compared.differs is not None:
            return cls.DIFFERS
        if facts.num_tokens is not None and facts.num_tokens < count:
            return cls.SHORT
        if compared.agreed == count:
            return cls.PROMPT if count <= (facts.prompt_len or 0) else cls.WHOLE
        # An unknown prompt may reach to the end of the tokens.
        prompt_len = count if facts.prompt_len is None else facts.prompt_len
        return cls.BEGINS if compared.agreed > prompt_len else cls.NONE


def tokens_of(sample: Sample, segment: Segment) -> npt.NDArray[np.integer[Any]] | None:
    """Return the tokens of a sample that a request's digests can prove; None: none.

    Digests count tokens from the start of the request; those behind the tokens that the rows are of
    may be another request's.
    """
    if sample.token_ids is None or segment.shift:
        return None
    return sample.token_ids[: min(segment.num_tokens or segment.stop, sample.num_tokens)]


def _others(segment: Segment, facts: TraceFacts) -> str:
    """Say how many other incarnations a trace has, and that they are no remedy."""
    others = facts.num_incarnations - 1
    if not others:
        return ""
    words = f"; the trace has {counted(others, 'other incarnation')}"
    if segment.incarnation or segment.nonce:
        return f"{words}: without incarnation= and nonce=, token_ids choose one"
    return f"{words}, and none is proven to have them"


def _explain(
    confirmed: int, agreed: int, token_ids: npt.NDArray[np.integer[Any]], facts: TraceFacts
) -> str:
    """Why tokens differ from a request's, after as many digests and tokens agreed."""
    position, value = facts.token_digests.tolist()[confirmed]
    key = digest_key(facts.labels)
    if not agreed:
        for shift in range(1, min(_MAX_SHIFT, len(token_ids) - position) + 1):
            if TokenDigest(key).update(token_ids[shift : shift + position]) == value:
                return (
                    f"they start {shift} {'token' if shift == 1 else 'tokens'} late in the sample, "
                    "which has padding or special tokens before them that the engine did not see"
                )
        return (
            f"they differ before position {position}: another prompt, another tokenization, or "
            "tokens missing at the start"
        )
    prompt_len = facts.prompt_len or 0
    where = "in the prompt" if position <= prompt_len else "behind the prompt"
    if agreed < prompt_len < position:
        where = f"around the end of the prompt ({prompt_len} tokens)"
    return (
        f"they agree before position {agreed} and differ before {position}, {where}: tokenized "
        "again, edited, or of another sample"
    )
