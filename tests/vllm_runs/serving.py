"""vLLM's OpenAI server, and what is asked of it over HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from vllm_runs.engine import Answer, Ask, Prompts, Setup, labels_of
from vllm_runs.scenarios import expect

_START_S = 240.0
_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Served:
    """The server, in a process of its own; the arguments are those of any other engine."""

    def __init__(self, setup: Setup) -> None:
        self.prompts = Prompts(0)
        self.notes: dict[str, int] = {}
        self.model = str(setup.checkpoint)
        template = setup.directory / "chat.jinja"
        template.write_text(_CHAT)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        arguments = {
            **setup.arguments(),
            "host": "127.0.0.1",
            "port": self._port,
            "chat_template": str(template),
        }
        del arguments["skip_tokenizer_init"], arguments["disable_log_stats"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            command.append(f"--{name.replace('_', '-')}")
            if value is not True:
                command.append(json.dumps(value) if isinstance(value, dict) else str(value))
        self._process = subprocess.Popen(command)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def rpc(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the workers, as RL frameworks do."""
        answer = self.post("/collective_rpc", {"method": name, "args": args})
        results: list[Any] = json.loads(answer)["results"] if answer else []
        return results

    def agents(self) -> list[dict[str, Any]]:
        """Counters of the agents."""
        self.rpc("routetrace_flush", 10.0)
        return [stats for stats in self.rpc("routetrace_stats") if stats]

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        """Return the server's answer."""
        with self.open(path, body, headers) as response:
            return response.read()

    @contextmanager
    def open(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that is still coming; leaving the block disconnects."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{path}: {response.status} {response.read().decode()}")
            yield response
        finally:
            connection.close()

    def complete(self, ask: Ask, *, named_by_header: bool) -> list[Answer]:
        """Ask for for a completion.

        Args:
            ask: the request.
            named_by_header: whether its trace id is said by X-Request-Id alone.
        """
        words = ask.extra_args
        headers = {}
        if named_by_header:
            headers["X-Request-Id"] = words.pop("routetrace.trace_id")
        body = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"vllm_xargs": words} if words else {}),
            **ask.sampling,
        }
        return self._answers(ask, self.post("/v1/completions", body, headers))

    def chat(self, ask: Ask, text: str) -> list[Answer]:
        """Ask for for a chat completion; the prompt is the text, through the server's tokenizer."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": ask.extra_args,
        }
        return self._answers(ask, self.post("/v1/chat/completions", body))

    def _answers(self, ask: Ask, body: bytes) -> list[Answer]:
        answer = json.loads(body)
        handle = (answer.get("kv_transfer_params") or {}).get("routetrace")
        several = len(answer["choices"]) > 1
        done = []
        for choice in answer["choices"]:
            prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
            routed, choice["routed_experts"] = choice["routed_experts"], None
            name = f"{ask.trace_id}/{choice['index']}" if several else ask.trace_id
            done.append(
                Answer(
                    trace_id=name,
                    tokens=prompt + choice["token_ids"],
                    prompt_len=len(prompt),
                    native=np.load(io.BytesIO(base64.b64decode(routed))) if routed else None,
                    handle=handle,
                    # An answer has one handle, also where it has several completions.
                    has_handle=not several or (handle or {}).get("trace_id") == name,
                    labels=labels_of(ask),
                )
            )
        without = _size(answer)
        self._note("bytes of answers", len(body))
        self._note("bytes without vLLM's own rows", without)
        if handle:
            del answer["kv_transfer_params"]["routetrace"]
            self._note("bytes of routetrace's handles", without - _size(answer))
        self._note("rows", sum(len(a.tokens) - 1 for a in done))
        self._note("answer tokens", sum(len(a.tokens) - a.prompt_len for a in done))
        return done

    def _note(self, name: str, value: int) -> None:
        self.notes[name] = self.notes.get(name, 0) + value

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with code {self._process.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.2)
            finally:
                connection.close()
        raise TimeoutError("vLLM's server did not get ready")


def _size(answer: Any) -> int:
    """Bytes of an answer, written as compactly as the server does."""
    return len(json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode())


def completions(server: Served) -> list[Answer]:
    """Requests at a time, named by header or in their body; several samples; one opted out."""
    lengths = (5, 40, 100, 33, 64)
    asks = [(Ask(f"http-{n}", server.prompts.make(n)), True) for n in lengths]
    for i in range(2):
        words = {"group": "g", "sample": str(i)}
        asks.append((Ask(f"body-{i}", server.prompts.make(50), words=words), False))
    asks.append((Ask("samples", server.prompts.make(30), sampling={"n": 2}), True))
    out = Ask("http-out", server.prompts.make(20), words={"capture": False})
    asks.append((out, False))
    with ThreadPoolExecutor(len(asks)) as pool:
        waiting = [pool.submit(server.complete, a, named_by_header=named) for a, named in asks]
        done = [answer for future in waiting for answer in future.result()]
    for answer in done:
        answer.absent = answer.trace_id == out.trace_id
    sent = sum(stats["sent_bytes"] for stats in server.agents())
    server.notes["bytes that agents sent so far"] = sent
    return done


def chat(server: Served) -> list[Answer]:
    """Two turns of a conversation."""
    text = "".join(f"w{4 + i * 7 % 500} " for i in range(60))
    done = server.chat(Ask("chat-0", [], words={"session": "c"}), text)
    text += "w9 w10 w11"
    return done + server.chat(Ask("chat-1", [], words={"session": "c"}), text)


def streams(server: Served) -> list[Answer]:
    """A client that disconnects in the middle of its answer."""
    prompt = server.prompts.make(40)
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 180,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens = list(prompt)
    with server.open("/v1/completions", body, {"X-Request-Id": "disconnected"}) as response:
        while len(tokens) < len(prompt) + 5:
            line = response.readline().decode().removeprefix("data: ").strip()
            expect(line != "[DONE]", "the answer was over before the client left")
            for choice in json.loads(line)["choices"] if line else ():
                tokens += choice["token_ids"]
    return [Answer("disconnected", tokens, len(prompt), cut=True)]


def weight_version(server: Served) -> list[Answer]:
    """The weight version is set over HTTP."""
    server.rpc("routetrace_set_weight_version", 5)
    ask = Ask("http-version", server.prompts.make(45))
    (done,) = server.complete(ask, named_by_header=True)
    done.versions = ((0, len(done.tokens) - 1, 5),)
    return [done]
