"""Frames: how small they are, and what packing and unpacking them costs beside zstd alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from measure import DATA, DEEPSEEK, KIMI, OWN_CORE, QWEN3, Shape, Table, area, pin, ratios, rounds
from routetrace.codec import native
from routetrace.codec.frame import Codec, decode_frames, encode_frames, invalid_rows, slice_frame
from routetrace.common.layout import ModelLayout

Ids = npt.NDArray[Any]

SETS = (
    "real_qwen_text",
    "real_qwen_gen",
    "real_dsv3_text",
    "syn_qwen3_30b_1k",
    "syn_dsv3_1k",
    "syn_gptoss120b_1k",
    "syn_kimi_k2_1k",
)
FRAME_ROWS = (256, 512, 1024)
#: Rows of frames of running requests: with a reader that follows, and as large as PACK ones get.
SMALL_ROWS = (48, 255)

#: Level of zstd of agents.
LEVEL = 2

#: Payload of a message of a read, as the server aims at it.
MESSAGE_BYTES = 1 << 20

#: A quarter of Qwen3's layers: what a pipeline stage of four reads.
STAGE = QWEN3.layout.layer_ids[12:24]


def entropy_bytes(ids: Ids) -> float:
    """Order-0 entropy of ids [n, L, K] with a table for each layer; the tables are not counted."""
    bits = 0.0
    for layer in range(ids.shape[1]):
        counts = np.bincount(ids[:, layer].ravel())
        shares = counts[counts > 0] / counts.sum()
        bits -= float((shares * np.log2(shares)).sum()) * ids[:, layer].size
    return bits / 8


def recorded(name: str) -> tuple[Ids, ModelLayout] | None:
    """A set of rows, in whole frames, and its layout; None where it does not lie here."""
    if not (DATA / f"{name}.npz").exists():
        return None
    with np.load(DATA / f"{name}.npz") as data:
        ids, experts = data["ids"], int(data["E"])
    _, layers, top_k = ids.shape
    layout = ModelLayout(tuple(range(layers)), layers, experts, top_k)
    return ids[: len(ids) // FRAME_ROWS[-1] * FRAME_ROWS[-1]], layout


def cut(ids: Ids, rows: int) -> list[Ids]:
    return [ids[at : at + rows] for at in range(0, len(ids), rows)]


def sizes(table: Table) -> None:
    """Of all sets and frame sizes the worst line of each class."""
    small: list[tuple[float, str]] = []
    large: list[tuple[float, str]] = []
    plain: list[tuple[float, str]] = []
    for name in SETS:
        found = recorded(name)
        if found is None:
            continue
        ids, layout = found
        bound = entropy_bytes(ids)
        for rows in FRAME_ROWS:
            stored = sum(map(len, encode_frames(cut(ids, rows), layout)))
            label = f"{name.removesuffix('_1k')}, {rows} rows"
            (small if layout.num_experts <= 256 else large).append((stored / bound, label))
            plain.append((stored / ids.size / 4, label))
    for group, what, against in (
        (small, "up to 256 experts", "order-0 entropy of each layer"),
        (large, "above 256 experts", "order-0 entropy of each layer"),
        (plain, "any set", "int32"),
    ):
        if group:
            worst, label = max(group)
            table.add(f"size, {what}, worst ({label})", worst, "x", against)
    if small:
        middle = [value for value, _ in small + large]
        table.add("size, all sets", middle, "x", "order-0 entropy of each layer")


def cpu(function: Callable[[], Any]) -> Callable[[], float]:
    """A cell: CPU seconds of a call."""

    def cell() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return cell


def messages(frames: Iterable[bytes]) -> list[list[bytes]]:
    """Frames as a read sends them."""
    sent: list[list[bytes]] = []
    room = 0
    for frame in frames:
        if len(frame) > room:
            sent.append([])
            room = MESSAGE_BYTES
        sent[-1].append(frame)
        room -= len(frame)
    return sent


def unpack(sent: list[list[bytes]], layer_ids: Sequence[int] | None = None) -> None:
    for frames in sent:
        for _ in decode_frames((frame, layer_ids, None) for frame in frames):
            pass


def speeds(table: Table, shape: Shape, rows: int, count: int) -> None:
    """Measure frames of one size: unpacked, unpacked in part, packed."""
    parts = cut(shape.rows(max(14 * 1024 // (4 if table.quick else 1), rows)), rows)
    frames = encode_frames(parts, shape.layout)
    sent = messages(frames)
    one_zstd = [
        zstandard.ZstdCompressor(level=3).compress(part.transpose(1, 0, 2).tobytes())
        for part in parts
    ]
    decompressor = zstandard.ZstdDecompressor()
    compressor = zstandard.ZstdCompressor(level=3)

    shift = max(0, (shape.layout.num_experts - 1).bit_length() - 8)
    planes = [(part >> shift).astype(np.uint8).transpose(1, 0, 2) for part in parts]
    chunks = [  # as the agent seals them: 1 MiB of rows
        [plane.tobytes() for part in planes[a:b] for plane in part]
        for a, b in pairwise([*range(0, len(parts), 1024 * 3 // rows), len(parts)])
    ]

    def pack() -> None:
        for part in (
            parts[at : at + 1024 * 3 // rows] for at in range(0, len(parts), 3072 // rows)
        ):
            encode_frames(part, shape.layout, validate=False)

    def cut_and_unpack() -> None:
        unpack(messages(slice_frame(frame, STAGE) for frame in frames), STAGE)

    cells = {
        "decode": cpu(lambda: unpack(sent)),
        "zstd": cpu(lambda: [decompressor.decompress(data) for data in one_zstd]),
    }
    if shape is QWEN3:
        cells |= {
            "part": cpu(cut_and_unpack),
            "encode": cpu(pack),
            "multi": cpu(lambda: [compressor.multi_compress_to_buffer(c) for c in chunks]),
        }
    took = rounds(cells, count)
    name = f"{rows}-row frames, {shape.name}"
    table.add(
        f"decode of {name}",
        ratios(took["zstd"], took["decode"]),
        "x",
        "one plain zstd decompress of the same ids",
    )
    if shape is QWEN3:
        table.add(
            f"cut and decode 12 of 48 layers, {rows}-row frames",
            ratios(took["part"], took["decode"]),
            "x",
            "decode of all layers",
        )
        table.add(
            f"encode of {name}",
            ratios(took["encode"], took["multi"]),
            "x",
            "zstd of the same planes alone",
        )


def small_frames(table: Table, shape: Shape, rows: int, count: int) -> None:
    """Measure PACK by the compiled loops and by numpy, and zstd: checked and packed, unpacked."""
    layout = shape.layout
    parts = [np.ascontiguousarray(part) for part in cut(shape.rows(rows * (3072 // rows)), rows)]
    out = np.empty((len(layout.layer_ids), rows * len(parts), layout.top_k), layout.dtype)
    places = [out[:, at : at + rows] for at in range(0, out.shape[1], rows)]
    loaders = {"numpy": native.Loader("off", present=False)}
    if native.installed():
        loaders["compiled"] = native.Loader("on", present=True)
    ways = {name: (loader, Codec.PACK) for name, loader in loaders.items()}
    ways["zstd"] = (loaders.get("compiled", loaders["numpy"]), Codec.LAYER_ZSTD)
    cells: dict[str, Callable[[], float]] = {}
    stored: dict[str, int] = {}
    for name, (loader, codec) in ways.items():

        def encoded(codec: Codec = codec) -> list[bytes]:
            for part in parts:
                invalid_rows(part, layout.num_experts)
            return encode_frames(parts, layout, codec=codec, level=LEVEL, validate=False)

        frames = encoded()
        stored[name] = sum(map(len, frames))

        def decoded(frames: list[bytes] = frames) -> None:
            for _ in decode_frames(
                (frame, layout.layer_ids, place)
                for frame, place in zip(frames, places, strict=True)
            ):
                pass

        for what, function in (("encode", encoded), ("decode", decoded)):
            cells[f"{what} {name}"] = _with(loader, cpu(function))
    took = rounds(cells, count)
    tokens, label = out.shape[1], f"{rows}-row frames, {shape.name}"
    for what in ("encode", "decode"):
        title = f"{'check and pack' if what == 'encode' else 'unpack'} {label}"
        for name in ways:
            cost = [second / tokens * 1e6 for second in took[f"{what} {name}"]]
            table.add(f"{title}: {name}", cost, "us/tok", "")
        if "compiled" in ways:
            for name in ("numpy", "zstd"):
                ratio = ratios(took[f"{what} compiled"], took[f"{what} {name}"])
                table.add(f"{title}, compiled", ratio, "x", name)
    table.add(f"bytes of {label}: PACK", stored["numpy"] / tokens, "B/tok", "")
    table.add(f"bytes of {label}, PACK", stored["numpy"] / stored["zstd"], "x", "LAYER_ZSTD")


def _with(loader: native.Loader, cell: Callable[[], float]) -> Callable[[], float]:
    """A cell, measured with the loops of a loader."""

    def measured() -> float:
        before = native.use(loader)
        try:
            return cell()
        finally:
            native.use(before)

    return measured


def measure(table: Table) -> None:
    pin(OWN_CORE)
    sizes(table)
    count = 5 if table.quick else 41
    for rows in reversed(FRAME_ROWS):
        speeds(table, QWEN3, rows, count)
    speeds(table, KIMI, FRAME_ROWS[-1], count)
    for rows in SMALL_ROWS:
        for shape in (QWEN3, DEEPSEEK, KIMI):
            small_frames(table, shape, rows, count)


if __name__ == "__main__":
    area(measure)
