"""Explanation: where the row of one cell comes from, or why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from routetrace.client.stat import ReadFacts, version_from_wire
from routetrace.common.errors import counted
from routetrace.common.missing import MissingReason, reason_of
from routetrace.common.values import Values
from routetrace.v1 import routetrace_pb2 as pb

_RULES = {
    "own_pass": "own pass",
    "own_slot": "own slot",
    "handoff": "named hand-over",
    "later_attempt": "a later attempt",
}


@dataclass(frozen=True)
class EngineRequest(Values):
    """Engine request of a trace."""

    number: int
    """Its number, in order of arrival from 1: that of the incarnation that ends with it."""
    request_id: str
    """Its name at the engine."""
    engine_id: str

    def __str__(self) -> str:
        return f"request {self.number} ({self.request_id!r} at engine {self.engine_id!r})"

    @classmethod
    def from_proto(cls, message: pb.EngineRequest) -> EngineRequest:
        """Convert a message."""
        return cls(message.number, message.request_id, message.engine_id)


@dataclass(frozen=True)
class ChainMember(Values):
    """Engine request in the chain of another one."""

    request: EngineRequest
    proven: int
    """Tokens that digests prove it shares with the prompt of the next member; 0 for the last."""
    start: int
    """First position that it owns."""
    stop: int | None
    """One past the last position that it owns; None: all from `start` on."""


@dataclass(frozen=True)
class CellRow(Values):
    """Row of a cell."""

    reported_by: EngineRequest
    """Request that has it: the owner, or the one that handed its KV over."""
    shard: str
    """Shard whose agent reported it; "" if it records the whole engine."""
    attempt: int
    """Attempt of that request, from 1."""
    computed_by: EngineRequest | None
    """Request whose forward pass computed it; None if it is not found in the trace."""
    weight_version: int | None
    """Weight version that computed it; None: unknown."""
    transfer_id: str | None
    """Name of the hand-over behind it; None without one."""


@dataclass(frozen=True)
class RefusedCandidate(Values):
    """Engine request, or one of its attempts, that was not chosen."""

    request: EngineRequest
    attempt: int | None
    """Its attempt, from 1; None: the request as a whole."""
    reason: str
    """Why it was refused."""


@dataclass(frozen=True)
class Explanation(Values):
    """Where the row of one cell comes from, or why there is none; as text, line by line.

    The rules are those of docs/rows.md, section 5.
    """

    trace_id: str
    incarnation: int
    """Number of the incarnation."""
    position: int
    layer_id: int
    rule: str | None
    """Rule that gave the row: "own_pass", "own_slot", "handoff" or "later_attempt"; None: there is
    no row."""
    row: CellRow | None
    """The row; None: there is none."""
    missing: MissingReason | None
    """Why there is no row; None: there is one."""
    remedy: str
    """An action that helps where the row is missing; "" if there is none."""
    owner: EngineRequest | None
    """Request that owns the position; None: several may own it."""
    owner_reason: str
    """Why it is the owner, or why there is none."""
    chain: tuple[ChainMember, ...]
    """Chain of the incarnation's last request: at most 64 members, the owner among them."""
    num_members: int
    """Members of the whole chain."""
    evidence: tuple[str, ...]
    """Facts that the rule, or the reason, rests on."""
    refused: tuple[RefusedCandidate, ...]
    """Requests and attempts that do not own the position, or do not give its row, though they
    might: at most 64."""
    num_refused: int
    """Number of all of them."""

    @classmethod
    def from_proto(
        cls, trace_id: str, position: int, response: pb.ExplainCellResponse
    ) -> Explanation:
        """Convert a message.

        Raises:
            ValueError: if it contradicts itself.
        """
        has_row = response.HasField("row")
        if has_row == bool(response.missing) or has_row != bool(response.rule):
            raise ValueError(f"rule {response.rule!r} with reason {response.missing}")
        return cls(
            trace_id=trace_id,
            incarnation=response.incarnation,
            position=position,
            layer_id=response.layer_id,
            rule=response.rule or None,
            row=_row(response.row) if has_row else None,
            missing=None if has_row else reason_of(response.missing),
            remedy=response.remedy,
            owner=EngineRequest.from_proto(response.owner) if response.HasField("owner") else None,
            owner_reason=response.owner_reason,
            chain=tuple(
                ChainMember(
                    EngineRequest.from_proto(one.request), one.proven, one.start, one.stop or None
                )
                for one in response.chain
            ),
            num_members=response.num_members,
            evidence=tuple(response.evidence),
            refused=tuple(
                RefusedCandidate(
                    EngineRequest.from_proto(one.request), one.attempt or None, one.reason
                )
                for one in response.refused
            ),
            num_refused=response.num_refused,
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:8} {text}".rstrip() for name, text in self.lines())

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each line; the name is "" where it is that above."""
        yield "cell", f"position {self.position} of layer {self.layer_id}"
        yield "trace", f"{self.trace_id}, incarnation {self.incarnation}"
        yield "row", f"none: {self.missing}" if self.row is None else self._row_text(self.row)
        yield from _named("because", self.evidence)
        if self.remedy:
            yield "remedy", self.remedy
        yield "owner", str(self.owner or "ambiguous")
        yield from _named("because", (self.owner_reason,))
        members = [_member_text(one) for one in self.chain]
        if self.num_members > len(members):
            members.append(f"and {self.num_members - len(members)} more")
        yield from _named("chain", members)
        refused = [
            f"{f'attempt {one.attempt} of ' if one.attempt else ''}{one.request}: {one.reason}"
            for one in self.refused
        ]
        if self.num_refused > len(refused):
            refused.append(f"and {self.num_refused - len(refused)} more")
        yield from _named("refused", refused)

    def _row_text(self, row: CellRow) -> str:
        text = f"{_RULES.get(self.rule or '', self.rule)}: attempt {row.attempt} of "
        text += f"{row.reported_by}" + (f", shard {row.shard!r}" if row.shard else "")
        if row.transfer_id is not None:
            text += f", by the transfer id {row.transfer_id!r}"
        if row.computed_by not in (row.reported_by, None):
            text += f", computed by {row.computed_by}"
        version = "unknown" if row.weight_version is None else row.weight_version
        return f"{text}, weight version {version}"


def pointer(read: ReadFacts) -> str:
    """Return which command explains the first cell whose reason alone does not say what to do."""
    unclear = (MissingReason.KV_UNKNOWN, MissingReason.AMBIGUOUS)
    cell = next((one for one in read.missing if one.reason in unclear), None)
    if cell is None or not read.trace_id:
        return ""
    first = cell.layer_ids[0] == read.layout.moe_layer_ids[0]
    more = "" if first else f" --layer {cell.layer_ids[0]}"
    if read.num_incarnations > 1:
        more += f" --incarnation {read.incarnation}"
    name = shlex.quote(read.trace_id)
    return f"; `routetrace explain {name} --position {cell.start}{more}` says why"


def _row(message: pb.CellRow) -> CellRow:
    known = message.HasField("computed_by")
    return CellRow(
        reported_by=EngineRequest.from_proto(message.reported_by),
        shard=message.shard,
        attempt=message.attempt + 1,
        computed_by=EngineRequest.from_proto(message.computed_by) if known else None,
        weight_version=version_from_wire(message.weight_version),
        transfer_id=message.transfer_id or None,
    )


def _member_text(one: ChainMember) -> str:
    owns = f"[{one.start}, {one.stop})" if one.stop else f"from {one.start} on"
    text = f"{one.request} owns the positions {owns}"
    shares = f", and shares {counted(one.proven, 'token')} with the next prompt"
    return text + (shares if one.proven else "")


def _named(name: str, texts: Any) -> Iterator[tuple[str, str]]:
    for text in texts:
        yield name, text
        name = ""
