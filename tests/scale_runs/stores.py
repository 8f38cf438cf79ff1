"""Object stores from package registries, run as processes on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from faults.serving import free_port
from support.waiting import wait_for

BOUND_S = 120.0


def _program(name: str) -> str:
    found = Path(sys.executable).with_name(name)
    path = str(found) if found.exists() else shutil.which(name)
    assert path, f"{name} is not installed; see make test-scale"
    return path


class Store(AbstractContextManager["Store"]):
    """A store in a process group of its own, with one bucket, "bucket"."""

    def __init__(self, command: list[str], port: int, directory: str) -> None:
        os.environ.update(AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._directory = directory
        # SeaweedFS would take these for its own users.
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with Path(directory, "log").open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=env
            )
        try:
            wait_for(self._answers, BOUND_S)
        except BaseException:
            self.__exit__()
            raise

    def _answers(self) -> bool:
        try:
            request = urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
        except OSError as error:
            return getattr(error, "code", 0) == 409
        return True

    def pause(self) -> None:
        """Stop all processes of the store where they are."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        self.resume()
        for process in psutil.Process(self._process.pid).children(recursive=True):
            process.kill()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory)


def seaweed() -> Store:
    """SeaweedFS: master, volume, filer and S3 gateway in one process."""
    directory = tempfile.mkdtemp(prefix="seaweed-")
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    command = [_program("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={directory}", "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false"]  # no reports to its authors
    command += [f"-{name}={port}" for name, port in ports.items()]
    # Each gRPC port is 10,000 above by default, and may be taken.
    command += [f"-{name}.grpc={free_port()}" for name in ports]
    return Store(command, ports["s3.port"], directory)


def moto() -> Store:
    """The mock of S3."""
    port = free_port()
    directory = tempfile.mkdtemp(prefix="moto-")
    return Store([_program("moto_server"), "-p", str(port)], port, directory)


def rclone() -> Store:
    """A gateway that checks conditions and writes afterwards."""
    port = free_port()
    directory = tempfile.mkdtemp(prefix="rclone-")
    command = [_program("rclone"), "serve", "s3", directory, f"--addr=127.0.0.1:{port}"]
    return Store(command, port, directory)
