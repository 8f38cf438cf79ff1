"""HAProxy in front of a server, as docker/proxy runs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from support.composed import ROOT

#: Empty where it is not installed.
HAPROXY = shutil.which("haproxy") or ""
FOLDER = ROOT / "docker/proxy"


class Proxy:
    """The proxy, until closed.

    Args:
        listen: host:port, or host:first-last.
        server: host:port, or the host alone.
        pem: the certificate and its key.
        ca_file: authority of the server's certificate.
        log: file that gets its output.
        folder: with run.sh.
    """

    def __init__(
        self, listen: str, server: str, pem: Path, ca_file: Path, log: Path, folder: Path = FOLDER
    ) -> None:
        environ = {
            **os.environ,
            "ROUTETRACE_PROXY_LISTEN": listen,
            "ROUTETRACE_PROXY_SERVER": server,
            "ROUTETRACE_PROXY_PEM": str(pem),
            "ROUTETRACE_PROXY_CA": str(ca_file),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["sh", folder / "run.sh"], env=environ, stdout=output, stderr=output
            )
        host, _, ports = listen.rpartition(":")
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection((host, int(ports.partition("-")[0])), 5).close()
                return
            time.sleep(0.05)
        self.close()
        raise RuntimeError(f"haproxy does not listen: {log.read_text()}")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
