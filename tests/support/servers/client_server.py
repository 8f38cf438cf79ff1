"""A trace service that says what a test tells it to, and made-up traces for it to say."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from routetrace.codec.frame import encode_frame, slice_frame
from routetrace.codec.records import SPAN, U32, Provenance
from routetrace.common.errors import ERROR_METADATA_KEY, NotFound, RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

LAYOUT = ModelLayout((1, 2, 4, 5, 7), 9, 40, 3)
WIDE = ModelLayout((0, 3), 4, 300, 2)

_METHODS = [
    *(
        (f"routetrace.v1.TraceService/{m.name}", m)
        for m in pb.DESCRIPTOR.services_by_name["TraceService"].methods
    ),
    *(
        (f"routetrace.v1.IngestService/{m.name}", m)
        for m in pb.DESCRIPTOR.services_by_name["IngestService"].methods
        if m.name == "BindRequest"
    ),
]


def rows_of(layout: ModelLayout, num_rows: int, seed: int = 0) -> np.ndarray:
    """Ids [num_rows, layers, top_k] that a router could have chosen."""
    rng = np.random.default_rng(seed)
    order = rng.random((num_rows, len(layout.layer_ids), layout.num_experts)).argsort(axis=2)
    return order[:, :, : layout.top_k].astype(layout.dtype)


@dataclass
class Piece:
    """Consecutive rows that one pipeline stage sent, or did not."""

    layer_ids: tuple[int, ...]
    start: int
    stop: int
    there: bool
    version: int
    provenance: int

    def counts(self, request: pb.GetTraceRequest) -> bool:
        """Whether the rows are there, and of the version that is asked for."""
        any_version = not request.HasField("weight_version")
        return self.there and (any_version or self.version == request.weight_version)


@dataclass
class Truth:
    """A trace, whole, and how it was cut into pieces."""

    ids: np.ndarray
    layout: ModelLayout = LAYOUT
    pieces: list[Piece] = field(default_factory=list)
    info: pb.TraceInfo = field(default_factory=pb.TraceInfo)

    @property
    def valid(self) -> np.ndarray:
        return self.valid_for(pb.GetTraceRequest())

    def valid_for(self, request: pb.GetTraceRequest) -> np.ndarray:
        """Which of all cells [rows, layers] count, in the eyes of a request."""
        valid = np.zeros(self.ids.shape[:2], bool)
        for piece in self.pieces:
            if piece.counts(request):
                valid[piece.start : piece.stop, self.layout.columns(piece.layer_ids)] = True
        return valid

    def is_there(self, request: pb.GetTraceRequest) -> bool:
        """Whether this is what the request waits for."""
        if request.wait_for == pb.WAIT_FOR_END:
            return self.info.state != pb.TRACE_STATE_RUNNING
        if request.wait_for == pb.WAIT_FOR_ROWS:
            if not (stop := request.token_stop or max(self.info.num_tokens - 1, 0)):
                return self.info.num_tokens > 0
            columns = self.layout.columns(tuple(request.layer_ids) or self.layout.layer_ids)
            valid = self.valid_for(request)[request.token_start : stop, columns]
            return stop <= len(self.ids) and bool(valid.all())
        return True

    def responses(
        self,
        request: pb.GetTraceRequest | None = None,
        rng: random.Random | None = None,
        make: type[Any] = pb.GetTraceResponse,
    ) -> list[Any]:
        """The answer to a request, cut into frames and messages at random."""
        request = request or pb.GetTraceRequest()
        rng = rng or random.Random(0)
        start, stop = request.token_start, request.token_stop or len(self.ids)
        start = min(start, max(stop, 0))
        ranges = [(r.start, r.stop) for r in request.token_ranges] or [(start, stop)]
        start, stop = ranges[0][0], ranges[-1][1]
        asked = tuple(request.layer_ids) or self.layout.layer_ids
        missing, sent = [], []
        for piece, (first, last) in itertools.product(self.pieces, ranges):
            a, b = max(piece.start, first), min(piece.stop, last)
            kept = tuple(i for i in piece.layer_ids if i in asked)
            if a >= b or not kept:
                continue
            if piece.counts(request):
                sent.append(replace(piece, start=a, stop=b, layer_ids=kept))
            else:
                reason = pb.MISSING_REASON_OTHER_VERSION if piece.there else rng.randint(1, 9)
                missing.append(pb.MissingRange(start=a, stop=b, layer_ids=kept, reason=reason))
        for first, last in ranges:
            if last > (known := max(first, len(self.ids))):
                missing.append(
                    pb.MissingRange(start=known, stop=last, reason=pb.MISSING_REASON_NOT_YET)
                )
        rng.shuffle(sent)
        messages, num_frames = [make(info=self.info)], 0
        if not rng.randrange(2):
            messages.append(make())
        while sent:
            if messages[-1].spans or rng.randrange(2):
                messages.append(make())
            message = messages[-1]
            spans: list[tuple[int, ...]] = []
            frames: list[bytes] = []
            for _ in range(min(len(sent), rng.randint(1, 3))):
                stage = sent[-1].layer_ids
                group: list[Piece] = []
                while sent and sent[-1].layer_ids == stage and len(group) < 3:
                    group.append(sent.pop())
                frame, rows = self._frame(group, rng)
                spans += [
                    (p.start, p.stop - p.start, num_frames, row, 0, p.provenance, 0, p.version)
                    for p, row in zip(group, rows, strict=True)
                ]
                frames.append(frame)
                num_frames += 1
                if not sent:
                    break
            message.spans = np.array(spans, SPAN).tobytes()
            message.frame_lengths = np.array([len(f) for f in frames], U32).tobytes()
            message.payload = b"".join(frames)
        end = pb.ReadEnd(
            info=self.info,
            token_start=start,
            token_stop=stop,
            missing=missing,
            num_spans=sum(len(m.spans) for m in messages) // SPAN.itemsize,
        )
        if rng.randrange(2):
            messages.append(make())
        messages[-1].end.CopyFrom(end)
        return messages

    def _frame(self, pieces: list[Piece], rng: random.Random) -> tuple[bytes, list[int]]:
        """One frame of the pieces' rows among those of other requests, and where they begin."""
        parts, rows, at = [], [], 0
        for piece in pieces:
            junk = rng.choice((0, 0, 2))
            parts += [
                rows_of(self.layout, junk, rng.randrange(99)),
                self.ids[piece.start : piece.stop],
            ]
            rows.append(at + junk)
            at += junk + piece.stop - piece.start
        # As a server does it: the agent's frame, cut to the groups with the layers asked for.
        ids = np.concatenate(parts)
        held = next(
            p.layer_ids for p in self.pieces if set(pieces[0].layer_ids) <= set(p.layer_ids)
        )
        frame = encode_frame(
            np.ascontiguousarray(ids[:, self.layout.columns(held)]), self.layout.select(held)
        )
        return slice_frame(frame, pieces[0].layer_ids), rows


def truth(
    count: int = 12,
    /,
    *,
    layout: ModelLayout = LAYOUT,
    state: int | None = None,
    stages: list[tuple[int, ...]] | None = None,
    holes: list[tuple[int, int]] = (),
    rng: random.Random | None = None,
    **facts: Any,
) -> Truth:
    """A made-up trace: whole but for `holes`, or cut at random into stages, runs and holes."""
    ids = rows_of(layout, count, rng.randrange(99) if rng else 0)
    if rng:
        stages = [layout.layer_ids]
        if rng.randrange(2):
            owner = [rng.randrange(3) for _ in layout.layer_ids]
            stages = [
                tuple(i for i, o in zip(layout.layer_ids, owner, strict=True) if o == stage)
                for stage in sorted(set(owner))
            ]
    pieces = []
    for stage in stages or [layout.layer_ids]:
        at = 0
        while at < count:
            if rng:
                stop, there = min(count, at + rng.randint(1, 6)), rng.random() < 0.8
            else:
                there = not any(a <= at < b for a, b in holes)
                edges = [e for hole in holes for e in hole if e > at]
                stop = min([count, *edges])
            version, provenance = (
                (rng.randrange(3), rng.choice(list(Provenance))) if rng else (7, 1)
            )
            pieces.append(Piece(stage, at, stop, there, version, int(provenance)))
            at = stop
    whole = all(p.there for p in pieces)
    if state is None:
        state = pb.TRACE_STATE_COMPLETE if whole else pb.TRACE_STATE_INCOMPLETE
    info = pb.TraceInfo(
        **{
            "run": "default",
            "trace_id": "req",
            "state": state,
            "num_tokens": 0 if state == pb.TRACE_STATE_RUNNING else count + 1,
            "prompt_len": 4,
            "num_rows": count,
            "layout": layout.to_proto(),
            "prefix_trace_ids": ["other"],
            "labels": {"group": "g1"},
            "incarnation": 1,
            "num_incarnations": 1,
            "finish_reason": "" if state == pb.TRACE_STATE_RUNNING else "stop",
            "engine_ids": ["e0"],
            "num_attempts": 1,
            "created_ms": 1500,
            **facts,
        }
    )
    return Truth(ids, layout, pieces, info)


Handler = Callable[[Any, grpc.ServicerContext], Any]


class ScriptedServer:
    """A gRPC server on a real socket; `script[method]` answers, `requests` keeps what was asked.

    Reads of GetTraces are among the requests of GetTrace; `batches` keeps their calls.
    """

    def __init__(self, port: int = 0) -> None:
        self.script: dict[str, Handler] = {"GetTraces": self._get_traces}
        self.requests: list[tuple[str, Any]] = []
        self.batches: list[pb.GetTracesRequest] = []
        self._truths: list[Truth] = []
        self._changed = threading.Condition()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(40), options=[("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers([_Handlers(self)])
        self.target = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    @property
    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.requests)

    def serve(self, *truths: Truth) -> None:
        """Answers GetTrace with these alone, by trace id; calls wait as they are asked to.

        Of several with one id that of the highest incarnation answers, if none is asked for.
        """
        with self._changed:
            self._truths = list(truths)
            self._changed.notify_all()
        self.script["GetTrace"] = self._get_trace

    def tell(self, info: Callable[[Any], pb.TraceInfo]) -> None:
        """Answers StatTrace and DescribeTrace with the info of a request."""
        self.script |= {
            "StatTrace": lambda request, _: pb.StatTraceResponse(info=info(request)),
            "DescribeTrace": lambda request, _: pb.DescribeTraceResponse(info=info(request)),
        }

    def _get_trace(
        self, request: pb.GetTraceRequest, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        with self._changed:
            while not ((found := self._find(request)) and found.is_there(request)):
                if not (request.wait_for and context.is_active()):
                    break
                self._changed.wait(0.05)
        if found is None:
            fail(context, NotFound(field="trace_id", value=request.trace_id, expected="known"))
        yield from found.responses(request)

    def _get_traces(
        self, request: pb.GetTracesRequest, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Answers each read as GetTrace does, side by side; parts share messages at random."""
        parts: queue.SimpleQueue[pb.TracePart | _Aborted | None] = queue.SimpleQueue()

        def answer(number: int, read: pb.GetTraceRequest) -> None:
            read.run = request.run
            self.requests.append(("GetTrace", read))
            try:
                for message in self.script["GetTrace"](read, _ReadContext(context)):
                    parts.put(pb.TracePart(read=number, message=message))
            except _Aborted as aborted:
                parts.put(
                    pb.TracePart(read=number, error=aborted.detail) if aborted.detail else aborted
                )
            parts.put(None)

        for number, asked in enumerate(request.reads):
            read = pb.GetTraceRequest.FromString(asked.SerializeToString())
            threading.Thread(target=answer, args=(number, read), daemon=True).start()
        rng, left = random.Random(len(request.reads)), len(request.reads)
        message = pb.GetTracesResponse()
        while left:
            part = parts.get()
            if part is None:
                left -= 1
                continue
            if isinstance(part, _Aborted):
                context.abort(part.status, part.text)
            part.payload_bytes = len(part.message.payload)
            message.payload += part.message.payload
            part.message.ClearField("payload")
            message.parts.append(part)
            if rng.randrange(2):
                yield message
                message = pb.GetTracesResponse()
        message.last = True
        if message.parts:
            yield message

    def _find(self, request: pb.GetTraceRequest) -> Truth | None:
        found = [
            t
            for t in self._truths
            if t.info.trace_id == request.trace_id
            and request.incarnation in (0, t.info.incarnation)
        ]
        return max(found, key=lambda t: t.info.incarnation, default=None)

    def stop(self) -> None:
        self._server.stop(None).wait()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Aborted(Exception):
    """End of one read of several."""

    def __init__(self, status: Any, text: str, detail: pb.ErrorDetail | None) -> None:
        self.status, self.text, self.detail = status, text, detail


class _ReadContext:
    """The context of one read of several."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._detail: pb.ErrorDetail | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._detail = pb.ErrorDetail.FromString(dict(metadata)[ERROR_METADATA_KEY])

    def abort(self, status: Any, text: str) -> None:
        raise _Aborted(status, text, self._detail)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._methods = {f"/{path}": m for path, m in _METHODS}

    def service(self, details: Any) -> Any:
        method = self._methods.get(details.method)
        if method is None:
            return None
        request_type = getattr(pb, method.input_type.name)

        def answer(raw: bytes, context: grpc.ServicerContext) -> Any:
            request = request_type.FromString(raw)
            if method.name == "GetTraces":
                self._server.batches.append(request)
            else:
                self._server.requests.append((method.name, request))
            return self._server.script[method.name](request, context)

        def stream(raw: bytes, context: grpc.ServicerContext) -> Iterator[Any]:
            yield from answer(raw, context)

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, _bytes)
        return grpc.unary_unary_rpc_method_handler(answer, None, _bytes)


def sealed(response: Any, later: bytes = b"") -> bytes:
    """A message as a server sends it: where the contract has it, with the checksum.

    `later` is a field of a later version, behind the payload.
    """
    fields = response.DESCRIPTOR.fields_by_name
    if "crc32" not in fields:
        return response.SerializeToString()
    payload, head = type(response)(), type(response)()
    head.CopyFrom(response)
    if "payload" in fields:
        payload.payload = response.payload
        head.ClearField("payload")
    data = head.SerializeToString()
    crc = b"\x75" + zlib.crc32(data + later).to_bytes(4, "little")
    return data + crc + payload.SerializeToString() + later


def _bytes(response: Any) -> bytes:
    return response if isinstance(response, bytes) else sealed(response)


def fail(context: grpc.ServicerContext, error: RouteTraceError) -> None:
    """End a call with a typed error, as the server does."""
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_detail().SerializeToString()),))
    context.abort(error.status, error.message)
