"""Traces as .npz or Parquet files, which are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from routetrace.cli.facts import facts_json
from routetrace.client import Trace
from routetrace.client.stat import version_number
from routetrace.common.errors import InvalidArgument

# Rows of a Parquet row group; short traces share one.
_GROUP_ROWS = 1 << 19
# Maximum length of a file name from an id; file systems allow 255 bytes.
_MAX_NAME = 180


class Writer(Protocol):
    """Context that takes traces; the output exists once it exits without an error."""

    keeps_parts: bool
    """Whether written traces stay if others fail."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *error: object) -> None: ...

    def add(self, trace: Trace) -> Path:
        """Write a trace; return the path of its file."""


def writer_for(
    output: str, trace_ids: Sequence[str], may_replace: Callable[[Sequence[Path]], bool]
) -> Writer:
    """Return the writer of traces for a path, by its suffix.

    Args:
        output: path; a directory if it ends in /.
        trace_ids: traces to write.
        may_replace: returns whether files that exist are replaced.

    Raises:
        InvalidArgument: if the format cannot hold the traces, a file exists, or pyarrow is not
            installed.
    """
    path = Path(output)
    if not (path.parent.is_dir() or output.endswith("/")):
        raise InvalidArgument(
            field="--output",
            value=output,
            expected=f"a file in a directory; {path.parent} is not a directory",
        )
    is_directory = output.endswith("/") or path.is_dir()
    writer = Directory(path) if is_directory else _file_writer(output, len(trace_ids))
    names = [path]
    if is_directory:
        names = [path / f"{file_name(trace_id)}.npz" for trace_id in trace_ids]
    there = [name for name in names if name.exists()]
    if there and not may_replace(there):
        raise InvalidArgument(
            field="--output", value=str(there[0]), expected="no such file yet, or --force"
        )
    return writer


def _file_writer(output: str, num_traces: int) -> Writer:
    path = Path(output)
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
    """Yield a temporary path, renamed to `path` on success, removed on error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_npz(trace: Trace, path: Path) -> None:
    """Write one trace to a .npz.

    Arrays: `topk_ids` [tokens, layers, top_k] uint8 or uint16, `valid` bool [tokens, layers],
    `layer_ids` int32 [layers], `weight_versions` int64 [n, 3] (start, stop, version by position;
    UNKNOWN_VERSION is -2**63), `token_digests` [n] (position, digest), and `facts`, a string of
    JSON.
    """
    versions = [(start, stop, version_number(v)) for start, stop, v in trace.weight_versions]
    with atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(
            file,
            topk_ids=trace.topk_ids,
            valid=trace.valid,
            layer_ids=np.array(trace.layer_ids, np.int32),
            weight_versions=np.array(versions, np.int64).reshape(-1, 3),
            token_digests=trace.token_digests,
            facts=np.array(json.dumps(facts_json(trace))),
        )


class NpzFile:
    """A .npz of one trace."""

    keeps_parts = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, trace: Trace) -> Path:
        """Write the trace."""
        write_npz(trace, self._path)
        return self._path


class Directory:
    """One .npz per trace; each exists as soon as it is written."""

    keeps_parts = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Directory:
        self._path.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, trace: Trace) -> Path:
        """Write a trace."""
        path = self._path / f"{file_name(trace.trace_id)}.npz"
        write_npz(trace, path)
        return path


def file_name(trace_id: str) -> str:
    """Return a unique and valid file name for any id."""
    name = quote(trace_id, safe="")
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(trace_id.encode()).hexdigest()[:16]}"


class ParquetFile:
    """Parquet of all traces, one row per token and layer.

    Columns: `trace_id`, `position`, `layer`, `topk_ids` (a list of top_k ids; null where the cell
    is missing), `weight_version` (null where it is unknown).
    """

    keeps_parts = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._file: Any = None
        self._tables: list[Any] = []
        self._first: Trace | None = None

    def __enter__(self) -> ParquetFile:
        self._part = self._stack.enter_context(atomically(self._path))
        self._part.open("wb").close()  # fail early if it cannot be written
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._flush()
        finally:
            if self._file is not None:
                self._file.close()
            self._stack.__exit__(*error)

    def add(self, trace: Trace) -> Path:
        """Write a trace; the file exists once the context has ended.

        Raises:
            InvalidArgument: if its model has another top-k or id width than the first one.
        """
        first = self._first = self._first or trace
        if (trace.top_k, trace.layout.dtype) != (first.top_k, first.layout.dtype):
            raise InvalidArgument(
                field=f"trace {trace.trace_id!r}",
                value=f"top-{trace.top_k} of {trace.layout.num_experts}",
                expected=f"top-{first.top_k} of {first.layout.num_experts}, as in the first trace; "
                "write traces of several models to a directory",
            )
        self._tables.append(parquet_table(trace))
        if sum(len(table) for table in self._tables) >= _GROUP_ROWS:
            self._flush()
        return self._path

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


def parquet_table(trace: Trace) -> Any:
    """Return the Parquet table of a trace."""
    import pyarrow as pa

    tokens, layers, top_k = trace.topk_ids.shape
    cells = tokens * layers
    positions = np.arange(trace.token_start, trace.token_stop, dtype=np.uint32)
    versions, known = _versions(trace)
    columns = {
        "trace_id": pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(cells, np.int32)), pa.array([trace.trace_id])
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


def _versions(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the weight version of each token, and a mask of the known ones."""
    versions = np.zeros(len(trace), np.int64)
    known = np.zeros(len(trace), bool)
    # Where pipeline stages differ, the newest version is reported.
    for start, stop, version in sorted(
        trace.weight_versions, key=lambda span: version_number(span[2])
    ):
        if version is not None:
            rows = slice(start - trace.token_start, stop - trace.token_start)
            versions[rows], known[rows] = version, True
    return versions, known
