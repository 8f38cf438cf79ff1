"""`routetrace-server backup` and `restore`: copies of a data directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pydantic import ByteSize

from routetrace.common.errors import Corrupt, RouteTraceError
from routetrace.server.index.journal import Journal
from routetrace.server.index.state import State
from routetrace.server.ops import logs
from routetrace.server.process.partitions import make_partitions, partition_dir, partitions_of
from routetrace.server.settings import usage
from routetrace.server.settings.config import ConfigError
from routetrace.server.settings.loading import load_config
from routetrace.server.store.disk.copying import Copied, check_empty, copy_store, survey
from routetrace.server.store.disk.directory import NAME, PART
from routetrace.server.store.disk.store import DiskStore

_DESCRIPTIONS = {
    "backup": "Copy the data directory of a server, which may be running, into a new or empty "
    "directory on the same machine. The copy holds all rows that were acknowledged before the "
    "command began and that were not deleted since. Run it as the user of the server.",
    "restore": "Copy a backup into the new or empty data directory of a server that is not "
    "running. The backup stays as it is.",
}


def main(command: str, argv: Sequence[str]) -> int:
    """Run `backup` or `restore`.

    Returns:
        0; 1 if the copy cannot be made, or does not pass --verify; 2 if the arguments are wrong.
    """
    parser = usage.new_parser(
        command,
        f"{_DESCRIPTIONS[command]} Exit code 0: done, 1: not done, 2: invalid arguments.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of the server (default: none) [env: ROUTETRACE_CONFIG]",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="data directory of the server (default: that of --config, or routetrace-data) [env: "
        "ROUTETRACE_DATA_DIR]",
    )
    backup_flag = "--to" if command == "backup" else "--from"
    parser.add_argument(
        backup_flag,
        metavar="DIR",
        type=Path,
        required=True,
        dest="backup",
        help="the backup (required)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then open the copy as a server does, and compare every byte with its checksum; takes "
        "the memory that a server takes",
    )
    args = parser.parse_args(argv)
    flags = [("--config", args.config), ("--data-dir", args.data_dir)]
    try:
        config = load_config([f"{flag}={value}" for flag, value in flags if value is not None])
    except ConfigError as error:
        print(f"routetrace-server {command}: {error}", file=sys.stderr)
        return 2
    logs.set_up("warning", config.log_format)
    data_dir, to = config.data_dir, args.backup
    if command == "restore":
        data_dir, to = to, data_dir
    os.nice(10)  # the server and its neighbours come first
    try:
        _copy(data_dir, to, check=args.verify)
    except (RouteTraceError, ConfigError, OSError) as error:
        print(f"routetrace-server {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _copy(data_dir: Path, to: Path, *, check: bool) -> None:
    """Copy all partitions of a data directory, and check the copies if wanted."""
    parts = partitions_of(data_dir)
    if len(parts) > 1:
        check_empty(to)
    for number, part in enumerate(parts):
        part_to = to if len(parts) == 1 else partition_dir(to, number)
        copied = copy_store(part, part_to)
        print(_describe(part, part_to, copied))
        if check:
            print(f"verified: {verify(part_to, copied)} traces")
    if len(parts) > 1:  # last: a copy without it is not whole, and no server opens it
        make_partitions(to, len(parts))


def _describe(data_dir: Path, to: Path, copied: Copied) -> str:
    text = (
        f"copied {data_dir} to {to}: {copied.payloads} chunks, "
        f"{ByteSize(copied.payload_bytes).human_readable()}, up to record {copied.last_number}"
    )
    if copied.damaged:
        text += f"; {copied.damaged} parts of {data_dir} are damaged, and damaged in the copy"
    return text


def verify(data_dir: Path, copied: Copied) -> int:
    """Open a copy as a server does, and read all of it; return the number of its traces.

    A copy that does not pass is renamed, so that no server opens it.

    Raises:
        Corrupt: if it does not hold all that was copied.
        UnsupportedFormat: if it has a format that this version does not read.
        Unavailable: if a server uses it already.
    """
    found = survey(data_dir)
    if found[:3] != copied[:3] or found.damaged > copied.damaged:
        (data_dir / NAME).rename(data_dir / (NAME + PART))
        raise Corrupt(
            f"{data_dir} does not hold what was copied: expected (last record, chunks, bytes, "
            f"damaged) {copied[:4]}, found {found[:4]}; copy again, to another disk"
        )
    with closing(DiskStore(data_dir, capacity_bytes=1)) as store:
        state = State(default_ttl=1)
        Journal(store, state).recover()
    return len(state.traces.traces)
