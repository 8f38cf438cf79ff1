"""Breaks the code on purpose, and shows that the oracle sees it.

Each mutation is a textual replacement in a copy of the sources. A mutation that the oracle does not
catch means that the oracle is too weak; one that no longer applies, that the code has changed: both
are failures.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "server", "client", "capture_agent")
TESTS = Path(__file__).parents[1]

#: Cells after which a mutation counts as not caught, and seconds after which a run stands still.
_CELLS = 10_000_000
_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Mutation:
    """A way to break the code."""

    name: str
    path: str
    old: str
    """Occurs once in the file."""
    new: str
    seed: int = 1000
    """Of the first run; it is caught soon from there on."""
    world: str = "inline"
    """One of `oracle.runs.WORLDS`."""


SERVER = "server/routetrace/server"
AGENT = "capture_agent/routetrace/capture_agent"

MUTATIONS = (
    Mutation(
        "slot writes of a window out of order",
        f"{SERVER}/index/apply.py",
        "enumerate(self.chunk.ops, 1)",
        "enumerate("
        "sorted(self.chunk.ops, key=lambda op: -op[10] if op[3] == NO_REQUEST else 0), 1)",
    ),
    Mutation(
        "a host block keeps the rows of what it held before",
        f"{SERVER}/index/slot_map.py",
        "        runs, nths = self._run_again(self._run[held], step + 1), self._nth[held]\n",
        "        runs, nths = self._run_again(self._run[held], step + 1), self._nth[held]\n"
        "        old = self._run[[*pairs]]\n"
        "        runs = np.where(old > 0, old, runs)\n",
        seed=1015,
    ),
    Mutation(
        "a copy names rows that its source names later",
        f"{AGENT}/pipeline/framer.py",
        "        self.flush_writers(blocks)\n        self._owners.copy(",
        "        self._owners.copy(",
        seed=1015,
    ),
    Mutation(
        "first write wins in the slot map",
        f"{SERVER}/index/slot_map.py",
        '        self._cells["ref"][cells] = refs\n',
        '        old = self._cells["ref"][cells]\n'
        '        self._cells["ref"][cells] = np.where(old == UNKNOWN, refs, old)\n',
    ),
    Mutation(
        "blocks handed out anew keep their rows",
        f"{SERVER}/index/apply.py",
        "                if kind == BLOCKS:\n                    self.slots.erase(blocks)\n",
        "                if kind == BLOCKS:\n",
    ),
    Mutation(
        "uncached blocks of a new request keep their rows",
        f"{SERVER}/index/apply.py",
        "            self.slots.erase(source.blocks[new:])\n",
        "",
    ),
    Mutation(
        "rows given up by a preemption kept",
        f"{SERVER}/index/traces/sources.py",
        """        self.give_up(position)
        self.remove(position)
""",
        """        self.give_up(position)
""",
    ),
    Mutation(
        "rows that are taken back kept in their slots",
        f"{SERVER}/index/apply.py",
        """        self._remove(key, source, position)
        self._forget(source, position, FOREVER)
""",
        """        self._remove(key, source, position)
""",
    ),
    Mutation(
        "drafts in slots before they are confirmed",
        f"{SERVER}/index/apply.py",
        "        if tentative:\n            sure",
        "        if False:\n            sure",
    ),
    Mutation(
        "confirmed drafts in no slot",
        f"{SERVER}/index/apply.py",
        "                    self._name(source, span.cut(start, end), source.draft_step)\n",
        "                    pass\n",
    ),
    Mutation(
        "a skipped pass confirms nothing",
        f"{SERVER}/index/apply.py",
        "                    if count:\n                        self._confirm",
        "                    if False:\n                        self._confirm",
        seed=5000,
    ),
    Mutation(
        "what lies behind the end of a request kept in its slots",
        f"{SERVER}/index/apply.py",
        "        self._confirm(source, position)\n"
        "        self.slots.forget_run(source.blocks, position, FOREVER)\n",
        "        self._confirm(source, FOREVER)\n",
    ),
    Mutation(
        "the last token of a request kept in its slot",
        f"{SERVER}/index/apply.py",
        "self._release(source, max(0, count - 1))",
        "self._release(source, count)",
    ),
    Mutation(
        "drafts confirmed after their blocks were forgotten",
        f"{SERVER}/index/slot_map.py",
        "            if max(self._erased[self._entry(block)], self._all_erased) <= since:\n",
        "            if True:\n",
    ),
    Mutation(
        "a snapshot forgets which drafts slots are to name",
        f"{SERVER}/index/traces/sources.py",
        "        drafts=SpanList(message.drafts),\n",
        "",
    ),
    Mutation(
        "tentative rows served",
        f"{SERVER}/index/traces/sources.py",
        "        if attempt < len(self.attempts) - 1 or not self.tentative:\n",
        "        if True:\n",
    ),
    Mutation(
        "a resumed request goes on in its first attempt",
        f"{SERVER}/index/traces/sources.py",
        "        self.attempts.append(SpanList())\n",
        "",
    ),
    Mutation(
        "off by one at finish",
        f"{SERVER}/index/apply.py",
        "source.ended, source.num_tokens, source.finish_reason = True, count, arg",
        "source.ended, source.num_tokens, source.finish_reason = True, count + 1, arg",
    ),
    Mutation(
        "every seventh chunk dropped in silence",
        f"{SERVER}/index/apply.py",
        """    yield from _Applier(state, writer, chunk, number, now).run()
""",
        """    if change.sequence % 7:
        yield from _Applier(state, writer, chunk, number, now).run()
""",
    ),
    Mutation(
        "external KV taken from the slot map",
        f"{SERVER}/index/apply.py",
        "num_computed_tokens - num_external_tokens\n        source.blocks",
        "num_computed_tokens\n        source.blocks",
    ),
    Mutation(
        "blocks that were loaded keep their rows",
        f"{SERVER}/index/apply.py",
        """            elif kind == EXTERNAL:
                self.slots.erase(blocks)
""",
        """            elif kind == EXTERNAL:
                pass
""",
    ),
    Mutation(
        "a stage joined to another request",
        f"{SERVER}/index/traces/sources.py",
        "        return self.writer.engine_id, self.request_id, self.occurrence\n",
        '        return self.writer.engine_id, "", ""\n',
        seed=1018,
    ),
    Mutation(
        "a sweep forgets the slots",
        f"{SERVER}/index/state.py",
        "            yield chain(writer.slots.chunks().tolist(), *drafts)\n",
        "            yield ()\n",
    ),
    Mutation(
        "a snapshot forgets what is tentative",
        f"{SERVER}/index/traces/sources.py",
        "        tentative=message.tentative,\n",
        "",
    ),
    Mutation(
        "two layers swapped",
        "client/routetrace/client/_core/assemble.py",
        "return _Placed(frame, columns.layer_ids, columns.where,",
        "ids = columns.layer_ids\n"
        "        return _Placed(frame, ids[1::-1] + ids[2:], columns.where,",
    ),
    Mutation(
        "a frame cut at the wrong layer",
        "proto/routetrace/codec/frame_header.py",
        "tuple(layer for layer in layer_ids if group_of[layer] in groups)",
        "layer_ids[: sum(group_layers[g] for g in groups)]",
    ),
    Mutation(
        "late rows of an ended request kept",
        f"{AGENT}/agent.py",
        "        if late is not None:\n            kept =",
        "        if False:\n            kept =",
    ),
    Mutation(
        "requests that go on stand still",
        f"{AGENT}/pipeline/intake.py",
        "positions + counts, counts]",
        "positions, counts]",
    ),
    Mutation(
        "a step goes on from one that was not written last",
        f"{AGENT}/step_path/steady.py",
        "return self._expected.startswith(spans, at)",
        "return len(spans) > 0",
    ),
    Mutation(
        "late rows of a preempted request kept",
        f"{AGENT}/pipeline/framer.py",
        "        if request.phase is Phase.PREEMPTED:\n            self._drop(Word.LATE",
        "        if False:\n            self._drop(Word.LATE",
        seed=1031,
    ),
    Mutation(
        "a late rewind takes later rows along",
        f"{AGENT}/pipeline/framer.py",
        "        if not step or self._linger.step[request.lane] <= step:\n",
        "        if True:\n",
    ),
    Mutation(
        "nobody says which rows are tentative",
        f"{AGENT}/pipeline/emitter.py",
        "position, ids[part], *facts)\n                    request.emitted",
        "position, ids[part], *facts[:2], 0)\n                    request.emitted",
    ),
    Mutation(
        "samples that start in one step share nothing",
        f"{AGENT}/pipeline/framer.py",
        "            self._starting[lane] = known\n",
        "            self._starting[lane] = known\n"
        "            self._inherit(lane)\n"
        "            return\n",
    ),
    Mutation(
        "rows of a step in their own order, whoever inherits them",
        f"{AGENT}/pipeline/framer.py",
        "sorted(slow, key=lambda i: turns.get(int(lanes[i]), 0))",
        "sorted(slow, key=lambda i: -turns.get(int(lanes[i]), 0))",
    ),
    Mutation(
        "late rows leave their slots as they are",
        f"{AGENT}/pipeline/framer.py",
        "            self._out.forget(slots)\n",
        "            pass\n",
    ),
    Mutation(
        "a prefix looked up before its rows were sent",
        f"{AGENT}/pipeline/framer.py",
        "            self._emitter.flush(np.unique(hit))\n",
        "            self._emitter.flush(hit[:0])\n",
    ),
    Mutation(
        "a rank's second range of positions not sent",
        f"{SERVER}/rows/view.py",
        "for a, b in ranges if max(a, start) < min(b, stop)]",
        "for a, b in ranges[:1] if max(a, start) < min(b, stop)]",
    ),
    Mutation(
        "rows of a rank placed one token late",
        "client/routetrace/client/plan.py",
        "first = self.at + (start - self.start) * self.stride",
        "first = self.at + min(start - self.start + (start > self.start), stop - start)",
    ),
    Mutation(
        "rows stand in for KV that may be of other weights",
        f"{AGENT}/step_path/kv_version.py",
        "            and (not external or self._is_outside(version))\n",
        "",
    ),
    Mutation(
        "live requests when caches are emptied ignored",
        f"{AGENT}/step_path/kv_version.py",
        "        self._blocks = UNKNOWN_VERSION if live else None\n",
        "        self._blocks = None\n",
    ),
    Mutation(
        "rows stand in for cached KV that may be of other weights",
        f"{AGENT}/step_path/kv_version.py",
        "            and (not cached or self._blocks in (None, version))\n",
        "",
    ),
    Mutation(
        "the earliest trace's rows stand in first",
        f"{SERVER}/rows/prefixes.py",
        "order = np.where(serial > own, serial, own - serial)",
        "order = serial.copy()",
    ),
    Mutation(
        "no request's rows stand in for another one's of its trace",
        f"{SERVER}/rows/prefixes.py",
        "if other is not trace or request.number != owner.number:",
        "if other is not trace:",
    ),
    Mutation(
        "one of several passes counts as the only one",
        f"{SERVER}/rows/prefixes.py",
        "        several += intersect(once, mine)\n",
        "",
    ),
    Mutation(
        "inherited rows stand in",
        f"{SERVER}/rows/prefixes.py",
        "if span.provenance == Provenance.FORWARD and span.weight_version == version:\n",
        "if span.weight_version == version:\n",
    ),
    Mutation(
        "a snapshot forgets which prefixes were computed",
        f"{SERVER}/index/traces/trace_index.py",
        "        self.prefixes.add(trace)\n",
        "",
    ),
    Mutation(
        "a reader that wants no rows of others gets them",
        f"{SERVER}/rows/served.py",
        "        if not own.holes or prefix_rows == pb.PREFIX_ROWS_NEVER:\n",
        "        if not own.holes:\n",
    ),
    Mutation(
        "parts of a trace in the order of the workers",
        f"{SERVER}/spread/parts.py",
        "sources.sort(key=lambda s: s[:3])",
        "sources.sort(key=lambda s: s[1:3])",
        world="sharded",
    ),
    Mutation(
        "references into another worker's chunks as its own",
        f"{SERVER}/spread/parts.py",
        "aliases = {n: held[n].alias if n in held else UNKNOWN_CHUNK for n in own}",
        "aliases = {n: n for n in own}",
        world="sharded",
    ),
    Mutation(
        "the part of the first worker is all of a trace",
        f"{SERVER}/spread/gathering.py",
        "if len(places.workers) + len(places.fates) > 1:",
        "if len(places.fates) > 1:",
        world="sharded",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation."""

    mutation: Mutation
    caught: bool
    how: str
    """Seed and first difference; else what went wrong."""
    seconds: float


def judge(mutation: Mutation) -> Verdict:
    """Runs the oracle against a copy of the sources with one mutation."""
    started = time.monotonic()
    with TemporaryDirectory(prefix="mutation-") as directory:
        for source in SOURCES:
            shutil.copytree(
                ROOT / source, Path(directory, source), ignore=shutil.ignore_patterns("__pycache__")
            )
        path = Path(directory, mutation.path)
        text = path.read_text()
        if text.count(mutation.old) != 1:
            how = f"does not apply: {text.count(mutation.old)} times in {mutation.path}"
            return Verdict(mutation, False, how, 0.0)
        path.write_text(text.replace(mutation.old, mutation.new))
        command = f"-m oracle --world {mutation.world} --seed {mutation.seed} --cells {_CELLS}"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*(f"{directory}/{s}" for s in SOURCES), str(TESTS)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *command.split()]
        out = _run(command, env)
    seconds = time.monotonic() - started
    if found := re.search(r"WRONG: (seed.*)", out):
        return Verdict(mutation, True, found[1], seconds)
    return Verdict(mutation, False, f"not caught: {out.strip().splitlines()[-1]}", seconds)


def _run(command: list[str], env: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"still running after {_TIMEOUT_S} s"
    return done.stdout + done.stderr


def judge_all(mutations: Iterable[Mutation]) -> Iterable[Verdict]:
    """As many at a time as there are CPUs, in order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(judge, mutations)


def main() -> int:
    """Prints the table; returns 1 if a mutation was not caught."""
    parser = argparse.ArgumentParser(prog="oracle.mutations")
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--every", type=int, default=1, help="each nth; others on other days")
    args = parser.parse_args()
    first = int(time.time() // 86400) % args.every
    chosen = [m for m in MUTATIONS[first :: args.every] if not args.names or m.name in args.names]
    print(f"{len(chosen)} of {len(MUTATIONS)} mutations, from number {first} on")
    missed = 0
    for verdict in judge_all(chosen):
        missed += not verdict.caught
        mark = "" if verdict.caught else "MISSED "
        how = f"{mark}{verdict.how}"
        print(f"{verdict.mutation.name:<44}{verdict.seconds:5.0f} s  {how:.160}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
