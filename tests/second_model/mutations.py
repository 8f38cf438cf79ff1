"""Breaks the rules of docs/rows.md in the product, one at a time; each model must see each.

python -m second_model.mutations                    by the second model: orders by number and seed
python -m second_model.mutations --model first      by the oracle's worlds, those that it lacks
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from oracle.mutations import AGENT, ROOT, SERVER, SOURCES, TESTS, Mutation
from oracle.mutations import MUTATIONS as ORACLES

MUTATIONS = (
    Mutation(
        "what confirms a draft kept back from who hits it",
        f"{AGENT}/pipeline/framer.py",
        "np.minimum(linger.end[lanes] - linger.fill[lanes], linger.sure[lanes])",
        "linger.end[lanes] - linger.fill[lanes]",
    ),
    Mutation(
        "the rest of a block that is cached in part keeps its rows",
        f"{SERVER}/index/apply.py",
        "        if size and known % size:",
        "        if size and known % size > size:",
    ),
    Mutation(
        "no tombstone of a deleted trace is left",
        f"{SERVER}/index/state.py",
        "        self.tombstones.add(key, sources, fate)\n",
        "",
    ),
    Mutation(
        "a reset leaves slots as they are",
        f"{SERVER}/index/apply.py",
        "                self.slots.forget_all(count)\n",
        "                pass\n",
    ),
    Mutation(
        "drafts that a preemption kept are not confirmed",
        f"{SERVER}/index/apply.py",
        "        self._confirm(source, position)\n        self.slots.forget_run(",
        "        self.slots.forget_run(",
    ),
    Mutation(
        "rows of several requests in one block in any order",
        f"{AGENT}/pipeline/framer.py",
        "                other.alone = False\n",
        "",
    ),
    Mutation(
        "rows of another request stay in slots that a skipped pass wrote",
        f"{AGENT}/pipeline/framer.py",
        "            self._out.forget(self._owners.slots(",
        "            (lambda slots: None)(self._owners.slots(",
    ),
    Mutation(
        "a row that one attempt lost is supplied by another",
        f"{SERVER}/rows/view.py",
        "            if lost := source.lost_in(attempt):\n",
        "            if (lost := source.lost_in(attempt)) and False:\n",
    ),
    Mutation(
        "an attempt that lost its row at the end of the prompt did not sample",
        f"{SERVER}/index/traces/lineage.py",
        "{s.stops[attempt] for s in self.sources if attempt < len(s.stops)}",
        "{s.attempts[attempt].end for s in self.sources if attempt < len(s.stops)}",
    ),
    Mutation(
        "lost rows that are taken back stay lost",
        f"{SERVER}/index/traces/sources.py",
        "            lost.truncate(position)\n",
        "            pass\n",
    ),
    Mutation(
        "reasons of attempts that sampled nothing count",
        f"{SERVER}/rows/gaps.py",
        "        parts = [*parts_of(one, latest=latest)]\n",
        "        parts = [*parts_of(one, latest=latest)]\n        if not latest:\n"
        "            parts[:0] = [parts[0]._replace(attempts=range(owner.first_that_sampled))]\n",
    ),
    Mutation(
        "rows stand in for KV that a pass computed again",
        f"{SERVER}/index/traces/lineage.py",
        "min(self.prompt_len, self._first_pass, *(",
        "min(self.prompt_len, *(",
    ),
    Mutation(
        "digests leave adapters out",
        "proto/routetrace/codec/records.py",
        "for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL))",
        "for name in (KV_CACHE_DTYPE_LABEL,))",
    ),
    Mutation(
        "digests leave the dtype of the KV cache out",
        "proto/routetrace/codec/records.py",
        "for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL))",
        "for name in (ADAPTER_LABEL,))",
    ),
    Mutation(
        "live requests when stores are emptied ignored",
        f"{AGENT}/step_path/kv_version.py",
        "        self._outside = UNKNOWN_VERSION if live else self._blocks\n",
        "        self._outside = self._blocks\n",
    ),
    Mutation(
        "KV in blocks is not written to stores that were emptied",
        f"{AGENT}/step_path/kv_version.py",
        "        self._outside = UNKNOWN_VERSION if live else self._blocks\n",
        "        self._outside = UNKNOWN_VERSION if live else None\n",
    ),
    Mutation(
        "rows stand in for KV that was loaded into blocks",
        f"{AGENT}/step_path/kv_version.py",
        "        self.add(version if self._is_outside(version) else UNKNOWN_VERSION)\n",
        "",
    ),
    Mutation(
        "attempts of a request count as one pass",
        f"{SERVER}/rows/prefixes.py",
        "_of_several(rows for _, rows in passes)",
        "_of_several({(*(id(s) for s, _ in rows),): rows for _, rows in passes}.values())",
    ),
    Mutation(
        "rows stand in beyond what is proven",
        f"{SERVER}/rows/prefixes.py",
        "yield _Candidate(other, request, attempt, min(stop, request.num_rows))\n",
        "yield _Candidate(other, request, attempt, request.num_rows)\n",
    ),
    Mutation(
        "rows stand in for KV that another attempt than the one that sampled read",
        f"{SERVER}/rows/gaps.py",
        "if one.owner.kv_version != UNKNOWN_VERSION and not one.owner.first_that_sampled",
        "if one.owner.kv_version != UNKNOWN_VERSION",
    ),
    Mutation(
        "KV that was given up counts as it was loaded",
        f"{SERVER}/index/traces/sources.py",
        "        if position < self.loaded[1]:\n",
        "        if False:\n",
    ),
    Mutation(
        "a repeated preemption forgets the blocks of late rows",
        f"{AGENT}/pipeline/framer.py",
        "        if not again:",
        "        if True:",
    ),
    Mutation(
        "a resume without a preemption confirms drafts",
        f"{AGENT}/pipeline/framer.py",
        "            self.preempt(handle, num_computed_tokens)\n",
        "            pass\n",
    ),
)

#: Of the oracle's mutations, those of rules for rows that came after 0.7.0.
SHARED = (
    "a host block keeps the rows of what it held before",
    "a copy names rows that its source names later",
    "rows that are taken back kept in their slots",
    "drafts in slots before they are confirmed",
    "confirmed drafts in no slot",
    "a skipped pass confirms nothing",
    "what lies behind the end of a request kept in its slots",
    "the last token of a request kept in its slot",
    "drafts confirmed after their blocks were forgotten",
    "rows of a step in their own order, whoever inherits them",
    "what confirms a draft kept back from who hits it",
    "late rows of a preempted request kept",
    "live requests when caches are emptied ignored",
    "rows stand in for KV that may be of other weights",
    "rows stand in for cached KV that may be of other weights",
    "the earliest trace's rows stand in first",
    "no request's rows stand in for another one's of its trace",
    "one of several passes counts as the only one",
    "inherited rows stand in",
    "a snapshot forgets which drafts slots are to name",
    "a snapshot forgets which prefixes were computed",
    "a reader that wants no rows of others gets them",
)

#: By model: mutations of rules that it does not cover, and why.
NOT_COVERED = {
    "first": {
        "no tombstone of a deleted trace is left": "its worlds delete no trace",
        "live requests when stores are emptied ignored": "its engines get there too seldom",
        "KV in blocks is not written to stores that were emptied": "the same",
        "rows stand in for KV that was loaded into blocks": "the same",
        "attempts of a request count as one pass": "the same",
        "rows stand in beyond what is proven": "the same",
        "rows stand in for KV that another attempt than the one that sampled read": "the same",
        "KV that was given up counts as it was loaded": "its engines keep what they loaded",
        "a repeated preemption forgets the blocks of late rows": "its engines preempt once",
        "a resume without a preemption confirms drafts": "its engines preempt first",
        # Rows get there only by a pass that computes the same tokens into the same slots while the
        # other request goes on in parts. Its own drafts there are no case: such an engine would
        # spoil a block that others can hit.
        "the rest of a block that is cached in part keeps its rows": "its engines leave what lies "
        "behind a hit inside a block to the request that hits it",
    },
    "second": {
        "a snapshot forgets which drafts slots are to name": "its servers never start again",
        "a snapshot forgets which prefixes were computed": "its servers never start again",
        "a reader that wants no rows of others gets them": "its readers have the default policy",
    },
}

_COMMANDS = {
    "second": "-m second_model --first --shrink 0 --events 0 --random 20 --length 25",
    "first": "-m oracle --world inline --cells 3000000 --seed 1000",
}


def judge(mutation: Mutation, model: str, root: Path, timeout_s: float) -> str:
    """Whether a model sees a mutation, in words."""
    if why := NOT_COVERED[model].get(mutation.name):
        return f"not covered: {why}"
    original = (root / mutation.path).read_text()
    if original.count(mutation.old) != 1:
        return "DOES NOT APPLY"
    with TemporaryDirectory(prefix="mutation-") as directory:
        for source in SOURCES:
            shutil.copytree(
                root / source, Path(directory, source), ignore=shutil.ignore_patterns("__pycache__")
            )
        Path(directory, mutation.path).write_text(original.replace(mutation.old, mutation.new))
        path = [*(str(Path(directory, source)) for source in SOURCES), str(TESTS)]
        facts = {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        started = time.monotonic()
        try:
            run = subprocess.run(
                [sys.executable, *_COMMANDS[model].split()],
                env={**os.environ, **facts},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "NOT CAUGHT"
    took = f"{time.monotonic() - started:.0f} s"
    said = [line for line in run.stdout.splitlines() if "->" in line or "WRONG" in line]
    if not said:
        return f"NOT CAUGHT in {took}: {(run.stderr.splitlines() or ['no finding'])[-1]:.100}"
    return f"caught in {took}: {said[-1].strip():.100}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(_COMMANDS), default="second")
    parser.add_argument("--only", default="", help="mutations whose names hold this")
    parser.add_argument("--root", type=Path, default=ROOT, help="the sources")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each")
    args = parser.parse_args()
    started, failed = time.monotonic(), 0
    # The oracle's own command has judged its own already.
    shared = [m for m in ORACLES if m.name in SHARED] if args.model == "second" else []
    chosen = [m for m in (*shared, *MUTATIONS) if args.only in m.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda m: judge(m, args.model, args.root, args.timeout), chosen)
        for mutation, verdict in zip(chosen, verdicts, strict=True):
            failed += not verdict.startswith(("caught", "not covered"))
            print(f"{mutation.name:<64}{args.model} model: {verdict}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(chosen) - failed} of {len(chosen)}, {time.monotonic() - started:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of CPU"
    )
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
