"""What a reader may get for each cell of a trace, by docs/rows.md sections 4 to 8.

A request is the list of its parts, one for each shard. Every answer is a set: a row (or None, for
missing) that is not in it is wrong; where None is not in it, a row must be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from second_model import stand_ins
from second_model.log import UNKNOWN, Log, Part, Policy, Row, Value
from second_model.stand_ins import PrefixRows

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


class Found(NamedTuple):
    """A row that a reader may get, or a lost one, which ends the search for others."""

    row: Row
    how: str
    """Its provenance; "" where the contract does not name it."""


Cell = frozenset["Found | None"]
MISSING: Cell = frozenset((None,))

#: Behind all positions.
_NEVER = 1 << 60
#: Requests with one prompt that are compared with the prompt of the next turn.
_MOST = 64


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


class Chain(NamedTuple):
    """Requests that a reader's answer is made of, in the order in which they sampled."""

    members: tuple[Request, ...]
    ambiguous: range
    """Positions of the first one that several requests sampled alike."""


class Answers:
    """The answers after all calls of a log.

    Args:
        log: all calls.
        prefix_rows: which rows stand in (section 6).
    """

    def __init__(self, log: Log, *, prefix_rows: PrefixRows = "never") -> None:
        self.log = log
        self.prefix_rows = prefix_rows
        self.known: dict[Any, Any] = {}
        self._digests: dict[Request, Digests] = {}
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
    def proven(self, a: Request, b: Request) -> int:
        mine, yours = self.digests(a), self.digests(b)
        return max(
            (p for p in mine if p <= b.prompt_len and yours.get(p) == mine[p]),
            default=0,
        )

    def _others(self, request: Request) -> list[Request]:
        return [r for r in self.trace(request.first.trace_id) if r is not request]

    @_once
    def chains(self, last: Request) -> list[Chain]:
        """The chain that ends with a request; several where the contract leaves the choice."""
        found = []
        for one in self._continued(last):
            if isinstance(one, range):
                found.append(Chain((last,), ambiguous=one))
            else:
                found += [c._replace(members=(*c.members, last)) for c in self.chains(one)]
        return found

    def _continued(self, last: Request) -> list[Request | range]:
        """The request that another one continues; of one that continues none, what is ambiguous."""
        proven = {
            r: self.proven(r, last)
            for r in self._others(last)
            if 0 < r.prompt_len < self.proven(r, last)
        }
        most = max((p for r, p in proven.items() if r.reason != "handoff"), default=0)
        equals = [r for r, p in proven.items() if r.reason != "handoff" and p == most]
        takes = [self._giver(r) for r in equals]
        handed = [
            r for r, p in proven.items() if r.reason == "handoff" and r.prompt_len < most <= p
        ]
        rivals = [*equals, *(r for r in handed if r not in takes)]
        if not equals or self._giver(last) in rivals[len(equals) :]:
            return [range(0)]
        makers: Iterable[Request | None] = equals
        if len(rivals) > 1:
            makers = self._makers(last, rivals, most)
        elif self._others_may_be(equals[0], last):
            makers = [None]
        return [range(most - 1) if m is None else range(0) if m in handed else m for m in makers]

    def _others_may_be(self, a: Request, b: Request) -> bool:
        """Whether others may have sampled, behind the same prompt, what stands of `a` in `b`'s."""
        if a.reason == "stop" and a.num_tokens <= self.proven(a, b):
            return False
        of = [r for r in self._others(b) if r.prompt_len == a.prompt_len == self.proven(r, a)]
        return len(of) > _MOST or any(
            c is not a
            and c.reason != "handoff"
            and c.num_tokens > self.proven(c, b)
            and self._agree_until(c, b) == _NEVER
            for c in of
        )

    def _makers(self, last: Request, equals: list[Request], stop: int) -> Iterable[Request | None]:
        """Which of several made the row of the last position that came from a slot."""
        found: set[Request | None] = set()
        behind = min(r.prompt_len for r in equals)
        for part in last.parts:
            first = part.attempts[0]
            mine: set[Request | None] = set()
            for position in range(min(first.cached - first.external, stop) - 1, behind - 1, -1):
                rows = self.log.cached(part, 0, position)
                for row in rows - UNKNOWN:
                    makers = (r for r in equals if row and row.part in r.parts)
                    one = next(makers, None)
                    mine.add(one if one and position >= one.prompt_len else None)
                if None not in rows:
                    break
            else:
                mine.add(None)
            if None not in mine:
                return mine  # one shard that tells is enough
            found |= mine
        return found

    def owners(self, request: Request, position: int, policy: Policy) -> set[Request | None]:
        """The requests that may own a position; None where it is ambiguous."""
        found: set[Request | None] = set()
        for members, ambiguous in self.chains(request):
            if policy == "latest":
                found.add(request)
            elif position in ambiguous and position < self._stop(members):
                found.add(None)
            else:
                owns = (a for a, b in pairwise(members) if position < self._stop((a, b)))
                found.add(next(owns, request))
        return found

    def _stop(self, members: tuple[Request, ...]) -> int:
        """One past the positions of the first request that it owns."""
        if len(members) == 1:
            return _NEVER
        a, b = members[:2]
        return min(self.proven(a, b), a.num_tokens) - 1

    def absorbed(self, a: Request) -> bool:
        """Whether a request is no incarnation of its own."""
        return any(self._goes_on(b, a) for b in self._others(a))

    def _goes_on(self, b: Request, a: Request) -> bool:
        """Whether a request goes on from another one."""
        handed = a.reason == "handoff"
        longer = b.prompt_len > a.prompt_len
        if not longer and not (b.prompt_len == a.prompt_len and handed and b.reason != "handoff"):
            return False
        proven = self.proven(a, b)
        if 0 < a.prompt_len < a.num_tokens <= proven:
            return True
        return handed and (0 < a.prompt_len <= proven or self._giver(b) is a)

    def _giver(self, request: Request) -> Request | None:
        """The one other request that ended with the hand-over that a begin named."""
        name = request.first.transfer
        found = [r for r in self._others(request) if name in {part.handed for part in r.parts}]
        return found[0] if name and len(found) == 1 else None

    def labels(self, request: Request) -> list[dict[str, str]]:
        """Labels that an incarnation may have."""
        return [
            {k: v for r in chain.members for part in r.parts for k, v in part.labels.items()}
            for chain in self.chains(request)
        ]

    # ------------------------------------------------------------------ cells

    @_once
    def cell(
        self,
        request: Request,
        position: int,
        layer: int,
        policy: Policy = "as_sampled",
        version: int | None = None,
    ) -> Cell:
        """What a reader of the incarnation that ends with `request` may get for a cell."""
        if request.num_tokens and position >= request.num_tokens - 1:
            return MISSING
        result: Cell = frozenset()
        for owner in self.owners(request, position, policy):
            row = self._row(owner, position, layer, policy) if owner else MISSING
            if owner and None in row and policy == "as_sampled" and self.prefix_rows != "never":
                row = self._stand_in(request, owner, position, layer, row)
            result |= row
        if None in result and policy == "latest":  # it gets the stand-ins of the other policy
            sampled = self.cell(request, position, layer)
            given = frozenset(f for f in sampled if f and f.how == "prefix")
            result = (result - MISSING if given == sampled else result) | given
        if version is None:
            return result
        return frozenset(f if f and f.row.version == version else None for f in result)

    @staticmethod
    def _first_of(cells: Iterable[Cell]) -> Cell:
        found: Cell = frozenset()
        for cell in cells:
            found |= cell - MISSING
            if None not in cell:
                return found
        return found | MISSING

    def _row(self, owner: Request, position: int, layer: int, policy: Policy) -> Cell:
        """The row that the owner of a position has for a cell."""
        handed = self._handed(owner, position, layer)
        found: Cell = frozenset()
        for search in self._searches(owner, policy):
            rows = [self._attempt(owner, n, position, layer) for n in search]
            if policy == "latest":
                rows.append(handed)
            elif not search[0]:
                rows.insert(1, handed)
            found |= self._first_of(rows)
        return frozenset(f if f and not f.row.lost else None for f in found)

    @_once
    def _searches(self, owner: Request, policy: Policy) -> list[list[int]]:
        """The attempts that count, in order; several where the contract leaves the choice."""
        last = max(len(part.attempts) for part in owner.parts) - 1
        if policy == "latest":
            return [[*range(last, -1, -1)]]
        sampled = self._that_sampled(owner)
        found, most = [sampled], self._computed(owner, sampled) or 0
        for number in range(sampled + 1, last):
            computed = self._computed(owner, number)
            if computed is None or computed >= self._had(owner, number, most):
                found.append(number)
                most = max(most, computed or 0)
        if last == sampled:
            return [found]
        had, computed = self._had(owner, last, most), self._computed(owner, last)
        if computed is not None and computed >= had:
            return [[*found, last]]
        stop = max((run.stop for part in owner.parts for run in part.runs), default=0)
        behind = [
            self.log.own(p, last, n) for p in owner.parts for n in range(max(had - 1, 0), stop)
        ]
        if any(None not in value for value in behind):
            return [[*found, last]]
        maybe = any(value != UNKNOWN for value in behind)
        return [found, [*found, last]] if maybe else [found]

    @_once
    def _that_sampled(self, owner: Request) -> int:
        """The first attempt that was preempted with its whole prompt computed, else the last."""
        last = max(len(part.attempts) for part in owner.parts) - 1
        for number in range(last):
            computed = self._computed(owner, number)
            if computed is not None and computed >= owner.prompt_len:
                return number
        return last

    @staticmethod
    def _computed(owner: Request, number: int) -> int | None:
        """How many tokens an attempt had computed when it was preempted."""
        told = (kept for part in owner.parts for _, of, kept in part.preempts if of == number)
        return min(told, default=None)

    @staticmethod
    def _had(owner: Request, number: int, most: int) -> int:
        """How many tokens the request had when an attempt began.

        If no resume gave a number: one more than the greatest number of tokens that an attempt
        which sampled had computed.
        """
        attempts = [part.attempts[number] for part in owner.parts if number < len(part.attempts)]
        return max((a.had for a in attempts if a.had is not None), default=most + 1)

    def _attempt(self, request: Request, number: int, position: int, layer: int) -> Cell:
        """The row that one attempt computed, lost, or took from a slot.

        What one shard has comes before what another one lost, and that before nothing.
        """
        values = [MISSING]
        for part in request.parts:
            if layer in part.writer.layer_ids and number < len(part.attempts):
                own = _by("forward", self.log.own(part, number, position))
                slot = _by("slot", self.log.cached(part, number, position))
                values.append(self._first_of([own, slot]))
        found: Cell = frozenset().union(*values)
        if any(None not in value for value in values):
            found -= MISSING
        if any(all(f and not f.row.lost for f in value) for value in values):
            found = frozenset(f for f in found if f and not f.row.lost)
        return found

    @_once
    def _handed(
        self, request: Request, position: int, layer: int, seen: tuple[Request, ...] = ()
    ) -> Cell:
        """The row behind the hand-over that a begin named."""
        first = [part.attempts[0] for part in request.parts]
        if not any(a.cached - a.external <= position < a.cached for a in first):
            return MISSING
        giver = self._giver(request)
        if giver is None or giver in seen:
            return MISSING
        failed = self.log.failed(request.parts, position)
        if failed == {True} or position >= self._agree_until(request, giver):
            return MISSING
        number = max(len(part.attempts) for part in giver.parts) - 1
        value = self._attempt(giver, number, position, layer)
        if not number:
            further = self._handed(giver, position, layer, (*seen, request))
            value = self._first_of([value, further])
        value = frozenset(f and f._replace(how="handoff") for f in value)
        return value | MISSING if True in failed else value

    def _agree_until(self, a: Request, b: Request) -> int:
        """From where on digests disprove that two requests share their tokens."""
        mine, yours = self.digests(a), self.digests(b)
        alike = 0
        for position in sorted({*mine} & {*yours}):
            if mine[position] != yours[position]:
                return alike
            alike = position
        return _NEVER

    # ------------------------------------------------------------------ rows that stand in

    def _stand_in(
        self, request: Request, owner: Request, position: int, layer: int, row: Cell
    ) -> Cell:
        """What there may be in a cell whose owner may have no row."""
        first = owner.first.attempts[0]
        reasons, sampled = self._reasons_at(owner, position, layer), self._that_sampled(owner)
        if position >= min(owner.prompt_len, first.cached) or "kv_unknown" not in reasons:
            return row
        computed_again = self.log.failed(owner.parts, position)
        if computed_again == {True}:
            return row
        found: set[Row | None] = {None} if True in computed_again else set()
        for version in self._kv_versions(owner):
            if version is None:
                found.add(None)
                continue
            of = self._candidates(owner, position, version)
            if self.prefix_rows == "unique":
                rows, sure = stand_ins.the_only_one(of, layer)
            else:
                rows, sure = stand_ins.the_first(self, request, of.get(layer, ()))
            found |= rows | (set() if sure else {None})
        if sampled:
            return row
        if reasons != {"kv_unknown"}:
            found.add(None)
        return (row - MISSING) | _by("prefix", frozenset(found))

    @_once
    def _candidates(
        self, owner: Request, position: int, version: int
    ) -> Mapping[int, list[stand_ins.Candidate]]:
        return stand_ins.candidates(self, owner, position, version)

    @_once
    def _kv_versions(self, owner: Request) -> set[int | None]:
        return stand_ins.kv_versions(self.log, owner)

    @_once
    def alike(self, owner: Request) -> list[tuple[Request, int]]:
        """Requests of the same model, and how many tokens of the owner's prompt they share."""
        others = [r for r in self.requests if r is not owner and stand_ins.same_model(r, owner)]
        return [(r, self.proven(r, owner)) for r in others]

    @_once
    def appeared(self, trace_id: str, other: str) -> bool:
        """Whether a trace appeared before another one for certain."""
        return stand_ins.began_before(self.log, self.trace(trace_id), self.trace(other))

    # ------------------------------------------------------------------ blocks

    def bound(self, engine_id: str, blocks: list[int], position: int, layer: int) -> Cell:
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
        return _by("", frozenset(found) or UNKNOWN)

    # ------------------------------------------------------------------ states and reasons

    def state(self, request: Request, layers: Iterable[int]) -> set[str]:
        """States that the trace may be in, for a reader of this incarnation."""
        requests = self.trace(request.first.trace_id)
        running = any(not r.ended for r in requests)
        unclaimed = request.reason == "handoff" and request.ended and not self.absorbed(request)
        if unclaimed or not any(p.ended_at >= 0 for p in request.parts):
            return {"running", "incomplete"} if self.log.settled else {"running"}
        cells = [
            self.cell(request, p, layer) for p in range(request.num_tokens - 1) for layer in layers
        ]
        states = set()
        if all(value != MISSING for value in cells):
            states.add("complete")
        if any(None in value for value in cells):
            states.add("incomplete")
        if running or len(request.parts) < self._shards(request):
            states.add("running")
        return states

    def why(
        self, request: Request, position: int, layer: int, policy: Policy, version: int | None
    ) -> set[str]:
        """Reasons that a missing cell may have, for a reader of one version, or of all."""
        rows = self.cell(request, position, layer, policy)
        found = self.reasons(request, position, layer, policy) if None in rows else set()
        if version is not None and any(f and f.row.version != version for f in rows):
            found = {*found, "other_version"}
        return found

    @_once
    def reasons(
        self, request: Request, position: int, layer: int, policy: Policy = "as_sampled"
    ) -> set[str]:
        """Reasons that a cell without a row may have."""
        found: set[str] = set()
        for owner in self.owners(request, position, policy):
            if owner is None:
                found.add("ambiguous")
            else:
                found |= self._reasons_at(owner, position, layer, policy)
        return found

    def _reasons_at(
        self, owner: Request, position: int, layer: int, policy: Policy = "as_sampled"
    ) -> set[str]:
        """Reasons that a cell of its owner without a row may have."""
        found = set[str]()
        for search in self._searches(owner, policy):
            lost, sure = self._why_lost(owner, search, position, layer)
            for part in owner.parts:
                if layer in part.writer.layer_ids:
                    known = lost if sure else set()
                    found |= lost | self._reasons_of(part, position, search, known)
        if self.log.settled and not owner.ended:
            found |= {"agent_lost", "aborted", "not_captured"}
        if len(owner.parts) < self._shards(owner):
            found.add("not_yet")  # a shard that has not begun with it
        return found

    def _why_lost(
        self, owner: Request, numbers: Iterable[int], position: int, layer: int
    ) -> tuple[set[str], bool]:
        """Why the first of some attempts that lost a cell did, and whether one did for certain."""
        found = set[str]()
        for number in numbers:
            cell = self._attempt(owner, number, position, layer)
            found |= {f.row.lost for f in cell if f and f.row.lost}
            if all(f and f.row.lost for f in cell):
                return found, True
        return found, False

    def _shards(self, request: Request) -> int:
        w = request.first.writer
        return sum(v.engine_id == w.engine_id and v.boot_id == w.boot_id for v in self.log.writers)

    def _reasons_of(
        self, part: Part, position: int, search: Iterable[int], lost: set[str]
    ) -> set[str]:
        """Reasons by one shard, if some attempts count and one of them lost the cell, or none."""
        count = {n: part.attempts[n] for n in search if n < len(part.attempts)}
        end, end_known = max((part.end(n) for n in count), default=0), part.ended_at >= 0
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
        if lost:
            return lost
        if position >= end:
            if part.ended_at < 0:
                return {"not_yet"}
            if any(position < a.cached for a in count.values()):  # loaded, and given up
                return {"kv_unknown"}
            return {"aborted"} if aborted else {"not_captured"}
        found: set[str] = set()
        for number, attempt in count.items():
            runs = (r for r in part.runs if r.attempt == number and r.start <= position < r.stop)
            rows = [run.rows[position - run.start] for run in runs]
            if not rows and position < attempt.cached:
                found.add("kv_unknown")
            taken = bool(rows) and not rows[-1].lost  # and not to be served, for now or for ever
            if taken and None in self.log.own(part, number, position):
                found.add("not_yet" if part.ended_at < 0 else "not_captured")
        return found or {"not_captured", "kv_unknown"}


def _by(how: str, value: Value) -> Cell:
    return frozenset(row and Found(row, how) for row in value)


def _learn(one: Digests, other: Digests) -> bool:
    """Takes over the digests before the last one that both have; whether there were any."""
    last = max((p for p, tokens in one.items() if other.get(p) == tokens), default=0)
    new = {p: tokens for p, tokens in other.items() if p < last and p not in one}
    one.update(new)
    return bool(new)
