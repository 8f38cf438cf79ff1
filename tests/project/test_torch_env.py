"""scripts/torch_env.sh: which torch is installed from where, with pip and torch as stand-ins."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_env.sh"
#: A python whose torch is a file, and whose pip notes its arguments.
PYTHON = f"""#!/bin/bash
case "$1 $2" in
  "-c "*) [ -e {{0}}/torch ] && echo 9.9 || exit 1 ;;
  "- "*) exec {sys.executable} "$@" ;;
  "-m pip") shift 2; echo "$@" >> {{0}}/calls; [ "$1" = install ] && touch {{0}}/torch || true ;;
esac
"""


@pytest.fixture
def index() -> Iterator[str]:
    """An index that can be reached."""

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/cpu"
        server.shutdown()


def install(folder: Path, index: str) -> tuple[str, list[str]]:
    """Output of the script, and the calls of pip."""
    python = folder / "python"
    python.write_text(PYTHON.format(folder))
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, python],
        env={"PATH": "/usr/bin:/bin", "TORCH_INDEX": index, "TORCH": "torch==1.2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls = folder / "calls"
    return done.stdout, calls.read_text().splitlines() if calls.exists() else []


def test_a_torch_that_is_there_is_kept(tmp_path, index):
    (tmp_path / "torch").touch()
    assert install(tmp_path, index) == ("torch 9.9 is installed already: kept\n", [])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has CPU builds")
def test_the_cpu_build_is_the_default_and_its_size_is_said_before(tmp_path, index):
    output, (removed, installed) = install(tmp_path, index)
    assert output.startswith("Installing torch==1.2 for the CPU: 200 MB")
    assert removed.startswith("uninstall ")  # what an interrupted installation left
    assert installed == f"install --disable-pip-version-check --index-url {index} torch==1.2"
    assert install(tmp_path, index)[1] == [removed, installed]  # once more: nothing


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has CPU builds")
def test_an_index_out_of_reach_is_passed_over(tmp_path):
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # bound, and refuses: nothing listens
        output, (_, installed) = install(tmp_path, f"http://127.0.0.1:{port}/cpu")
    assert "cannot be reached within 5 s: installing torch==1.2 from the default index" in output
    assert installed == "install --disable-pip-version-check torch==1.2"


def test_an_empty_index_is_the_default_one(tmp_path):
    output, (_, installed) = install(tmp_path, "")
    assert "from the default index: on Linux up to 3 GB with CUDA" in output
    assert installed == "install --disable-pip-version-check torch==1.2"
