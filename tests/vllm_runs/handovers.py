"""Prefill and decode engines between which NIXL moves KV, so that each hand-over has a name.

The engines have weights of several versions, and the first prefill engine other ones than the two
others: rows of a pass that the answer was not sampled from differ, or are of another version.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

from vllm_runs.engine import BLOCK, Answer, Ask, Engine, Setup
from vllm_runs.scenarios import expect, update_weights

#: Weight versions of the first and the second prefill engine and of the one that decodes.
_FIRST, _SECOND, _DECODE = 1, 2, 3
_CHANGED = (_SECOND, _DECODE)

_NIXL: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    # A prefill engine may load what a decode engine computed.
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1},
}


class Trio:
    """Two engines that compute prompts, and one that goes on from their KV."""

    def __init__(self, setup: Setup) -> None:
        engines = []
        for number in range(3):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
            attachment = setup.attachment.numbered(number)
            engines.append(Engine(replace(setup, attachment=attachment), _NIXL))
        self.first, self.second, self.decode = engines
        self.prompts = self.first.prompts
        self.first.rpc("routetrace_set_weight_version", _FIRST)
        update_weights(self.second, _SECOND)
        update_weights(self.decode, _DECODE)

    def agents(self) -> list[dict[str, Any]]:
        """Counters of their agents."""
        return [stats for engine in self._engines for stats in engine.agents()]

    def close(self) -> None:
        """End all."""
        for engine in self._engines:
            engine.close()

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.first, self.second, self.decode


def handed_over(trio: Trio) -> list[Answer]:
    """Prompts are computed by one engine and go on in another one, in one trace.

    Both compute the last token of the prompt; the answer is sampled from the second one's pass.
    """
    done = []
    for i, length in enumerate((100, 3 * BLOCK, 70, 1)):
        name, prompt = f"handed-over-{i}", trio.prompts.make(length)
        first = _prefill(trio.first, name, prompt)
        # The prompt alone, or with the token that the first one sampled.
        asked = first.tokens if i == 2 else prompt
        (answer,) = trio.decode.run([Ask(name, asked, transfer=first.transfer)])
        done.append(_handed(answer, _FIRST, _DECODE))
    # Nobody tells of the routing behind the blocks that another trace loaded.
    (alone,) = trio.decode.run([Ask("hits-loaded", done[0].tokens[:100])])
    alone.loaded = 100 // BLOCK * BLOCK
    alone.may_lack, alone.must_lack = ("kv_unknown",), (0, alone.loaded)
    alone.versions, alone.changed = ((alone.loaded, len(alone.tokens) - 1, _DECODE),), _CHANGED
    return [*done, alone]


def two_prefills(trio: Trio) -> list[Answer]:
    """A prompt is computed twice, as the first one stalls; the decode engine takes one of them.

    What was thrown away is told before the other one, or after the answer.
    """
    done = []
    for i, (used, early) in enumerate(((0, True), (0, False), (1, True), (1, False))):
        name, prompt = f"two-prefills-{i}", trio.prompts.make(90)
        engines, versions = (trio.first, trio.second), (_FIRST, _SECOND)
        if early:
            _prefill(engines[1 - used], name, prompt)
        taken = _prefill(engines[used], name, prompt)
        (answer,) = trio.decode.run([Ask(name, prompt, transfer=taken.transfer)])
        if not early:
            _prefill(engines[1 - used], name, prompt)
        done.append(_handed(answer, versions[used], _DECODE))
    trio.agents()  # all is told
    return done


def retried(trio: Trio) -> list[Answer]:
    """An answer is aborted, and its request is repeated on another prefill engine.

    The prompt is shorter than a block: it hits nothing that was loaded before.
    """
    prompt = trio.prompts.make(BLOCK - 2)
    first = _prefill(trio.first, "retried", prompt)
    trio.decode.add(Ask("retried", prompt, 150, transfer=first.transfer))
    while "retried" not in trio.decode.delivered:
        trio.decode.step()
    gone = trio.decode.abort("retried")
    expect(len(gone.tokens) < len(prompt) + 150, "nothing was aborted")
    second = _prefill(trio.second, "retried", prompt)
    (answer,) = trio.decode.run([Ask("retried", prompt, transfer=second.transfer)])
    return [_handed(answer, _SECOND, _DECODE)]


def computed_itself(trio: Trio) -> list[Answer]:
    """The KV does not arrive, or nobody asks for it: the prompt is computed again."""
    prompts = [trio.prompts.make(70) for _ in range(3)]
    taken = [_prefill(trio.first, f"itself-{i}", prompt) for i, prompt in enumerate(prompts)]
    # The second one has not met the first one yet, and cannot find it.
    lost = {"remote_port": _free_port()}
    done = trio.second.run([Ask("itself-before", prompts[1])])
    asks = [
        Ask(f"itself-{i}", prompts[i], transfer={**taken[i].transfer, **change})
        for i, change in enumerate((lost, lost, {"do_remote_prefill": False}))
    ]
    done += sorted(trio.second.run(asks), key=lambda answer: answer.trace_id)
    for answer in done:
        end, hit = len(answer.tokens) - 1, 2 * BLOCK if answer.trace_id == "itself-1" else 0
        answer.versions, answer.changed = ((0, end, _SECOND),), _CHANGED
        slots = ((0, hit, "slot"),) if hit else ()
        answer.sources = (*slots, (hit, end, "forward"))
    return done


def handed_back(trio: Trio) -> list[Answer]:
    """A second turn, whose prefill engine loads what the decode engine computed in the first."""
    prompt = trio.prompts.make(70)
    first = _prefill(trio.first, "handed-back", prompt)
    (turn,) = trio.decode.run([Ask("handed-back", prompt, transfer=first.transfer)])
    asked = turn.tokens + trio.prompts.make(30)
    second = _prefill(trio.second, "handed-back", asked, turn.transfer)
    (answer,) = trio.decode.run([Ask("handed-back", asked, transfer=second.transfer)])
    ends = (len(prompt) - 1, len(turn.tokens) - 1, len(asked) - 1, len(answer.tokens) - 1)
    spans = list(zip((0, *ends), ends, strict=False))
    versions, sources = (_FIRST, _DECODE, _SECOND, _DECODE), ("handoff", "forward") * 2
    answer.versions = tuple((*span, v) for span, v in zip(spans, versions, strict=True))
    answer.sources = tuple((*span, s) for span, s in zip(spans, sources, strict=True))
    answer.changed = _CHANGED
    return [answer]


def _prefill(
    engine: Engine, name: str, prompt: list[int], known: dict[str, Any] | None = None
) -> Answer:
    """Compute a prompt for another engine, which gets the answer's `transfer`.

    Args:
        engine: computes it.
        name: of the trace.
        prompt: token ids.
        known: the `transfer` of an engine that has KV of its first tokens.
    """
    transfer = {**(known or {}), "do_remote_decode": True}
    (answer,) = engine.run([Ask(name, prompt, max_tokens=1, transfer=transfer)])
    expect(bool(answer.transfer.get("do_remote_prefill")), f"handed over: {answer.transfer}")
    return answer


def _handed(answer: Answer, sender: int, receiver: int) -> Answer:
    """Expect rows of the sender for all of the prompt but its last token.

    Args:
        answer: of the receiver.
        sender: its weight version.
        receiver: its weight version.
    """
    handed, end = answer.prompt_len - 1, len(answer.tokens) - 1
    spans = ((0, handed, sender, "handoff"), (handed, end, receiver, "forward"))
    answer.versions = tuple((a, b, version) for a, b, version, _ in spans if a < b)
    answer.sources = tuple((a, b, source) for a, b, _, source in spans if a < b)
    answer.changed = _CHANGED
    return answer


def _free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
