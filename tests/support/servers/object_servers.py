"""Servers over one object store: one serves each partition, the others stand by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from faults.serving import free_ports
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.testing import ServerProcess


class ObjectServer:
    """A server process over its lives; leaving it as a context manager kills it.

    Args:
        directory: for its log.
        endpoint: of the object store.
        workers: one for each partition.
        checkout: of the version that runs; None: this one. It can be set between two lives.
        settings: of `ServerConfig`.
    """

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        workers: int = 1,
        checkout: Path | None = None,
        **settings: Any,
    ) -> None:
        self.checkout = checkout
        self.target = f"127.0.0.1:{free_ports(workers)}"
        self._log = directory / f"log-{self.target.rpartition(':')[2]}"
        self.settings: dict[str, Any] = {
            "listen": self.target,
            "workers": workers,
            "store": "object",
            "object_url": "s3://bucket/runs",
            "object_endpoint": endpoint,
            "object_lease_seconds": 2,
            "drain_seconds": 1,
            "log_format": "json",
            **settings,
        }
        self.process: Any = None

    def start(self) -> None:
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in self.settings.items()]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ROUTETRACE_")}
        env |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        if self.checkout is not None:
            folders = ("proto", "server", "client", "capture_agent")
            env["PYTHONPATH"] = os.pathsep.join(str(self.checkout / folder) for folder in folders)
        with self._log.open("ab") as output:
            self.process = ServerProcess.popen(
                [sys.executable, "-m", "routetrace.server.daemon", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )

    def __enter__(self) -> ObjectServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all processes at once, as the loss of a machine does."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGSTOP)  # else workers would end cleanly, one by one
            self.signal(signal.SIGKILL)
            self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        assert self.process is not None
        first = psutil.Process(self.process.pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def health(self) -> str:
        """Return the health of the trace service, or the status of a failed call."""
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="routetrace.v1.TraceService")
            try:
                answer = stub.Check(request, timeout=2)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    @property
    def serves(self) -> bool:
        return self.health() == "SERVING"

    @property
    def stands_by(self) -> bool:
        return self.health() == "NOT_SERVING" and "standby" in self.log


def owners_of(bucket: Bucket, partitions: int) -> list[str]:
    """Return the address of each partition's owner, as the bucket says; "" where it was freed."""
    found = []
    for number in range(partitions):
        chain = sorted(listed.key for listed in bucket.list(f"part/{number}/lease/"))
        sign = json.loads((chain and bucket.get(chain[-1])) or b"{}")
        found.append("" if sign.get("free") else str(sign.get("address", "")))
    return found


def owned_by(bucket: Bucket, partitions: int, target: str) -> list[int]:
    """Return the partitions that the server at a target owns, as the bucket says."""
    host, _, port = target.rpartition(":")
    owners = owners_of(bucket, partitions)
    return [n for n in range(partitions) if owners[n] == f"{host}:{int(port) + n}"]
