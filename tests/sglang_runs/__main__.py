"""Real SGLang schedulers with tiny models on the CPU, compared with Transformers in float32.

    python -m sglang_runs --rows 30000
    python -m sglang_runs --scenario retraction --seed 3

Each scenario runs in a process of its own, since SGLang keeps one scheduler a process.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.engines.sglang import seams
from routetrace.client import ReadOptions, RouteClient
from routetrace.common.errors import NotFound, RouteTraceError
from routetrace.server.testing import run_server
from sglang_runs.engine import DRAFTS, MODEL_DRAFTS, Engine, prepare, request
from sglang_runs.frameworks import differing
from sglang_runs.models import VOCABULARY, write_changed, write_drafter, write_model
from sglang_runs.serving import Answer, Pair, generate
from support.models.routed_cells import WRONG, fates
from vllm_runs.reference import Reference, change_weights

_TOLD = 6
_RUNNING = 12
#: Requests after which a prompt comes again: SGLang has evicted it by then.
_AGO = 14
#: Rows in which enough of them come again.
_EVICTING = 3_500


@dataclass(frozen=True)
class Scenario:
    """A way to run SGLang."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    native: bool = False
    """Whether SGLang's own return is on, and compared."""
    aborts: bool = False
    updates: str = ""
    """Mode of the pause in which weights change under way; "retract" computes all again. "failed":
    an update that fails, and ten passes later one that succeeds. "session": several updates, which
    each replace a part. "peers": a session in which others write the weights."""
    retracts: bool = False
    """Whether SGLang's own switch retracts requests now and then."""
    again: bool = False
    """Whether prompts come again, which SGLang has evicted meanwhile to host memory or storage."""
    drafts: bool = False
    """Whether a pass verifies trees of drafts."""
    served: bool = False
    """Whether SGLang's HTTP server runs it, with a process for each rank."""
    pair: Pair | None = None
    """Two HTTP servers, a prefill and a decode engine."""
    engines: int = 1
    """Engines that the ranks are: each rank of data-parallel attention is one."""
    skips: int | None = None
    """Layer whose routing SGLang's capturer does not see: such a server must not start."""
    uncaptured: bool = False
    """Whether the model runner makes no capturer, as MLX's: such a server must not start."""
    may_lack: tuple[str, ...] = ()
    """Reasons for which rows may be missing."""

    @property
    def own_are_right(self) -> bool:
        """Whether SGLang's own return is right, and capture must not change that."""
        return self.native and not (
            self.updates or self.again or self.drafts or self.pair is not None
        )


_COPIES = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
_HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, **_COPIES}
_STORAGE = {
    "hicache_storage_backend": "file",
    "hicache_ratio": 1.1,
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
    "page_size": 16,
}
_SMALL = {"max_total_tokens": 700, "schedule_conservativeness": 0.05}
SCENARIOS = (
    Scenario("overlap", native=True),
    Scenario("no prefix cache", {"disable_radix_cache": True}, native=True),
    Scenario("normal", {"disable_overlap_schedule": True}, native=True, aborts=True),
    Scenario("page 16", {"page_size": 16}),
    Scenario("mixed chunks", {"enable_mixed_chunk": True, "chunked_prefill_size": 32}, aborts=True),
    Scenario("retraction", _SMALL, native=True, retracts=True),
    Scenario("retraction page 16", {**_SMALL, "page_size": 16}, retracts=True),
    Scenario("new weights", updates="retract", native=True),
    Scenario("new weights in place", updates="in_place", native=True),
    Scenario("new weights in parts", updates="session"),
    Scenario("weights of peers", updates="peers"),
    Scenario("failed update", updates="failed", may_lack=("not_captured", "kv_unknown")),
    Scenario("host memory", {**_HOST, **_SMALL}, native=True, again=True),
    Scenario(
        "storage",
        {**_HOST, **_SMALL, **_STORAGE},
        native=True,
        again=True,
        may_lack=("kv_unknown",),
    ),
    Scenario("drafts", DRAFTS, native=True, drafts=True),
    Scenario(
        "drafts normal",
        {**DRAFTS, "disable_overlap_schedule": True},
        native=True,
        drafts=True,
        aborts=True,
    ),
    Scenario(
        "drafts retraction page 16",
        {**DRAFTS, **_SMALL, "page_size": 16},
        drafts=True,
        retracts=True,
    ),
    Scenario("model drafts", MODEL_DRAFTS, native=True, drafts=True, aborts=True),
    Scenario(
        "model drafts retraction page 16",
        {**MODEL_DRAFTS, **_SMALL, "page_size": 16},
        native=True,
        drafts=True,
        retracts=True,
    ),
    Scenario(
        "model drafts normal", {**MODEL_DRAFTS, "disable_overlap_schedule": True}, drafts=True
    ),
    Scenario("tensor parallel", {"tp_size": 2}, native=True, served=True),
    Scenario(
        "data-parallel attention",
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        native=True,
        served=True,
        engines=2,
    ),
    Scenario("prefill and decode", pair=Pair(), native=True, served=True, engines=2),
    Scenario(
        "prefill and decode retraction page 16",
        {"page_size": 16, "chunked_prefill_size": 32},
        pair=Pair(decode={**_SMALL, **_COPIES, "num_reserved_decode_tokens": 4}),
        served=True,
        retracts=True,
        engines=2,
    ),
    Scenario(
        "prefill and decode prefix again",
        {"disable_overlap_schedule": True},
        pair=Pair(
            prefill={"optimistic_prefill_attempts": 2},
            decode={"disaggregation_decode_enable_radix_cache": True, **_SMALL, **_COPIES},
            environment={"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.3"},
        ),
        served=True,
        engines=2,
    ),
    Scenario("prefill and decode pauses", pair=Pair(pauses=12), served=True, engines=2),
    Scenario(
        "decode alone",  # so that no row of the prefill engine hides one of an earlier request
        pair=Pair(decode={**_SMALL, **_COPIES, "num_reserved_decode_tokens": 4}, captures=False),
        served=True,
        may_lack=("kv_unknown",),
    ),
    Scenario(
        "model drafts data-parallel attention",
        {**MODEL_DRAFTS, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        native=True,
        served=True,
        engines=2,
    ),
    Scenario("a layer skips the capture site", skips=2),
    Scenario("no capturer", uncaptured=True),
)
#: Those that SGLang 0.5.12 runs: its pages and drafts need kernels that a CPU lacks, it clears no
#: cache while requests wait, and its pairs are refused.
OLDER = (
    "overlap",
    "no prefix cache",
    "normal",
    "mixed chunks",
    "retraction",
    "new weights in place",
    "failed update",
    "host memory",
    "tensor parallel",
)
#: Those that older versions run, by version.
ABLE = {
    seams.TESTED[0]: OLDER,
    seams.TESTED[1]: (*OLDER, "prefill and decode"),
    seams.TESTED[2]: (*OLDER, "prefill and decode", "model drafts"),
}
#: Those of CI.
SHARE = (
    "overlap",
    "drafts retraction page 16",
    "model drafts",
    "prefill and decode",
    "new weights",
    "new weights in place",
    "new weights in parts",
    "failed update",
    "a layer skips the capture site",
    "no capturer",
)


class Run:
    """One scenario in this process.

    Args:
        scenario: what happens.
        engine: in which it happens.
        rng: of all that is random.
    """

    def __init__(self, scenario: Scenario, engine: Engine, rng: random.Random) -> None:
        self.finished: dict[str, list[int]] = {}
        """Tokens of each request that ended."""
        self.counts: Counter[str] = Counter()
        self.kept: dict[str, int] = {}
        """Rows that were computed before the weights changed, of requests with an answer then."""
        self.model = engine.scheduler.tp_worker.model_runner.model
        self.unanswered: set[str] = set()
        """Requests that were aborted without an answer."""
        self._scenario, self._engine, self._rng = scenario, engine, rng
        self._stems = [self._words(48) for _ in range(3)]
        self._prompts: list[list[int]] = []
        self._running: set[str] = set()
        self._passes = self._sent = self._tokens = self._known_at = 0
        self._changed = False
        self._follow()

    @property
    def own_rows(self) -> dict[str, Any]:
        """Rows of SGLang's own return, by request."""
        return {rid: answer.rows for rid, answer in self._engine.answers.items()}

    def each(self, num_rows: int) -> bool:
        """Do what is to be done before a pass; return whether all is over."""
        from sglang.srt.managers import io_struct

        self._passes += 1
        if self._passes == self._known_at:
            self._rename(io_struct, "2")
        self._running -= self.finished.keys()
        if self._scenario.updates and not self._changed and self._tokens > num_rows // 2:
            self._change(io_struct)
            return False
        if self._scenario.aborts and self._running and self._rng.random() < 0.1:
            self._engine.send(io_struct.AbortReq(rid=self._rng.choice(sorted(self._running))))
        if self._tokens > num_rows:
            return not self._running and self._engine.idle
        if self._passes % 3 == 0 and len(self._running) < _RUNNING:
            self._engine.send(self._request())
        return False

    def _change(self, io_struct: Any) -> None:
        """Pause, change the weights, and go on: at once, between two passes."""
        scheduler, mode = self._engine.scheduler, self._scenario.updates
        self._changed = True
        if mode == "failed":
            nowhere = io_struct.UpdateWeightFromDiskReqInput(model_path="nowhere")
            assert not self._engine.updater.update_weights_from_disk(nowhere).success
            self._known_at = self._passes + 10
            return
        pause = "retract" if mode == "retract" else "in_place"
        scheduler.process_input_requests([io_struct.PauseGenerationReqInput(mode=pause)])
        for req in scheduler.waiting_queue if mode == "retract" else ():
            if req.output_ids:
                self.kept[req.rid] = len(req.origin_input_ids) + len(req.output_ids) - 1
        if mode in ("session", "peers"):
            self._update_in_session(io_struct, self._engine.updater)
        else:
            change_weights(self.model)
            self._rename(io_struct, "1")
        assert mode != "retract" or scheduler.flush_cache()
        scheduler.process_input_requests([io_struct.ContinueGenerationReqInput()])

    def _update_in_session(self, io_struct: Any, updater: Any) -> None:
        """Change the weights between SGLang's begin and end of a session, as version 1."""
        # SGLang's own serializer shares memory of CUDA devices alone.
        updater.tp_worker.deserialize_own_rank = lambda payload: torch.load(BytesIO(payload[0]))
        assert updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput()).success
        before = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        change_weights(self.model)
        if self._scenario.updates == "session":
            after = {name: each.detach().clone() for name, each in self.model.named_parameters()}
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(before[name])
            changed = [(n, each) for n, each in after.items() if not each.equal(before[n])]
            for part in (changed[::2], changed[1::2]):
                torch.save(part, payload := BytesIO())
                request = io_struct.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[payload.getvalue()],
                    flush_cache=False,
                    weight_version="1",
                )
                done = updater.update_weights_from_tensor(request)
                assert done.success, done.message
        else:
            self._rename(io_struct, "1")
        assert updater.end_weight_update(io_struct.EndWeightUpdateReqInput()).success

    def _rename(self, io_struct: Any, version: str) -> None:
        """Name the weights; version 1 is that of the changed ones."""
        scheduler = self._engine.scheduler
        if hasattr(scheduler, "handle_update_weight_version"):
            scheduler.handle_update_weight_version(
                io_struct.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
            )
            return
        # In 0.5.16 and older ones updates alone give versions.
        model = Path(scheduler.server_args.model_path)
        request = io_struct.UpdateWeightFromDiskReqInput(
            model_path=str(write_changed(model) if version == "1" else model),
            load_format="auto",
            weight_version=version,
            flush_cache=False,
        )
        done = self._engine.updater.update_weights_from_disk(request)
        assert done.success, done.message

    def _request(self) -> Any:
        rng = self._rng
        self._sent += 1
        rid = f"r{self._sent}"
        if self._scenario.again and len(self._prompts) >= _AGO and rng.random() < 0.5:
            prompt = self._prompts[-_AGO]
        else:
            stem = rng.choice(self._stems) if rng.random() < 0.5 else []
            prompt = stem + self._words(rng.randrange(5, 90))
        self._prompts = [*self._prompts[-_AGO:], prompt]
        length = rng.randrange(4, 60)
        self._tokens += len(prompt) + length
        self._running.add(rid)
        return request(
            rid, prompt, length, {"group": "g"}, return_routed_experts=self._scenario.native
        )

    def _words(self, n: int) -> list[int]:
        return [self._rng.randrange(4, VOCABULARY) for _ in range(n)]

    def _follow(self) -> None:
        """Note the tokens of requests that end, and retractions."""
        scheduler = self._engine.scheduler
        process, send = scheduler.process_batch_result, self._engine.sender.send_output

        def processed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = process(batch, *args, **kwargs)
            for req in batch.reqs:
                if req.finished():
                    note(req)
            return result

        def sent(output: Any, req: Any = None) -> Any:
            if type(output).__name__ == "AbortReq" and hasattr(req, "output_ids"):
                note(req)
            return send(output, req)

        def note(req: Any) -> None:
            if req.rid not in self.finished:
                self.finished[req.rid] = [*req.origin_input_ids, *req.output_ids_through_stop]
                self.counts["retracted"] += req.retraction_count > 0
                if not req.output_ids:
                    self.unanswered.add(req.rid)
                self.counts["loaded"] += req.cached_tokens_host
                self.counts["from storage"] += req.cached_tokens_storage
                self.counts["drafts"] += getattr(req, "spec_num_correct_drafts", 0)
                self.counts["aborted"] += type(req.finished_reason).__name__ == "FINISH_ABORT"

        scheduler.process_batch_result = processed
        self._engine.sender.send_output = sent


class Served:
    """What became of a scenario that SGLang's HTTP server ran.

    Args:
        answers: by request id.
    """

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.finished = {rid: answer.tokens for rid, answer in answers.items()}
        self.own_rows = {rid: answer.rows for rid, answer in answers.items()}
        retracted = sum(answer.num_retractions > 0 for answer in answers.values())
        self.counts = Counter[str](retracted=retracted)
        self.kept: dict[str, int] = {}
        self.unanswered: set[str] = set()
        self.faults = [
            f"{rid}: handles {answer.handles}"
            for rid, answer in answers.items()
            if not _are_handles(answer.handles, _handles(rid, answer))
        ]


def _are_handles(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Whether handles are as expected, and each has a nonce."""
    named = [dict(handle) for handle in found]
    nonces = [handle.pop("nonce", None) for handle in named]
    return named == expected and all(isinstance(n, int) and 0 < n < 1 << 53 for n in nonces)


def _handles(rid: str, answer: Answer) -> list[dict[str, Any]]:
    """Return the handles that an answer must have, but for their nonces."""
    if seams.ANSWERS.place is None:
        return []
    return [{"run": "tiny", "trace_id": rid, "num_tokens": len(answer.tokens)}]


def play(scenario: Scenario, seed: int, num_rows: int) -> dict[str, Any]:
    """Run a scenario; return what came of it."""
    rng, counts = random.Random(f"{scenario.name} {seed}"), Counter[str]()
    faults: list[str] = []
    missing: Counter[str] = Counter()
    fate: dict[str, Counter[str]] = {"cells": Counter(), "native_cells": Counter()}
    with tempfile.TemporaryDirectory() as folder, run_server() as server:
        model = write_model(Path(folder), seed)
        if scenario.arguments.get("speculative_algorithm") == "EAGLE":
            drafter = {"speculative_draft_model_path": str(write_drafter(model, seed))}
            scenario = replace(scenario, arguments=scenario.arguments | drafter)
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(Path(folder, "storage"))
        if scenario.retracts:  # read when SGLang is imported
            os.environ.update(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="23")
        if not scenario.served:
            prepare(server.target, run="tiny", linger_seconds=0.05)
        if scenario.skips is not None or scenario.uncaptured:
            faults = _refusal(model, scenario.skips)
            return {"missing": {}, "faults": faults, **fate}
        if scenario.served:
            given = scenario.arguments, rng, num_rows, scenario.pair
            served = Served(generate(model, server.target, *given))
            run: Run | Served = served
            faults += served.faults
        else:
            run = _run_here(scenario, model, rng, num_rows, faults)
        engines: set[str] = set()
        reference = Reference(model)
        with RouteClient(server.target, run="tiny") as client:
            for rid, tokens in run.finished.items():
                if rid in run.unanswered and not _begun(client, rid):
                    continue
                mine = {name: Counter[str]() for name in fate}
                own = run.own_rows.get(rid)
                found = _compare(
                    scenario, own, reference, client, rid, tokens, counts, missing, faults, mine
                )
                engines.update(client.stat(rid).engine_ids if found else ())
                if scenario.updates == "retract" and len(found or ()) > 1 and rid not in run.kept:
                    # Old rows of a prompt whose answer is new: which ones are right is a choice.
                    counts["changed before the answer"] += 1
                    continue
                for name, counted in mine.items():
                    fate[name] += counted
                if found and rid in run.kept:
                    at = run.kept[rid]
                    if found != ((0, at, None), (at, len(tokens) - 1, 1)):
                        faults.append(f"{rid}: weights {found}, but they changed at row {at}")
    counts.update(run.counts)
    if len(engines) != scenario.engines:
        faults.append(f"rows of engines {sorted(engines)}")
    pauses = scenario.updates == "retract" or (scenario.pair and scenario.pair.pauses)
    if (scenario.retracts or pauses) and not counts["retracted"]:
        faults.append("nothing was retracted")
    if scenario.pair is not None and not scenario.pair.captures and not missing["kv_unknown"]:
        faults.append("rows of prompts are served, but their prefill engine captures nothing")
    if scenario.drafts and not counts["drafts"]:
        faults.append("no draft was accepted")
    where = "from storage" if "hicache_storage_backend" in scenario.arguments else "loaded"
    if scenario.again and not counts[where]:
        faults.append("nothing was loaded from host memory or storage")
    if scenario.aborts and not counts["aborted"]:
        faults.append("nothing was aborted")
    if scenario.updates == "failed":
        if not missing["not_captured"]:
            faults.append("no row is missing under unknown weights")
    elif scenario.updates and not counts["changed"]:
        faults.append("no rows of both weights in one trace")
    return {**counts, "missing": dict(missing), "faults": faults, **fate}


def _run_here(
    scenario: Scenario, model: Path, rng: random.Random, num_rows: int, faults: list[str]
) -> Run:
    """Run a scenario in this process."""
    engine = Engine(model, enable_return_routed_experts=scenario.native, **scenario.arguments)
    run = Run(scenario, engine, rng)
    engine.run(lambda: run.each(num_rows))
    from routetrace.capture_agent.engines.sglang.plugin import current

    capture = current()
    assert capture is not None
    capture.close()
    if capture.faults:
        faults.append("capture broke down")
    return run


def _refusal(model: Path, layer: int | None) -> list[str]:
    """Start a server with a layer that is not captured, or without a capturer (None).

    Returns:
        A fault unless it is refused.
    """
    from sglang.srt.layers.moe import topk
    from sglang.srt.model_executor.model_runner import ModelRunner

    expected = f"layers [{layer}] show no ids"
    if layer is None:
        expected = "makes no capturer"
        ModelRunner.init_routed_experts_capturer = lambda _: None
    shown = topk.capture_routed_experts_if_allowed

    def hide(config: Any, layer_id: int, ids: Any) -> None:
        if layer_id != layer:
            shown(config, layer_id, ids)

    topk.capture_routed_experts_if_allowed = hide
    try:
        Engine(model)
    except SystemExit as refusal:
        if expected in str(refusal):
            return []
        return [f"refused otherwise: {refusal}"]
    return ["it started"]


def _begun(client: RouteClient, rid: str) -> bool:
    """Return whether a request that was aborted without an answer has a trace."""
    try:
        client.get(rid, missing="mask")
    except NotFound:
        return False
    return True


def _compare(
    scenario: Scenario,
    own: npt.NDArray[Any] | None,
    reference: Reference,
    client: RouteClient,
    rid: str,
    tokens: list[int],
    counts: Counter[str],
    missing: Counter[str],
    faults: list[str],
    fate: dict[str, Counter[str]],
) -> tuple[tuple[int, int, int | None], ...] | None:
    """Compare a trace; return its weight versions, or None if it cannot be compared."""
    try:
        options = ReadOptions(missing="mask", wait_for="end", timeout=30)
        trace = client.get(rid, options=options)
    except RouteTraceError as error:
        faults.append(f"{rid}: {error}")
        return None
    counts["traces"] += 1
    rows = len(tokens) - 1
    if len(trace) != rows:
        faults.append(f"{rid}: {trace!r} of {len(tokens)} tokens")
        return None
    trace.verify_tokens(tokens)
    for gap in trace.missing:
        missing[gap.reason] += gap.stop - gap.start
        if gap.reason not in scenario.may_lack and not (
            gap.reason == "aborted" and scenario.aborts
        ):
            faults.append(f"{rid}: missing {gap}")
    phases = [(start, stop, version == 1) for start, stop, version in trace.weight_versions]
    changed = any(changed for *_, changed in phases)
    counts["changed"] += changed and len(phases) > 1
    recomputed = scenario.updates == "retract"
    choice = reference.choose(tokens[:-1], phases if changed else (), recomputed)
    fate["cells"] += fates(choice, trace.topk_ids, trace.valid, trace.missing, trace.layer_ids)
    same, ties = choice.agrees(trace.topk_ids)
    wrong = trace.valid & ~same
    counts["rows"] += int(trace.valid.all(axis=1).sum())
    counts["ties"] += ties
    counts["wrong"] += int(wrong.any(axis=1).sum())
    if wrong.any():
        faults.append(f"{rid}: rows {np.flatnonzero(wrong.any(axis=1))[:5]} are wrong")
    if scenario.native:
        found = fates(choice, None if own is None else own[:, list(trace.layer_ids)])
        fate["native_cells"] += found
        if scenario.own_are_right and found[WRONG]:
            faults.append(f"{rid}: {found[WRONG]} cells of SGLang's own return are wrong")
        if scenario.served and own is not None and not found[WRONG] and trace.valid.all():
            text = base64.b64encode(own.tobytes()).decode()
            faults += [f"{rid}: {name}'s array differs" for name in differing(text, trace)]
            counts["in frameworks"] += 1
    return trace.weight_versions


def main() -> int:
    """Return 1 if a row is wrong, or missing without a reason."""
    parser = argparse.ArgumentParser("python -m sglang_runs", description=__doc__)
    parser.add_argument("--rows", type=int, default=32_000, help="compared in all, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append", help="only those of these names")
    parser.add_argument("--share", action="store_true", help="fewer scenarios and rows: for CI")
    parser.add_argument("--json", type=Path, help="also writes the results there")
    parser.add_argument("--alone", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.alone:
        started = time.monotonic()
        scenario = next(s for s in SCENARIOS if s.name in args.scenario)
        result = play(scenario, args.seed, max(args.rows, _EVICTING if scenario.again else 0))
        result["seconds"] = round(time.monotonic() - started)
        print(f"\nRESULT {json.dumps(result)}", flush=True)
        os._exit(0)  # threads of SGLang do not end
    names = SHARE if args.share else tuple(s.name for s in SCENARIOS)
    if able := ABLE.get(version("sglang")):
        names = tuple(name for name in names if name in able)
    names = tuple(name for name in names if not args.scenario or name in args.scenario)
    if not names:
        parser.error(f"no scenario of this share and version is called {args.scenario}")
    rows = 2_000 if args.share else -(-args.rows // len(names))
    total, failed = Counter[str](), 0
    results: dict[str, Any] = {}
    for name in names:
        command = ["--alone", "--scenario", name, "--seed", str(args.seed), "--rows", str(rows)]
        done = subprocess.run(
            [sys.executable, "-m", "sglang_runs", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{name}, seed {args.seed}: FAULT no result\n{done.stderr[-12_000:]}", flush=True)
            failed += 1
            results[name] = {"faults": ["no result"]}
            continue
        result = json.loads(lines[-1].removeprefix("RESULT "))
        results[name] = dict(result)
        faults = result.pop("faults")
        print(f"{name}, seed {args.seed}: {result}", flush=True)
        for fault in faults[:_TOLD]:
            print(f"    FAULT {fault}", flush=True)
        failed += bool(faults)
        total.update(rows=result.get("rows", 0), wrong=result.get("wrong", 0))
    print(f"\ntotal: {dict(total)}, {failed} scenarios failed")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 1 if failed or total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
