"""SGLang's HTTP servers on the CPU: answers of several ranks or engines, and bytes of answers."""

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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
    rows: npt.NDArray[np.int32] | None
    """[tokens - 1, layers, top_k]: SGLang's own return; a decode engine may have none."""
    handles: list[dict[str, Any]]
    """Of its trace; one."""
    num_retractions: int
    num_bytes: int
    """Of the HTTP answer."""
    own_bytes: int
    """Of SGLang's own rows in it."""


@dataclass(frozen=True)
class Pair:
    """Arguments of a prefill and a decode engine, beside those of both."""

    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of both."""
    captures: bool = True
    """Whether the prefill engine captures."""
    pauses: int = 0
    """How often the decode engine retracts all its requests in a pause."""


def generate(
    model: Path,
    target: str,
    arguments: Mapping[str, Any],
    rng: Random,
    num_rows: int,
    pair: Pair | None = None,
) -> dict[str, Answer]:
    """Return the answers of one server, or of a pair, to random requests, by request id.

    Args:
        model: directory of the model.
        target: of routetrace-server.
        arguments: of SGLang's servers, beside those of all runs.
        rng: of prompts and lengths.
        num_rows: rows of the answers, about.
        pair: None: one server does all.
    """
    stems = [_words(rng, 48) for _ in range(3)]
    requests: dict[str, tuple[list[int], int]] = {}
    while num_rows > 0:
        stem = rng.choice(stems) if rng.random() < 0.5 else []
        prompt, length = stem + _words(rng, rng.randrange(5, 90)), rng.randrange(4, 60)
        if rng.random() < 0.1:
            length = 1
        requests[f"r{len(requests)}"] = prompt, length
        num_rows -= len(prompt) + length
    with ExitStack() as stack:
        if pair is None:
            port = stack.enter_context(_serving(model, target, arguments))
            ask = partial(_ask, port)
        else:
            ports = stack.enter_context(_paired(model, target, arguments, pair))
            ask = partial(_ask_pair, *ports)
        pool = stack.enter_context(ThreadPoolExecutor(_RUNNING))
        jobs = {rid: pool.submit(ask, rid, *given) for rid, given in requests.items()}
        for job in list(jobs.values())[: pair.pauses if pair else 0]:
            job.exception()  # the next ones are under way
            _post(ports[1], {"mode": "retract"}, "pause_generation")
            _post(ports[1], {}, "continue_generation")
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
def _paired(
    model: Path, target: str, arguments: Mapping[str, Any], pair: Pair
) -> Iterator[tuple[int, int, int]]:
    """Run a prefill and a decode engine.

    Yields their ports, and that where the prefill engine tells the other one about itself.
    """
    meeting = _free_port()
    both = {**arguments, "disaggregation_transfer_backend": "nixl"}
    both["disaggregation_bootstrap_port"] = meeting
    # Of a prefix that is sent early SGLang waits for an event of a GPU.
    environment = {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0", **pair.environment}
    environment["SGLANG_HOST_IP"] = "127.0.0.1"
    prefill = {**both, **pair.prefill, "disaggregation_mode": "prefill"}
    decode = {**both, **pair.decode, "disaggregation_mode": "decode"}
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        off = {} if pair.captures else {"ROUTETRACE_SGLANG": "off"}
        starts = [
            _serving(model, target, prefill, environment | off),
            _serving(model, target, decode, environment),
        ]
        ports = list(pool.map(stack.enter_context, starts))
        yield ports[0], ports[1], meeting


@contextmanager
def _serving(
    model: Path,
    target: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run a server; yield its port."""
    port = _free_port()
    server = _start(model, port, target, arguments, environment or {})
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


def _free_port() -> int:
    """Return a port below those that the system gives out itself: SGLang 0.5.15 adds 10,000."""
    for port in Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 20,000 and 32,000 is free")


def _start(
    model: Path,
    port: int,
    target: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
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
    spare_models("qwen3_moe", "qwen3_moe_mtp")
    return subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT, **ours, **environment}, stdout=sys.stderr
    )


def _ask(port: int, rid: str, prompt: list[int], length: int) -> Answer:
    return _answer(prompt, _post(port, _body(rid, prompt, length)))


def _ask_pair(
    prefill: int, decode: int, meeting: int, rid: str, prompt: list[int], length: int
) -> Answer:
    """Send a request to both engines, as SGLang's router does; return the last one's answer."""
    body = _body(rid, prompt, length)
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": meeting}
    body["bootstrap_room"] = int(rid[1:]) + 1
    with ThreadPoolExecutor(1) as other:
        first = other.submit(_post, prefill, body)
        answer = _post(decode, body)
        first.result()
    return _answer(prompt, answer)


def _body(rid: str, prompt: list[int], length: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
    return {**body, "return_routed_experts": True}


def _answer(prompt: list[int], answer: bytes) -> Answer:
    fields = json.loads(answer)
    rows = fields["meta_info"].get("routed_experts")
    tokens = prompt + fields["output_ids"]
    return Answer(
        tokens,
        rows and np.frombuffer(base64.b64decode(rows), np.int32).reshape(len(tokens) - 1, -1, 4),
        fields["meta_info"].get("routetrace", []),
        fields["meta_info"]["num_retractions"],
        len(answer),
        # As the field stands in the answer, with its name, quotes and a comma.
        len(rows or "") + len('"routed_experts":"",'),
    )


def _post(port: int, body: dict[str, Any], path: str = "generate") -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}",
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
