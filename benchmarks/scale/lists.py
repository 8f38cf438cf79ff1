"""Cost of lists of many traces for the server, and of a start with them.

    python benchmarks/run.py scale.lists [--traces 10000] [--dir DIR]

A run of finished traces of 48 layers: most of one request; some chats of three turns, each of which
takes the KV of the one before from its slots; some requests that were preempted, aborted, or given
KV from elsewhere; a few that still run. The server's CPU time for a trace is printed for two looks
at all of them by pages, for filters and for a watch; the longest callback of the event loop
meanwhile; then CPU time, clock and memory of a restart, and the same looks after it. Before the
restart the server writes a snapshot, which has the entries of the traces in lists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingest.load import Agent, hello
from measure import Shape, cpu_seconds, rss
from routetrace.client import RouteClient
from routetrace.codec.frame import encode_frames
from routetrace.codec.records import DIGEST, OP, U32, FinishReason, OpKind
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess
from routetrace.v1 import routetrace_pb2 as pb

#: The layers of a large model, and few ids: indexes are those of a large model, payloads are not.
LAYERS = Shape("48 layers", "", ModelLayout(tuple(range(48)), 48, 4, 1))

#: Traces of a chunk, by kind.
_KINDS = {"plain": 30, "chat": 7, "preempted": 1, "aborted": 1, "loaded": 1}
_EACH = sum(_KINDS.values())
_BLOCK, _BLOCKS = 16, 1 << 12
_PROMPT, _TOKENS = 16, 33

#: Records after which a server writes a new snapshot.
_SNAPSHOT_RECORDS = 20_000


class _Chunks:
    """Messages of one stream; each has the same requests under other names."""

    def __init__(self, run: str, *, ends: bool = True) -> None:
        self._run = run
        self._ops: list[Any] = []
        self._begins: list[tuple[str, int]] = []  # suffix of the trace id, length of the prompt
        self._blocks: list[int] = []
        self._frames: list[int] = []  # rows of each
        self._digests: list[tuple[int, int]] = []  # position, and which prefix
        self._made = 0
        self._held = 0  # blocks of the last request
        self._last_block = -1
        for number in range(_EACH):
            if not ends:
                self._request(f"{number}", _PROMPT, _TOKENS, ends=False)
                continue
            kind = next(k for k, n in _cumulated() if number < n)
            if kind == "chat":
                for turn in range(3):
                    tokens = (turn + 1) * _TOKENS
                    cached = turn * _TOKENS // _BLOCK * _BLOCK
                    self._request(f"{number}", tokens - 17, tokens, cached=cached, turn=turn)
            else:
                self._request(f"{number}", _PROMPT, _TOKENS, kind=kind)
        self._columns = np.concatenate(self._ops)
        self._is_begin = self._columns["kind"] == OpKind.BEGIN
        frames = encode_frames(
            [LAYERS.rows(rows, seed) for seed, rows in enumerate(self._frames)], LAYERS.layout
        )
        self._lengths = np.array([*map(len, frames)], U32).tobytes()
        self._payload = b"".join(frames)
        self._crc = zlib.crc32(self._payload)

    def message(self) -> bytes:
        """Return the next one."""
        number, self._made = self._made, self._made + 1
        ops = self._columns.copy()
        ops["value"][self._is_begin] += np.uint64(number * len(self._begins))
        digests = np.array(self._digests, DIGEST)
        digests["value"] += np.uint64(number * len(self._digests))
        digests["value"] *= np.uint64(0x9E3779B97F4A7C15)
        header = pb.ChunkHeader(
            layout=LAYERS.layout.to_proto(),
            request_ids=[f"r-{number}-{i}" for i in range(len(self._begins))],
            begins=[
                pb.RequestBegin(
                    trace_id=f"t-{self._run}-{number:06}-{suffix}",
                    prompt_len=prompt,
                    labels={"group": f"g{number}", "step": f"{number // 100}"},
                )
                for suffix, prompt in self._begins
            ],
            ops=ops.tobytes(),
            block_ids=np.array(self._blocks, U32).tobytes(),
            frame_lengths=self._lengths,
            frame_rows=np.array(self._frames, U32).tobytes(),
            token_digests=digests.tobytes(),
        ).SerializeToString()
        chunk = pb.Chunk(
            sequence=number + 1,
            header_crc32=zlib.crc32(header),
            payload_crc32=self._crc,
            header=header,
            payload=self._payload,
        )
        return pb.IngestRequest(chunk=chunk).SerializeToString()

    def _request(
        self,
        trace: str,
        prompt: int,
        tokens: int,
        *,
        cached: int = 0,
        kind: str = "plain",
        turn: int = 0,
        ends: bool = True,
    ) -> None:
        index = len(self._begins)
        self._begins.append((trace, prompt))
        need = -(-tokens // _BLOCK)
        # Blocks of the turn before, which it continues.
        first = self._blocks[-self._held :][: cached // _BLOCK] if cached else []
        at = len(self._blocks)
        fresh = [(self._next_block() if i >= len(first) else first[i]) for i in range(need)]
        self._blocks += fresh
        self._held = need
        loaded = _BLOCK if kind == "loaded" else 0
        self._op(OpKind.BEGIN, index, arg=index, value=index, blocks_at=at, num_blocks=need,
                 position=cached + loaded, count=loaded)  # fmt: skip
        if cached:
            self._op(OpKind.INHERIT, index)
        spots = [(turn + 1) * _TOKENS - 17] + ([turn * _TOKENS] if turn else [])
        self._digest(index, sorted(spots))
        start = cached + loaded
        for stop in sorted({(start + tokens) // 2, tokens - 1}):
            self._rows(index, start, stop)
            start = stop
            if kind == "preempted" and stop < tokens - 1:
                self._op(OpKind.PREEMPT, index, position=stop)
                self._op(OpKind.RESUME, index, value=stop + 1,
                         blocks_at=len(self._blocks), num_blocks=need)  # fmt: skip
                self._blocks += fresh  # an op has its own
                start = 0
        if ends:
            self._digest(index, [tokens])
            reason = FinishReason.ABORT if kind == "aborted" else FinishReason.STOP
            self._op(OpKind.FINISH, index, count=tokens, arg=int(reason))

    def _next_block(self) -> int:
        self._last_block = (self._last_block + 1) % _BLOCKS
        return self._last_block

    def _rows(self, index: int, start: int, stop: int) -> None:
        self._op(OpKind.ROWS, index, position=start, count=stop - start, step=index + 1,
                 frame=len(self._frames), weight_version=1 + index % 2)  # fmt: skip
        self._frames.append(stop - start)

    def _digest(self, index: int, positions: list[int]) -> None:
        trace = int(self._begins[index][0])
        self._op(OpKind.DIGEST, index, row=len(self._digests), count=len(positions))
        self._digests += [(p, trace * 1000 + p) for p in positions]

    def _op(self, kind: OpKind, request: int, **fields: int) -> None:
        op = np.zeros(1, OP)
        op["kind"], op["request"] = kind, request
        for name, value in fields.items():
            op[name] = value
        self._ops.append(op)


def _cumulated() -> Iterator[tuple[str, int]]:
    total = 0
    for kind, count in _KINDS.items():
        total += count
        yield kind, total


def fill(target: str, run: str, count: int) -> Agent:
    """Store at least `count` finished traces, and some that run; return the agent of those."""
    chunks = _Chunks("f")
    agent = Agent(target, hello(LAYERS, run, num_blocks=_BLOCKS))
    left = -(-count // _EACH)
    while left:
        some = min(left, 200)
        agent.send([chunks.message() for _ in range(some)])
        left -= some
    agent.close()
    running = Agent(target, hello(LAYERS, run, "e1", num_blocks=_BLOCKS))
    running.send([_Chunks("r", ends=False).message()])
    return running


def _store_snapshot(agent: Agent, directory: Path) -> None:
    """Send chunks without content, which follow one chunk, until there is a new snapshot."""
    header = pb.ChunkHeader(layout=LAYERS.layout.to_proto()).SerializeToString()
    chunk = pb.Chunk(header_crc32=zlib.crc32(header), payload_crc32=zlib.crc32(b""), header=header)
    messages = []
    for number in range(_SNAPSHOT_RECORDS):
        chunk.sequence = number + 2
        messages.append(pb.IngestRequest(chunk=chunk).SerializeToString())
    before = {path.name for path in directory.rglob("snapshot*")}
    agent.send(messages)
    stop = time.monotonic() + 600
    while {path.name for path in directory.rglob("snapshot*")} <= before:
        if time.monotonic() > stop:
            raise SystemExit("no new snapshot within 600 s")
        time.sleep(1)


class Server:
    """A server on a directory, every callback of which is timed."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.notes = directory / "notes"
        watched = Path(__file__).parent / "watched.py"
        self._command = [
            *(sys.executable, str(watched), str(self.notes)),
            *("--listen=127.0.0.1:0", f"--data-dir={directory / 'data'}", "--log-level=error"),
            *("--page-listen=", *flags),
        ]
        begun = time.monotonic()
        self.process = ServerProcess(self._command, 3600)
        self.ready_seconds = time.monotonic() - begun
        self.ready_cpu = cpu_seconds(self.process.pid)

    def stop(self, spans: dict[str, tuple[float, float]]) -> dict[str, tuple[float, str]]:
        """Stop it; return the longest callback in each span of time: CPU seconds, name."""
        self.process.stop(300)
        found: dict[str, tuple[float, str]] = {}
        for line in self.notes.read_text().splitlines():
            begun, cpu, _, name = json.loads(line)
            for span, (start, stop) in spans.items():
                if start <= begun < stop and cpu > found.get(span, (0.0, ""))[0]:
                    found[span] = cpu, name
        return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk of the store")
    parser.add_argument("--no-restart", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="lists-", dir=options.dir))
    try:
        _measure(directory, options.traces, restart=not options.no_restart)
    finally:
        shutil.rmtree(directory)


def _measure(directory: Path, traces: int, *, restart: bool) -> None:
    server = Server(directory)
    with server.process:
        pid = server.process.pid
        begin, empty = cpu_seconds(pid), rss(pid)
        running = fill(server.process.target, "run", traces)
        took = cpu_seconds(pid) - begin
        print(f"stored: {1e6 * took / traces:.1f} us a trace", flush=True)
        spans = _looks(server, rss(pid) - empty)
        if restart:
            _store_snapshot(running, directory / "data")
        _report(server, spans)
        running.close()
    if not restart:
        return
    server = Server(directory)
    with server.process:
        pid = server.process.pid
        print(
            f"restart: ready after {server.ready_seconds:.1f} s, {server.ready_cpu:.1f} s of CPU, "
            f"{rss(pid) / 2**20:.0f} MiB",
            flush=True,
        )
        _report(server, _looks(server, rss(pid)))


def _report(server: Server, spans: dict[str, tuple[float, float]]) -> None:
    """Stop a server, and print the longest callback of each span."""
    for name, (cpu, where) in server.stop(spans).items():
        print(f"{name}: longest callback {1e3 * cpu:.1f} ms of CPU: {where}", flush=True)


def _looks(server: Server, grown: int) -> dict[str, tuple[float, float]]:
    client = RouteClient(server.process.target, run="run", timeout=600)
    pid = server.process.pid
    spans: dict[str, tuple[float, float]] = {}

    def timed(name: str, look: Callable[[], int]) -> None:
        begin, start = cpu_seconds(pid), time.monotonic()
        count = look()
        cpu, stop = cpu_seconds(pid) - begin, time.monotonic()
        spans[name] = start, stop
        print(
            f"{name}: {count:,} traces, {cpu:.2f} s of CPU, {1e6 * cpu / seen[0]:.1f} us a trace, "
            f"{stop - start:.1f} s by the clock, {rss(pid) / 2**20:.0f} MiB",
            flush=True,
        )

    def watched() -> int:
        count = 0
        for changes in client.watch():
            count += len(changes.traces)
            if changes.whole:
                break
        return count

    seen = [client.server_info().num_traces]
    print(f"{seen[0]:,} traces, {grown / seen[0]:.0f} bytes each, {rss(pid) / 2**20:.0f} MiB")
    timed("first list", lambda: sum(1 for _ in client.find()))
    timed("second list", lambda: sum(1 for _ in client.find()))
    timed("list of those that run", lambda: sum(1 for _ in client.find(states=["running"])))
    timed("list by a label of none", lambda: sum(1 for _ in client.find(labels={"group": "x"})))
    timed("retirable", lambda: sum(1 for _ in client.find(retirable_through=2)))
    timed("watch", watched)
    client.close()
    return spans


if __name__ == "__main__":
    main()
