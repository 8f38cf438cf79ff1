"""Breaks the durability of the disk store and of the server; images of lost power must show each.

python -m faults.mutations     (in tests/)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.check import check
from oracle.mutations import ROOT, SERVER, SOURCES, TESTS, Mutation

_STORE = f"{SERVER}/store/disk"
_PAYLOADS = (
    "            if any(stored):\n"
    "                self._blocks.sync()  # first: the log must name durable payloads only\n"
)
_COMMIT = (
    _PAYLOADS
    + "            before = [self._durable_number, *(item.record.number for item in group)]\n"
    "            frames = (\n"
    "                record_frame(item.record, where, previous)\n"
    "                for item, where, previous in zip(group, stored, before, strict=False)\n"
    "            )\n"
    "            self._log.append(frames, group[-1].record.number)\n"
)
MUTATIONS = (
    Mutation("payloads are not synced", f"{_STORE}/store.py", "self._blocks.sync()", "pass"),
    Mutation(
        "the log is synced before payloads",
        f"{_STORE}/store.py",
        _COMMIT,
        _COMMIT.replace(_PAYLOADS, "") + _PAYLOADS,
    ),
    Mutation(
        "the log is not synced",
        f"{_STORE}/log.py",
        "        os.fdatasync(self._out)\n        self._torn = False\n",
        "        self._torn = False\n",
    ),
    Mutation(
        "records of a commit that was torn are taken for committed",
        f"{_STORE}/log.py",
        "            yield frame._replace(last=True)\n",
        "            yield frame\n            yield from map(_alone, behind)\n",
        seed=7,
    ),
    Mutation(
        "the name of a new log is not synced",
        f"{_STORE}/log.py",
        "            sync_directory(self._directory)\n",
        "            pass\n",
    ),
    Mutation(
        "a snapshot is not synced", f"{_STORE}/snapshot.py", "        os.fsync(self._out)\n", ""
    ),
    Mutation(
        "the name of a snapshot is not synced",
        f"{_STORE}/snapshot.py",
        "            sync_directory(self._name.parent)\n",
        "            pass\n",
    ),
    Mutation(
        "the directory of the store is not synced",
        f"{_STORE}/directory.py",
        "        sync_directory(path.parent)\n",
        "        pass\n",
    ),
    Mutation(
        "a drop is not in the log",
        f"{_STORE}/store.py",
        "                if drop or not self._writable:\n",
        "                if not (drop or not self._writable):\n",
    ),
    Mutation(
        "a record is acknowledged before its commit",
        f"{_STORE}/store.py",
        'self._ack_early = ack_mode == "memory"',
        "self._ack_early = True",
    ),
    Mutation(
        "the log is trimmed before the snapshot has its name",
        f"{_STORE}/store.py",
        "                new = work.draft.finish(work.number, self._log.rotate(), index)\n",
        "                base = self._log.rotate()\n"
        "                self._log.trim(work.number, base)\n"
        "                new = work.draft.finish(work.number, base, index)\n",
    ),
)  # fmt: skip


_HELD = "                index = {n: where for n, where in self._index.items() if n not in gone_}\n"
#: Of what the store alone does not show.
OF_SERVERS = (
    Mutation(
        "holes are punched before the snapshot is durable",
        f"{_STORE}/store.py",
        _HELD,
        _HELD + "                for n in drop:\n"
        "                    self._blocks.free(self._index[n].table)\n"
        "                self._blocks.give_back(1 << 30)\n"
        "                for n in drop:\n"
        "                    self._blocks.claim(self._index[n].table)\n",
    ),
    Mutation(
        "a record is applied before its commit",
        f"{SERVER}/index/journal.py",
        "        stored = self.store.append(Record(self._number, record, payload, sums))\n",
        "        self.store.append(Record(self._number, record, payload, sums))\n"
        "        stored: Future[None] = Future()\n"
        "        stored.set_result(None)\n",
    ),
)  # fmt: skip


def seen(mutation: Mutation) -> str:
    """Return how the images show a mutation; "" if they do not."""
    scenario = "server_power" if mutation in OF_SERVERS else "power"
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        for source in SOURCES:
            shutil.copytree(ROOT / source, Path(directory, source))
        path = Path(directory, mutation.path)
        text = path.read_text()
        check(text.count(mutation.old) == 1, f"{mutation.name}: does not apply")
        mutated = text.replace(mutation.old, mutation.new)
        compile(mutated, path, "exec")  # else an error of syntax counts as seen
        path.write_text(mutated)
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                f"faults.scenarios.{scenario}",
                "--images",
                "6000",
                "--seed",
                str(mutation.seed),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*(f"{directory}/{s}" for s in SOURCES), str(TESTS)]),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def main() -> int:
    """Return 1 if a mutation was not seen."""
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mutations = (*MUTATIONS, *OF_SERVERS)
        for mutation, how in zip(mutations, pool.map(seen, mutations), strict=True):
            missed += not how
            print(f"{mutation.name:<54}{how[:120] or 'MISSED'}", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} mutations seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
