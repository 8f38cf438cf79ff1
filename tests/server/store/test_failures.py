"""Errors of the operating system at the files of the store: path, cause and the remedy of each."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from routetrace.common.errors import RouteTraceError
from routetrace.server import daemon
from routetrace.server.store.disk import directory
from routetrace.server.store.disk.failures import explain
from routetrace.server.store.disk.store import DiskStore
from support.servers.store_records import record
from support.servers.stores import CAPACITY, Disk

DATA_DIR = Path("/srv/routetrace")

# Number, path below the data directory, message.
MESSAGES = [
    ("ENOSPC", "store/blocks", "the disk is full: cannot write to {} ({}); free space, or lower "
     "store_capacity"),
    ("EDQUOT", "store/blocks", "the disk is full: cannot write to {} ({}); free space, or lower "
     "store_capacity"),
    ("EFBIG", "store/blocks", "cannot write to {} ({}); raise the limit of file sizes (ulimit -f)"),
    ("EACCES", "lock", "cannot write to {} ({}); choose a writable data_dir"),
    ("EPERM", "lock", "cannot write to {} ({}); choose a writable data_dir"),
    ("EROFS", "", "cannot write to {} ({}); choose a writable data_dir"),
    ("ENOENT", "", "cannot write to {} ({}); choose a writable data_dir"),
    ("ENOENT", "store/1.log", "cannot open {} ({}); it was removed: restore data_dir from a "
     "backup"),
    ("ENOTDIR", "", "cannot write to {} ({}); choose a data_dir whose path has directories alone"),
    ("EEXIST", "", "cannot write to {} ({}); choose a data_dir whose path has directories alone"),
    ("EMFILE", "lock", "cannot open {} ({}); raise the limit of open files (ulimit -n)"),
    ("ENFILE", "lock", "cannot open {} ({}); raise the machine's limit of open files "
     "(fs.file-max)"),
    ("EIO", "store/1.log", "cannot read or write {} ({}); the disk fails: check it (dmesg), or "
     "replace it"),
    ("ENOLCK", "lock", "cannot use {} ({})"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "below", "message"), MESSAGES)
def test_each_error_has_its_own_remedy(name: str, below: str, message: str) -> None:
    number, path = getattr(errno, name), DATA_DIR / below
    error = OSError(number, os.strerror(number), str(path))
    assert explain(error, DATA_DIR) == message.format(repr(str(path)), os.strerror(number))


def test_an_error_without_a_path_is_of_the_directory() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert explain(full, DATA_DIR).startswith(f"the disk is full: cannot write to '{DATA_DIR}' (")
    assert explain(OSError("odd"), DATA_DIR) == f"cannot use '{DATA_DIR}' (odd)"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("below", ["file", "file/data"])
def test_a_data_dir_that_is_a_file_or_below_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int, below: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / below
    words = ("--data-dir", str(path), "--workers", str(workers), "--listen", "127.0.0.1:17411")
    assert daemon.main(words) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "cannot" in one]
    assert line.startswith(f"routetrace-server: cannot write to '{path}")
    assert line.endswith("; choose a data_dir whose path has directories alone")


@pytest.mark.parametrize(("number", "starts"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_directory_above_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, starts: bool
) -> None:
    """As that of automatic mounts; a data_dir that is made there is refused in any case."""
    real = directory.sync_directory

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(number, os.strerror(number), str(path))
        real(path)

    monkeypatch.setattr(directory, "sync_directory", sync)
    with pytest.raises(OSError, match=os.strerror(number)):
        DiskStore(tmp_path / "data", capacity_bytes=CAPACITY)
    assert (tmp_path / "data").is_dir()
    with nullcontext() if starts else pytest.raises(OSError, match=os.strerror(number)):
        DiskStore(tmp_path / "data", capacity_bytes=CAPACITY).close()


def test_a_start_on_a_full_disk(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]):
    disk.refuse = {"fsync": errno.ENOSPC}
    assert daemon.main(["--data-dir", str(tmp_path), "--listen", "127.0.0.1:0"]) == 1
    assert capsys.readouterr().err.endswith(
        f"routetrace-server: the disk is full: cannot write to '{tmp_path}' (No space left on "
        "device); free space, or lower store_capacity\n"
    )


def test_the_log_has_path_and_remedy_and_the_answer_has_not(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, capacity_bytes=CAPACITY)
    disk.refuse = {"pwrite": errno.ENOSPC}
    with pytest.raises(RouteTraceError) as refused:
        store.append(record(1)).result(30)
    disk.refuse = {}
    store.close()
    assert str(refused.value) == "the disk is full: No space left on device"
    assert (
        f"records cannot be written: the disk is full: cannot write to '{store._path}' (No space "
        "left on device); free space, or lower store_capacity"
    ) in caplog.text
