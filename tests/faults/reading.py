"""A process that reads: many calls at once, spoken plainly, so that every status is seen.

`python -m faults.reading` takes a request as JSON on its standard input and prints what it counted;
it needs grpcio, protobuf, and the contract, of whatever versions run it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import grpc

from routetrace.common.errors import ERROR_METADATA_KEY
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc

_MOST_BYTES = [("grpc.max_receive_message_length", 64 << 20)]


async def _get(stub: Any, run: str, trace_id: str, counts: Counter[str]) -> int:
    """Read one trace until it is answered; return its bytes."""
    deadline = time.monotonic() + 120
    while True:
        size, ended = 0, False
        try:
            call = stub.GetTrace(pb.GetTraceRequest(run=run, trace_id=trace_id), timeout=120)
            async for response in call:
                size += len(response.payload)
                ended = response.HasField("end")
            counts["ok" if ended else "cut short"] += 1
            return size
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            counts[name] += 1
            detail = pb.ErrorDetail()
            for key, value in error.trailing_metadata() or ():
                if key == ERROR_METADATA_KEY:
                    detail.ParseFromString(value)
            typed = detail.kind == pb.ERROR_KIND_OVERLOADED and detail.retry_after_ms > 0
            if name != "RESOURCE_EXHAUSTED" or not typed or time.monotonic() > deadline:
                counts["gave up"] += 1
                return 0
        await asyncio.sleep(detail.retry_after_ms / 1000 * random.uniform(1, 2))


async def _read(job: dict[str, Any]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    times: list[float] = []
    gate = asyncio.Semaphore(job["at_once"])
    rng = random.Random(job["seed"])

    async with grpc.aio.insecure_channel(job["target"], options=_MOST_BYTES) as channel:
        stub = pb_grpc.TraceServiceStub(channel)

        async def one(trace_id: str) -> int:
            async with gate:
                begun = time.monotonic()
                size = await _get(stub, job["run"], trace_id, counts)
                times.append(time.monotonic() - begun)
                return size

        names = [rng.choice(job["traces"]) for _ in range(job["count"])]
        begun = time.monotonic()
        sizes = await asyncio.gather(*map(one, names))
        seconds = time.monotonic() - begun
    times.sort()
    return {
        "counts": counts,
        "bytes": sum(sizes),
        "seconds": seconds,
        "p50": times[len(times) // 2],
        "p99": times[len(times) * 99 // 100],
        "grpc": grpc.__version__,
    }


async def _hang(job: dict[str, Any]) -> None:
    """Open streams, take the first message of each, say so, and wait to be killed."""
    async with grpc.aio.insecure_channel(job["target"], options=_MOST_BYTES) as channel:
        stub = pb_grpc.TraceServiceStub(channel)
        calls = [
            stub.GetTrace(pb.GetTraceRequest(run=job["run"], trace_id=name, follow=job["follow"]))
            for name in (job["traces"] * job["count"])[: job["count"]]
        ]
        await asyncio.gather(*(call.read() for call in calls))
        print("open", flush=True)
        await asyncio.sleep(3600)


def main() -> None:
    """Carry out the commands of stdin."""
    job = json.loads(sys.stdin.readline())
    if job.get("hang"):
        asyncio.run(_hang(job))
    else:
        print(json.dumps(asyncio.run(_read(job))), flush=True)


if __name__ == "__main__":
    main()
