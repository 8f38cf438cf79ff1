"""SGLang's HTTP server on the CPU: answers of several ranks, and bytes of answers."""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from sglang_runs.engine import ARGUMENTS, ENVIRONMENT, spare_models
from sglang_runs.models import VOCABULARY, write_model

_START_S = 240.0
_ANSWER = 24
_PROMPTS = (5, 40, 100, 33, 64, 50, 50, 30)
#: Requests that run at the same time, where many are sent.
_RUNNING = 12


@dataclass(frozen=True)
class Answer:
    """Answer to one request."""

    tokens: list[int]
    """Of prompt and answer."""
    rows: npt.NDArray[np.int32]
    """[tokens - 1, layers, top_k]: SGLang's own return."""
    handles: list[dict[str, Any]]
    """Of its trace; one."""
    num_bytes: int
    """Of the HTTP answer."""
    own_bytes: int
    """Of SGLang's own rows in it."""


def generate(
    model: Path, target: str, arguments: Mapping[str, Any], rng: Random, num_rows: int
) -> dict[str, Answer]:
    """Return the answers of one server to random requests, by request id.

    Args:
        model: directory of the model.
        target: of routetrace-server.
        arguments: of SGLang's server, beside those of all runs.
        rng: of prompts and lengths.
        num_rows: rows of the answers, about.
    """
    stems = [_words(rng, 48) for _ in range(3)]
    requests: dict[str, tuple[list[int], int]] = {}
    while num_rows > 0:
        stem = rng.choice(stems) if rng.random() < 0.5 else []
        prompt, length = stem + _words(rng, rng.randrange(5, 90)), rng.randrange(4, 60)
        requests[f"r{len(requests)}"] = prompt, length
        num_rows -= len(prompt) + length
    with _serving(model, target, arguments) as port, ThreadPoolExecutor(_RUNNING) as pool:
        jobs = {rid: pool.submit(_ask, port, rid, *given) for rid, given in requests.items()}
        return {rid: job.result() for rid, job in jobs.items()}


def measure(seed: int) -> dict[str, int]:
    """Return the bytes of the answers to requests that run at the same time.

    "answers" are bytes of whole answers, "own" those of SGLang's own rows in them; "tokens" counts
    the tokens of the answers.
    """
    counts = Counter[str]()
    rng = Random(seed)
    with TemporaryDirectory() as folder, run_server() as routes:
        model = write_model(Path(folder), seed)
        prompts = [_words(rng, n) for n in _PROMPTS]
        with _serving(model, routes.target, {}) as port:
            with ThreadPoolExecutor(len(prompts)) as pool:
                jobs = [
                    pool.submit(_ask, port, f"http-{i}", prompt, _ANSWER)
                    for i, prompt in enumerate(prompts)
                ]
                for job in jobs:
                    answer = job.result()
                    counts.update(tokens=_ANSWER, answers=answer.num_bytes, own=answer.own_bytes)
            with RouteClient(routes.target, run="tiny") as client:
                for i, prompt in enumerate(prompts):
                    trace = client.get(f"http-{i}", wait_for="end", timeout=30)
                    assert len(trace) == len(prompt) + _ANSWER - 1, f"{trace!r}"
    return dict(counts)


@contextmanager
def _serving(model: Path, target: str, arguments: Mapping[str, Any]) -> Iterator[int]:
    """Run a server; yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = _start(model, port, target, arguments)
    try:
        _wait_until_ready(server, port)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _start(
    model: Path, port: int, target: str, arguments: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    given = ARGUMENTS | {"model_path": str(model), "host": "127.0.0.1", "port": port}
    given |= {"enable_return_routed_experts": True, "skip_server_warmup": True} | dict(arguments)
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in given.items():
        command.append(f"--{name.replace('_', '-')}")
        command += [] if value is True else [str(value)]
    settings = json.dumps({"run": "tiny", "linger_seconds": 0.05})
    ours = {"ROUTETRACE_TARGET": target, "ROUTETRACE_SGLANG": settings}
    ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * int(given.get("tp_size", 1)))
    spare_models("qwen3_moe")
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **ours}, stdout=sys.stderr)


def _ask(port: int, rid: str, prompt: list[int], length: int) -> Answer:
    sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
    answer = _post(port, {**body, "return_routed_experts": True})
    fields = json.loads(answer)
    rows = fields["meta_info"]["routed_experts"]
    tokens = prompt + fields["output_ids"]
    return Answer(
        tokens,
        np.frombuffer(base64.b64decode(rows), np.int32).reshape(len(tokens) - 1, -1, 4),
        fields["meta_info"].get("routetrace", []),
        len(answer),
        # As the field stands in the answer, with its name, quotes and a comma.
        len(rows) + len('"routed_experts":"",'),
    )


def _post(port: int, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: bytes = response.read()
    return answer


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"SGLang's server ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError("SGLang's server did not get ready")


def _words(rng: Random, n: int) -> list[int]:
    return [rng.randrange(4, VOCABULARY) for _ in range(n)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m sglang_runs.serving", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.parse_args().json.write_text(json.dumps(measure(1)))
