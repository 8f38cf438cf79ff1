"""Application of the records without rows: writers, bound requests, deletions, leases."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from routetrace.codec.records import DIGEST, U32, unpack
from routetrace.server.index.agreements import Report
from routetrace.server.index.records.record import hash_of_bind, layout_from_stored
from routetrace.server.index.slot_map import SlotMap
from routetrace.server.index.state import State, engine_key
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER, SpanList
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.index.writer import Writer
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb


def key_of(message: stored.WriterKey) -> WriterKey:
    """Return the key of a writer."""
    return WriterKey(message.run, message.engine_id, message.shard)


#: Requests that are lost at a time.
_LOST = 256


def lose_track(
    state: State, writer: Writer, reason: int = pb.MISSING_REASON_CORRUPT
) -> Generator[None, None, None]:
    """Forget slots and live requests of a writer: their state is unknown, as calls are lost.

    `reason` is the MissingReason of their rows.
    """
    writer.slots.forget_all()
    for index, (key, source) in enumerate(writer.live.values(), 1):
        if not index % _LOST:
            yield
        if trace := state.traces.traces.get(key):
            state.changed(trace)
            trace.rejoin()
        source.lose_track(reason)
    # The rest of a request whose trace was deleted must not become a trace.
    writer.live = {name: known for name, known in writer.live.items() if known[1].forgotten}


def close_requests(state: State, writer: Writer, now: float) -> Generator[None, None, None]:
    """Note that no call of the live requests will come, as their agent was closed.

    Their drafts stay unconfirmed.
    """
    for index, name in enumerate([*writer.live], 1):
        key, source = writer.live.pop(name)
        source.closed, source.blocks, source.cached, source.drafts = True, [], 0, SpanList()
        lost = source.lost.get(len(source.attempts) - 1)
        last = lost[len(lost) - 1] if lost else None
        if last and last.stop == FOREVER and last.provenance == pb.MISSING_REASON_AGENT_LOST:
            source.lose(last.position, FOREVER, pb.MISSING_REASON_AGENT_CLOSED)
        if not source.forgotten and (trace := state.trace(key, now)):
            state.touch(trace, now)
        if not index % _LOST:
            yield


def _apply_open(state: State, change: stored.Open, _: float) -> Generator[None, None, Writer]:
    yield
    key = key_of(change.writer)
    old = state.writers.get(key)
    if old and old.boot_id == change.boot_id:  # calls between the two epochs are lost
        agent_lost, corrupt = pb.MISSING_REASON_AGENT_LOST, pb.MISSING_REASON_CORRUPT
        yield from lose_track(state, old, agent_lost if change.restarted else corrupt)
    if old:
        state.touched.update(trace_key for trace_key, _ in old.live.values())
    slots = SlotMap(change.block_size, change.num_blocks)
    layout = layout_from_stored(change.layout)
    writer = Writer(
        key,
        change.epoch,
        change.boot_id,
        state.number,
        layout,
        slots,
        change.token,
        model=change.model,
        says_unknown_versions=change.says_unknown_versions,
    )
    state.writers[key] = writer
    state.epochs[key] = writer.epoch
    state.touched.add(engine_key(key.run, key.engine_id))
    state.prune_tombstones()
    return writer


def _apply_bind(state: State, change: stored.Bind, now: float) -> Generator[None, None, None]:
    """Make a finished request of the rows that the slots of its blocks name."""
    begin = pb.RequestBegin(
        trace_id=change.trace_id,
        prompt_len=change.prompt_len,
        labels=change.labels,
        ttl_seconds=change.ttl_seconds,
    )
    request_id, num_tokens, step = change.request_id, change.num_tokens, change.step
    blocks = unpack(change.block_ids, U32, "block_ids")
    digests = unpack(change.digests, DIGEST, "token_digests")
    asked = yield from hash_of_bind(request_id, blocks, num_tokens, step)
    found = []
    for writer in state.engine_writers(change.run, change.engine_id):
        rows = Source(writer.key, writer.epoch, request_id, "", writer.layout)
        yield from state.inherit(writer, rows, blocks, change.num_computed_tokens, step)
        found.append((writer, rows))
    # From here on at once: a reader sees all of a bound request or nothing.
    for writer, rows in found:
        key, source = state.begin(writer, request_id, f"bind {asked}", begin, now)
        trace = state.traces.traces[key]
        source.ended, source.num_tokens = True, num_tokens
        source.attempts, source.unknown = rows.attempts, rows.unknown
        source.add_digests(digests)
        state.traces.learn(trace, source)
        # A repeated bind replaces the request: more slots may be known.
        for i, other in enumerate(trace.sources[:-1]):
            if (other.writer, other.occurrence) == (source.writer, source.occurrence):
                trace.sources[i] = trace.sources.pop()
                break
        state.touch(trace, now)


def _apply_delete(state: State, change: stored.Delete, now: float) -> Generator[None, None, int]:
    fate = Fate(change.reason, now, change.token)
    count = 0
    for trace_id in change.trace_ids:
        key = change.run, trace_id
        trace = state.trace(key, now)  # one that has expired is not counted, swept or not
        # One that changed since it was chosen may run again, or be another one of the same id.
        if trace and 0 < change.judged < trace.last_record:
            pass
        elif change.until:
            count += yield from state.forget_begun(key, change.since, change.until, fate)
        else:
            count += state.forget(key, fate)
        yield
    return count


def _apply_renew(state: State, change: stored.Renew, now: float) -> Generator[None, None, int]:
    yield
    traces = [state.trace((change.run, i), now) for i in change.trace_ids]
    found = [trace for trace in traces if trace]
    for trace in found:
        ttl, expires = change.ttl, now + change.ttl
        if change.keep_longer:
            ttl, expires = max(ttl, trace.ttl), max(expires, trace.expires)
        trace.ttl, trace.expires = ttl, expires
        trace.packed = None
        state.touched.add(trace.key)
    return len(found)


def _apply_forget(
    state: State, change: stored.Forget, _: float
) -> Generator[None, None, list[WriterKey]]:
    yield
    engine = change.run, change.engine_id
    keys = [key for key in state.writers if (key.run, key.engine_id) == engine]
    for key in keys:
        state.touched.update(trace_key for trace_key, _ in state.writers.pop(key).live.values())
    return keys


def _apply_agreement(
    state: State, change: stored.Agreement, _: float
) -> Generator[None, None, None]:
    yield
    state.agreements.add(change.run, Report(change.step, change.reporter, change.report))


#: Function that applies a change, by its name in the record.
CONTROL: dict[str, Callable[[State, Any, float], Generator[None, None, Any]]] = {
    "open": _apply_open,
    "bind": _apply_bind,
    "delete": _apply_delete,
    "renew": _apply_renew,
    "forget": _apply_forget,
    "agreement": _apply_agreement,
}
