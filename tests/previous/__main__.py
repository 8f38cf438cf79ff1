"""Write the fixtures: `python -m previous DIRECTORY`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from previous.contract import columns
from previous.scenario import AGAIN, answers, go_on, happen
from previous.serving import Serving
from previous.wire import exchange
from routetrace.v1 import routetrace_pb2 as pb

_LEFT_OUT = ("lock", "reserve")


def write_data(directory: Path) -> None:
    """Write a data directory, and the answers of the server that wrote it."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        with Serving(data) as serving:
            writers = happen(serving)
        archive = directory / "data.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as out:
            for path in sorted(data.rglob("*")):
                if path.is_file() and path.name not in _LEFT_OUT:
                    out.write(path, str(path.relative_to(data)))
        again = Path(name) / "again"
        shutil.copytree(data, again)
        with Serving(again, AGAIN) as serving:
            before = answers(serving.target)
            go_on(serving, writers)
            after = answers(serving.target)
    write_json(directory / "answers.json", {"writers": writers, "before": before, "after": after})


def write_wire(directory: Path) -> None:
    """Write the messages of an agent and a client, and the descriptors of the contract."""
    with tempfile.TemporaryDirectory() as name:
        write_json(directory / "wire.json", exchange(Path(name)))
    write_json(directory / "columns.json", columns())
    contract = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(contract)
    (directory / "contract.binpb").write_bytes(
        FileDescriptorSet(file=[contract]).SerializeToString()
    )


def write_json(path: Path, parts: dict[str, Any]) -> None:
    """Write parts, each with a line for each of its entries."""
    lines = []
    for name, part in parts.items():
        if isinstance(part, dict):
            inside = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()]
            body = "{\n" + ",\n".join(inside) + "\n }"
        elif isinstance(part, list):
            body = "[\n" + ",\n".join(f"  {json.dumps(value)}" for value in part) + "\n ]"
        else:
            body = json.dumps(part)
        lines.append(f" {json.dumps(name)}: {body}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Write all fixtures."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    write_data(directory)
    write_wire(directory)


if __name__ == "__main__":
    main()
