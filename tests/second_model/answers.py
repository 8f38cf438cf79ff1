"""What a reader may get for each cell of a trace, by docs/rows.md sections 4 to 8.

A request is the list of its parts, one for each shard. Every answer is a set: a row (or None, for
missing) that is not in it is wrong; where None is not in it, a row must be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from second_model.log import UNKNOWN, Log, Part, Policy, Row, Value

Method = TypeVar("Method", bound=Callable[..., Any])


def _once(method: Method) -> Method:
    """Remembers what a method returns: a log does not change while its answers are asked for."""

    @wraps(method)
    def remembered(self: Answers, *args: Any, **named: Any) -> Any:
        key = method.__name__, args, *named.items()
        if key not in self.known:
            self.known[key] = method(self, *args, **named)
        return self.known[key]

    return remembered  # type: ignore[return-value]


#: The tokens before each position at which a digest of them is known.
Digests = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Request:
    """One engine request: what each shard of one boot was told of it."""

    parts: tuple[Part, ...]

    @property
    def first(self) -> Part:
        return self.parts[0]

    @property
    def prompt_len(self) -> int:
        return self.first.prompt_len

    @property
    def num_tokens(self) -> int:
        """0 while it runs."""
        return max(p.num_tokens for p in self.parts)

    @property
    def ended(self) -> bool:
        return all(p.ended_at >= 0 for p in self.parts)

    @property
    def reason(self) -> str:
        return self.first.reason

    def told(self) -> Digests:
        return {k: v for part in self.parts for k, v in part.digests().items()}


class Answers:
    """The answers after all calls of a log.

    Args:
        log: all calls.
        prefix_rows: whether rows of other traces stand in (section 6).
    """

    def __init__(self, log: Log, *, prefix_rows: bool = True) -> None:
        self.log = log
        self.prefix_rows = prefix_rows
        self.known: dict[Any, Any] = {}
        self._digests: dict[Request, Digests] = {}
        self._before: dict[Request, list[tuple[Request, int]]] = {}
        groups: dict[tuple[str, str, str, int], list[Part]] = {}
        for part in log.parts:
            writer = part.writer
            key = writer.engine_id, writer.boot_id, part.request_id, part.index
            groups.setdefault(key, []).append(part)
        self.requests = [
            Request(tuple(parts))
            for parts in groups.values()
            if not any(log.deleted(p, log.now + 1) for p in parts)
        ]

    @_once
    def trace(self, trace_id: str) -> list[Request]:
        """The requests of a trace, in the order in which they began."""
        return [r for r in self.requests if r.first.trace_id == trace_id]

    def hidden(self, request: Request) -> bool:
        """Whether the server need not know of the request yet."""
        return all(self.log.held(p) for p in request.parts)

    # ------------------------------------------------------------------ joins

    def digests(self, request: Request) -> Digests:
        """What a request told, and what follows from requests of its trace with the same tokens."""
        if request not in self._digests:
            requests = self.trace(request.first.trace_id)
            self._digests.update({r: r.told() for r in requests})
            known = [self._digests[r] for r in requests]
            while any(_learn(one, other) for one in known for other in known if one is not other):
                pass
        return self._digests[request]

    @_once
    def _shared(self, a: Request, b: Request) -> int:
        """The greatest position before which digests prove the same tokens."""
        mine, yours = self.digests(a), self.digests(b)
        return max((p for p in mine if yours.get(p) == mine[p]), default=0)

    @_once
    def proven(self, a: Request, b: Request) -> int:
        mine, yours = self.digests(a), self.digests(b)
        return max(
            (p for p in mine if p <= b.prompt_len and yours.get(p) == mine[p]),
            default=0,
        )

    @_once
    def continues(self, b: Request, a: Request) -> bool:
        """Whether b goes on where a ended."""
        handed = a.reason == "handoff"
        longer = b.prompt_len > a.prompt_len
        if not (longer or (b.prompt_len == a.prompt_len and handed and b.reason != "handoff")):
            return False
        proven = self.proven(a, b)
        return proven > a.prompt_len or (handed and proven >= a.num_tokens - 1)

    def _continued(self, request: Request) -> list[tuple[Request, int]]:
        """The requests that one continues, each with the length of the tokens that are proven."""
        if request not in self._before:
            others = self.trace(request.first.trace_id)
            self._before[request] = [
                (r, self.proven(r, request))
                for r in others
                if r is not request and self.continues(request, r)
            ]
        return self._before[request]

    def absorbed(self, a: Request, others: Iterable[Request]) -> bool:
        """Whether all of a lies in a request that continues it."""
        return any(
            b is not a
            and self.continues(b, a)
            and a.ended
            and self.proven(a, b) >= a.num_tokens - (a.reason == "handoff")
            for b in others
        )

    def incarnations(self, trace_id: str) -> list[Request]:
        """The requests of a trace that readers can choose among."""
        requests = self.trace(trace_id)
        return [r for r in requests if not self.absorbed(r, requests)]

    # ------------------------------------------------------------------ cells

    @_once
    def cell(
        self,
        request: Request,
        position: int,
        layer: int,
        policy: Policy = "as_sampled",
        version: int | None = None,
    ) -> Value:
        """What a reader of the incarnation that ends with `request` may get for a cell."""
        if request.num_tokens and position >= request.num_tokens - 1:
            return UNKNOWN
        result = self._joined(request, position, layer, policy, version)
        if None not in result or not self.prefix_rows:
            return result
        if None not in self._joined(request, position, layer, policy, None):
            return result  # a row of another version is no hole
        stand_in = self._prefix(request, position, layer, version)
        if None not in stand_in and self.reasons(request, position) == {"kv_unknown"}:
            return (result - UNKNOWN) | stand_in
        return result | stand_in

    def _joined(
        self, request: Request, position: int, layer: int, policy: Policy, version: int | None
    ) -> Value:
        """The row that the requests of the trace have for a cell."""
        candidates: list[Value] = []
        others: set[Row | None] = set()
        before = []
        for other in self.trace(request.first.trace_id):
            if other is request:
                continue
            if self.continues(request, other):
                if position < self.proven(other, request):
                    before.append(other)
            elif position < self.proven(other, request):
                # The contract names requests with the same prompt; a longer or shorter one that is
                # proven to begin alike has rows of the same tokens, and may stand in.
                others |= self._of(other, position, layer, policy, version)
        itself = self._of(request, position, layer, policy, version)
        # Those that sampled at the same place: the contract orders them by time alone.
        before.sort(key=lambda r: r.prompt_len)
        prior: list[Value] = []
        for length in sorted({r.prompt_len for r in before}):
            values = [
                self._of(r, position, layer, policy, version)
                for r in before
                if r.prompt_len == length
            ]
            have = frozenset(row for value in values for row in value if row is not None)
            sure = any(None not in value for value in values)
            prior.append(have if sure else have | UNKNOWN)
        if policy == "latest":
            candidates = [itself, *reversed(prior)]
        elif position == request.prompt_len - 1:
            own = self._of(request, position, layer, policy, version, forward_only=True)
            kept = [r for r in before if self._sampled_by(r, request)]
            candidates = [*prior, itself] if kept else [own, *prior, itself]
        else:
            candidates = [*prior, itself]
        result = self._first_of(candidates)
        rest = frozenset(row for row in others if row is not None)
        if None in result and rest:
            # Whether one of them has it for certain is not needed: one that may, does not have to.
            sure = any(
                None not in self._of(r, position, layer, policy, version)
                for r in self.trace(request.first.trace_id)
                if r is not request
                and not self.continues(request, r)
                and self._same_prompt(r, request)
            )
            if not request.ended and "not_yet" in self.reasons(request, position):
                sure = False  # not a hole: the request has not got there
            result = (result - UNKNOWN) | rest | (frozenset() if sure else UNKNOWN)
        return result

    @staticmethod
    def _first_of(values: Iterable[Value]) -> Value:
        found: set[Row | None] = set()
        for value in values:
            found |= value - UNKNOWN
            if None not in value:
                return frozenset(found)
        return frozenset(found | {None})

    def _sampled_by(self, a: Request, b: Request) -> bool:
        """Whether digests prove that the token behind b's prompt is the one that a sampled."""
        return a.num_tokens > b.prompt_len and self._shared(a, b) > b.prompt_len

    def _same_prompt(self, a: Request, b: Request) -> bool:
        n = b.prompt_len
        mine, yours = self.digests(a).get(n), self.digests(b).get(n)
        return a.prompt_len == n and n > 0 and mine is not None and mine == yours

    @_once
    def _of(
        self,
        request: Request,
        position: int,
        layer: int,
        policy: Policy,
        version: int | None,
        *,
        forward_only: bool = False,
    ) -> Value:
        """The row that one request has for a cell, by its attempts."""
        values = []
        reached = False
        for number in range(max(len(p.attempts) for p in request.parts)):
            if forward_only and reached:
                break  # it was given the token behind the position
            reached = any(self.log.reached(part, number, position) for part in request.parts)
            found: set[Row | None] = set()
            sure = False
            for part in request.parts:
                if layer in part.writer.layer_ids and number < len(part.attempts):
                    value = self.log.own(part, number, position)
                    if None in value and not forward_only:
                        value = self._first_of([value, self.log.cached(part, number, position)])
                    if version is not None:
                        value = frozenset(
                            row if row is not None and row.version == version else None
                            for row in value
                        )
                    found |= value
                    sure = sure or None not in value
            values.append(frozenset(found - {None} if sure else found | {None}))
        return self._first_of(values if policy == "as_sampled" else reversed(values))

    # ------------------------------------------------------------------ prefixes

    def _prefix(self, request: Request, position: int, layer: int, version: int | None) -> Value:
        """Rows of other traces that stand in for a cell."""
        if position >= request.prompt_len or "kv_unknown" not in self.reasons(request, position):
            return UNKNOWN
        own = next(
            (row for part in request.parts for run in part.runs for row in run.rows if row), None
        )
        if own is None or (version is not None and version != own.version):
            return UNKNOWN
        digests = {p: t for p, t in self.digests(request).items() if p <= request.prompt_len}
        found: set[Row | None] = set()
        sure = False
        for other in self.requests:
            if other.first.trace_id == request.first.trace_id:
                continue
            theirs = self.digests(other)
            if not any(p > position and theirs.get(p) == t for p, t in digests.items()):
                continue
            for part in other.parts:
                if layer in part.writer.layer_ids:
                    for number in range(len(part.attempts)):
                        value = self.log.own(part, number, position)
                        rows = {r for r in value if r is not None and r.version == own.version}
                        found |= rows
                        clear = other.first.trace_id not in self.log.unclear
                        sure = sure or (bool(rows) and None not in value and clear)
        return frozenset(found if sure else found | {None})

    # ------------------------------------------------------------------ blocks

    def bound(self, engine_id: str, blocks: list[int], position: int, layer: int) -> Value:
        """What the slots behind blocks hold now, for GetBlocks and BindRequest."""
        found: set[Row | None] = set()
        boots = [w.boot_id for w in self.log.writers if w.engine_id == engine_id]
        for writer in self.log.writers:
            if (
                writer.engine_id == engine_id
                and writer.boot_id == boots[-1]
                and layer in writer.layer_ids
            ):
                size = writer.block_size
                slot = blocks[position // size] * size + position % size
                found |= self.log.slot(writer, slot)
        return frozenset(found) or UNKNOWN

    # ------------------------------------------------------------------ states and reasons

    def state(self, request: Request, layers: Iterable[int]) -> set[str]:
        """States that the trace may be in, for a reader of this incarnation."""
        requests = self.trace(request.first.trace_id)
        running = any(not r.ended for r in requests)
        unclaimed = request.reason == "handoff" and request.ended
        if unclaimed or not any(p.ended_at >= 0 for p in request.parts):
            return {"running", "incomplete"} if self.log.settled else {"running"}
        cells = [
            self.cell(request, p, layer) for p in range(request.num_tokens - 1) for layer in layers
        ]
        states = set()
        if all(value != UNKNOWN for value in cells):
            states.add("complete")
        if any(None in value for value in cells):
            states.add("incomplete")
        if running or len(request.parts) < self._shards(request):
            states.add("running")
        return states

    @_once
    def reasons(self, request: Request, position: int, version: int | None = None) -> set[str]:
        """Reasons that a missing cell may have."""
        found: set[str] = set()
        for part in request.parts:
            found |= self._reasons_of(part, position)
        for one, stop in self._continued(request):
            if position < stop:
                for part in one.parts:
                    found |= self._reasons_of(part, position)
        if self.log.settled and not request.ended:
            found |= {"agent_lost", "aborted", "not_captured"}
        if len(request.parts) < self._shards(request):
            found.add("not_yet")  # a shard that has not begun with it
        if version is not None:
            return found | {"other_version"}
        return found

    def _shards(self, request: Request) -> int:
        w = request.first.writer
        return sum(v.engine_id == w.engine_id and v.boot_id == w.boot_id for v in self.log.writers)

    def _reasons_of(self, part: Part, position: int) -> set[str]:
        end, end_known = part.end(), part.ended_at >= 0
        aborted = part.reason == "abort"
        if part.ended_at >= 0:
            # Rows that an earlier attempt computed stand; the last one may not have got there.
            end = min(end, part.num_tokens - 1)
        last = part.attempts[-1]
        if len(part.attempts) > 1 and (last.inherits_at < 0 or not last.surely or not end_known):
            return {"not_yet", "kv_unknown", "not_captured", "invalid_ids", "aborted"}
        if part.attempts[-1].inherits_at < 0 or not part.attempts[-1].surely:
            return {"kv_unknown", "aborted" if aborted else "not_yet", "not_captured"}
        if part.ended_at < 0 and part.released_at >= 0:
            return {"not_yet", "kv_unknown", "not_captured", "invalid_ids"}
        if position >= end:
            if part.ended_at < 0:
                return {"not_yet"}
            return {"aborted"} if aborted else {"not_captured"}
        found: set[str] = set()
        for number, attempt in enumerate(part.attempts):
            for run in reversed(part.runs):
                if run.attempt == number and run.start <= position < run.stop:
                    why = run.why_lost[position - run.start]
                    found.add(why or ("not_yet" if part.ended_at < 0 else "not_captured"))
                    break
            else:
                if position < attempt.cached:
                    found.add("kv_unknown")
        return found or {"not_captured", "kv_unknown"}


def _learn(one: Digests, other: Digests) -> bool:
    """Takes over the digests before the last one that both have; whether there were any."""
    last = max((p for p, tokens in one.items() if other.get(p) == tokens), default=0)
    new = {p: tokens for p, tokens in other.items() if p < last and p not in one}
    one.update(new)
    return bool(new)
