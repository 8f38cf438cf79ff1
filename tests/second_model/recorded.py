"""The second model over the runs of the first: what the oracle's engines tell is kept in a log too.

A `RecordingWorld` takes the place of the oracle's inline world. Each agent that it hands out also
writes every call to a `Log`; when the run is over, the answers of the server that the oracle has
compared with its own truth are compared with this one. Both models then judge the same answers, so
that where they disagree at least one of them fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from oracle import harness
from oracle.world import EngineSpec, Shard
from second_model.drive import Ask, Report, judge, labels_of
from second_model.log import Log, Part, Writer

#: Of every recorded run, in order.
REPORTS: list[Report] = []

#: Cells of one run after which no further trace is judged; those left out are counted.
CELLS = 200_000


class RecordingAgent:
    """A capture agent whose calls are kept; an `oracle.world.Sink`."""

    def __init__(self, agent: Any, log: Log, writer: Writer) -> None:
        self._agent, self._log, self._writer = agent, log, writer
        self._parts: dict[int, Part] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def begin(
        self,
        request_id: str,
        *,
        trace_id: str | None = None,
        prompt_len: int = 0,
        num_computed_tokens: int = 0,
        num_external_tokens: int = 0,
        block_ids: Iterable[int] = (),
        prompt_token_ids: Any = None,
        transfer_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> int:
        blocks = list(block_ids)
        handle: int = self._agent.begin(
            request_id,
            trace_id=trace_id,
            prompt_len=prompt_len,
            num_computed_tokens=num_computed_tokens,
            num_external_tokens=num_external_tokens,
            block_ids=blocks,
            prompt_token_ids=prompt_token_ids,
            transfer_id=transfer_id,
            labels=labels,
            **facts,
        )
        self._parts[handle] = self._log.begin(
            self._writer,
            request_id,
            trace_id or "",
            prompt_len,
            num_computed_tokens,
            num_external_tokens,
            blocks,
            prompt_token_ids,
            transfer_id or "",
            {**(labels or {}), **({} if prompt_token_ids is None else labels_of(prompt_token_ids))},
        )
        return handle

    def add_blocks(self, handle: int, block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        self._agent.add_blocks(handle, blocks)
        self._log.add_blocks(self._parts[handle], blocks)

    def rewind(self, handle: int, position: int, *, step: int = 0) -> None:
        self._agent.rewind(handle, position, step=step)
        self._log.rewind(self._parts[handle], position, step)

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        self._agent.preempt(handle, num_computed_tokens)
        self._log.preempt(self._parts[handle], num_computed_tokens)

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        *,
        block_ids: Iterable[int] = (),
        num_external_tokens: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        blocks = list(block_ids)
        told = {} if num_tokens is None else {"num_tokens": num_tokens}
        self._agent.resume(
            handle,
            num_computed_tokens,
            block_ids=blocks,
            num_external_tokens=num_external_tokens,
            **told,
        )
        part = self._parts[handle]
        self._log.resume(part, num_computed_tokens, blocks, num_external_tokens, num_tokens)

    def finish(
        self,
        handle: int,
        num_tokens: int,
        *,
        reason: str = "stop",
        token_ids: Any = None,
        transfer_id: str | None = None,
    ) -> None:
        named = {} if transfer_id is None else {"transfer_id": transfer_id}
        self._agent.finish(handle, num_tokens, reason=reason, token_ids=token_ids, **named)
        part = self._parts[handle]
        self._log.finish(part, num_tokens, reason, token_ids, transfer_id or "")

    def mark_external(self, block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        self._agent.mark_external(blocks)
        self._log.external(self._writer, blocks)

    def copy_blocks(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        read, written = list(sources), list(targets)
        self._agent.copy_blocks(read, written)
        self._log.copy(self._writer, read, written)

    def reset_prefix_cache(self) -> None:
        self._agent.reset_prefix_cache()
        self._log.reset(self._writer)

    def reset_external_kv(self) -> None:
        self._agent.reset_external_kv()
        self._log.emptied(self._writer)

    def set_weight_version(self, version: int | None) -> None:
        self._agent.set_weight_version(version)
        self._log.set_version(self._writer, version)

    def step(self, rows: np.ndarray, runs: Any) -> int:
        number: int = self._agent.step(rows, runs)
        self._told(number, runs, self._ids(rows))
        return number

    def skip(self, runs: Any) -> int:
        number: int = self._agent.skip(runs)
        self._told(number, runs, None)
        return number

    def _told(
        self, number: int, runs: Any, ids: list[Mapping[int, tuple[int, ...]]] | None
    ) -> None:
        if not number:  # no rows: a rank to which the step dealt none
            return
        self._writer.step = number - 1
        taken = [(self._parts[int(h)], int(start), int(n)) for h, start, n in np.asarray(runs)]
        self._log.step(self._writer, taken, ids)

    def _ids(self, rows: np.ndarray) -> list[Mapping[int, tuple[int, ...]]]:
        layers = self._writer.layer_ids
        return [
            {layer: tuple(ids) for layer, ids in zip(layers, row, strict=True)}
            for row in np.asarray(rows).tolist()
        ]


class RecordingWorld(harness.InlineWorld):
    """The oracle's inline world, with a log beside it."""

    def __init__(self, layout: Any, seed: int) -> None:
        super().__init__(layout, seed)
        self.log = Log()
        self._writers: dict[tuple[str, str], Writer] = {}
        #: Traces that the log says too little of: of engines that crashed, or bound to blocks.
        self._unclear: set[str] = set()

    def connect(self, spec: EngineSpec, shard: Shard, boot_id: str) -> Any:
        self._lost(spec.engine_id, shard.name)
        agent = super().connect(spec, shard, boot_id)
        writer = Writer(
            spec.engine_id,
            boot_id,
            shard.name,
            tuple(shard.layer_ids),
            self.layout.num_experts,
            spec.block_size,
            spec.num_blocks,
            spec.host_blocks,
            model=spec.model,
            declares=spec.empties == "declared",
        )
        self._writers[spec.engine_id, shard.name] = self.log.writer(writer)
        return RecordingAgent(agent, self.log, writer)

    def barrier(self) -> None:
        super().barrier()
        self.log.flushed()

    def crash(self, engine_id: str) -> None:
        for key in list(self._writers):
            if key[0] == engine_id:
                self._lost(*key)
        super().crash(engine_id)

    def _lost(self, engine_id: str, shard: str) -> None:
        writer = self._writers.pop((engine_id, shard), None)
        if writer is not None:
            self._unclear.update(p.trace_id for p in writer.parts)

    def bind(
        self,
        engine_id: str,
        request_id: str,
        trace_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        num_computed_tokens: int,
        step: int,
        token_ids: Sequence[int] | None,
    ) -> None:
        super().bind(
            engine_id,
            request_id,
            trace_id,
            block_ids,
            num_tokens,
            num_computed_tokens,
            step,
            token_ids,
        )
        self._unclear.add(trace_id)

    def settle(self) -> None:
        super().settle()
        self.log.settled = True

    def close(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self._judge()
        finally:
            super().close()

    def _judge(self) -> None:
        self.log.unclear = self._unclear
        report = Report()
        prefix_rows = self.rng.choice(("unique", "any"))
        ask = Ask(self.client, "", (), self.layout.layer_ids, prefix_rows)
        traces = list(dict.fromkeys(p.trace_id for p in self.log.parts))
        self.rng.shuffle(traces)
        for trace_id in traces:
            if trace_id in self._unclear or report.counts["cells"] >= CELLS:
                report.counts["traces left out"] += 1
                continue
            report.counts["traces"] += 1
            judge(self.log, [trace_id], ask, report)
        REPORTS.append(report)


def main() -> int:
    """Runs the oracle's own command over recorded worlds; its arguments are the oracle's."""
    harness.InlineWorld = RecordingWorld  # type: ignore[misc]
    from oracle import __main__ as command

    failed = command.main()
    counts = sum((r.counts for r in REPORTS), Counter[str]())
    findings = [f for r in REPORTS for f in r.findings]
    print(
        f"the second model over the same {len(REPORTS)} runs: {counts['traces']:,} traces "
        f"({counts['traces left out']:,} left out), {counts['cells']:,} cells, "
        f"{len(findings)} findings"
    )
    print("\n".join(findings[:40]))
    return 1 if findings else int(failed or 0)


if __name__ == "__main__":
    sys.exit(main())
