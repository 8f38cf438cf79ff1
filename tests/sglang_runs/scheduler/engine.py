"""SGLang's scheduler around a fake model, and clients that do what clients do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_runs.engine import Engine, request
from sglang_runs.scheduler.truth import LAYOUT, VOCABULARY, Ints, Life, Rows

#: Tokens that are sampled where drafts are used: few, so that the same ones come again.
_DRAFTED = 48


@dataclass(frozen=True)
class Case:
    """One way to run SGLang."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    pauses: bool = True


class FakeModel:
    """Chooses experts and tokens at random, and leaves the number of each row in its KV entry.

    Args:
        engine: whose model it replaces.
        rows: that it chooses.
        rng: of the tokens.
    """

    def __init__(self, engine: Engine, rows: Rows, rng: random.Random) -> None:
        self.rows = rows
        self.lives: dict[str, Life] = {}
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(rng.randrange(1 << 32))
        self._batch: Any = None
        self._runner = engine.scheduler.tp_worker.model_runner
        drafts = not engine.scheduler.spec_algorithm.is_none()
        self._words = _DRAFTED if drafts else VOCABULARY
        self._runner.model.forward = self._forward
        self._launch = engine.scheduler.run_batch
        engine.scheduler.run_batch = self._run_batch
        # By request: rows of its last pass that are drafts (docs/rows.md, 2).
        self._drafts: dict[str, set[int]] = {}
        self._copied: list[int] = []  # rows that were copied to host memory since the last pass
        self._copied_as_drafts: set[int] = set()
        self._loaded: set[int] = set()  # slots that were loaded and not written since
        controller = getattr(engine.scheduler.tree_cache, "cache_controller", None)
        if controller is not None:
            load, write = controller.load, controller.write

            def loaded(*args: Any, **kwargs: Any) -> Any:
                slots = load(*args, **kwargs)
                if slots is not None:
                    self.counts["loaded"] += len(slots)
                    self._loaded.update(slots.tolist())
                return slots

            def written(device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                slots = write(device_indices, *args, **kwargs)
                if slots is not None:
                    self._copied += self._tags[device_indices.long(), 0, 0].long().tolist()
                return slots

            controller.load, controller.write = loaded, written

    @property
    def _tags(self) -> torch.Tensor:
        """The KV entries, which hold the numbers of their rows."""
        tags: torch.Tensor = self._runner.token_to_kv_pool.get_key_buffer(0)
        return tags

    def _note_copies(self) -> None:
        """Note the drafts of requests that go on which were copied to host memory."""
        copied, self._copied = set(self._copied), []
        for rid, numbers in self._drafts.items():
            if not self.lives[rid].tokens:
                self._copied_as_drafts |= numbers & copied

    def _run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = batch
        return self._launch(batch, *args, **kwargs)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        *_: Any,
        **__: Any,
    ) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        batch, n = self._batch, len(input_ids)
        verifies = forward_batch.forward_mode.is_target_verify()
        if verifies:
            counts = [forward_batch.spec_info.draft_token_num] * len(batch.reqs)
        elif forward_batch.forward_mode.is_extend():
            counts = list(forward_batch.extend_seq_lens_cpu)
        else:
            counts = [1] * n
        tags = self._tags
        self._note_copies()
        numbers = self.rows.new(n, self.version)
        slots = forward_batch.out_cache_loc
        # What was written by earlier passes is read first, as attention does.
        table = self._runner.req_to_token_pool.req_to_token
        sampled = self._rng.integers(self._words, size=n if verifies else len(counts))
        at = 0
        for i, (req, count) in enumerate(zip(batch.reqs, counts, strict=True)):
            first = int(positions[at])
            life = self.lives[req.rid]
            attempt, new = life.pass_from(first)
            if new and first:
                cached = table[int(forward_batch.req_pool_indices[i]), :first].long()
                reused = tags[cached, 0, 0].long().tolist()
                attempt.numbers.update(enumerate(reused))
                hidden = self.rows.hidden
                attempt.unknown = {p for p, number in enumerate(reused) if number in hidden}
                # The copy of a draft names no row.
                attempt.unknown |= {
                    p
                    for p, (slot, number) in enumerate(zip(cached.tolist(), reused, strict=True))
                    if number in self._copied_as_drafts and slot in self._loaded
                }
                self.counts["cached"] += first
            if new and len(life.attempts) > 1:
                self.counts["resumed"] += 1
            own = numbers[at : at + count].tolist()
            if not life.captured:
                self.rows.hidden.update(own)
            if verifies:
                tree = forward_batch.spec_info.custom_mask.view(-1, count, count)[i]
                choices = sampled[at : at + count]  # a view
                drafts = input_ids[at : at + count].tolist()
                path = self._walk(life, first, tree.tolist(), drafts, choices)
                own = [own[node] for node in path]
                tokens = [int(choices[node]) for node in path]
                attempt.sampled.update(enumerate(tokens, start=first))
                self.counts["drafts"] += len(path) - 1
                self.counts["off the front"] += path != list(range(len(path)))
            else:
                last = first + count - 1
                sampled[i] = self._unlike(life.samples_at(last), sampled[i])
                attempt.sampled[last] = int(sampled[i])
            behind = max(len(life.prompt) - first, 1)
            self._drafts[req.rid] = set(own[behind:])
            attempt.numbers.update(enumerate(own, start=first))
            attempt.end = first + len(own)
            at += count
        if at != n:
            raise AssertionError(f"{at} tokens of {n}")
        tags[slots, 0, 0] = torch.from_numpy(numbers).to(tags.dtype)
        self._loaded.difference_update(slots.tolist())
        self.counts["passes"] += 1
        self.counts["most running"] = max(self.counts["most running"], len(batch.reqs))
        ids = torch.from_numpy(self.rows.ids[numbers].astype(np.int32))
        capturer = get_global_experts_capturer()
        for column, layer in enumerate(LAYOUT.layer_ids):
            capturer.capture(layer_id=layer, topk_indices=ids[:, column])
        logits = torch.zeros(len(sampled), VOCABULARY)
        logits[torch.arange(len(sampled)), torch.from_numpy(sampled)] = 1.0
        return LogitsProcessorOutput(next_token_logits=logits)

    def _walk(
        self, life: Life, first: int, tree: list[list[bool]], tokens: list[int], sampled: Ints
    ) -> list[int]:
        """Sample a draft that follows most times; return the path that SGLang accepts.

        Args:
            life: that samples.
            first: position of the first node.
            tree: which nodes are ancestors of each.
            tokens: of the nodes.
            sampled: by each node, changed.
        """
        path, node = [0], 0
        while True:
            children = [i for i in range(node + 1, len(tree)) if _parent(tree[i], i) == node]
            if children and self._rng.random() < 0.7:
                sampled[node] = tokens[children[int(self._rng.integers(len(children)))]]
            spent = life.samples_at(first + len(path) - 1)
            sampled[node] = self._unlike(spent, sampled[node])
            found = [i for i in children if tokens[i] == sampled[node]]
            if not found:
                return path
            node = found[0]
            path.append(node)

    def _unlike(self, spent: set[int], token: int) -> int:
        """A token for a position that is none of those which earlier attempts sampled there.

        So a sample that SGLang throws away never looks like the one that it keeps.
        """
        while token in spent:
            token = (token + 1) % self._words
        return token


def _parent(ancestors: list[bool], node: int) -> int:
    return max((i for i in range(node) if ancestors[i]), default=-1)


class Clients:
    """Sends requests, aborts, pauses, flushes and versions at random.

    Args:
        engine: to send to.
        model: that it runs.
        case: of the engine.
        rng: of all that is done.
    """

    def __init__(self, engine: Engine, model: FakeModel, case: Case, rng: random.Random) -> None:
        self._engine, self._model, self._case, self._rng = engine, model, case, rng
        self._sent = 0
        self._stems = [self._words(rng.randrange(20, 90)) for _ in range(6)]
        self._running: set[str] = set()
        self._paused = 0
        self._flush_when_idle = False
        self.ended: list[Life] = []

    def act(self) -> None:
        """Do what comes to mind before a pass."""
        from sglang.srt.managers import io_struct

        rng, engine = self._rng, self._engine
        if self._paused:
            self._paused -= 1
            if not self._paused:
                engine.send(io_struct.ContinueGenerationReqInput())
            return
        if self._flush_when_idle:
            if engine.idle:
                engine.send(io_struct.FlushCacheReqInput())
                self._model.counts["flushes"] += 1
                self._flush_when_idle = False
            return
        if len(self._running) < 24 and rng.random() < 0.5:
            engine.send(*(self._request() for _ in range(rng.randrange(1, 4))))
        if self._running and rng.random() < 0.01:
            engine.send(io_struct.AbortReq(rid=rng.choice(sorted(self._running))))
            self._model.counts["aborts"] += 1
        # In 0.5.15 a version without weights does not reach the scheduler.
        if rng.random() < 0.004 and hasattr(engine.scheduler, "handle_update_weight_version"):
            self._model.version += 1
            self._rename()
        if rng.random() < 0.003:
            self._flush_when_idle = True
        if self._case.pauses and rng.random() < 0.004:
            mode = rng.choice(["retract", "in_place"])
            engine.send(io_struct.PauseGenerationReqInput(mode=mode))
            self._paused = rng.randrange(2, 5)
            self._model.counts[f"pauses {mode}"] += 1

    def _rename(self) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        version = str(self._model.version)
        self._engine.scheduler.handle_update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )

    def settle(self) -> None:
        """Take the ends of requests."""
        for rid in sorted(self._running & self._finished.keys()):
            self._running.discard(rid)
            self.ended.append(self._finished.pop(rid))

    @property
    def _finished(self) -> dict[str, Life]:
        return self._done

    def watch(self) -> None:
        """Follow the ends of requests, as the scheduler decides them."""
        self._done: dict[str, Life] = {}
        scheduler = self._engine.scheduler
        process = scheduler.process_batch_result

        def processed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = process(batch, *args, **kwargs)
            for req in batch.reqs:
                if req.finished():
                    self._note(req)
            return result

        scheduler.process_batch_result = processed
        sender = self._engine.sender
        send = sender.send_output

        def sent(output: Any, req: Any = None) -> Any:
            if type(output).__name__ == "AbortReq" and hasattr(req, "output_ids"):
                self._note(req, "abort")
            return send(output, req)

        sender.send_output = sent

    def _note(self, req: Any, reason: str = "") -> None:
        life = self._model.lives[req.rid]
        if not life.tokens:
            life.tokens = list(req.origin_input_ids) + list(req.output_ids_through_stop)
            life.reason = reason or type(req.finished_reason).__name__
            # Under overlap, SGLang forwards the last token of an aborted request, too, and caches
            # its KV. It has no row (docs/rows.md, 4), so a request that reuses this KV lacks one.
            for attempt in life.attempts:
                behind = [n for p, n in attempt.numbers.items() if p >= len(life.tokens) - 1]
                self._model.rows.hidden.update(behind)
            self._done[req.rid] = life

    def _request(self) -> Any:
        rng = self._rng
        self._sent += 1
        rid = f"r{self._sent}"
        stem = rng.choice(self._stems) if rng.random() < 0.7 else []
        if stem and rng.random() < 0.3:
            stem = stem[: rng.randrange(1, len(stem))]
        prompt = stem + self._words(rng.randrange(1, 60))
        if self.ended and rng.random() < 0.15:  # a further turn of an earlier conversation
            prompt = (rng.choice(self.ended[-8:]).tokens + self._words(5))[:180]
        if rng.random() < 0.1:
            self._stems[rng.randrange(len(self._stems))] = self._words(rng.randrange(20, 90))
        life = self._model.lives[rid] = Life(rid, prompt, captured=rng.random() > 0.05)
        self._running.add(rid)
        options = {"capture": life.captured, "labels": {"case": self._case.name}}
        return request(rid, prompt, rng.randrange(1, 120), options)

    def _words(self, n: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(n)]

    @property
    def busy(self) -> bool:
        """Whether requests run."""
        return bool(self._running)

    def finish(self) -> None:
        """Let what runs go on to its end."""
        if self._paused:
            self._paused = 1
            self.act()


def make(model: Path, case: Case) -> Engine:
    """An engine for a case: small enough that requests are retracted."""
    arguments = {
        "max_total_tokens": 800,
        "max_running_requests": 16,
        "context_length": 300,
        "chunked_prefill_size": 64,
        "load_format": "dummy",
        "schedule_conservativeness": 0.05,
        "sampling_backend": "pytorch",
    }
    return Engine(model, **arguments | case.arguments)
