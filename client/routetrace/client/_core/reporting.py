"""A trainer's own choices as the stream of an agent, in one go; no I/O."""

from __future__ import annotations

import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._core.config import Config
from routetrace.client._core.retry import Attempts
from routetrace.client._core.steps import END, Emit, Open, Part, Plan, Receive, Sleep
from routetrace.client._memory import to_numpy
from routetrace.client.stat import TraceStat
from routetrace.codec.frame import encode_frame, invalid_rows
from routetrace.codec.records import (
    ADAPTER_LABEL,
    KV_CACHE_DTYPE_LABEL,
    OP,
    U32,
    UNKNOWN_VERSION,
    FinishReason,
    OpKind,
)
from routetrace.common.errors import (
    InvalidArgument,
    RouteTraceError,
    Unavailable,
    from_detail,
    kind_of,
)
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_STEP
from routetrace.v1 import routetrace_pb2 as pb

#: Label of a report with its training step.
STEP_LABEL = "step"

#: Rows of a frame, and bytes of frames after which a chunk is full.
_FRAME_ROWS = 512
_CHUNK_BYTES = 1 << 20
_Ids = npt.NDArray[np.unsignedinteger[Any]]


class Report(NamedTuple):
    """Rows of one trace as a trainer chose them."""

    layout: ModelLayout
    """Of the reported layers."""
    ids: _Ids
    """[n, layers, top_k] of `layout.dtype`, of all positions from `start` on."""
    counts: npt.NDArray[np.bool_]
    """[n]: positions that were reported."""
    start: int
    labels: dict[str, str]
    weight_version: int
    ttl_seconds: int
    """Lease: what is left of the trace's."""


def report_of(
    stat: TraceStat,
    topk_ids: Any,
    *,
    valid: Any,
    layer_ids: Sequence[int] | None,
    token_start: int,
    step: int | None,
    weight_version: int | None,
) -> Report:
    """Return the checked arguments of RouteClient.report_routing.

    Args:
        stat: facts about the trace.
        topk_ids: as there.
        valid: as there.
        layer_ids: as there.
        token_start: as there.
        step: as there.
        weight_version: as there.

    Raises:
        InvalidArgument: naming the wrong argument.
    """
    layers = check.layers(layer_ids)
    model = stat.layout
    unknown = sorted(set(layers or ()) - set(model.layer_ids))
    if unknown:
        raise InvalidArgument(
            field="layer_ids", value=unknown, expected=f"MoE layers: {list(model.layer_ids)}"
        )
    layout = model.select(layers or model.layer_ids)
    ids = _checked(topk_ids, layout)
    counts = _counts(valid, ids, layout)
    if stat.num_tokens is None:
        raise InvalidArgument(
            field="trace_id",
            value=f"{stat.trace_id!r}, which has no known end",
            expected="a trace that has ended",
        )
    start = check.whole("token_start", token_start)
    if start + len(ids) > stat.num_tokens:
        raise InvalidArgument(
            field="topk_ids",
            value=f"{len(ids)} tokens from {start} on",
            expected=f"those of the {stat.num_tokens} tokens of the trace",
            remedy="leave the padding out",
        )
    # The last token is in no forward pass of the rollout.
    kept = max(0, min(len(ids), stat.num_tokens - 1 - start))
    if not counts[:kept].any():
        raise InvalidArgument(
            field="topk_ids",
            value="no token that counts",
            expected="at least one whose cells are all valid, before the last token of the trace",
        )
    labels = {
        name: stat.labels[name]
        for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL)
        if name in stat.labels
    }
    if step is not None:
        labels[STEP_LABEL] = str(check.whole("step", step, 0, MAX_STEP))
    return Report(
        layout=layout,
        ids=np.ascontiguousarray(ids[:kept].astype(layout.dtype)),
        counts=counts[:kept],
        start=start,
        labels=labels,
        weight_version=UNKNOWN_VERSION
        if weight_version is None
        else check.weight_version(weight_version),
        ttl_seconds=max(1, round(stat.expires_at.timestamp() - time.time())),
    )


def _array(field: str, values: Any) -> npt.NDArray[Any]:
    """Return values as an array; other objects become one that no check accepts."""
    try:
        return to_numpy(values)
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists, tensors of bfloat16
        expected = "an array, or a tensor"
        raise InvalidArgument(field=field, value=kind_of(values), expected=expected) from error


def _checked(topk_ids: Any, layout: ModelLayout) -> npt.NDArray[np.integer[Any]]:
    ids = _array("topk_ids", topk_ids)
    columns = (len(layout.layer_ids), layout.top_k)
    if ids.ndim != 3 or ids.shape[1:] != columns or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            field="topk_ids",
            value=f"{ids.dtype} {list(ids.shape)}",
            expected=f"integers [tokens, {columns[0]}, {columns[1]}]",
        )
    return ids


def _counts(
    valid: Any, ids: npt.NDArray[np.integer[Any]], layout: ModelLayout
) -> npt.NDArray[np.bool_]:
    """Return the positions that are reported: those whose cells are all valid."""
    shape = ids.shape[:2]
    cells = np.ones(shape, np.bool_) if valid is None else _array("valid", valid)
    if cells.shape != shape or cells.dtype != np.bool_:
        shown = f"{cells.dtype} {list(cells.shape)}"
        raise InvalidArgument(field="valid", value=shown, expected=f"bool {list(shape)}")
    counts: npt.NDArray[np.bool_] = np.asarray(cells.all(axis=1))
    known = ids if counts.all() else ids[counts]
    row = _first_bad(known, layout)
    if row is not None:
        at = int(np.flatnonzero(counts)[row])
        each = (_first_bad(known[row : row + 1, [column]], layout) for column in range(shape[1]))
        column = next(column for column, bad in enumerate(each) if bad is not None)
        raise InvalidArgument(
            field="topk_ids",
            value=f"{known[row, column].tolist()} at index {at}, layer {layout.layer_ids[column]}",
            expected=f"{layout.top_k} different ids in [0, {layout.num_experts})",
            remedy="mark cells that no router chose as not valid",
        )
    return counts


def _first_bad(ids: npt.NDArray[np.integer[Any]], layout: ModelLayout) -> int | None:
    """Return the first token that no router could choose as given; None if there is none."""
    if not ids.size:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= layout.num_experts:
        bad = ((ids < 0) | (ids >= layout.num_experts)).any(axis=(1, 2))
    else:
        bad = invalid_rows(np.ascontiguousarray(ids.astype(layout.dtype)), layout.num_experts)
    return int(bad.argmax()) if bad.any() else None


class WriterNames:
    """Names of the writers of one client, each lent to one report at a time.

    A server keeps what it knows of a writer for a while, so that few names are used.
    """

    def __init__(self) -> None:
        self._mine = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._free: list[str] = []
        self._made = 0

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Lend a name."""
        with self._lock:
            if self._free:
                name = self._free.pop()
            else:
                self._made += 1
                name = f"{self._mine}-{self._made}"
        try:
            yield name
        finally:
            with self._lock:
                self._free.append(name)


def sent(
    report: Report,
    stat: TraceStat,
    config: Config,
    reporter: str,
    writers: WriterNames,
    timeout: float | None,
) -> Plan[None]:
    """Send a report; emit None once the server has stored it.

    A report that breaks off is sent again as a whole; of an earlier attempt the server keeps at
    most an incomplete incarnation.

    Args:
        report: the rows.
        stat: facts about their trace.
        config: of the client, whose run is that of the reports.
        reporter: name of the reporter.
        writers: names of writers.
        timeout: seconds.
    """
    attempts = Attempts(config.limit(timeout))
    chunks = [*_chunks(report, stat)]
    with writers.lend() as writer:
        while True:
            hello = pb.Hello(
                run=config.run,
                engine_id=reporter,
                shard=writer,
                boot_id=uuid.uuid4().hex,
                layout=report.layout.to_proto(),
                says_unknown_versions=True,
            )
            requests = iter([pb.IngestRequest(hello=hello), *chunks])
            try:
                yield from _stored(Open("Ingest", requests, attempts.start()), len(chunks))
            except (grpc.RpcError, RouteTraceError) as failure:
                pause = attempts.pause(failure)
            else:
                break
            yield Sleep(pause, attempts.failure, attempts.left())
    yield Emit(None)


def _stored(stream: Open, count: int) -> Part[None]:
    """Open a stream; return once all of its chunks are stored."""
    call = yield stream
    acknowledged = 0
    while acknowledged < count:
        answer = yield Receive(call)
        if answer is END:
            raise Unavailable("the server has ended the report")
        if answer.HasField("reject"):
            raise from_detail(answer.reject.error)
        if answer.HasField("ack"):
            acknowledged = answer.ack.sequence


def _chunks(report: Report, stat: TraceStat) -> Iterator[pb.IngestRequest]:
    """Yield the chunks of one request: its begin, rows by frames, and its end."""
    # Without the length of the prompt, in which rows of another report with the same digests would
    # fill holes.
    begin = pb.RequestBegin(
        trace_id=stat.trace_id, labels=report.labels, ttl_seconds=report.ttl_seconds
    )
    digests = stat.token_digests
    ops = [_op(OpKind.BEGIN)]
    if len(digests):
        ops.append(_op(OpKind.DIGEST, count=len(digests)))
    chunk = _Chunk(1, ops, begin, digests.tobytes())
    for start, stop in _ranges(report.counts):
        frame = encode_frame(report.ids[start:stop], report.layout, validate=False)
        if chunk.nbytes and chunk.nbytes + len(frame) > _CHUNK_BYTES:
            yield chunk.sealed(report.layout)
            chunk = _Chunk(chunk.sequence + 1, [])
        chunk.ops.append(
            _op(
                OpKind.ROWS,
                position=report.start + start,
                count=stop - start,
                frame=len(chunk.frames),
                step=1,
                weight_version=report.weight_version,
            )
        )
        chunk.frames.append(frame)
        chunk.frame_rows.append(stop - start)
    assert stat.num_tokens is not None
    chunk.ops.append(_op(OpKind.FINISH, count=stat.num_tokens, arg=FinishReason.STOP))
    yield chunk.sealed(report.layout)


class _Chunk:
    """A chunk that is being filled."""

    def __init__(
        self,
        sequence: int,
        ops: list[npt.NDArray[Any]],
        begin: pb.RequestBegin | None = None,
        digests: bytes = b"",
    ) -> None:
        self.sequence = sequence
        self.ops = ops
        self.frames: list[bytes] = []
        self.frame_rows: list[int] = []
        self._begins = [] if begin is None else [begin]
        self._digests = digests

    @property
    def nbytes(self) -> int:
        """Bytes of its frames."""
        return sum(map(len, self.frames))

    def sealed(self, layout: ModelLayout) -> pb.IngestRequest:
        """Return the message."""
        header = pb.ChunkHeader(
            layout=layout.to_proto(),
            request_ids=["report"],
            begins=self._begins,
            ops=np.concatenate(self.ops).tobytes(),
            frame_lengths=np.array([*map(len, self.frames)], U32).tobytes(),
            frame_rows=np.array(self.frame_rows, U32).tobytes(),
            token_digests=self._digests,
        ).SerializeToString()
        payload = b"".join(self.frames)
        return pb.IngestRequest(
            chunk=pb.Chunk(
                sequence=self.sequence,
                header_crc32=zlib.crc32(header),
                payload_crc32=zlib.crc32(payload),
                header=header,
                payload=payload,
            )
        )


def _op(kind: OpKind, **fields: int) -> npt.NDArray[Any]:
    op = np.zeros(1, OP)
    op["kind"] = kind
    for name, value in fields.items():
        op[name] = value
    return op


def _ranges(counts: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield neighbouring positions that are reported, a frame's number of them at most."""
    edges = np.flatnonzero(np.diff(counts.astype(np.int8), prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        for at in range(start, stop, _FRAME_ROWS):
            yield at, min(stop, at + _FRAME_ROWS)
