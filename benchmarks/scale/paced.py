"""The model (scale/model.py) beside a real server: engines that make a chunk of 1 MiB a second."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ingest.load import Agent, hello, load
from measure import QWEN3, Table, cpu_seconds
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.testing import ServerProcess
from scale.model import CHUNK_BYTES, Partition, Setup

_names = itertools.count()


def measure(table: Table, server: ServerProcess, bucket: Bucket) -> None:
    """Add the lines of a server and of the model at 1 and 10 engines.

    Args:
        table: for the lines.
        server: without other load.
        bucket: of its log.
    """
    small, large = (_puts(bucket, size) for size in (CHUNK_BYTES, 4 * CHUNK_BYTES))
    median = statistics.median(small)
    bytewise = min(0.9 * median, (statistics.median(large) - median) / 3)
    bare = median - bytewise
    table.add("a PUT of 1 MiB", [1e3 * s for s in small], "ms", "")
    table.add("a PUT of 4 MiB", [1e3 * s for s in large], "ms", "")
    begun = cpu_seconds(server.pid)
    time.sleep(5)
    idle = (cpu_seconds(server.pid) - begun) / 5
    for engines in (1, 10):
        seconds = 4 if table.quick else 40
        before, cpu = len(bucket.list("part/0/log/")), cpu_seconds(server.pid)
        with ThreadPoolExecutor(engines) as pool:
            found = [pool.submit(_engine, server.target, seconds) for _ in range(engines)]
            latencies = [*itertools.chain(*(one.result() for one in found))]
        puts = len(bucket.list("part/0/log/")) - before
        tokens = CHUNK_BYTES / Setup().costs.sent
        busy = cpu_seconds(server.pid) - cpu - idle * seconds
        micros = 1e6 * busy / len(latencies) / tokens
        setup = Setup(
            nodes=1,
            engines=engines,
            tokens=engines * tokens,
            core=Setup().costs.ingest / micros,
            into=0,
            put_seconds=bare,
            put_p99=max(1.01 * bare, float(np.percentile(small, 99)) - bytewise),
            put_rate=CHUNK_BYTES / bytewise,
            seconds=seconds,
        )
        model = Partition(setup, engines, "1").run()
        for name, acks, count in (
            ("server", latencies, puts),
            ("model", model.latencies, round(model.rates.puts * seconds)),
        ):
            of = f"{name}, {engines} MiB/s"
            per = len(acks) / seconds
            table.add(f"{of}: acknowledged after", [1e3 * s for s in acks], "ms", "")
            table.add(f"{of}: p99", 1e3 * float(np.percentile(acks, 99)), "ms", "")
            table.add(f"{of}: PUTs of a record", count / seconds / per, "", "")


def _puts(bucket: Bucket, size: int) -> list[float]:
    """Return the seconds of some PUTs."""
    body, found = os.urandom(size), []
    for _ in range(100):
        begin = time.monotonic()
        bucket.create(f"paced/{next(_names)}", body)
        found.append(time.monotonic() - begin)
    return found


def _engine(target: str, seconds: float) -> list[float]:
    """Send a chunk a second; return the seconds until each was acknowledged."""
    name = f"p{next(_names)}"
    part = load(QWEN3, int(seconds), message_bytes=CHUNK_BYTES, name=name, num_blocks=1 << 10)
    agent = Agent(target, hello(QWEN3, "paced", engine=name, num_blocks=1 << 10))
    found, due = [], time.monotonic() + random.random()
    try:
        for message in part.messages:
            time.sleep(max(0.0, due - time.monotonic()))
            found.append(agent.send([message]))
            due += random.uniform(0.9, 1.1)
    finally:
        agent.close()
    return found
