"""Backup and restore: a copy of a data directory holds what was acknowledged, whatever goes on."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.check import read_all
from faults.scenarios.kill import SETTINGS, scripts
from faults.script import RUN
from faults.serving import Server
from faults.writers import Job, Run, Writers, no_violations
from routetrace.client import RouteClient
from routetrace.common.errors import Corrupt, Unavailable
from routetrace.server import backup
from routetrace.server.store.disk import copying
from routetrace.server.store.disk.blocks import BLOCK_BYTES, Blocks
from routetrace.server.store.disk.copying import copy_store, survey
from routetrace.server.store.disk.directory import NAME, PART
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record

CAPACITY = 64 << 20
PAYLOAD = 3 * BLOCK_BYTES


def command(*args: object) -> subprocess.CompletedProcess[str]:
    """Run routetrace-server with arguments."""
    return subprocess.run(
        [sys.executable, "-m", "routetrace.server.daemon", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")},
    )


def content(number: int) -> bytes:
    return bytes([number % 251]) * PAYLOAD


def put(store: DiskStore, *numbers: int) -> None:
    for future in [store.append(Record(n, b"h%d" % n, content(n))) for n in numbers]:
        future.result(30)


def held(data_dir: Path) -> dict[int, bytes]:
    """Payloads of a store that nobody uses, by number."""
    store = DiskStore(data_dir, capacity_bytes=CAPACITY)
    try:
        assert not store.stats().damaged_records
        return {n: bytes(store.read(n, [(0, PAYLOAD)])[0]) for n in store.numbers()}
    finally:
        store.close()


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run backup or restore in this process; return the exit code, output and error."""
    monkeypatch.setattr(backup.logs, "set_up", lambda *_: None)
    monkeypatch.setattr(backup.os, "nice", lambda _: None)

    def run(name: str, *args: object) -> tuple[int, str, str]:
        code = backup.main(name, [str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def store(tmp_path: Path):
    store = DiskStore(tmp_path / "data", capacity_bytes=CAPACITY)
    yield store
    store.close()


# ---------------------------------------------------------------------------- a server under load


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copy_under_load_holds_every_acknowledged_row(tmp_path: Path) -> None:
    """Ingests, deletions, expiries and compactions go on while a copy is made and verified."""
    settings = {**SETTINGS, "store_capacity": CAPACITY}
    jobs = [Job(7, f"e{i}", window=16, deletes=True) for i in range(2)]
    with Writers(2) as writers, Server(tmp_path / "data", **settings) as server:
        writers.jobs(jobs)
        writers.run(Run(server.target, 150))
        before = copy.deepcopy(writers.reports())
        assert all(report.known.acked >= 150 for report in before)
        writers.run(Run(server.target, 1 << 30))
        source, to = server.data_dir, tmp_path / "copy"
        done = command("backup", "--data-dir", source, "--to", to, "--verify")
        assert done.returncode == 0, done.stderr
        assert "verified: " in done.stdout
        assert "damaged" not in done.stdout + done.stderr
        after = writers.stop()
        no_violations(after)
        # What was acknowledged, and not deleted, before the copies began; and nothing never said.
        known = []
        for old, new in zip(before, after, strict=True):
            known.append(copy.copy(new.known))
            known[-1].acked, known[-1].deleted = old.known.acked, old.known.deleted
        restore = ("restore", "--from", tmp_path / "copy", "--data-dir")
        refused = command(*restore, server.data_dir)
        assert refused.returncode == 1
        assert "is in use by process" in refused.stderr
    done = command(*restore, tmp_path / "restored")
    assert done.returncode == 0, done.stderr
    with Server(tmp_path / "restored") as server:
        with RouteClient(server.target, run=RUN) as client:
            served = read_all(client, list(zip(scripts(after), known, strict=True)))
        assert served.rows > 500
        assert served.complete > 50
        assert server.stop() == 0


# ---------------------------------------------------------------------------- races, one by one


def reuse(store: DiskStore, drop: list[int], new: list[int], snapshot: bool = True) -> None:
    """Drop payloads in a compaction, and write new ones into their blocks."""
    store.compact((store.last_number(), [b"state"]) if snapshot else None, drop)
    put(store, *new)


@pytest.mark.parametrize("snapshot", [True, False])
def test_payloads_whose_blocks_are_used_again_are_left_out(store, tmp_path, monkeypatch, snapshot):
    put(store, *range(1, 21))
    read = Blocks.read
    reads = []

    def reading(self: Blocks, number: int, *args):
        reads.append(number)
        if len(reads) == 5:  # half of them go, also of what was copied already
            for first, new in ((1, (21, 22, 23, 24)), (3, (25, 26, 27)), (5, (28, 29, 30))):
                reuse(store, list(range(first, 21, 6)), list(new), snapshot)
        return read(self, number, *args)

    monkeypatch.setattr(copying.Blocks, "read", reading)
    copied = copy_store(tmp_path / "data", tmp_path / "copy")
    monkeypatch.undo()
    assert (copied.rounds, copied.damaged) == (2, 0)
    assert {f.name for f in (tmp_path / "copy" / NAME).iterdir()} == {
        f.name for f in (tmp_path / "data" / NAME).iterdir() if f.name != "reserve"
    }
    wanted = {n: content(n) for n in [*range(2, 21, 2), *range(21, 31)]}
    assert held(tmp_path / "copy") == wanted


def test_number_of_a_refused_record_that_is_used_again_is_copied_again(
    store, tmp_path, monkeypatch
):
    """The log may show a record whose commit then fails: another one takes its number."""
    put(store, 1, 2)
    (log,) = (tmp_path / "data" / NAME).glob("log-*")
    fdatasync, read = os.fdatasync, Blocks.read
    calls = []

    def refusing(file: int) -> None:
        if os.path.samestat(os.fstat(file), log.stat()):
            raise OSError(errno.EIO, "Input/output error")
        fdatasync(file)

    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", refusing)
        refused = store.append(Record(3, b"h3", content(30)))
        with pytest.raises(Unavailable):
            refused.result(30)

    def reading(self: Blocks, number: int, *args):
        payload = read(self, number, *args)
        calls.append(number)
        if calls == [1, 2, 3]:
            assert payload[0] == content(30)
            put(store, 3)
        elif len(calls) == 1:
            raise Corrupt("another round, please")
        return payload

    monkeypatch.setattr(copying.Blocks, "read", reading)
    copy_store(tmp_path / "data", tmp_path / "copy")
    monkeypatch.undo()
    assert held(tmp_path / "copy") == {n: content(n) for n in (1, 2, 3)}
    assert calls == [1, 2, 3, 1, 3]


def test_list_of_files_that_changed_while_it_was_read_is_read_again(store, tmp_path, monkeypatch):
    put(store, 1)
    reuse(store, [], [2])
    names = copying._names
    lists = []

    def listing(source: Path) -> list[str]:
        lists.append(names(source))
        # A directory may be listed without a file that was made before another one of the list.
        return [n for n in lists[-1] if len(lists) > 1 or not n.startswith("log-00000001")]

    monkeypatch.setattr(copying, "_names", listing)
    copy_store(tmp_path / "data", tmp_path / "copy")
    assert len(lists) == 3
    assert {f.name for f in (tmp_path / "copy" / NAME).iterdir()} == {*lists[-1], "blocks"}


def test_copy_is_of_one_moment(store, tmp_path, monkeypatch):
    """Records that are dropped between two files of a copy do not leave it with halves."""
    put(store, *range(1, 5))
    copy_file = copying._copy_file
    names = []

    def copying_file(file, to):
        names.append(to.name)
        if len(names) == 1:  # the log: it is deleted after the second of these
            for number in (10, 20, 30):
                reuse(store, [number - 10 or 1], [number])
        copy_file(file, to)

    monkeypatch.setattr(copying, "_copy_file", copying_file)
    copy_store(tmp_path / "data", tmp_path / "copy")
    assert held(tmp_path / "copy") == {n: content(n) for n in (2, 3, 4, 30)}


def test_store_that_changes_faster_than_it_is_copied_is_refused(store, tmp_path, monkeypatch):
    put(store, 1)
    read = Blocks.read

    def reading(self: Blocks, number: int, *args):
        reuse(store, [number], [store.last_number() + 1])
        return read(self, number, *args)

    monkeypatch.setattr(copying.Blocks, "read", reading)
    monkeypatch.setattr(copying, "_MAX_ROUNDS", 5)
    with pytest.raises(Unavailable, match="changes faster than it can be copied"):
        copy_store(tmp_path / "data", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["lock"]
    monkeypatch.undo()
    assert copy_store(tmp_path / "data", tmp_path / "copy").payloads == 1


def test_commit_under_way_is_cut_off(store, tmp_path, caplog):
    put(store, 1, 2)
    log = max((tmp_path / "data" / NAME).glob("log-*"))
    whole = log.stat().st_size
    os.truncate(log, whole - 5)  # as a copy sees the end of a commit that is being written
    copy_store(tmp_path / "data", tmp_path / "copy")
    os.truncate(log, whole)
    assert held(tmp_path / "copy") == {1: content(1)}
    assert not caplog.records


# ---------------------------------------------------------------------------- damage


def test_damaged_payload_stays_damaged_and_keeps_its_other_blocks(store, tmp_path):
    put(store, 1, 2)
    with open(tmp_path / "data" / NAME / "blocks", "r+b") as blocks:
        blocks.seek(BLOCK_BYTES + 7)  # the second block of the first record
        blocks.write(b"?")
    copied = copy_store(tmp_path / "data", tmp_path / "copy")
    assert (copied.payloads, copied.damaged) == (2, 1)
    assert survey(tmp_path / "copy").damaged == 1
    other = DiskStore(tmp_path / "copy", capacity_bytes=CAPACITY)
    try:
        assert other.read(2, [(0, PAYLOAD)])[0] == content(2)
        for at in (0, 2 * BLOCK_BYTES):
            assert other.read(1, [(at, 10)])[0] == content(1)[:10]
        with pytest.raises(Corrupt):
            other.read(1, [(BLOCK_BYTES, 10)])
    finally:
        other.close()


def test_damaged_record_of_the_log_is_counted(store, tmp_path):
    put(store, 1)
    put(store, 2)
    put(store, 3)
    (log,) = (tmp_path / "data" / NAME).glob("log-*")
    data = bytearray(log.read_bytes())
    data[data.index(b"h2")] ^= 1
    log.write_bytes(data)
    assert copy_store(tmp_path / "data", tmp_path / "copy")[::3] == (3, 1)


@pytest.mark.parametrize("part", ["blocks", "log", "snapshot"])
def test_verify_finds_a_byte_that_the_disk_changed(store, tmp_path, monkeypatch, run_here, part):
    put(store, 1, 2, 3)
    store.compact((3, [b"state"]), [2])
    put(store, 4)

    def copied_badly(data_dir: Path, to: Path):
        result = copy_store(data_dir, to)
        file = min((to / NAME).glob(f"{part}*"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return result

    monkeypatch.setattr(backup, "copy_store", copied_badly)
    args = ("--data-dir", tmp_path / "data", "--to", tmp_path / "copy", "--verify")
    code, _, error = run_here("backup", *args)
    assert code == 1
    assert "does not hold what was copied" in error
    with pytest.raises(Unavailable, match="is an unfinished copy: delete it, and copy again"):
        DiskStore(tmp_path / "copy", capacity_bytes=CAPACITY)


# ---------------------------------------------------------------------------- refusals


def test_copies_go_into_new_or_empty_directories_only(store, tmp_path, run_here):
    put(store, 1)
    full, other = tmp_path / "full", tmp_path / "other"
    full.mkdir()
    (full / "notes").touch()
    for args, why in (
        (("backup", "--data-dir", tmp_path / "data", "--to", full), "is not empty, it holds notes"),
        (("restore", "--from", tmp_path / "data", "--data-dir", full), "is not empty"),
        (("restore", "--from", full, "--data-dir", other), "holds no store of this version"),
        (("backup", "--data-dir", tmp_path / "data", "--to", tmp_path / "data"), "is in use by"),
    ):
        code, output, error = run_here(*args)
        assert (code, output) == (1, "")
        assert why in error
        assert len(error.splitlines()) == 1
    assert [path.name for path in full.iterdir()] == ["notes"]
    assert not other.exists()


def test_config_file_names_the_data_dir(store, tmp_path, run_here):
    put(store, 1)
    config = tmp_path / "server.toml"
    config.write_text(f'data_dir = "{tmp_path / "data"}"\n')
    code, output, error = run_here("backup", "--config", config, "--to", tmp_path / "copy")
    assert code == 0, error
    assert "1 chunks" in output
    code, _, error = run_here("backup", "--config", tmp_path / "none", "--to", tmp_path / "more")
    assert code == 2
    assert "cannot be read" in error
    assert not (tmp_path / "more").exists()


def test_unfinished_copy_is_opened_by_no_server(tmp_path):
    (tmp_path / (NAME + PART)).mkdir()
    refused = command("--data-dir", tmp_path, "--listen", "127.0.0.1:0")
    assert refused.returncode == 1
    assert "is an unfinished copy: delete it, and copy again" in refused.stderr
