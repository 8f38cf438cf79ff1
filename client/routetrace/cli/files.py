"""Traces as files: .npz, a directory of them, or Parquet. A file is there whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from routetrace.cli.facts import facts_json
from routetrace.client import RoutingTrace
from routetrace.v1.errors import InvalidArgument

# Rows of a Parquet row group; short traces share one.
_GROUP_ROWS = 1 << 19
# Longest file name that is made of an id; file systems take 255 bytes.
_LONGEST_NAME = 180


class Writer(Protocol):
    """Takes traces; what it wrote is there once it is left without an error."""

    keeps_parts: bool
    """Whether what was written stays if other traces fail."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *error: object) -> None: ...

    def add(self, trace: RoutingTrace) -> None:
        """Writes a trace."""


def writer_for(output: str, num_traces: int) -> Writer:
    """What writes to a path, by its ending.

    Raises:
        InvalidArgument: if that can not hold so many traces, or needs what is not installed.
    """
    path = Path(output)
    if not (path.parent.is_dir() or output.endswith("/")):
        raise InvalidArgument(
            field="--output", value=output, expected=f"a file in a directory; {path.parent} is none"
        )
    if output.endswith("/") or path.is_dir():
        return Directory(path)
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise InvalidArgument("to write Parquet, pip install pyarrow")
        return ParquetFile(path)
    if path.suffix == ".npz" and num_traces == 1:
        return NpzFile(path)
    expected = "a directory (with a / at the end) or .parquet, to hold several traces"
    if path.suffix != ".npz":
        expected = "a path that ends in .npz, .parquet or /"
    raise InvalidArgument(field="--output", value=output, expected=expected)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` if all goes well, and nothing otherwise."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_npz(trace: RoutingTrace, path: Path) -> None:
    """Writes one trace.

    Arrays: `topk_ids` [tokens, layers, top_k] uint8 or uint16, `valid` bool [tokens, layers],
    `layer_ids` int32 [layers], `weight_versions` int64 [n, 3] (start, stop, version by position),
    `token_digests` [n] (position, digest), and `facts`, a string of JSON.
    """
    with atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(
            file,
            topk_ids=trace.topk_ids,
            valid=trace.valid,
            layer_ids=np.array(trace.layer_ids, np.int32),
            weight_versions=np.array(trace.weight_versions, np.int64).reshape(-1, 3),
            token_digests=trace.token_digests,
            facts=np.array(json.dumps(facts_json(trace))),
        )


class NpzFile:
    """One trace."""

    keeps_parts = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, trace: RoutingTrace) -> None:
        """Writes it."""
        write_npz(trace, self._path)


class Directory:
    """A .npz for each trace; each is there as soon as it is written."""

    keeps_parts = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Directory:
        self._path.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, trace: RoutingTrace) -> None:
        """Writes a trace."""
        write_npz(trace, self._path / f"{file_name(trace.request_id)}.npz")


def file_name(request_id: str) -> str:
    """A name for a file, of an id that may hold anything; other ids get other names."""
    name = quote(request_id, safe="")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(request_id.encode()).hexdigest()[:16]}"


class ParquetFile:
    """All traces, a row for each token and layer.

    Columns: `trace_id`, `position`, `layer`, `topk_ids` (a list of top_k ids; null where the cell
    is missing), `weight_version` (null where it is unknown).
    """

    keeps_parts = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._file: Any = None
        self._tables: list[Any] = []
        self._first: RoutingTrace | None = None

    def __enter__(self) -> ParquetFile:
        self._part = self._stack.enter_context(atomically(self._path))
        self._part.open("wb").close()  # tells now, not after an hour, that it can not be written
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._flush()
        finally:
            if self._file is not None:
                self._file.close()
            self._stack.__exit__(*error)

    def add(self, trace: RoutingTrace) -> None:
        """Writes a trace.

        Raises:
            InvalidArgument: if its model has another top-k, or wider ids, than the first one's.
        """
        first = self._first = self._first or trace
        if (trace.top_k, trace.layout.dtype) != (first.top_k, first.layout.dtype):
            raise InvalidArgument(
                field=f"trace {trace.request_id!r}",
                value=f"top-{trace.top_k} of {trace.layout.num_experts}",
                expected=f"top-{first.top_k} of {first.layout.num_experts}, as the first one has; "
                "write models of several kinds into a directory",
            )
        self._tables.append(parquet_table(trace))
        if sum(len(table) for table in self._tables) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._tables:
            return
        table = pa.concat_tables(self._tables).unify_dictionaries()
        if self._file is None:
            self._file = pq.ParquetWriter(self._part, table.schema, compression="zstd")
        self._file.write_table(table, row_group_size=_GROUP_ROWS)
        self._tables = []


def parquet_table(trace: RoutingTrace) -> Any:
    """The rows of a trace as they are written to Parquet."""
    import pyarrow as pa

    tokens, layers, top_k = trace.topk_ids.shape
    cells = tokens * layers
    positions = np.arange(trace.token_start, trace.token_stop, dtype=np.uint32)
    versions, known = _versions(trace)
    columns = {
        "trace_id": pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(cells, np.int32)), pa.array([trace.request_id])
        ),
        "position": pa.array(positions.repeat(layers)),
        "layer": pa.array(np.tile(np.array(trace.layer_ids, np.uint16), tokens)),
        "topk_ids": pa.FixedSizeListArray.from_arrays(
            pa.array(np.ascontiguousarray(trace.topk_ids).reshape(-1)),
            top_k,
            mask=pa.array(~trace.valid.reshape(-1)),
        ),
        "weight_version": pa.array(versions.repeat(layers), mask=~known.repeat(layers)),
    }
    return pa.table(columns)


def _versions(trace: RoutingTrace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Weight version of each token, and whether it is known."""
    versions = np.zeros(len(trace), np.int64)
    known = np.zeros(len(trace), bool)
    # Pipeline stages may differ for a moment: the newest one is told.
    for start, stop, version in sorted(trace.weight_versions, key=lambda run: run[2]):
        rows = slice(start - trace.token_start, stop - trace.token_start)
        versions[rows], known[rows] = version, True
    return versions, known
