"""The rows of each trace, one by one, with vLLM's own and with those of Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from routetrace.client import ReadOptions, RouteClient, Trace, TraceState
from routetrace.common.errors import NotFound, RouteTraceError
from support.models.routed_cells import fates
from vllm_runs.engine import Answer
from vllm_runs.reference import Reference
from vllm_runs.report import Tally

#: Seconds in which a trace must have come to its end, after the engine has.
WAIT_S = 20.0


class Comparison:
    """Compares the traces of one run.

    Args:
        client: reads them.
        reference: the model; None if it chooses otherwise, for its precision.
        layers: its MoE layers.
        native: whether vLLM returns its own rows, and they are right.
        handles: the run's name, if responses must hold a handle.
        asked: whether vLLM was asked for its own rows, right or not.
    """

    def __init__(
        self,
        client: RouteClient,
        reference: Reference | None,
        layers: tuple[int, ...],
        native: bool,
        handles: str | None,
        asked: bool = False,
    ) -> None:
        self._client = client
        self._reference = reference
        self._layers = layers
        self._native = native
        self._handles = handles
        self._asked = asked

    def compare(self, answers: Iterable[Answer]) -> Tally:
        """Compare what is served for each of these requests."""
        tally = Tally()
        for answer in answers:
            tally.requests += 1
            faults = self._answer(answer, tally)
            tally.faults += [f"{answer.trace_id}: {fault}" for fault in faults]
        return tally

    def _answer(self, answer: Answer, tally: Tally) -> list[str]:
        try:
            options = ReadOptions(missing="mask")
            if not answer.absent:
                timeout = 1.0 if answer.optional else WAIT_S
                options = ReadOptions(missing="mask", wait_for="end", timeout=timeout)
            # Else a session may be read as of the turn before.
            whole = not (answer.absent or answer.broken or answer.cut)
            number = len(answer.tokens) if whole else None
            which = _named(answer)
            trace = self._client.get(answer.trace_id, num_tokens=number, options=options, **which)
        except NotFound:
            return [] if answer.absent or answer.optional else ["no such trace"]
        except RouteTraceError as error:
            return [] if answer.optional else [f"{type(error).__name__}: {error}"]
        if answer.absent:
            return [f"there is {trace!r}"]
        faults = self._facts(answer, trace)
        if trace.layer_ids != self._layers:
            return [*faults, f"layers {trace.layer_ids} instead of {self._layers}"]
        latest = self._client.get(answer.trace_id, missing="mask", policy="latest", **which)
        if which and answer.newest:
            alone = self._client.get(answer.trace_id, missing="mask")
            if not np.array_equal(_cells(alone), _cells(trace)):
                faults.append("a read by the trace id alone has other rows than one by the handle")
        return faults + self._rows(answer, trace, latest, tally)

    def _facts(self, answer: Answer, trace: Trace) -> list[str]:
        if answer.broken:
            right = trace.state is TraceState.INCOMPLETE and trace.valid.all()
            return [] if right and 0 < len(trace) < len(answer.tokens) else [f"{trace!r}"]
        faults = []
        number = len(answer.tokens)
        told = trace.num_tokens or 0
        if told < number or (told > number and not answer.cut):
            faults.append(f"{trace.num_tokens} tokens instead of {number}")
        if len(trace) != told - 1:
            faults.append(f"{len(trace)} rows of {trace.num_tokens} tokens")
        whole = TraceState.COMPLETE if trace.valid.all() else TraceState.INCOMPLETE
        if trace.state is not whole or (
            trace.state is not TraceState.COMPLETE and not answer.may_lack
        ):
            faults.append(f"{trace!r}")
        if trace.prompt_len != answer.prompt_len:
            faults.append(f"prompt of {trace.prompt_len} instead of {answer.prompt_len} tokens")
        if not answer.labels.items() <= trace.labels.items():
            faults.append(f"labels {trace.labels} instead of {answer.labels}")
        if answer.versions is not None and trace.weight_versions != answer.versions:
            faults.append(f"weights {trace.weight_versions} instead of {answer.versions}")
        if answer.sources is not None and trace.provenance != answer.sources:
            faults.append(f"rows of {trace.provenance} instead of {answer.sources}")
        if self._handles is not None and answer.has_handle and not answer.cut:
            handle = {"run": self._handles, "trace_id": answer.trace_id, "num_tokens": number}
            told = dict(answer.handle or {})
            if not 0 < told.pop("nonce", 0) < 1 << 53 or told != handle:
                faults.append(f"handle {answer.handle} instead of {handle} and a nonce")
        try:
            trace.verify_tokens(answer.tokens)
            trace.validate()
        except RouteTraceError as error:
            faults.append(f"{type(error).__name__}: {error}")
        return faults

    def _rows(self, answer: Answer, trace: Trace, latest: Trace, tally: Tally) -> list[str]:
        faults = []
        rows = min(len(trace), len(answer.tokens) - 1)
        ids, valid = trace.topk_ids[:rows].astype(np.int64), trace.valid[:rows]
        there = int(valid.any(axis=1).sum())

        for missing in trace.missing:
            before = tally.missing.get(missing.reason, 0)
            tally.missing[missing.reason] = before + missing.stop - missing.start
            if missing.reason not in answer.may_lack:
                faults.append(f"missing {missing}")
        if answer.must_lack and valid[slice(*answer.must_lack)].any():
            faults.append(f"there are rows in {answer.must_lack}")

        wrong = np.zeros_like(valid)
        choice = None
        if self._reference is not None:
            phases = [(a, b, v in answer.changed) for a, b, v in answer.versions or ()]
            tokens = answer.tokens[:rows]
            if answer.loaded is None:
                choice = self._reference.choose(tokens, phases, answer.recomputed)
            else:
                choice = self._reference.choose_handed(tokens, answer.loaded, phases[-1][0])
            choice_again = choice
            same, ties = choice.agrees(ids)
            wrong = valid & ~same
            _add(tally.cells, fates(choice, ids, valid, trace.missing, self._layers))
            if self._asked:
                own = None if answer.native is None else answer.native[:, list(self._layers)]
                _add(tally.native_cells, fates(choice, own))
            tally.reference += there
            tally.ties += ties
            if wrong.any():
                faults.append(f"unlike Transformers': {_where(wrong, self._layers)}")
            if not answer.recomputed:
                if answer.loaded is not None:  # of what both computed the second one's
                    choice_again = self._reference.choose_handed(
                        tokens, answer.loaded, answer.loaded
                    )
                again = latest.valid[:rows] & ~choice_again.agrees(latest.topk_ids[:rows])[0]
                if again.any():
                    faults.append(f"the latest ones are wrong: {_where(again, self._layers)}")

        if answer.native is None and self._native and not answer.cut:
            faults.append("vLLM returned no rows")
        if answer.native is not None:
            native = answer.native.astype(np.int64)
            if native.shape[0] != len(answer.tokens) - 1:
                return [*faults, f"vLLM's own rows are {native.shape}"]
            native = native[:rows, list(self._layers)]
            if choice is not None:
                tally.native_wrong += int((~choice.agrees(native)[0]).any(axis=1).sum())
            if self._native:
                unlike = valid & (native != ids).any(axis=2)
                tally.native += there
                if unlike.any():
                    faults.append(f"unlike vLLM's own: {_where(unlike, self._layers)}")
                wrong |= unlike

        tally.wrong += int(wrong.any(axis=1).sum())
        return faults


def _named(answer: Answer) -> dict[str, int]:
    """Return what names the request of an answer at the server: its handle, where there is one."""
    handle = answer.handle or {}
    if handle.get("trace_id") == answer.trace_id:
        return {"nonce": handle["nonce"]}
    return {} if answer.incarnation is None else {"incarnation": answer.incarnation}


def _cells(trace: Trace) -> np.ndarray:
    """Return the expert ids of a trace, -1 where they are missing."""
    return np.where(trace.valid[..., None], trace.topk_ids.astype(np.int64), -1)


def _add(total: dict[str, int], counts: Mapping[str, int]) -> None:
    for fate, count in counts.items():
        total[fate] = total.get(fate, 0) + count


def _where(cells: np.ndarray, layers: tuple[int, ...]) -> str:
    rows = np.flatnonzero(cells.any(axis=1))
    columns = [layers[i] for i in np.flatnonzero(cells.any(axis=0))]
    return f"{rows.size} of {len(cells)} rows from {rows[0]} to {rows[-1]}, layers {columns}"
