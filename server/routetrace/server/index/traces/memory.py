"""Memory that the index takes for traces and chunks, counted from what they hold.

Constants are of CPython on 64-bit machines, with the allocator's own part; the objects of a trace
are many and small, so that a walk over all of them would take as long as a view.
"""

from __future__ import annotations

from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.trace import Trace

#: Objects of a trace and its places in the index, and those of a source with its entries in the
#: index of tokens, without what they list.
_TRACE_BYTES, _SOURCE_BYTES = 700, 1450

#: A span, a KV block, and a digest with its entry in the index of prefixes.
_SPAN_BYTES, _BLOCK_BYTES, _DIGEST_BYTES = 40, 16, 44

#: A list of spans or intervals by attempt, and a mapping of labels with one label, without texts.
_LIST_BYTES, _LABELS_BYTES, _LABEL_BYTES = 250, 180, 110

#: Cached conclusions: a summary, a join, a request in it, and each of its digests.
_SUMMARY_BYTES, _JOIN_BYTES, _REQUEST_BYTES, _JOINED_DIGEST_BYTES = 300, 300, 1000, 65

#: Entry of a stored chunk.
_CHUNK_BYTES, _FRAME_BYTES = 350, 4


def memory_of(trace: Trace) -> int:
    """Return the bytes of memory that a trace takes."""
    total = _TRACE_BYTES + len(trace.key[1]) + len(trace.packed or b"")
    if trace.summary:
        total += _SUMMARY_BYTES + len(trace.summary.entry) + len(trace.summary.told)
    joined = trace.has_join
    if joined:
        total += _JOIN_BYTES
    for source in trace.sources:
        total += _memory_of_source(source)
        if joined:
            total += _REQUEST_BYTES + _JOINED_DIGEST_BYTES * source.num_digests
    return total


def _memory_of_source(source: Source) -> int:
    total = _SOURCE_BYTES + len(source.request_id) + len(source.occurrence)
    total += _DIGEST_BYTES * source.num_digests + _BLOCK_BYTES * len(source.blocks)
    if source.labels:
        texts = sum(len(key) + len(text) for key, text in source.labels.items())
        total += _LABELS_BYTES + _LABEL_BYTES * len(source.labels) + texts
    spans = [*source.attempts, *source.lost.values(), source.drafts]
    num_spans = sum(map(len, spans)) + sum(map(len, source.unknown.values()))
    num_lists = len(spans) + len(source.unknown)
    return total + _SPAN_BYTES * num_spans + _LIST_BYTES * (num_lists - 2)


def memory_of_chunk(num_frames: int) -> int:
    """Return the bytes of memory that the entry of a stored chunk takes."""
    return _CHUNK_BYTES + _FRAME_BYTES * num_frames
