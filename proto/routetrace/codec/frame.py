"""Frame: compressed consecutive rows that decode alone and can be cut by layers.

A frame is a header (frame_header.py) and a body: layer groups, back to back, in ascending layer
order. Each group decodes without the others. A group holds the ids [n, K] of each of its layers,
row-major, one layer after the other, as one of these:

* RAW: the ids, u8 or u16, little-endian.
* LAYER_ZSTD: a plane of one byte per id, `id >> s` with s = max(0, ceil(log2 E) - 8), as one zstd
  frame with its content size and checksum, without a dictionary; uncompressed where zstd does not
  make the group smaller, as its length shows. Then, if s > 0, the low bits: per layer s bit
  planes, lowest bit first, of ceil(n K / 8) bytes each, 8 ids to a byte, the first id in the lowest
  bit.
* PACK: as LAYER_ZSTD without zstd, and `id >> s` takes ceil(log2 E) - s bits in place of a byte: 8
  of them follow each other in as many bytes (bit_pack.py), the last ones of a layer filled up with
  zeros.

Bytes of a group outside of a zstd frame are followed by their CRC-32 (as in zlib), so that every id
is under a checksum of 32 bits: zstd's (of XXH64) or that one. Damaged bytes give Corrupt or the
same ids, never others. They may give the same ids since zstd's checksum covers its output, and its
decoder ignores some bits of a frame.

Popular experts differ by layer. A layer that is large enough has its own entropy table, which
compresses more than a higher level does. In a small frame such tables cost as much as they save,
and a packed one is encoded and decoded several times as fast.
"""

# Over 400 lines: encoder and decoder of one format mirror each other and are read together.

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise, repeat
from math import gcd
from operator import itemgetter, ne
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from routetrace.codec import bit_pack, native, packed
from routetrace.codec.frame_header import (
    CRC_BYTES,
    MAX_FRAME_DECODED_BYTES,
    MAX_FRAME_ROWS,
    Buffer,
    Codec,
    FrameHeader,
    Pick,
    corrupt,
    group_layers,
    id_shift,
    id_width,
    layer_bytes,
    packed_header,
    read_header,
)
from routetrace.common.checksum import stepped_crc32 as crc32
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout

__all__ = [
    "MAX_FRAME_DECODED_BYTES",
    "MAX_FRAME_ROWS",
    "Codec",
    "FrameHeader",
    "copy_ids",
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

# The byte after the magic of a zstd frame, without its upper bits (the form of the content size): a
# checksum, no dictionary, reserved bits 0.
_FLAGS, _FLAGS_MASK, _CHECKSUM_ALONE = itemgetter(4), 0b00011111, 0b00000100

#: Rows of a frame from which on tables of zstd pay, and experts up to which they never do.
ZSTD_ROWS = 256
PACKED_EXPERTS = 8

# Bytes decompressed at a time: about one message.
_BATCH_BYTES = 4 << 20


class _Contexts(threading.local):
    """zstd contexts of this thread: concurrent use of one crashes the process."""

    def __init__(self) -> None:
        self.decompressor: Any = zstandard.ZstdDecompressor()
        self.compressors: dict[int, Any] = {}

    def compressor(self, level: int) -> Any:
        if level not in self.compressors:
            self.compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True)
        return self.compressors[level]


_contexts = _Contexts()


def invalid_rows(ids: Ids, num_experts: int) -> npt.NDArray[np.bool_]:
    """Find rows that no router chose: an id out of range, or twice in one top-k.

    Args:
        ids: [n, L, K] unsigned integers.
        num_experts: logical experts; ids must be below it.

    Returns:
        bool [n], True where a row is invalid.
    """
    kernels = native.kernels(0)
    if kernels:
        found = packed.invalid_rows(kernels, ids, num_experts)
        if found is not None:
            return found
    num_rows, num_layers, top_k = ids.shape
    cells = ids.reshape(num_rows * num_layers, top_k)
    bad = np.zeros(len(cells), np.bool_)
    if ids.size and int(ids.max()) >= num_experts:
        bad |= (cells >= num_experts).any(axis=1)
    if top_k > 1:
        # A contiguous plane per rank, compared with the one `step` ranks before: ten times as fast
        # as a sort of each top-k.
        ranks = np.ascontiguousarray(cells.T)
        same = ranks[1:] == ranks[:-1]
        for step in range(2, top_k):
            same[step - 1 :] |= ranks[step:] == ranks[:-step]
        if same.any():
            bad |= same.any(axis=0)
    return np.asarray(bad.reshape(num_rows, num_layers).any(axis=1), np.bool_)


def encode_frame(
    ids: Ids,
    layout: ModelLayout,
    *,
    codec: Codec | None = Codec.LAYER_ZSTD,
    level: int = 3,
    validate: bool = True,
) -> bytes:
    """Return one frame of the rows `ids` [n, L, K]; see `encode_frames`."""
    return encode_frames([ids], layout, codec=codec, level=level, validate=validate)[0]


def encode_frames(
    list_of_ids: Sequence[Ids],
    layout: ModelLayout,
    *,
    codec: Codec | None = Codec.LAYER_ZSTD,
    level: int = 3,
    validate: bool = True,
) -> list[bytes]:
    """Return one frame per array; zstd runs once for all of them, outside of the GIL.

    Args:
        list_of_ids: arrays [n, L, K] of `layout.dtype` and any strides, 1 <= n <= MAX_FRAME_ROWS.
        layout: of the columns.
        codec: encoding of the groups; None: PACK for frames of less than ZSTD_ROWS rows, and for
            models of up to PACKED_EXPERTS experts, else LAYER_ZSTD.
        level: zstd level, 1 to 19.
        validate: False where `invalid_rows` has checked the ids.

    Raises:
        InvalidArgument: if a shape, a dtype, an id or the level is wrong.
    """
    if not 1 <= level <= 19:
        raise InvalidArgument(field="level", value=level, expected="a number in [1, 19]")
    for ids in list_of_ids:
        _check_ids(ids, layout, validate)
    codecs = [_codec_of(ids, layout) if codec is None else codec for ids in list_of_ids]
    frames: list[bytes] = [b""] * len(codecs)
    left = list(range(len(codecs)))
    kernels = native.kernels(_packed_rows(list_of_ids, codecs))
    if kernels:
        for i, (ids, its) in enumerate(zip(list_of_ids, codecs, strict=True)):
            if packed.encodes(ids, its):
                frames[i] = packed.encode(kernels, ids, layout)
        left = [i for i, frame in enumerate(frames) if not frame]
    stored = {
        each: _pack([list_of_ids[i] for i in left if codecs[i] is each], layout, each, level)
        for each in {codecs[i] for i in left}
    }
    for i in left:
        ids, its = list_of_ids[i], codecs[i]
        counts = group_layers(len(layout.layer_ids), len(ids) * layout.top_k, its)
        groups = list(islice(stored[its], len(counts)))
        if its is Codec.PACK:
            head, _ = packed_header(layout.layer_ids, len(ids), layout.num_experts, layout.top_k)
        else:
            head = FrameHeader(
                num_rows=len(ids),
                layer_ids=layout.layer_ids,
                num_experts=layout.num_experts,
                top_k=layout.top_k,
                codec=its,
                group_layers=counts,
                group_bytes=tuple(map(len, groups)),
            ).pack()
        frames[i] = b"".join([head, *groups])
    return frames


def _packed_rows(list_of_ids: Sequence[Ids], codecs: list[Codec]) -> int:
    return sum(len(ids) for ids, its in zip(list_of_ids, codecs, strict=True) if its is Codec.PACK)


def _codec_of(ids: Ids, layout: ModelLayout) -> Codec:
    pays = len(ids) >= ZSTD_ROWS and layout.num_experts > PACKED_EXPERTS
    return Codec.LAYER_ZSTD if pays else Codec.PACK


def copy_ids(ids: Ids, out: Ids) -> None:
    """Copy ids [L, n, K] to an array of the same shape and dtype, of any strides.

    Copies words of a top-k: between separate rows numpy takes as long for one id as for eight.
    """
    size = ids.itemsize
    if ids.dtype == out.dtype and ids.strides[2] == out.strides[2] == size:
        word = f"u{gcd(ids.shape[2] * size, 8)}"
        ids, out = ids.view(word), out.view(word)
    out[...] = ids


def slice_frame(frame: Buffer, layer_ids: Iterable[int]) -> bytes:
    """Return a frame of only the groups that hold the given layers, without decoding.

    Args:
        frame: exactly one frame.
        layer_ids: absolute layer ids, in any order.

    Returns:
        A frame with at least these layers: layers of a group stay together.

    Raises:
        InvalidArgument: if no layer is named, or the frame lacks one.
        Corrupt: as `read_header`. Groups are copied with their checksums, unchecked.
    """
    header = read_header(frame)
    sliced, runs = header.cut(tuple(layer_ids))
    if sliced == header:
        return bytes(frame)
    view = memoryview(frame).cast("B")
    return b"".join([sliced.pack(), *[view[start:stop] for start, stop in runs]])


def decode_frame(frame: Buffer, *, layer_ids: Iterable[int] | None = None) -> Ids:
    """Return the ids of a frame, layer-major.

    Args:
        frame: exactly one frame.
        layer_ids: absolute layer ids, in the order of the result; None: all.

    Returns:
        A new array [len(layer_ids), n, K] of uint8 or uint16.

    Raises:
        InvalidArgument: if no layer is named, or the frame lacks one.
        Corrupt: if a checksum, a length or an id is wrong, in the header or in a group used.
    """
    [ids] = decode_frames([(frame, layer_ids, None)])
    return ids


def decode_into(frame: Buffer, out: Ids, layer_ids: Iterable[int]) -> None:
    """Decode a frame into an array of the caller.

    Args:
        frame: exactly one frame.
        out: [len(layer_ids), n, K] of the frame's dtype; undefined after an error. Fastest
            where each out[i] is contiguous.
        layer_ids: absolute layer ids, in the order of `out`.

    Raises:
        InvalidArgument: if no layer is named, the frame lacks one, or `out` does not fit.
        Corrupt: as `decode_frame`.
    """
    [_] = decode_frames([(frame, layer_ids, out)])


def decode_frames(
    frames: Iterable[tuple[Buffer, Iterable[int] | None, Ids | None]],
    headers: Iterable[FrameHeader] | None = None,
) -> Iterator[Ids]:
    """Decode frames one after the other; zstd runs once for many of them, outside of the GIL.

    Each time it takes 5 ms to reacquire the GIL from a thread that is busy in Python. Bytes decoded
    ahead are bounded, since a few bytes may expand to very many.

    Args:
        frames: (frame, layer_ids, out) of each, as for `decode_frame` and `decode_into`.
        headers: what `read_header` returned for each; None: it is called here.

    Yields:
        The ids of each, in `out` where that is given, written just before it is yielded.

    Raises:
        InvalidArgument, Corrupt: as those, where possible before the first result.
    """
    frames = list(frames)
    if headers is None:
        headers = [read_header(frame) for frame, _, _ in frames]
    opened = [
        (_Groups(frame, header, layer_ids), out)
        for (frame, layer_ids, out), header in zip(frames, headers, strict=True)
    ]
    for groups, out in opened:
        groups.check(out)
    for batch in _batches(opened):
        packed = [plane for groups, _ in batch for plane in groups.packed]
        sizes = [size for groups, _ in batch for size in groups.sizes]
        unpacked = iter(_decompress(packed, sizes))
        for groups, out in batch:
            yield groups.ids(unpacked, out)


def _batches(
    opened: list[tuple[_Groups, Ids | None]],
) -> Iterator[list[tuple[_Groups, Ids | None]]]:
    """Yield consecutive frames to decompress together: about _BATCH_BYTES, or one frame."""
    batch: list[tuple[_Groups, Ids | None]] = []
    size = 0
    for groups, out in opened:
        more = sum(groups.sizes)
        if batch and size + more > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((groups, out))
        size += more
    if batch:
        yield batch


class _Groups:
    """Groups of a frame that hold given layers."""

    def __init__(self, frame: Buffer, header: FrameHeader, layer_ids: Iterable[int] | None) -> None:
        self.header = header
        wanted = header.layer_ids if layer_ids is None else tuple(layer_ids)
        self._pick = pick = header.pick(wanted)
        self._shape = len(wanted), header.num_rows, header.top_k
        self._decode = None
        kernels = native.kernels(header.num_rows) if header.codec is Codec.PACK else None
        if kernels:
            self.packed, self.sizes = [], []
            decoding = packed.opened(frame, header, wanted)
            self._decode = partial(packed.decode, kernels, frame, header, decoding)
            return
        plane, low = header.layer_bytes
        self.packed = _stored(frame, header, pick)
        """Planes that are a zstd frame."""
        self.sizes = list(map(plane.__mul__, pick.group_layers))
        """Their content sizes."""
        self._plain: dict[int, memoryview] = {}  # uncompressed planes, by their place
        self._low_bits: list[memoryview] = []
        if low or max(header.group_bytes) >= min(self.sizes):
            self._take_plain(low)

    def _take_plain(self, low: int) -> None:
        """Move bytes outside of any zstd frame out of `packed`."""
        pick = self._pick
        groups = zip(pick.groups, pick.group_layers, self.packed, self.sizes, strict=True)
        self.packed, self.sizes = [], []
        for place, (group, count, stored, size) in enumerate(groups):
            as_it_is = len(stored) == size + count * low + CRC_BYTES
            low_at = len(stored) - count * low - CRC_BYTES
            if as_it_is or low:
                _check_crc(group, stored[0 if as_it_is else low_at :])
            if as_it_is:
                self._plain[place] = stored[:size]
            else:
                self.packed.append(stored[:low_at] if low else stored)
                self.sizes.append(size)
            if low:
                self._low_bits.append(stored[low_at:-CRC_BYTES])

    def check(self, out: Ids | None) -> None:
        """Refuse an array of another shape or dtype than the ids."""
        if out is None:
            return
        dtype = self.header.dtype
        if out.shape != self._shape or out.dtype != dtype or not out.flags.writeable:
            raise InvalidArgument(
                field="out",
                value=f"{'a' if out.flags.writeable else 'a read-only'} {out.dtype} {out.shape}",
                expected=f"a {dtype} {self._shape}",
            )

    def ids(self, unpacked: Iterator[Any], out: Ids | None) -> Ids:
        """Return the ids, from the contents of `packed`."""
        header = self.header
        if self._decode:
            ids = self._decode(out)
            if out is None or ids is out:
                return ids
            copy_ids(ids, out)
            return out
        contents: list[Any] = list(islice(unpacked, len(self.packed)))
        for place, plain in self._plain.items():
            contents.insert(place, plain)
        shift, dtype = header.shift, np.dtype(np.uint8) if header.shift else header.dtype
        ids = self._layers(contents, dtype.newbyteorder("<"))
        if header.codec is Codec.PACK:
            ids = bit_pack.unpack(ids.reshape(-1), header.width).reshape(len(ids), -1)
            ids = ids[:, : header.num_rows * header.top_k]
        ids = ids.reshape(self._shape)
        if shift:
            ids = np.left_shift(ids, shift, dtype=header.dtype)
            ids |= _unpack_low_bits(self._layers(self._low_bits, np.dtype(np.uint8)), shift, ids)
        if header.num_experts < 1 << (header.width + shift):
            largest = int(np.maximum.reduce(ids, axis=None))
            if largest >= header.num_experts:
                raise corrupt("topk_ids", largest, f"ids below {header.num_experts}")
        if out is None:
            return ids.astype(header.dtype, copy=False)
        copy_ids(ids, out)
        return out

    def _layers(self, parts: list[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return parts of groups as [wanted layers, numbers of each]."""
        held = np.frombuffer(bytearray().join(parts), dtype).reshape(len(self._pick.layer_ids), -1)
        return held if self._pick.order is None else held[self._pick.order]


def _stored(frame: Buffer, header: FrameHeader, pick: Pick) -> list[memoryview]:
    """Return the stored bytes of the picked groups."""
    view, at = memoryview(frame).cast("B"), header.group_offsets
    return [view[at[g] : at[g + 1]] for g in pick.groups]


def _check_crc(group: int, sealed: memoryview) -> None:
    """Check the CRC-32 at the end of uncompressed bytes."""
    crc, stored = crc32(sealed[:-CRC_BYTES]), int.from_bytes(sealed[-CRC_BYTES:], "little")
    if crc != stored:
        raise corrupt(f"crc32 of group {group}", crc, str(stored))


def _seal(*parts: Any) -> list[Any]:
    """Return uncompressed parts, followed by their CRC-32."""
    crc = 0
    for part in parts:
        if len(part):
            crc = crc32(part, crc)
    return [*parts, crc.to_bytes(CRC_BYTES, "little")]


def _pack(
    list_of_ids: Sequence[Ids], layout: ModelLayout, codec: Codec, level: int
) -> Iterator[Any]:
    """Yield the stored bytes of the groups of all frames."""
    num_layers, shift = len(layout.layer_ids), id_shift(layout.num_experts, codec)
    shapes = [
        (
            *layer_bytes(len(ids), layout.top_k, layout.num_experts, codec),
            group_layers(num_layers, len(ids) * layout.top_k, codec),
        )
        for ids in list_of_ids
    ]
    width = id_width(layout.num_experts, codec)
    # Bytes of a layer's plane before it is packed.
    rooms = [plane * 8 // width if codec is Codec.PACK else plane for plane, _, _ in shapes]
    planes = np.empty(num_layers * sum(rooms), np.uint8)
    sizes = [count * plane for plane, _, counts in shapes for count in counts]
    low_bits: list[memoryview] = []
    at = 0
    for ids, bytes_of_layer, (_, low, counts) in zip(list_of_ids, rooms, shapes, strict=True):
        room = planes[at : at + num_layers * bytes_of_layer].reshape(num_layers, -1)
        at += room.size
        used = ids[0, 0].nbytes * len(ids) if not shift else len(ids) * layout.top_k
        room[:, used:] = 0
        room = room[:, :used]
        if shift:
            major = _layer_major(ids, np.empty((num_layers, used * ids.itemsize), np.uint8))
            np.right_shift(major, shift, out=room.reshape(major.shape), casting="unsafe")
            held = memoryview(_pack_low_bits(major, shift).reshape(-1))  # type: ignore[arg-type]
            low_bits += _cut(held, [count * low for count in counts])
        else:
            _layer_major(ids, room)
    if codec is Codec.PACK:
        planes = bit_pack.pack(planes, width)
    plain = _cut(memoryview(planes), sizes)  # type: ignore[arg-type]
    if codec is not Codec.LAYER_ZSTD:
        for plane, bits in zip(plain, low_bits or repeat(b""), strict=False):
            yield b"".join(_seal(plane, bits))
        return
    packed = _compress(planes, sizes, level)
    for z, whole, bits in zip(packed, plain, low_bits or repeat(b""), strict=False):
        if len(z) >= len(whole) + (0 if bits else CRC_BYTES):
            yield b"".join(_seal(whole, bits))
        else:
            yield b"".join([z, *_seal(bits)]) if bits else z


def _cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    """Return consecutive parts of these sizes."""
    return [data[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def _layer_major(ids: Ids, room: npt.NDArray[np.uint8]) -> Ids:
    """Write ids [n, L, K] as [L, n, K], little-endian, into the bytes `room` [L, ...]."""
    num_rows, num_layers, top_k = ids.shape
    ids = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
    major = room.view(ids.dtype).reshape(num_layers, num_rows, top_k)
    # Words that divide a top-k move several times as fast as single ids.
    contiguous = ids.strides[2] == ids.itemsize
    word = f"u{gcd(top_k * ids.itemsize, 8)}" if contiguous else ids.dtype
    major.view(word)[...] = ids.view(word).transpose(1, 0, 2)
    return major


def _pack_low_bits(ids: Ids, shift: int) -> npt.NDArray[np.uint8]:
    """Return the `shift` low bits of ids [L, n, K], as [L, shift * ceil(n K / 8)]."""
    packed = [np.zeros((len(ids), 0), np.uint8)]
    if shift:
        flat = ids.astype(np.uint8).reshape(len(ids), -1)
        packed += [
            np.packbits(flat & (1 << bit), axis=1, bitorder="little") for bit in range(shift)
        ]
    return np.concatenate(packed, axis=1)


def _unpack_low_bits(packed: npt.NDArray[np.uint8], shift: int, like: Ids) -> Any:
    """Return the `shift` low bits of ids of the shape of `like`, [L, n, K]."""
    planes = packed.reshape(len(like), shift, -1)
    bits = np.unpackbits(planes, axis=2, count=like[0].size, bitorder="little")
    low = bits[:, 0]
    for bit in range(1, shift):
        low |= bits[:, bit] << bit
    return low.reshape(like.shape)


def _multi(context: Any, name: str) -> Any:
    """Return the call for many frames at a time; None where missing (cffi's only raises)."""
    return None if zstandard.backend == "cffi" else getattr(context, name, None)


def _compress(planes: npt.NDArray[np.uint8], sizes: list[int], level: int) -> Iterable[Any]:
    """Return consecutive parts of `planes`, of these sizes, as zstd frames."""
    context = _contexts.compressor(level)
    multi = _multi(context, "multi_compress_to_buffer")
    if multi is None:
        return map(context.compress, _cut(memoryview(planes), sizes))  # type: ignore[arg-type]
    if not sizes:
        return []
    segments = np.empty((len(sizes), 2), np.uint64)  # offset and length of each
    segments[:, 1] = sizes
    segments[:, 0] = np.cumsum(segments[:, 1]) - segments[:, 1]
    packed: Iterable[Any] = multi(zstandard.BufferWithSegments(planes.data, segments.tobytes()))
    return packed


def _decompress(packed: list[memoryview], sizes: list[int]) -> list[Any]:
    """Return the contents of zstd frames, which must declare and have these sizes."""
    if not packed:
        return []
    context = _contexts.decompressor
    try:
        # Before anything is allocated: 32 kB may claim to hold 1 GiB.
        declared = list(map(zstandard.frame_content_size, packed))
        if declared != sizes:
            at = list(map(ne, declared, sizes)).index(True)
            raise corrupt("zstd content size", declared[at], str(sizes[at]))
        for flags in set(map(_FLAGS, packed)):
            if flags & _FLAGS_MASK != _CHECKSUM_ALONE:
                raise corrupt("zstd flags", f"{flags:#010b}", "a checksum and no dictionary")
        multi = _multi(context, "multi_decompress_to_buffer")
        # zstd refuses a frame of another size than it declares.
        return list(multi(packed) if multi else map(context.decompress, packed))
    except zstandard.ZstdError as error:
        raise corrupt("zstd frame", str(error), "one that decodes") from error


def _check_ids(ids: Ids, layout: ModelLayout, validate: bool) -> None:
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
