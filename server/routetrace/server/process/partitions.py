"""Directories and settings of the workers, each of which serves a partition.

A partition is a whole server core with its own journal, state and reader; access/partition.py has
the runs that lie in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ByteSize

from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.store.disk.directory import NAME, make_directory
from routetrace.server.store.disk.failures import explain
from routetrace.server.store.disk.snapshot import sync_directory

#: File of a data directory with the number of its partitions; none: it is the directory of one.
_COUNT = "partitions"


def worker_address(address: str, number: int) -> str:
    """Return the address of a worker of the server at host:port."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def worker_config(config: ServerConfig, number: int) -> ServerConfig:
    """Return the settings of one worker: its ports, its directory and its share of the limits."""

    def listen(address: str) -> str:
        return worker_address(address, number) if address else ""

    return config.model_copy(
        update={
            "listen": listen(config.listen),
            "metrics_listen": listen(config.metrics_listen),
            "page_listen": config.page_listen if number == 0 else "",
            "advertise": config.advertised,
            "data_dir": partition_dir(config.data_dir, number),
            "object_cache": ByteSize(-(-config.object_cache // config.workers)),
            "object_cache_disk": ByteSize(-(-config.object_cache_disk // config.workers)),
            "store_capacity": ByteSize(-(-config.store_capacity // config.workers)),
            "memory_limit": ByteSize(-(-config.memory_limit // config.workers)),
            "ready_file": None,
        }
    )


def partition_dir(data_dir: Path, number: int) -> Path:
    """Return the directory of a partition of several."""
    return data_dir / f"partition-{number}"


def partitions_of(data_dir: Path) -> list[Path]:
    """Return the directories of all partitions of a data directory.

    Raises:
        ConfigError: if the number of its partitions cannot be read.
    """
    count = _count_of(data_dir)
    if count is None:
        return [data_dir]
    return [partition_dir(data_dir, number) for number in range(count)]


def check_partitions(data_dir: Path, workers: int) -> None:
    """Check that a data directory is for this number of workers, or new.

    Raises:
        ConfigError: if it is not.
    """
    count = _count_of(data_dir)
    if count is None:
        count = 1 if (data_dir / NAME).is_dir() else workers
        # Their number is noted before they are used, and behind the last one in a copy.
        if any(path.is_dir() for path in data_dir.glob(f"partition-*/{NAME}")):
            raise ConfigError(
                f"data_dir {data_dir} holds partitions, but not the file {_COUNT} with their "
                "number: expected a copy that is complete"
            )
    if count != workers:
        raise ConfigError(
            f"workers is {workers}: expected {count}, the number with which data_dir {data_dir} "
            "was made; another number needs a new directory"
        )
    lost = [path for path in partitions_of(data_dir) if path != data_dir and not path.is_dir()]
    if lost:
        raise ConfigError(f"{lost[0]} is missing: expected all {count} partitions of {data_dir}")


def make_partitions(data_dir: Path, count: int) -> None:
    """Create the directories of several partitions, and note their number, unless it is there.

    Raises:
        OSError: if they cannot be created; the message has the remedy.
    """
    if _count_of(data_dir) is not None:
        return
    try:
        for number in range(count):
            make_directory(partition_dir(data_dir, number))
        _write_durably(data_dir / _COUNT, f"{count}\n")
    except OSError as error:
        raise OSError(explain(error, data_dir)) from error


def _write_durably(path: Path, text: str) -> None:
    """Create or replace a file, whole, also over a loss of power."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def _count_of(data_dir: Path) -> int | None:
    path = data_dir / _COUNT
    try:
        text = path.read_text().strip()
        count = int(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if count < 2:
        raise ConfigError(f"{path} is {text!r}: expected a number of partitions from 2 on")
    return count
