"""The run of the two commands: sizes that are announced, and those that are measured."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution

import pytest

from two_commands.__main__ import Line, announced, processes_of, wheel_size

CPU = "Installing torch==1 for the CPU: 200 MB, a minute at 30 Mbit/s\n"
REST = "Installing the server and transformers: 70 MB, a minute\n"


@pytest.mark.parametrize(
    ("output", "size"),
    [
        (CPU + REST, (270, False)),
        (REST, (70, False)),
        ("", (0, False)),
        (
            CPU
            + "The index of builds for cpu cannot be reached\n"
            + "Installing torch==1 from the default index: up to 3 GB, with CUDA\n"
            + REST,
            (3070, True),
        ),
    ],
)
def test_the_announced_size_is_that_of_each_installation(output, size):
    assert announced(output) == size


@pytest.mark.parametrize(
    ("measured", "size", "right"),
    [
        (265, (270, False), True),
        (265, (3070, True), True),
        (2800, (270, False), False),
        (100, (270, False), False),
        (0, (0, False), True),
        (5000, (3070, True), False),
    ],
)
def test_a_command_that_announces_another_size_fails(measured, size, right):
    assert Line("3.11", "make demo", 1.0, measured, *size).right is right


def test_the_size_of_a_download_is_that_of_the_wheel(tmp_path):
    installed = distribution("zstandard")
    with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in installed.files or ():
            if file.suffix != ".pyc":
                wheel.write(file.locate(), str(file))
        size = sum(info.compress_size for info in wheel.infolist())
    assert wheel_size(installed) == pytest.approx(size, rel=0.02)


def test_processes_of_a_session_are_found():
    command = [sys.executable, "-c", "input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert len(processes_of(process.pid)) == 1
    finally:
        process.communicate(b"\n")
    assert processes_of(process.pid) == []
