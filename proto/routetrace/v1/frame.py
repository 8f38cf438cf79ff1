"""The frame: a run of rows, compressed, that can be decoded alone and cut by layers.

A frame is a header (frame_header.py has its layout) and a body: layer groups, back to back, in
ascending layer order. Each group decodes without the others. A group holds the ids [n, K] of each
of its layers, row-major, one layer after the other, as one of these:

* RAW: the ids as they are, u8 or u16, little-endian.
* LAYER_ZSTD: a plane of one byte per id, `id >> s` with s = max(0, ceil(log2 E) - 8), as one zstd
  frame with its content size and without zstd's checksum; as it is where zstd does not make it
  smaller, which its length tells. Then, if s > 0, the low bits: per layer s bit planes, lowest bit
  first, of ceil(n K / 8) bytes each, 8 ids to a byte, the first id in the lowest bit.

Popular experts differ by layer, so a layer gets an entropy table of its own where it is large
enough to pay for it: this, more than the level, is what compresses.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.frame_header import (
    MAX_FRAME_DECODED_BYTES,
    MAX_FRAME_ROWS,
    Buffer,
    Codec,
    FrameHeader,
    corrupt,
    id_shift,
    layer_bytes,
    read_header,
)
from routetrace.v1.layout import RoutingLayout

__all__ = [
    "MAX_FRAME_DECODED_BYTES",
    "MAX_FRAME_ROWS",
    "Codec",
    "FrameHeader",
    "decode_frame",
    "decode_frames",
    "decode_into",
    "encode_frame",
    "encode_frames",
    "invalid_rows",
    "read_header",
    "slice_frame",
]

Ids = npt.NDArray[np.unsignedinteger[Any]]

# Above this size zlib.crc32 gives up the GIL; beside a busy thread it takes 5 ms to get it back.
_CRC_STEP = 5120

# Decompressed at a time: some messages' worth.
_BATCH_BYTES = 32 << 20


class _Contexts(threading.local):
    """zstd contexts of this thread: one that two threads use at a time crashes the process."""

    def __init__(self) -> None:
        self.decompressor: Any = zstandard.ZstdDecompressor()
        self.compressors: dict[int, Any] = {}

    def compressor(self, level: int) -> Any:
        if level not in self.compressors:
            self.compressors[level] = zstandard.ZstdCompressor(level=level)
        return self.compressors[level]


_contexts = _Contexts()


def invalid_rows(ids: Ids, num_experts: int) -> npt.NDArray[np.bool_]:
    """Finds rows that no router chose: an id out of range, or twice in one top-k.

    Args:
        ids: [n, L, K] unsigned integers.
        num_experts: logical experts; ids must be below it.

    Returns:
        bool [n], True where a row is invalid.
    """
    num_rows, num_layers, top_k = ids.shape
    cells = ids.reshape(num_rows * num_layers, top_k)
    bad = np.zeros(len(cells), np.bool_)
    if ids.size and int(ids.max()) >= num_experts:
        bad |= (cells >= num_experts).any(axis=1)
    if top_k > 1:
        # A contiguous plane per rank, compared with the one that is `step` ranks before: ten times
        # as fast as to sort each top-k.
        ranks = np.ascontiguousarray(cells.T)
        same = ranks[1:] == ranks[:-1]
        for step in range(2, top_k):
            same[step - 1 :] |= ranks[step:] == ranks[:-step]
        if same.any():
            bad |= same.any(axis=0)
    return np.asarray(bad.reshape(num_rows, num_layers).any(axis=1), np.bool_)


def encode_frame(
    ids: Ids,
    layout: RoutingLayout,
    *,
    codec: Codec = Codec.LAYER_ZSTD,
    level: int = 3,
    validate: bool = True,
) -> bytes:
    """One frame of the rows `ids` [n, L, K]; see `encode_frames`."""
    return encode_frames([ids], layout, codec=codec, level=level, validate=validate)[0]


def encode_frames(
    list_of_ids: Sequence[Ids],
    layout: RoutingLayout,
    *,
    codec: Codec = Codec.LAYER_ZSTD,
    level: int = 3,
    validate: bool = True,
) -> list[bytes]:
    """One frame per array; zstd runs once for all of them, outside of the GIL.

    Args:
        list_of_ids: arrays [n, L, K] of `layout.dtype` and any strides, 1 <= n <= MAX_FRAME_ROWS.
        layout: what the columns are.
        codec: how to store them.
        level: zstd level, 1 to 19.
        validate: False where `invalid_rows` has checked the ids already.

    Raises:
        InvalidArgument: if a shape, a dtype, an id or the level is wrong.
    """
    if not 1 <= level <= 19:
        raise InvalidArgument(field="level", value=level, expected="a number in [1, 19]")
    for ids in list_of_ids:
        _check_ids(ids, layout, validate)
    split = [_split(ids, layout, codec) for ids in list_of_ids]
    planes = [plane for groups in split for plane, _ in groups]
    stored = iter(_compress(planes, level) if codec is Codec.LAYER_ZSTD else planes)
    frames = []
    for ids, groups in zip(list_of_ids, split, strict=True):
        parts = [(next(stored), low) for _, low in groups]
        header = FrameHeader(
            num_rows=len(ids),
            layer_ids=layout.layer_ids,
            num_experts=layout.num_experts,
            top_k=layout.top_k,
            codec=codec,
            group_layers=_group_layers(len(layout.layer_ids), len(ids) * layout.top_k),
            group_bytes=tuple(len(plane) + len(low) for plane, low in parts),
            group_crcs=tuple(_crc32(low, _crc32(plane)) for plane, low in parts),
        )
        frames.append(b"".join([header.pack(), *chain.from_iterable(parts)]))
    return frames


def slice_frame(frame: Buffer, layer_ids: Iterable[int]) -> bytes:
    """A frame of only those groups that hold the given layers; nothing is decoded.

    Args:
        frame: exactly one frame.
        layer_ids: absolute layer ids, in any order.

    Returns:
        A frame with at least these layers: layers of a group stay together.

    Raises:
        InvalidArgument: if no layer is named, or the frame lacks one.
        Corrupt: as `read_header`. Groups are copied with their checksums, and not checked here.
    """
    header = read_header(frame)
    keep = sorted({group for group, _ in header.locate(tuple(layer_ids))})
    if len(keep) == len(header.group_bytes):
        return bytes(frame)
    view = memoryview(frame).cast("B")
    cuts = list(accumulate(header.group_layers, initial=0))
    offsets = header.group_offsets
    sliced = replace(
        header,
        layer_ids=tuple(i for g in keep for i in header.layer_ids[cuts[g] : cuts[g + 1]]),
        group_layers=tuple(header.group_layers[g] for g in keep),
        group_bytes=tuple(header.group_bytes[g] for g in keep),
        group_crcs=tuple(header.group_crcs[g] for g in keep),
    )
    return b"".join([sliced.pack(), *(view[offsets[g] : offsets[g + 1]] for g in keep)])


def decode_frame(frame: Buffer, *, layer_ids: Iterable[int] | None = None) -> Ids:
    """The ids of a frame, layer-major.

    Args:
        frame: exactly one frame.
        layer_ids: absolute layer ids, in the order wanted; all of the frame's if None.

    Returns:
        A new array [len(layer_ids), n, K] of uint8 or uint16.

    Raises:
        InvalidArgument: if no layer is named, or the frame lacks one.
        Corrupt: if a checksum, a length or an id is wrong, in the header or in a group used.
    """
    [ids] = decode_frames([(frame, layer_ids, None)])
    return ids


def decode_into(frame: Buffer, out: Ids, layer_ids: Iterable[int]) -> None:
    """As `decode_frame`, into an array of the caller.

    Args:
        frame: exactly one frame.
        out: [len(layer_ids), n, K] of the frame's dtype; of undefined content after an error.
            Fastest where each out[i] is contiguous.
        layer_ids: absolute layer ids, in the order wanted.

    Raises:
        InvalidArgument: if no layer is named, the frame lacks one, or `out` does not fit.
        Corrupt: as `decode_frame`.
    """
    [_] = decode_frames([(frame, layer_ids, out)])


def decode_frames(
    frames: Iterable[tuple[Buffer, Iterable[int] | None, Ids | None]],
) -> Iterator[Ids]:
    """Decodes frames one after the other; zstd runs once for many of them, outside of the GIL.

    Beside a thread that is busy in Python it takes 5 ms to get the GIL back, each time. What is
    decoded ahead is bounded: a few bytes may well stand for very many.

    Args:
        frames: (frame, layer_ids, out) of each, as for `decode_frame` and `decode_into`.

    Yields:
        The ids of each, in `out` where that is given, written when it is its turn.

    Raises:
        InvalidArgument, Corrupt: as those, before the first if they can be seen by then.
    """
    opened = [(_Groups(frame, layer_ids), out) for frame, layer_ids, out in frames]
    for groups, out in opened:
        groups.check(out)
    for batch in _batches(opened):
        packed = [plane for groups, _ in batch for plane in groups.packed_planes()]
        sizes = [size for groups, _ in batch for size in groups.packed.values()]
        unpacked = iter(_decompress(packed, sizes))
        for groups, out in batch:
            yield groups.ids(unpacked, out)


def _batches(
    opened: list[tuple[_Groups, Ids | None]],
) -> Iterator[list[tuple[_Groups, Ids | None]]]:
    """Neighbours that are decompressed together: about _BATCH_BYTES, or one frame."""
    batch: list[tuple[_Groups, Ids | None]] = []
    size = 0
    for groups, out in opened:
        more = sum(groups.packed.values())
        if batch and size + more > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((groups, out))
        size += more
    if batch:
        yield batch


class _Groups:
    """The groups of a frame that hold some layers."""

    def __init__(self, frame: Buffer, layer_ids: Iterable[int] | None) -> None:
        self.header = header = read_header(frame)
        self._where = header.locate(header.layer_ids if layer_ids is None else tuple(layer_ids))
        view = memoryview(frame).cast("B")
        offsets = header.group_offsets
        plane, low = header.layer_bytes
        self._contents: dict[int, Any] = {}  # of each group: its planes,
        self._low_bits: dict[int, memoryview] = {}  # and its low bits
        self.packed: dict[int, int] = {}
        """Groups whose planes are a zstd frame, and its content size."""
        for group in dict(self._where):
            stored = view[offsets[group] : offsets[group + 1]]
            crc = _crc32(stored)
            if crc != header.group_crcs[group]:
                raise corrupt(f"crc32 of group {group}", crc, str(header.group_crcs[group]))
            layers = header.group_layers[group]
            if low:
                split = len(stored) - layers * low
                stored, self._low_bits[group] = stored[:split], stored[split:]
            self._contents[group] = stored
            if len(stored) != layers * plane:
                self.packed[group] = layers * plane

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self._where), self.header.num_rows, self.header.top_k

    def check(self, out: Ids | None) -> None:
        """Refuses an array that the ids do not fit into."""
        if out is None:
            return
        dtype = self.header.dtype
        if out.shape != self._shape or out.dtype != dtype or not out.flags.writeable:
            raise InvalidArgument(
                field="out",
                value=f"{'a' if out.flags.writeable else 'a read-only'} {out.dtype} {out.shape}",
                expected=f"a {dtype} {self._shape}",
            )

    def packed_planes(self) -> list[memoryview]:
        """The zstd frames of `packed`."""
        return [self._contents[group] for group in self.packed]

    def ids(self, unpacked: Iterator[Any], out: Ids | None) -> Ids:
        """The ids, from the contents of the `packed_planes`."""
        header = self.header
        plane, low = header.layer_bytes
        self._contents.update((group, next(unpacked)) for group in self.packed)
        if out is None:  # not before the sizes are known to be true
            out = np.empty(self._shape, header.dtype)
        dtype = np.dtype(np.uint8 if low else header.dtype).newbyteorder("<")
        direct = out.dtype == dtype and out[0].flags.c_contiguous
        planes = out if direct else np.empty(out.shape, dtype)
        for layer, (group, index) in zip(planes, self._where, strict=True):
            content = memoryview(self._contents[group])[index * plane : (index + 1) * plane]
            layer.data.cast("B")[:] = content
        self._contents.clear()  # its batch may go before the others come
        if not direct:
            out[...] = planes
        if low:
            parts = (self._low_bits[group][i * low : (i + 1) * low] for group, i in self._where)
            out <<= header.shift
            out |= _unpack_low_bits(b"".join(parts), header.shift, out)
        largest = int(out.max())
        if largest >= header.num_experts:
            raise corrupt("topk_ids", largest, f"ids below {header.num_experts}")
        return out


def _split(ids: Ids, layout: RoutingLayout, codec: Codec) -> list[tuple[memoryview, memoryview]]:
    """Plane and low bits of each group of a frame, before compression."""
    plane, low = layer_bytes(len(ids), layout.top_k, layout.num_experts, codec)
    major = _layer_major(ids)
    shift = id_shift(layout.num_experts, codec)
    low_bits = _view(_pack_low_bits(major, shift))
    planes = _view((major >> shift).astype(np.uint8) if shift else major)
    cuts = accumulate(_group_layers(len(major), len(ids) * layout.top_k), initial=0)
    return [(planes[a * plane : b * plane], low_bits[a * low : b * low]) for a, b in pairwise(cuts)]


def _layer_major(ids: Ids) -> Ids:
    """[n, L, K] -> [L, n, K], contiguous."""
    dtype = ids.dtype
    if ids.strides[2] == ids.itemsize:
        # Words as wide as divide a top-k move several times as fast as single ids.
        ids = ids.view(f"u{gcd(ids.shape[2] * ids.itemsize, 8)}")
    return np.ascontiguousarray(ids.transpose(1, 0, 2)).view(dtype)


def _pack_low_bits(ids: Ids, shift: int) -> npt.NDArray[np.uint8]:
    """The `shift` low bits of ids [L, n, K], as [L, shift * ceil(n K / 8)]."""
    packed = [np.zeros((len(ids), 0), np.uint8)]
    if shift:
        flat = ids.astype(np.uint8).reshape(len(ids), -1)
        packed += [
            np.packbits(flat & (1 << bit), axis=1, bitorder="little") for bit in range(shift)
        ]
    return np.concatenate(packed, axis=1)


def _unpack_low_bits(packed: bytes, shift: int, like: Ids) -> npt.NDArray[np.uint8]:
    """The `shift` low bits of ids of the shape of `like`, [L, n, K]."""
    planes = np.frombuffer(packed, np.uint8).reshape(len(like), shift, -1)
    bits = np.unpackbits(planes, axis=2, count=like[0].size, bitorder="little")
    low = bits[:, 0]
    for bit in range(1, shift):
        low |= bits[:, bit] << bit
    return low.reshape(like.shape)


def _compress(planes: list[memoryview], level: int) -> list[Any]:
    """Each plane as a zstd frame, or as it is where that is not smaller."""
    context = _contexts.compressor(level)
    packed: Iterable[Any]
    if planes and hasattr(context, "multi_compress_to_buffer"):
        packed = context.multi_compress_to_buffer(planes)
    else:  # another backend than C
        packed = map(context.compress, planes)
    return [z if len(z) < len(plane) else plane for z, plane in zip(packed, planes, strict=True)]


def _decompress(packed: list[memoryview], sizes: list[int]) -> list[Any]:
    """The contents of zstd frames, which must declare and have these sizes."""
    if not packed:
        return []
    context = _contexts.decompressor
    try:
        for data, size in zip(packed, sizes, strict=True):
            # Before anything is allocated: 32 kB may well claim to hold 1 GiB.
            declared = zstandard.frame_content_size(data)
            if declared != size:
                raise corrupt("zstd content size", declared, str(size))
        if hasattr(context, "multi_decompress_to_buffer"):
            contents = list(context.multi_decompress_to_buffer(packed))
        else:  # another backend than C
            contents = [context.decompress(data) for data in packed]
    except zstandard.ZstdError as error:
        raise corrupt("zstd frame", str(error), "one that decodes") from error
    for content, size in zip(contents, sizes, strict=True):
        if len(content) != size:
            raise corrupt("zstd content", f"{len(content)} bytes", f"{size} bytes")
    return contents


@lru_cache(maxsize=256)
def _group_layers(num_layers: int, cells: int) -> tuple[int, ...]:
    """Layers in each group, as even as can be, for `cells` ids per layer.

    From 512 ids on a layer stands alone; smaller ones share a table, about 2048 ids to a group.
    Measured from 4 to 256 rows with K >= 4: within 2 % of the best grouping on traces with the skew
    of large models (310 bytes a token at 64 rows, 336 in one group), within 6 % on small models
    (58 and 55), and a pipeline stage can cut its layers out of all but the smallest frames.
    """
    per_group = 1 if cells >= 512 else -(-2048 // cells)
    groups = -(-num_layers // per_group)
    return tuple(num_layers * (g + 1) // groups - num_layers * g // groups for g in range(groups))


def _check_ids(ids: Ids, layout: RoutingLayout, validate: bool) -> None:
    columns = (len(layout.layer_ids), layout.top_k)
    if ids.ndim != 3 or ids.shape[1:] != columns or not 1 <= len(ids) <= MAX_FRAME_ROWS:
        raise InvalidArgument(
            field="ids",
            value=f"of shape {ids.shape}",
            expected=f"of shape (n, {columns[0]}, {columns[1]}) with n in [1, {MAX_FRAME_ROWS}]",
        )
    if ids.dtype != layout.dtype:
        raise InvalidArgument(field="ids", value=f"of {ids.dtype}", expected=f"of {layout.dtype}")
    if ids.nbytes > MAX_FRAME_DECODED_BYTES:
        raise InvalidArgument(
            field="ids", value=f"{ids.nbytes} bytes", expected=f"at most {MAX_FRAME_DECODED_BYTES}"
        )
    if validate:
        bad = np.flatnonzero(invalid_rows(ids, layout.num_experts))
        if bad.size:
            raise InvalidArgument(
                field="ids",
                value=f"invalid in {bad.size} rows; row {bad[0]} holds {ids[bad[0]].tolist()}",
                expected=f"below {layout.num_experts}, and no id twice in a layer's top-k",
            )


def _view(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, little-endian."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    # Flat uint8 first: memoryviews know neither "<u2" nor empty arrays of several dimensions.
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _crc32(data: Any, crc: int = 0) -> int:
    if len(data) <= _CRC_STEP:
        return zlib.crc32(data, crc)
    view = memoryview(data)
    for at in range(0, len(view), _CRC_STEP):
        crc = zlib.crc32(view[at : at + _CRC_STEP], crc)
    return crc
