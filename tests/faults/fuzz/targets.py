"""The decoders of bytes that come from outside, each as a function that takes any bytes.

`one_input` returns if the input was decoded rightly or refused with a typed error; whatever else it
raises is a finding. `mutate` makes inputs whose checksums are right.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from faults.fuzz.mutate import (
    COLUMNS,
    frames_of,
    lengths_of,
    mutate_bytes,
    mutate_frame,
    mutate_message,
    mutate_records,
)
from routetrace.client._core import assemble as _assemble
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.messages import parser_of
from routetrace.client.stat import facts_from_proto
from routetrace.client.trace import Trace
from routetrace.codec.frame import (
    Codec,
    decode_frame,
    decode_into,
    encode_frame,
    read_header,
    slice_frame,
)
from routetrace.codec.frame_header import MAX_FRAME_DECODED_BYTES
from routetrace.common.errors import Corrupt, InvalidArgument, RouteTraceError, from_detail
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, WIDE, rows_of, sealed, truth

SMALL = ModelLayout((3,), 4, 1, 1)
LARGE = ModelLayout(tuple(range(1, 40)), 40, 300, 8)
LAYOUTS = (LAYOUT, WIDE, SMALL, LARGE)


class Target:
    """A decoder under attack."""

    name = ""
    limit = 64 << 20
    """Bytes that one input may make it allocate; the process may grow by twice as much."""

    def samples(self, rng: random.Random) -> bytes:
        """A valid input."""
        raise NotImplementedError

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        """An input that is a little wrong."""
        return mutate_bytes(rng, data)

    def one_input(self, data: bytes) -> bool:
        """Decodes; True if the input was taken, False if it was refused as it should be."""
        raise NotImplementedError


def pack_parts(parts: list[bytes]) -> bytes:
    """Several inputs as one."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def unpack_parts(data: bytes) -> list[bytes]:
    """The inputs of one; what is cut short is left out."""
    parts, at = [], 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


# ------------------------------------------------------------------ frames


@cache
def _frames() -> list[bytes]:
    frames = []
    for layout in LAYOUTS:
        for count in (1, 3, 70, 600):
            ids = rows_of(layout, count, count)
            ids[count // 2 :] = ids[0]  # something to compress
            frames += [encode_frame(ids, layout, codec=codec) for codec in Codec]
    return frames


class FrameTarget(Target):
    """frame.py: read_header, slice_frame, decode_frame, decode_into."""

    name = "frame"
    limit = 2 * MAX_FRAME_DECODED_BYTES

    def samples(self, rng: random.Random) -> bytes:
        return rng.choice(_frames())

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        return mutate_frame(rng, data)

    def one_input(self, data: bytes) -> bool:
        try:
            header = read_header(data)
            ids = decode_frame(data)
        except Corrupt:
            return False
        layers = header.layer_ids
        assert ids.shape == (len(layers), header.num_rows, header.top_k)
        assert ids.nbytes <= MAX_FRAME_DECODED_BYTES
        assert int(ids.max()) < header.num_experts
        # What can be decoded whole can be cut, and the parts hold the same.
        for part in {layers[:1], layers[-1:], layers[::2]}:
            cut = slice_frame(data, part)
            assert np.array_equal(
                decode_frame(cut, layer_ids=part), ids[[layers.index(i) for i in part]]
            )
        out = np.zeros((1, *ids.shape[1:]), ids.dtype)
        decode_into(data, out, layers[-1:])
        assert np.array_equal(out[0], ids[-1])
        return True


# ------------------------------------------------------------------ read streams


_WANTS = (
    Want("req", None, mask=True),
    Want("req", None),
    Want("req", (2, 5), mask=True),
    Want("req", None, 3, 9, mask=True),
    Want("req", None, mask=True, follow=True),
    Want("req", None, mask=True, weight_version=1),
)


class StreamTarget(Target):
    """messages.py, assemble.py and cells.py of _core: the client's end of a read."""

    name = "stream"
    limit = 256 << 20

    def __init__(self) -> None:
        # The client's own limits are those of very large traces; smaller ones show as well whether
        # they hold.
        _assemble.MAX_BYTES = _assemble._FIRST_BYTES = self.limit // 4
        _assemble.MAX_ROWS = 1 << 20
        self._parse = parser_of(pb.GetTraceResponse)

    def samples(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(_WANTS))
        want = _WANTS[number]
        source = truth(rng.choice((12, 40)), layout=LAYOUT, rng=rng if rng.randrange(2) else None)
        request = pb.GetTraceRequest(
            token_start=want.token_start,
            token_stop=want.token_stop or 0,
            layer_ids=want.layer_ids or (),
        )
        if want.weight_version is not None:
            request.weight_version = want.weight_version
        messages = source.responses(request, rng)
        return pack_parts([bytes([number]), *map(sealed, messages)])

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        head, *parts = unpack_parts(data) or [b"\0"]
        if not parts:
            return mutate_bytes(rng, data)
        i = rng.randrange(len(parts))
        kind = rng.randrange(10)
        if kind == 0:
            parts[i] = mutate_bytes(rng, parts[i])
        elif kind == 1:
            j = rng.randrange(len(parts))
            parts[i], parts[j] = parts[j], parts[i]
        elif kind == 2:
            parts.insert(rng.randrange(len(parts)), parts[i])
        else:
            message = pb.GetTraceResponse()
            try:
                message.ParseFromString(parts[i])
            except DecodeError:
                return data
            if kind < 6 and message.payload:
                _mutate_payload(rng, message)
            else:
                mutate_message(rng, message)
            parts[i] = sealed(message)
        return pack_parts([head, *parts])

    def one_input(self, data: bytes) -> bool:
        head, *parts = unpack_parts(data) or [b""]
        want = _WANTS[head[0] % len(_WANTS) if head else 0]
        assembler = Assembler(want)
        try:
            for part in parts:
                received = self._parse(part)
                assembler.feed(*received)
                if want.follow and (taken := assembler.take()):
                    _check_trace(taken, want)
            trace = assembler.finish()
        except InvalidArgument:
            raise  # what a server sends is no argument of the caller
        except RouteTraceError:
            return False
        assert isinstance(trace, Trace)
        _check_trace(trace, want)
        told = np.ones_like(trace.valid)
        for m in trace.missing:
            columns = [trace.layer_ids.index(i) for i in m.layer_ids]
            told[max(m.start - trace.token_start, 0) : m.stop - trace.token_start, columns] = False
        assert np.array_equal(told, trace.valid), "missing cells and valid ones do not add up"
        if trace.num_tokens:
            assert trace.num_rows == trace.num_tokens - 1
        return True


def _check_trace(trace: Trace, want: Want) -> None:
    ids, valid = trace.topk_ids, trace.valid
    layers = want.layer_ids or trace.layer_ids
    assert trace.layer_ids == layers
    assert trace.token_start >= want.token_start
    assert ids.shape == (len(trace), len(layers), trace.top_k)
    if valid.any():
        assert int(ids[valid].max()) < trace.layout.num_experts
    covered = np.zeros(len(trace), bool)
    for start, stop, version in trace.weight_versions:
        assert want.weight_version in (None, version)
        covered[start - trace.token_start : stop - trace.token_start] = True
    assert covered[valid.any(axis=1)].all(), "a row of no weight version"


def _mutate_payload(rng: random.Random, message: Any) -> None:
    """Change one of the frames; the lengths are right unless they are what is changed."""
    frames = frames_of(message.frame_lengths, message.payload)
    if frames:
        i = rng.randrange(len(frames))
        frames[i] = rng.choice((mutate_frame(rng, frames[i]), rng.choice(_frames())))
    message.payload = b"".join(frames)
    if rng.random() < 0.95:
        message.frame_lengths = lengths_of(frames)
    if rng.random() < 0.3:
        message.spans = mutate_records(rng, message.spans, COLUMNS["spans"])


class MessageTarget(Target):
    """_core/messages.py alone: what it reads is what protobuf reads."""

    name = "message"

    def samples(self, rng: random.Random) -> bytes:
        return sealed(rng.choice(truth(12, rng=rng).responses(None, rng)))

    def one_input(self, data: bytes) -> bool:
        head, payload = parser_of(pb.GetTraceResponse)(data)
        try:
            expected = pb.GetTraceResponse.FromString(data)
        except DecodeError:
            assert head is None, "read what protobuf does not"
            return False
        if head is None:
            return False  # stricter than protobuf: groups, repeated payloads, broken seals
        assert bytes(payload) == expected.payload
        expected.ClearField("payload")
        expected.ClearField("crc32")
        assert head == expected
        return True


# ------------------------------------------------------------------ small messages


class LayoutTarget(Target):
    """ModelLayout.from_proto, of Hello, chunks and traces."""

    name = "layout"

    def samples(self, rng: random.Random) -> bytes:
        return rng.choice(LAYOUTS).to_proto().SerializeToString()

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        message = pb.RoutingLayout()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return mutate_bytes(rng, data)
        mutate_message(rng, message)
        return message.SerializeToString()

    def one_input(self, data: bytes) -> bool:
        try:
            message = pb.RoutingLayout.FromString(data)
            layout = ModelLayout.from_proto(message)
        except (DecodeError, InvalidArgument):
            return False
        assert ModelLayout.from_proto(layout.to_proto()) == layout
        return True


class AnswerTarget(Target):
    """TraceInfo and ErrorDetail: small answers that the client turns into facts and errors."""

    name = "answer"

    def samples(self, rng: random.Random) -> bytes:
        if rng.randrange(2):
            return b"\0" + truth(12, rng=rng).info.SerializeToString()
        detail = InvalidArgument(field="f", value="v", expected="e").to_detail()
        return b"\1" + detail.SerializeToString()

    def mutate(self, rng: random.Random, data: bytes) -> bytes:
        message = pb.ErrorDetail() if data[:1] == b"\1" else pb.TraceInfo()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            return mutate_bytes(rng, data)
        mutate_message(rng, message)
        return data[:1] + message.SerializeToString()

    def one_input(self, data: bytes) -> bool:
        kind = pb.ErrorDetail if data[:1] == b"\1" else pb.TraceInfo
        try:
            message: Any = kind.FromString(data[1:])
        except DecodeError:
            return False
        if isinstance(message, pb.ErrorDetail):
            error = from_detail(message)
            assert isinstance(error, RouteTraceError)
            assert len(f"{error.value}") <= 200
            return True
        try:
            facts_from_proto(message)
        except (KeyError, ValueError):  # what the plans turn into Corrupt
            return False
        return True


def targets() -> dict[str, Callable[[], Target]]:
    """All of them, by name; those of the server only where it is installed."""
    from faults.fuzz.calls import RequestTarget
    from faults.fuzz.page import PageTarget
    from faults.fuzz.server import ChunkTarget, RecordTarget, SnapshotTarget, StormTarget

    classes = (
        FrameTarget,
        StreamTarget,
        MessageTarget,
        LayoutTarget,
        AnswerTarget,
        ChunkTarget,
        StormTarget,
        RecordTarget,
        SnapshotTarget,
        RequestTarget,
        PageTarget,
    )
    return {cls.name: cls for cls in classes}


#: Bytes of an input: mutations repeat what is there.
MAX_INPUT = 1 << 20


def inputs(target: Target, rng: random.Random) -> Iterator[bytes]:
    """Mutated samples; what was taken is mutated further now and then."""
    while True:
        data = target.samples(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
            mutated = target.mutate(rng, data)
            data = mutated if len(mutated) <= MAX_INPUT else data
        yield data
