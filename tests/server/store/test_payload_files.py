"""The cache of payloads on a local disk, beside a model; and what a disk does to it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from unittest.mock import patch

import pytest

from routetrace.server.store.object.cache import PayloadCache
from routetrace.server.store.object.files import PayloadFiles


def payload(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.glob("payloads-*/*") if path.name != "lock"]


@pytest.mark.parametrize("seed", range(10))
def test_it_holds_what_was_used_last(seed: int, tmp_path: Path):
    rng, model = random.Random(seed), OrderedDict[int, bytes]()
    files = PayloadFiles(tmp_path, 1000)
    for _ in range(400):
        number = rng.randrange(12)
        if rng.random() < 0.5:
            put = model.get(number) or payload(number, rng.choice((1, 90, 400, 1000, 1001)))
            files.put(number, put)
            if len(put) <= 1000 and number not in model:
                while sum(map(len, model.values())) + len(put) > 1000:
                    model.popitem(last=False)
                model[number] = put
        elif rng.random() < 0.1:
            files.drop(number)
            model.pop(number, None)
        else:
            assert files.get(number, lambda _: True) == model.get(number)
            if number in model:
                model.move_to_end(number)
        assert sorted(int(p.name) for p in files_of(tmp_path)) == sorted(model)
    files.close()
    assert not [*tmp_path.glob("payloads-*")]


def test_what_changed_on_the_disk_is_read_anew(tmp_path: Path):
    files = PayloadFiles(tmp_path, 1000)
    good = payload(1, 100)
    files.put(1, good)
    [file] = files_of(tmp_path)
    file.write_bytes(payload(2, 100))
    assert files.get(1, good.__eq__) is None
    assert not files_of(tmp_path)
    files.put(1, good)
    file.unlink()
    assert files.get(1, good.__eq__) is None
    files.put(1, good)
    assert files.get(1, good.__eq__) == good


def test_a_full_disk_keeps_nothing_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = PayloadFiles(tmp_path, 1000)
    with patch.object(Path, "write_bytes", side_effect=OSError(28, "No space left on device")):
        for number in range(3):
            files.put(number, payload(number, 10))
    assert caplog.text.count("No space left on device") == 1
    assert not files_of(tmp_path)
    files.put(1, payload(1, 10))
    assert files.get(1, lambda _: True) == payload(1, 10)


def test_only_what_processes_have_left_that_are_gone_is_removed(tmp_path: Path):
    code = (
        "import os, pathlib, sys\n"
        "from routetrace.server.store.object.files import PayloadFiles\n"
        "PayloadFiles(pathlib.Path(sys.argv[1]), 1000).put(1, b'left')\n"
        "os._exit(0)"
    )
    living = PayloadFiles(tmp_path, 1000)
    living.put(7, b"living")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert sorted(path.name for path in files_of(tmp_path)) == ["1", "7"]
    other = PayloadFiles(tmp_path, 1000)
    assert [path.name for path in files_of(tmp_path)] == ["7"]
    assert living.get(7, lambda _: True) == b"living"
    living.close()
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_payloads_leave_memory_for_the_disk_and_come_back(tmp_path: Path):
    files = PayloadFiles(tmp_path, 1 << 20)
    cache, fetched = PayloadCache(250, files), []

    def load(number: int) -> bytes:
        def read() -> bytes:
            fetched.append(number)
            return payload(number, 100)

        return bytes(cache.load(number, read, payload(number, 100).__eq__))

    for number in range(10):
        cache.put(number, memoryview(payload(number, 100)))
    assert [number for number in range(10) if cache.get(number) is not None] == [8, 9]
    assert [load(number) for number in range(10)] == [payload(n, 100) for n in range(10)]
    assert fetched == []
    cache.drop(3)
    assert load(3) == payload(3, 100)
    assert fetched == [3]
    cache.close()
