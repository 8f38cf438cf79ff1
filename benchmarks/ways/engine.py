"""The engine's side of every way to a trainer: a process that runs rounds of the load.

A round is a line on stdin, "WAY NAME"; on stdout it says what the driver waits for. The engine's
rows are int32, in one buffer that each step fills anew, as they come from the device.
"""

# Not all of it is installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ways.load import BLOCK, SHAPE, Load, Step, Turn, recorded

Rows = npt.NDArray[Any]


class Way(Protocol):
    """Destination of the rows."""

    def begin(self, round_name: str, turn: Turn, /) -> None: ...

    def step(self, rows: Rows, step: Step, /) -> None: ...

    def end(self, round_name: str, turn: Turn, /) -> None: ...


class Idle:
    """The engine alone: what it costs that rows are made, and steps paced."""

    def begin(self, round_name: str, turn: Turn) -> None:
        pass

    def step(self, rows: Rows, step: Step) -> None:
        pass

    def end(self, round_name: str, turn: Turn) -> None:
        pass


class Ours:
    """A CaptureAgent with the calls of vLLM's adapter: blocks, token ids, ends."""

    def __init__(
        self, load: Load, target: str, engine_id: str, codec: Any, said: Callable[[str], None]
    ) -> None:
        from routetrace.capture_agent import AgentConfig, CaptureAgent

        self.agent = CaptureAgent(
            AgentConfig(
                target=target,
                engine_id=engine_id,
                layout=SHAPE.layout,
                block_size=BLOCK,
                num_blocks=load.sessions * load.blocks,
                codec=codec,
            )
        )
        self._load = load
        self._said = said
        self._handles = np.zeros(load.sessions, np.int64)
        self._tokens = [load.token_ids(session) for session in range(load.sessions)]

    def begin(self, round_name: str, turn: Turn) -> None:
        tokens = self._tokens[turn.session]
        self._handles[turn.session] = self.agent.begin(
            f"{round_name}-{turn.name}",
            trace_id=f"{round_name}-{turn.session}",
            prompt_len=turn.prompt,
            num_computed_tokens=turn.cached,
            block_ids=self._load.block_ids(turn),
            prompt_token_ids=tokens[: turn.prompt],
        )

    def step(self, rows: Rows, step: Step) -> None:
        runs = step.runs.copy()
        runs[:, 0] = self._handles[runs[:, 0]]
        self.agent.step(rows, runs)

    def end(self, round_name: str, turn: Turn) -> None:
        tokens = self._tokens[turn.session][: turn.tokens]
        handle = int(self._handles[turn.session])
        self.agent.finish(handle, turn.tokens, token_ids=tokens)
        if turn.last:
            self._said(f"done {round_name}-{turn.session} {turn.session} {turn.rows}")


class Slots:
    """Rows by KV slot, as vLLM's RoutedExpertsManager and SGLang's host cache keep them.

    Args:
        load: tells how many slots there are; as few as it needs.
        dtype: of the rows.
        send: takes each request's rows when it has ended.
    """

    def __init__(self, load: Load, dtype: Any, send: Callable[[str, Turn, Rows], None]) -> None:
        self._load = load
        size = load.sessions * load.blocks * BLOCK
        self._rows = np.zeros((size, *recorded().shape[1:]), dtype)
        self._send = send

    def begin(self, round_name: str, turn: Turn) -> None:
        pass

    def step(self, rows: Rows, step: Step) -> None:
        self._rows[step.slots] = rows

    def end(self, round_name: str, turn: Turn) -> None:
        blocks = np.array(self._load.block_ids(turn))
        slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[: turn.rows]
        self._send(round_name, turn, self._rows[slots])


def _completion(rows: Rows) -> dict[str, Any]:
    import pybase64

    file = io.BytesIO()
    np.save(file, rows)
    text = pybase64.b64encode(file.getbuffer()).decode("ascii")
    return {"choices": [{"index": 0, "text": "", "routed_experts": text}]}


def vllm_answer(rows: Rows) -> bytes:
    """base64 of a .npy file in a completion, by the fastest JSON there is."""
    import orjson

    body: bytes = orjson.dumps(_completion(rows))
    return body


def shipped_answer(rows: Rows) -> bytes:
    """The same by the standard library's JSON, as the JSONResponse of vLLM's server writes it."""
    text = json.dumps(_completion(rows), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def sglang_answer(rows: Rows) -> bytes:
    """base64 of the flat int32 ids in the meta information."""
    import orjson
    import pybase64

    text = pybase64.b64encode(rows.tobytes()).decode()
    body: bytes = orjson.dumps({"text": "", "meta_info": {"routed_experts": text}})
    return body


class Http:
    """A server of answers to requests for them, in a thread of the engine's process.

    The engines have it in other processes; that their rows get there costs nothing here.
    """

    def __init__(self, answer: Callable[[Rows], bytes]) -> None:
        self._answer = answer
        self._ended: dict[str, asyncio.Future[Rows]] = {}
        self._loop = asyncio.new_event_loop()
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        self.port = started.result(30)

    def send(self, round_name: str, turn: Turn, rows: Rows) -> None:
        """A request has ended."""
        name = f"{round_name}-{turn.name}"
        self._loop.call_soon_threadsafe(lambda: self._of(name).set_result(rows))

    def _of(self, name: str) -> asyncio.Future[Rows]:
        return self._ended.setdefault(name, self._loop.create_future())

    def _run(self, started: concurrent.futures.Future[int]) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._start(started))
        self._loop.run_forever()

    async def _start(self, started: concurrent.futures.Future[int]) -> None:
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/generate/{name}", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        started.set_result(runner.addresses[0][1])

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        name = request.match_info["name"]
        rows = await self._of(name)
        del self._ended[name]
        body = self._answer(rows)
        return web.Response(body=body, content_type="application/json")


class Engine:
    """Runs rounds.

    Args:
        load: what is run.
        tokens_per_s: rows that it computes in a second.
    """

    def __init__(self, load: Load, tokens_per_s: float) -> None:
        self._steps = load.steps()
        self._bank = recorded().astype(np.int32)
        most = max(len(step.rows) for step in self._steps)
        self._buffer = np.empty((most, *self._bank.shape[1:]), np.int32)
        self._rate = tokens_per_s

    def round(self, way: Way, name: str) -> None:
        """Run the load once."""
        due = time.monotonic()
        for step in self._steps:
            for turn in step.begun:
                way.begin(name, turn)
            rows = self._buffer[: len(step.rows)]
            np.take(self._bank, step.rows, axis=0, out=rows, mode="clip")
            way.step(rows, step)
            for turn in step.ended:
                way.end(name, turn)
            due += len(step.rows) / self._rate
            if (left := due - time.monotonic()) > 0.002:
                time.sleep(left)


#: What is answered, and the dtype of the rows in the slot table.
_RIVALS: dict[str, tuple[Callable[[Rows], bytes], type[np.integer[Any]]]] = {
    "vllm": (vllm_answer, np.uint8),
    "vllm-shipped": (shipped_answer, np.uint8),
    "sglang": (sglang_answer, np.int32),
}


def main() -> None:
    """See the module."""
    kind, load_json, rate, target, engine_id = sys.argv[1:]
    load = Load(**json.loads(load_json))

    def say(line: str) -> None:
        print(line, flush=True)

    way: Way
    ours: Ours | None = None
    kind, _, codec = kind.partition("/")
    if kind == "ours":
        way = ours = Ours(load, target, engine_id, codec, say)
        say(f"ready {ours.agent.worker_pid}")
    else:
        answer, dtype = _RIVALS[kind]
        http = Http(answer)
        way = Slots(load, dtype, http.send)
        say(f"ready {http.port}")
    engine = Engine(load, float(rate))
    for line in sys.stdin:
        what, name = line.split()
        engine.round(Idle() if what == "idle" else way, name)
        say(f"over {ours.agent.stats().sent_bytes if ours else 0}")
    if ours:
        report = ours.agent.close()
        if report.dropped_rows or report.unsent_rows:
            raise SystemExit(f"rows were dropped: {report}")


if __name__ == "__main__":
    main()
