"""Orders of calls through real agents and a real server core, every cell read back and judged."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, permutations
from typing import Any

import numpy as np

from oracle.harness import InlineWorld
from oracle.marks import MARKS, marked, unmarked
from oracle.world import MODEL, EngineSpec, Shard
from routetrace.capture_agent import CaptureAgent
from routetrace.client import RouteClient, Trace
from routetrace.common.errors import NotFound, RouteTraceError
from routetrace.common.layout import ModelLayout
from second_model.answers import MISSING, Answers, Cell, Request
from second_model.lineage import LAW
from second_model.log import Log, Part, Policy, Writer
from second_model.orders import Call, Event, Family
from second_model.stand_ins import PrefixRows

_SALTS = count(1)

#: Most requests of a trace whose assignments to incarnations are all tried.
_PERMUTED = 6

LAYOUT = ModelLayout((1, 3), 5, 291, 3)
_PRIME = 97


def ids_of(serial: int) -> dict[int, tuple[int, ...]]:
    """The ids of one row, different from those of every other row and layer."""
    ids = {}
    for index, layer in enumerate(LAYOUT.layer_ids):
        n = serial * len(LAYOUT.layer_ids) + index
        ids[layer] = tuple(k * _PRIME + n // _PRIME**k % _PRIME for k in range(3))
    return ids


def serial_of(ids: tuple[int, ...]) -> int:
    """The number of the row that has these ids at one layer."""
    return sum((v - k * _PRIME) * _PRIME**k for k, v in enumerate(ids)) // len(LAYOUT.layer_ids)


def labels_of(tokens: Sequence[int]) -> dict[str, str]:
    """The labels that a prompt's first token stands for."""
    return next(m for i, m in enumerate(MARKS) if marked(tokens[:1], i)[0] == tokens[0])


@dataclass
class Report:
    """What was compared, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def say(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.findings.append(f"{kind}: {text}")


def judge(log: Log, trace_ids: Iterable[str], ask: Ask, report: Report) -> None:
    """Compares every cell of some traces, by every policy, with what the log allows."""
    answers = Answers(log, prefix_rows=ask.prefix_rows)
    for trace_id in trace_ids:
        _judge_trace(answers, trace_id, ask, report)


class Ask:
    """Reads of a client, by the names of a log; each once, since nothing changes meanwhile."""

    def __init__(
        self,
        client: RouteClient,
        prefix: str,
        versions: Sequence[int],
        layer_ids: Sequence[int] = LAYOUT.layer_ids,
        prefix_rows: PrefixRows = "any",
    ) -> None:
        self.client = client
        self.prefix_rows = prefix_rows
        self.layer_ids = layer_ids
        self.prefix = prefix
        self.versions = versions
        self._known: dict[tuple[Any, ...], Trace | None] = {}

    def get(self, trace_id: str, **options: Any) -> Trace | None:
        key = trace_id, *sorted(options.items())
        if key not in self._known:
            try:
                self._known[key] = self.client.get(
                    self.prefix + trace_id,
                    missing="mask",
                    prefix_rows=self.prefix_rows,
                    **options,
                )
            except NotFound:
                self._known[key] = None
        return self._known[key]


def _judge_trace(answers: Answers, trace_id: str, ask: Ask, report: Report) -> None:
    requests = answers.trace(trace_id)
    default = ask.get(trace_id)
    if default is None:
        if any(not answers.hidden(r) for r in requests):
            report.say("lost", f"trace {trace_id} is not found")
        return
    if not requests:
        report.say("wrong", f"trace {trace_id} should be gone: {default}")
        return
    arrival = sorted(requests, key=_arrival)
    reads: list[tuple[int, Trace]] = []
    for number in range(1, len(requests) + 1):
        trace = ask.get(trace_id, incarnation=number)
        if trace is not None and trace.incarnation == number:
            reads.append((number, trace))
    order = _assign(answers, arrival, reads, ask)
    best = Report()
    for number, trace in reads:
        _judge_incarnation(answers, order[number - 1], number, trace, ask, best)
    shown = {number for number, _ in reads}
    if default.incarnation not in shown:
        best.say("wrong", f"trace {trace_id}: incarnation {default.incarnation} of {shown}")
    gone = [answers.absorbed(r) for r in requests if not answers.hidden(r)]
    if not gone.count(False) <= default.num_incarnations <= len(requests) - gone.count(True):
        must = [r.first.request_id for r in requests if not answers.absorbed(r)]
        best.say(
            "wrong", f"trace {trace_id}: {default.num_incarnations} incarnations, expected {must}"
        )
    elif answers.absorbed(order[default.incarnation - 1]):
        best.say("wrong", f"trace {trace_id}: {default.incarnation} is no incarnation")
    report.counts.update(best.counts)
    report.findings += best.findings


def _assign(
    answers: Answers, arrival: list[Request], reads: list[tuple[int, Trace]], ask: Ask
) -> tuple[Request, ...]:
    """Which request each incarnation number is: by time, else by fit.

    Requests of several engines arrive in any order, and so do those that are held back.
    """
    faults: dict[tuple[int, int], int] = {}
    if len(arrival) == 1:
        return tuple(arrival)
    for number, trace in reads:
        for index, request in enumerate(arrival):
            tried = Report()
            _judge_incarnation(answers, request, number, trace, ask, tried, briefly=True)
            faults[number - 1, index] = len(tried.findings)
    if len(arrival) > _PERMUTED:  # by time, but for pairs that fit better the other way round
        by_time, better = list(range(len(arrival))), True
        while better:
            better = False
            for i, j in combinations(range(len(arrival)), 2):
                a, b = by_time[i], by_time[j]
                now = faults.get((i, a), 0) + faults.get((j, b), 0)
                if faults.get((i, b), 0) + faults.get((j, a), 0) < now:
                    by_time[i], by_time[j], better = b, a, True
        return tuple(arrival[index] for index in by_time)
    best = min(
        permutations(range(len(arrival))),
        key=lambda order: sum(faults.get(pair, 0) for pair in enumerate(order)),
    )
    return tuple(arrival[index] for index in best)


def _arrival(request: Request) -> int:
    first = request.first.attempts[0]
    if not first.cached:
        return first.at
    return first.inherits_at if first.inherits_at >= 0 else 1 << 60


def _judge_incarnation(
    answers: Answers,
    request: Request,
    number: int,
    trace: Trace,
    ask: Ask,
    report: Report,
    *,
    briefly: bool = False,
) -> None:
    trace_id = request.first.trace_id
    name = f"{trace_id}#{number} ({request.first.request_id})"
    states = answers.state(request, ask.layer_ids)
    if str(trace.state) not in states and trace.state.value not in states:
        report.say("state", f"{name} is {trace.state}, expected {sorted(states)}")
    labels = answers.labels(request)
    if trace.labels not in labels:
        report.say("wrong", f"{name} has the labels {trace.labels}, expected {labels}")
    if request.ended and request.reason != "handoff" and trace.num_tokens != request.num_tokens:
        report.say("wrong", f"{name} has {trace.num_tokens} tokens, not {request.num_tokens}")
    policies: tuple[Policy, ...] = ("as_sampled", "latest")
    for policy in policies:
        for version in (None,) if briefly else (None, *ask.versions):
            if policy == "as_sampled" and version is None:
                read: Trace | None = trace
            else:
                read = ask.get(trace_id, incarnation=number, policy=policy, weight_version=version)
            what = f"{name} {policy}" + ("" if version is None else f" of version {version}")
            if read is None:
                report.say("lost", f"{what}: not found")
                continue
            _judge_cells(
                read,
                what,
                lambda p, layer, po=policy, v=version: answers.cell(request, p, layer, po, v),
                lambda p, layer, po=policy, v=version: answers.why(request, p, layer, po, v),
                _length(request),
                report,
            )


def _length(request: Request) -> int:
    if request.num_tokens:
        return request.num_tokens - 1
    ends = [run.stop for part in request.parts for run in part.runs]
    return max([request.prompt_len, *ends, *(a.cached for p in request.parts for a in p.attempts)])


def _judge_cells(
    read: Trace,
    what: str,
    expected: Callable[[int, int], Cell],
    reasons: Callable[[int, int], set[str]] | None,
    length: int,
    report: Report,
) -> None:
    valid, ids = read.valid, read.topk_ids
    stand_ins = {p for a, b, how in read.provenance if how == "prefix" for p in range(a, b)}
    proven = sum(bool(cells.all()) for p, cells in enumerate(valid) if p not in stand_ins)
    if read.proven != proven:
        report.say("wrong", f"{what}: {read.proven} rows are proven, expected {proven}")
    # By position alone: those of several layers.
    versions, hows = _by_position(read.weight_versions), _by_position(read.provenance)
    sources = _by_position(read.prefix_sources)
    missing = reasons_of(read)
    for position in range(max(length, read.num_rows)):
        for column, layer in enumerate(read.layer_ids):
            cell = expected(position, layer)
            served = position < len(valid) and bool(valid[position, column])
            report.counts["cells"] += 1
            if served:
                got = tuple(int(i) for i in ids[position, column])
                rows = [f for f in cell if f is not None and tuple(f.row.ids[layer]) == got]
                if not rows:
                    report.say(
                        "wrong",
                        f"{what} @{position} layer {layer}: served {_name(got)}, "
                        f"expected {_names(cell)}",
                    )
                    continue
                if not {f.row.version for f in rows} & versions[position]:
                    report.say(
                        "wrong",
                        f"{what} @{position}: version {versions[position]}, "
                        f"expected {_names(frozenset(rows))}",
                    )
                if not {f.how for f in rows} & {*hows[position], ""}:
                    report.say(
                        "provenance",
                        f"{what} @{position}: {', '.join(hows[position])}, "
                        f"expected {', '.join({f.how for f in rows})}",
                    )
                given = {f.row.part.trace_id for f in rows if f.row.part and f.how == "prefix"}
                if len(given) == len(rows) and not any(
                    s.endswith(t) for s in sources[position] for t in given
                ):
                    report.say("wrong", f"{what} @{position}: of {sources[position]}, not {given}")
            elif None not in cell:
                why = missing.get((position, layer), "beyond the answer")
                report.say(
                    "lost", f"{what} @{position} layer {layer}: {why}, expected {_names(cell)}"
                )
            elif reasons is not None and (position, layer) in missing:
                allowed = reasons(position, layer)
                if missing[position, layer] not in allowed:
                    report.say(
                        "reason",
                        f"{what} @{position}: {missing[position, layer]}, "
                        f"expected {sorted(allowed)}",
                    )


def reasons_of(read: Trace) -> dict[tuple[int, int], str]:
    """Why each cell is missing, by position and layer."""
    return {
        (p, layer): m.reason
        for m in read.missing
        for p in range(m.start, m.stop)
        for layer in m.layer_ids
    }


def _by_position(spans: Iterable[tuple[int, int, Any]]) -> dict[int, set[Any]]:
    found: dict[int, set[Any]] = defaultdict(set)
    for start, stop, value in spans:
        for position in range(start, stop):
            found[position].add(value)
    return found


def _name(ids: tuple[int, ...]) -> str:
    return f"row {serial_of(ids)}"


def _names(cell: Cell) -> str:
    if cell == MISSING:
        return "unknown"
    return " or ".join(
        f"{_name(tuple(next(iter(f.row.ids.values()))))} {f.row} {f.how}" if f else "unknown"
        for f in cell
    )


# ---------------------------------------------------------------------------- one order


class Player:
    """Tells one order of events to agents of a world, and to a log."""

    def __init__(
        self, world: InlineWorld, family: Family, prefix: str, prefix_rows: PrefixRows
    ) -> None:
        self.world, self.family, self.prefix = world, family, prefix
        self.prefix_rows = prefix_rows
        #: Orders that share a server must not share tokens: rows of equal prefixes stand in.
        self.salt = next(_SALTS) % (1 << 18) << 14
        self.log = Log()
        self.serial = 0
        self.handles: dict[tuple[str, int], int] = {}
        self.parts: dict[tuple[str, int], Part] = {}
        self.late_calls: list[Callable[[], None]] = []
        self.engines: dict[str, list[tuple[CaptureAgent, Writer]]] = {}
        shards = [(1,), (3,)] if family.sharded else [LAYOUT.layer_ids]
        for engine in ("e", "d") if family.decode_engine else ("e",):
            agents = []
            for index, layers in enumerate(shards):
                shard = Shard(f"pp{index}" if family.sharded else "", layers)
                spec = EngineSpec(
                    *(prefix + engine, family.block_size, family.num_blocks, (shard,)),
                    empties="declared" if family.declares else "told",
                    model=MODEL[::-1] if engine in family.strangers else MODEL,
                    host_blocks=family.host_blocks,
                )
                world.connect(spec, shard, "boot")
                agent = world.agents[spec.engine_id, shard.name]
                writer = Writer(
                    *(engine, "boot", shard.name, layers, LAYOUT.num_experts),
                    family.block_size,
                    family.num_blocks,
                    family.host_blocks,
                    model=spec.model,
                    declares=family.declares,
                )
                agents.append((agent, self.log.writer(writer)))
            self.engines[engine] = agents
        if family.version is not None:
            self._call(("version", family.version))
        if family.fresh:
            self.play(tuple((kind, e) for e in self.engines for kind in ("reset", "emptied")))
            self.sync()

    def play(self, event: Event) -> None:
        for call in event:
            self._call(call)

    def _call(self, call: Call) -> None:
        kind, args = call[0], call[1:]
        if kind == "flush":
            self.world.barrier_only()
            self.log.flushed()
        elif kind == "sync":
            self.sync()
        elif kind == "delete":
            self.world.client.delete(self.prefix + args[0])
            self.log.delete(args[0])
        elif kind == "version":
            for agents in self.engines.values():
                for agent, writer in agents:
                    agent.set_weight_version(args[0])
                    self.log.set_version(writer, args[0])
        else:
            shards = range(2)
            if kind == "at":  # one shard alone
                shards, kind, args = range(args[0], args[0] + 1), args[1], args[2:]
            engine = args[0] if args[0] in self.engines else self._engine_of(args[0])
            rows = self._rows(kind, args)
            for shard in shards[: len(self.engines[engine])]:
                self._later(
                    shard, lambda s=shard, e=engine, r=rows: self._tell(kind, args, e, s, r)
                )

    def _later(self, shard: int, call: Callable[[], None]) -> None:
        if shard:
            self.late_calls.append(call)
        else:
            call()

    def sync(self) -> None:
        """The second shard catches up with the first."""
        calls, self.late_calls = self.late_calls, []
        for call in calls:
            call()

    def _tokens(self, tokens: Iterable[int]) -> list[int]:
        return [self.salt + t for t in tokens]

    def _engine_of(self, name: str) -> str:
        return self.parts[name, 0].writer.engine_id

    def _rows(self, kind: str, args: Any) -> list[dict[int, tuple[int, ...]]]:
        if kind not in ("step", "bad"):
            return []
        count = sum(n for _, _, n in args[1])
        rows = [ids_of(self.serial + i) for i in range(count)]
        self.serial += count
        if kind == "bad":
            rows[-1] = dict.fromkeys(rows[-1], (5, 5, 6))
        return rows

    def _tell(self, kind: str, args: Any, engine: str, shard: int, rows: list[Any]) -> None:
        agent, writer = self.engines[engine][shard]
        log, name = self.log, args[0]
        part = self.parts.get((name, shard)) if isinstance(name, str) else None
        handle = self.handles.get((name, shard), -1)
        if kind == "begin":
            _, name, trace, prompt, cached, external, blocks, *transfer = args
            prompt = self._tokens(prompt)
            labels = {**labels_of(prompt), "last": name, f"also {name}": "yes"}
            self.handles[name, shard] = agent.begin(
                name,
                trace_id=self.prefix + trace,
                prompt_len=len(prompt),
                labels=labels,
                num_computed_tokens=cached,
                num_external_tokens=external,
                block_ids=blocks,
                prompt_token_ids=unmarked(prompt),
                transfer_id=next(iter(transfer), None),
            )
            self.parts[name, shard] = log.begin(
                writer,
                name,
                trace,
                len(prompt),
                cached,
                external,
                blocks,
                prompt,
                *transfer,
                labels=labels,
            )
        elif kind in ("step", "bad", "skip"):
            runs = [(self.handles[n, shard], start, count) for n, start, count in args[1]]
            known = [(self.parts[n, shard], start, count) for n, start, count in args[1]]
            if kind == "skip":
                agent.skip(runs)
                log.step(writer, known, None)
            else:
                mine = [{layer: row[layer] for layer in writer.layer_ids} for row in rows]
                number = agent.step(np.array([list(r.values()) for r in mine]), runs)
                log.step(writer, known, mine)
                # One run may be late as a whole: the step counts, or does not, with the agent.
                writer.step = number or writer.step
        elif kind == "reset":
            agent.reset_prefix_cache()
            log.reset(writer)
        elif kind == "emptied":
            agent.reset_external_kv()
            log.emptied(writer)
        elif kind == "copy":
            agent.copy_blocks(args[1], args[2])
            log.copy(writer, args[1], args[2])
        elif kind == "external":
            agent.mark_external(args[1])
            log.external(writer, args[1])
        else:
            assert part is not None
            if kind == "add":
                agent.add_blocks(handle, args[1])
                log.add_blocks(part, args[1])
            elif kind == "rewind":
                agent.rewind(handle, args[1], step=args[2])
                log.rewind(part, args[1], args[2])
            elif kind == "preempt":
                agent.preempt(handle, args[2])
                log.preempt(part, args[2])
            elif kind == "resume":
                told = {"num_tokens": args[3]} if args[3:] else {}
                agent.resume(handle, args[1], block_ids=args[2], **told)
                log.resume(part, args[1], args[2], 0, **told)
            elif kind == "finish":
                tokens, transfer = self._tokens(args[1]), args[4:]
                agent.finish(
                    handle,
                    len(tokens),
                    reason=args[2],
                    token_ids=unmarked(tokens),
                    transfer_id=next(iter(transfer), None),
                )
                log.finish(part, len(tokens), args[2], tokens, *transfer)

    def flush(self) -> None:
        for agents in self.engines.values():
            for agent, _ in agents:
                assert agent.flush(60)
        self.log.flushed()

    def judge(self, report: Report) -> None:
        """Reads all back."""
        self.flush()
        rows = [r for p in self.log.parts for run in p.runs for r in run.rows if not r.lost]
        versions = {r.version for r in rows}
        ask = Ask(
            self.world.client,
            self.prefix,
            sorted(versions - {None}) if len(versions) > 1 else (),
            prefix_rows=self.prefix_rows,
        )
        judge(self.log, dict.fromkeys(p.trace_id for p in self.log.parts), ask, report)
        self._judge_blocks(report)

    def judge_by_hand(self, law: Mapping[str, tuple[str, ...]], report: Report) -> None:
        """Compares readers, and this model, with what is known of an order."""
        for reader, words in law.items():
            name, *options = reader.split()
            policy: Policy = "latest" if "latest" in options else "as_sampled"
            prefix_rows: PrefixRows = "any" if "any" in options else "unique"
            answers = Answers(self.log, prefix_rows=prefix_rows)
            trace_id, _, last = name.partition("#")
            reads = (
                self.world.client.get(
                    self.prefix + trace_id,
                    missing="mask",
                    policy=policy,
                    prefix_rows=prefix_rows,
                    incarnation=number,
                )
                for number in ([*range(1, len(self.log.parts) + 1)] if last else [None])
            )
            read = next(r for r in reads if last in ("", r.labels["last"]))
            hows, missing = _by_position(read.provenance), reasons_of(read)
            name = read.labels["last"]
            [request] = [r for r in answers.trace(trace_id) if r.first.request_id == name]
            for column, layer in enumerate(read.layer_ids):
                got = tuple(
                    f"{'|'.join(hows[p])[:1]}{serial_of(tuple(read.topk_ids[p, column].tolist()))}"
                    if read.valid[p, column]
                    else str(missing.get((p, layer)))
                    for p in range(read.num_rows)
                )
                mine = tuple(
                    "|".join(
                        f"{f.how[0]}{serial_of(f.row.ids[layer])}"
                        if f
                        else "|".join(answers.reasons(request, p, layer, policy))
                        for f in answers.cell(request, p, layer, policy)
                    )
                    for p in range(len(words))
                )
                for who, what in (("served", got), ("by the model", mine)):
                    if what != words:
                        report.say("law", f"{reader} layer {layer} {who}: {what}, not {words}")

    def _judge_blocks(self, report: Report) -> None:
        f, answers = self.family, Answers(self.log)
        blocks = list(range(f.num_blocks + f.host_blocks))
        for engine in self.engines:
            read = self.world.client.get_blocks(
                self.prefix + engine, blocks, len(blocks) * f.block_size, missing="mask"
            )
            _judge_cells(
                read,
                f"blocks of {engine}",
                lambda p, layer, e=engine: answers.bound(e, blocks, p, layer),
                lambda *_: {"kv_unknown"},
                len(blocks) * f.block_size,
                report,
            )

    def judge_bind(self, report: Report) -> None:
        """Binds the blocks of each request anew, and reads that back."""
        answers = Answers(self.log)
        for (name, shard), part in list(self.parts.items()):
            blocks = part.attempts[-1].blocks
            if shard or not blocks:
                continue
            engine = part.writer.engine_id
            total = len(blocks) * self.family.block_size
            trace_id = f"bound {name}"
            expected = {
                (p, layer): answers.bound(engine, blocks, p, layer)
                for p in range(total)
                for layer in LAYOUT.layer_ids
            }
            self.world.client.bind(
                self.prefix + engine, trace_id, blocks, total + 1, trace_id=self.prefix + trace_id
            )
            read = self.world.client.get(self.prefix + trace_id, missing="mask")
            _judge_cells(
                read, trace_id, lambda p, layer, e=expected: e[p, layer], None, total, report
            )

    def close(self) -> None:
        for engine in self.engines:
            self.world.crash(self.prefix + engine)


class Worlds(InlineWorld):
    """An inline world in which orders flush when they say so."""

    def barrier_only(self) -> None:
        for agent in self.agents.values():
            assert agent.flush(60)


def play(
    world: Worlds,
    family: Family,
    order: Sequence[Event],
    prefix: str,
    report: Report,
    rng: random.Random,
) -> None:
    """Tells an order and judges what readers get, at its end and sometimes in between."""
    player = Player(world, family, prefix, rng.choice(("unique", "any")))
    before = len(report.findings)
    between = rng.randrange(4 * len(order)) if order else -1
    try:
        for index, event in enumerate(order):
            player.play(event)
            if index == between:
                player.judge(report)
        if family.sharded:
            if rng.random() < 0.5:
                player.judge(report)
            player.sync()
        player.judge(report)
        player.judge_by_hand(LAW.get((family, tuple(order)), {}), report)
        if rng.random() < 0.15:
            player.judge_bind(report)
        if rng.random() < 0.3:
            _end_all(player)
            player.judge(report)
    except (RouteTraceError, AssertionError) as error:
        report.say("error", f"{type(error).__name__}: {error}")
    finally:
        player.close()
    report.counts["orders"] += 1
    report.counts["events"] += len(order)
    if len(report.findings) > before:
        report.counts["bad orders"] += 1


def _end_all(player: Player) -> None:

    for (name, shard), part in list(player.parts.items()):
        if part.ended_at < 0:
            agent, _ = player.engines[part.writer.engine_id][shard]
            number = max(part.end() + 1, part.prompt_len, 1)
            agent.finish(player.handles[name, shard], number, reason="abort")
            player.log.finish(part, number, "abort", None)
