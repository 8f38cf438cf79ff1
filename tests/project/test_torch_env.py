"""scripts/torch_env.sh: which torch is installed from where; pip, uv and torch are fakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_env.sh"
#: A python whose torch is a file, and whose pip and uv note their arguments; uv fails without the
#: file `reachable`.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-c "*) [ -e {0}/torch ] && echo 9.9 || exit 1 ;;
  "-m pip") shift 3; echo "pip $@" >> {0}/calls
    case "$*" in *torch==*) touch {0}/torch ;; esac ;;
  "-m uv") shift 2; echo "uv $@" >> {0}/calls; [ -e {0}/reachable ] && touch {0}/torch ;;
esac
"""


def install(folder: Path, **environ: str) -> tuple[str, list[str]]:
    """Output of the script, and the calls of pip and uv."""
    python = folder / "python"
    python.write_text(PYTHON.format(folder))
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, python],
        env={"PATH": "/usr/bin:/bin", "TORCH": "torch==1.2", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls = folder / "calls"
    return done.stdout, calls.read_text().splitlines() if calls.exists() else []


def test_a_torch_that_is_there_is_kept(tmp_path):
    (tmp_path / "torch").touch()
    assert install(tmp_path) == ("torch 9.9 is installed already: kept\n", [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has CPU builds")
def test_the_cpu_build_is_the_default_and_its_size_is_said_before(tmp_path):
    (tmp_path / "reachable").touch()
    output, (removed, uv, installed) = install(tmp_path)
    assert output.startswith("Installing torch==1.2 for the CPU: 200 MB")
    assert removed.startswith("pip uninstall ")  # what an interrupted installation left
    assert uv == "pip install --quiet uv"
    python = tmp_path / "python"
    assert installed == (f"uv pip install --python {python} --torch-backend cpu torch==1.2")
    assert install(tmp_path)[1] == [removed, uv, installed]  # once more: nothing


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has CPU builds")
def test_an_index_out_of_reach_is_passed_over(tmp_path):
    output, calls = install(tmp_path)
    assert "The index of builds for cpu cannot be reached\nInstalling torch==1.2 from the" in output
    assert [call.split()[0] for call in calls] == ["pip", "pip", "uv", "pip"]
    assert calls[-1] == "pip install torch==1.2"
    assert output.endswith("torch 9.9 is installed\n")


def test_an_empty_backend_is_the_default_index(tmp_path):
    output, (_, installed) = install(tmp_path, TORCH_BACKEND="")
    assert output.startswith("Installing torch==1.2 from the default index: up to 3 GB")
    assert installed == "pip install torch==1.2"
