"""The messages, frames and zstd frames of a stored trace: the bytes that rivals are given."""

# zstandard takes any buffer, whatever its stubs say.
# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import zstandard

from reads.load import LAYOUT, Array
from routetrace.codec.frame import read_header
from routetrace.v1 import routetrace_pb2 as pb


class Raw:
    """Messages of reads as they come off the wire: the client's own method, and no more.

    Args:
        target: of the server.
    """

    def __init__(self, target: str) -> None:
        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._channel = grpc.insecure_channel(target, options)
        self._get: Any = self._channel.unary_stream(
            "/routetrace.v1.TraceService/GetTrace",
            request_serializer=pb.GetTraceRequest.SerializeToString,
        )

    def messages(self, name: str) -> list[bytes]:
        """All messages of a trace."""
        return list(self._get(pb.GetTraceRequest(run="default", trace_id=name)))

    def transfer(self, name: str) -> int:
        """Take all messages of a trace; return their bytes."""
        return sum(
            len(data) for data in self._get(pb.GetTraceRequest(trace_id=name, run="default"))
        )

    def frames(self, name: str) -> list[bytes]:
        """The frames of a trace, by position: what a rival is given."""
        found: list[tuple[int, bytes]] = []
        number = 0
        for data in self.messages(name):
            message = pb.GetTraceResponse.FromString(data)
            spans = np.frombuffer(message.spans, np.dtype("<u4,<u4,<u4,V16"))
            where = {int(frame): int(position) for position, _, frame, _ in reversed(spans)}
            at = 0
            for length in np.frombuffer(message.frame_lengths, "<u4").tolist():
                found.append((where[number], message.payload[at : at + length]))
                at += length
                number += 1
        return [frame for _, frame in sorted(found)]

    def close(self) -> None:
        self._channel.close()


class Planes:
    """The zstd frames of a trace, and where each goes: what a reader without headers works with.

    Args:
        frames: of the trace, in order.
    """

    def __init__(self, frames: list[bytes]) -> None:
        self.data: list[bytes] = []
        self.places: list[tuple[int, int, int, int]] = []  # first layer, layers, first row, rows
        self.rows = 0
        for frame in frames:
            header = read_header(frame)
            layer = 0
            for layers, (a, b) in zip(
                header.group_layers, itertools.pairwise(header.group_offsets), strict=True
            ):
                self.data.append(frame[a:b])
                self.places.append((layer, layers, self.rows, header.num_rows))
                layer += layers
            self.rows += header.num_rows
        self.payload = b"".join(self.data)
        self.lengths = [len(plane) for plane in self.data]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(LAYOUT.layer_ids), self.rows, LAYOUT.top_k

    def pieces(self, size: int) -> list[bytes]:
        """The payload in pieces of about as many bytes, whole zstd frames each."""
        pieces: list[list[bytes]] = [[]]
        held = 0
        for plane in self.data:
            if held + len(plane) > size:
                pieces.append([])
                held = 0
            pieces[-1].append(plane)
            held += len(plane)
        return [b"".join(piece) for piece in pieces]

    def whole(self) -> list[bytes]:
        """One zstd frame for all rows of a layer, in their place."""
        ids = np.empty(self.shape, np.uint8)
        self.decode(memoryview(self.payload), ids)
        context = zstandard.ZstdCompressor(level=3)
        return [context.compress(layer) for layer in ids]

    def decode(self, payload: memoryview, out: Array) -> None:
        """All of them, in one call of zstd, copied to their place."""
        parts, at = [], 0
        for length in self.lengths:
            parts.append(payload[at : at + length])
            at += length
        self.unpack(parts, iter(self.places), out)

    def unpack(
        self, parts: list[memoryview], places: Iterator[tuple[int, int, int, int]], out: Array
    ) -> None:
        """Some of them, to the places that are next."""
        contents = zstandard.ZstdDecompressor().multi_decompress_to_buffer(parts)
        for content, (layer, layers, first, rows) in zip(contents, places, strict=False):
            if layers == 1:
                out[layer, first : first + rows].data.cast("B")[:] = memoryview(content)
            else:
                group = np.frombuffer(content, np.uint8).reshape(layers, rows, -1)
                out[layer : layer + layers, first : first + rows] = group
