"""The run of the two commands: sizes that are announced, and those that are measured."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from two_commands.__main__ import (
    Failed,
    Line,
    Machine,
    announced,
    left_behind,
    processes_of,
    wheel_size,
)

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


@pytest.fixture
def machine(tmp_path):
    """A machine whose `make` does what a test says."""
    made = Machine.__new__(Machine)
    made.clone = tmp_path

    def runs(script: str) -> Machine:
        made.start = lambda _: subprocess.Popen(  # type: ignore[method-assign]
            ["bash", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return made

    return runs


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 2", "make demo exited with 2; no line began with 'Installing'"),
        ("echo no network; exit 2", "make demo exited with 2; no line began with 'Installing'"),
        ("echo done", "make demo exited with 0; no line began with 'Installing'"),
        (
            "trap 'exit 0' INT; echo Installing; while :; do sleep 0.1; done",
            "make demo succeeded in spite of Ctrl-C",
        ),
    ],
)
def test_an_installation_that_is_not_interrupted_fails(machine, script, message):
    with pytest.raises(Failed) as caught:
        machine(script).interrupt("demo", after="Installing")
    assert str(caught.value) == message


def test_an_installation_is_interrupted(machine, capsys):
    machine("echo one; echo Installing x; sleep 60").interrupt("demo", after="Installing")
    assert capsys.readouterr().out == "make demo was interrupted after 'Installing x'\n"


def started(*arguments):
    """A process in a session of its own, once it runs: just after exec its arguments are empty."""
    command = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    return process


def test_processes_of_a_session_are_found(tmp_path):
    process = started()
    try:
        assert len(processes_of(process.pid, tmp_path)) == 1
        assert len(left_behind(process.pid, tmp_path, 0.1)) == 1
    finally:
        process.communicate(b"\n")
    assert processes_of(process.pid, tmp_path) == []


def test_processes_of_the_clone_are_found_in_a_session_of_their_own(tmp_path):
    process = started(str(tmp_path / "server"))
    try:
        (found,) = processes_of(0x7FFFFFFF, tmp_path)
        assert found.split()[-1] == str(tmp_path / "server")
        assert processes_of(0x7FFFFFFF, tmp_path / "other") == []
    finally:
        process.communicate(b"\n")


def test_processes_that_end_soon_or_have_ended_are_not_left_behind(tmp_path):
    soon = subprocess.Popen(["sleep", "0.5"], start_new_session=True)
    try:
        assert processes_of(soon.pid, tmp_path)
        # Ended, and not waited for.
        assert left_behind(soon.pid, tmp_path, 20) == []
        assert Path(f"/proc/{soon.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        soon.wait()
