"""PACK frames by the compiled loops of native.py: the same bytes and errors as frame.py's numpy."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.codec.frame_header import (
    CRC_BYTES,
    Buffer,
    Codec,
    FrameHeader,
    corrupt,
    group_layers,
    id_shift,
    id_width,
    layer_bytes,
    packed_header,
)
from routetrace.common.checksum import stepped_crc32 as crc32
from routetrace.common.layout import ModelLayout

if TYPE_CHECKING:
    from routetrace.codec.kernels import Kernels

Ids = npt.NDArray[np.unsignedinteger[Any]]
_Places = npt.NDArray[np.int64]


class _Encoding(NamedTuple):
    """All that frames of one shape share."""

    head: bytes
    """The header."""
    nbytes: int
    """Bytes of the frame."""
    sealed: tuple[tuple[int, int], ...]
    """[start, stop) of each group without its checksum, which follows."""
    planes: _Places
    low_planes: _Places
    width: int
    shift: int


class Decoding(NamedTuple):
    """All that frames of one shape share for a choice of layers."""

    sealed: tuple[tuple[int, int, int], ...]
    """(group, start, stop) of each group used, without its checksum, which follows."""
    planes: _Places
    low_planes: _Places


def invalid_rows(kernels: Kernels, ids: Ids, num_experts: int) -> npt.NDArray[np.bool_] | None:
    """Return rows that no router chose, as frame.py's; None where the loops have none for ids."""
    num_rows, num_layers, top_k = ids.shape
    if not (num_rows and ids.dtype.isnative and ids.flags.c_contiguous):
        return None
    bad = np.empty(num_rows, np.bool_)
    item = ids.itemsize
    rows = ids.reshape(-1).view(np.uint8)
    return bad if kernels.check(rows, top_k * item, num_layers, item, num_experts, bad) else None


def encodes(ids: Ids, codec: Codec) -> bool:
    """Return whether `encode` takes these ids."""
    return codec is Codec.PACK and ids.flags.c_contiguous and ids.dtype.isnative


def encode(kernels: Kernels, ids: Ids, layout: ModelLayout) -> bytes:
    """Return the PACK frame of checked rows [n, L, K], contiguous and of `layout.dtype`."""
    top_k, item = layout.top_k, ids.itemsize
    plan = _encoding(layout.layer_ids, len(ids), layout.num_experts, top_k)
    frame = np.empty(plan.nbytes, np.uint8)
    view = memoryview(frame)  # type: ignore[arg-type]
    view[: len(plan.head)] = plan.head
    done = kernels.pack(
        ids.reshape(-1).view(np.uint8), top_k * item, len(layout.layer_ids), item,
        plan.width, plan.shift, plan.planes, plan.low_planes, frame,
    )  # fmt: skip
    if not done:
        raise AssertionError(f"no place for rows of shape {ids.shape} in {plan.nbytes} bytes")
    for start, stop in plan.sealed:
        view[stop : stop + CRC_BYTES] = crc32(view[start:stop]).to_bytes(CRC_BYTES, "little")
    return frame.tobytes()


def opened(frame: Buffer, header: FrameHeader, layer_ids: tuple[int, ...]) -> Decoding:
    """Check the checksums of the groups that hold these layers; return what `decode` needs.

    Raises:
        InvalidArgument, Corrupt: as `frame.decode_frame`.
    """
    view, decoding = memoryview(frame).cast("B"), _decoding(header, layer_ids)
    for group, start, stop in decoding.sealed:
        crc = crc32(view[start:stop])
        stored = int.from_bytes(view[stop : stop + CRC_BYTES], "little")
        if crc != stored:
            raise corrupt(f"crc32 of group {group}", crc, str(stored))
    return decoding


def decode(
    kernels: Kernels,
    frame: Buffer,
    header: FrameHeader,
    decoding: Decoding,
    out: Ids | None,
) -> Ids:
    """Return the ids of layers.

    Args:
        kernels: the loops.
        frame: exactly one frame.
        header: of it.
        decoding: as `opened` returned it.
        out: written, where the ids of a layer lie behind each other; else they are in a new array.

    Raises:
        Corrupt: if an id is not below the number of experts.
    """
    layers, item = len(decoding.planes), header.dtype.itemsize
    ids = out
    if ids is None or not _takes(ids):
        ids = np.empty((layers, header.num_rows, header.top_k), header.dtype)
    count = header.num_rows * header.top_k
    largest = kernels.unpack(
        np.frombuffer(frame, np.uint8), decoding.planes, decoding.low_planes, count, item,
        header.width, header.shift, ids.view(np.uint8).reshape(layers, count * item),
    )  # fmt: skip
    if largest < 0:
        raise AssertionError(f"no {count} ids for each of {layers} layers in {ids.shape}")
    if largest >= header.num_experts:
        raise corrupt("topk_ids", largest, f"ids below {header.num_experts}")
    return ids


def _takes(out: Ids) -> bool:
    """Whether the ids of each layer lie behind each other."""
    top_k, item = out.shape[2], out.itemsize
    return out.dtype.isnative and out.strides[1:] == (top_k * item, item)


@lru_cache(maxsize=512)
def _encoding(layer_ids: tuple[int, ...], num_rows: int, num_experts: int, top_k: int) -> _Encoding:
    head, nbytes = packed_header(layer_ids, num_rows, num_experts, top_k)
    counts = group_layers(len(layer_ids), num_rows * top_k, Codec.PACK)
    plane, low = layer_bytes(num_rows, top_k, num_experts, Codec.PACK)
    sizes = [count * (plane + low) + CRC_BYTES for count in counts]
    ends = tuple(accumulate(sizes, initial=len(head)))
    planes, low_planes = _places(ends, counts, plane, low)
    return _Encoding(
        head,
        nbytes,
        tuple((start, stop - CRC_BYTES) for start, stop in pairwise(ends)),
        np.array(planes, np.int64),
        np.array(low_planes, np.int64),
        id_width(num_experts, Codec.PACK),
        id_shift(num_experts, Codec.PACK),
    )


@lru_cache(maxsize=512)
def _decoding(header: FrameHeader, layer_ids: tuple[int, ...]) -> Decoding:
    pick, ends = header.pick(layer_ids), header.group_offsets
    plane, low = header.layer_bytes
    planes, low_planes = _places(ends, header.group_layers, plane, low)
    columns = [header.layer_ids.index(layer) for layer in layer_ids]
    return Decoding(
        tuple((group, ends[group], ends[group + 1] - CRC_BYTES) for group in pick.groups),
        np.array([planes[i] for i in columns], np.int64),
        np.array([low_planes[i] for i in columns], np.int64),
    )


def _places(
    ends: tuple[int, ...], counts: tuple[int, ...], plane: int, low: int
) -> tuple[list[int], list[int]]:
    """Return where the plane and the low bits of each layer begin."""
    planes: list[int] = []
    low_planes: list[int] = []
    for start, count in zip(ends, counts, strict=False):
        planes += [start + i * plane for i in range(count)]
        low_planes += [start + count * plane + i * low for i in range(count)]
    return planes, low_planes
