"""Directories of the disk store as a crash, or a bad disk, may leave them: it starts, and lies not.

    python -m faults.scenarios.images [--images 300] [--flips 10000] [--seconds 0] [--seed N]

A writer puts, snapshots and drops without end. *Images* are copies of its directory, taken file by
file while it runs, so that no two files are of the same moment; each is opened as it is, and once
more with a file torn. *Flips* are single flipped bits, many of them, cut, zeroed, swapped, old and
missing parts of files of directories that were closed, or whose writer was killed. Long-lived
processes open one after the other and read every record; into some they write more, and open them
again.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from routetrace.common.errors import Corrupt, NotFound
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record

CAPACITY = 6 << 20
_BLOCK = 16384
_LIVE = 50
#: Of one writer; then it begins anew, so that there are few numbers to ask for.
_LAST = 1500
_NOISE = random.Random(0).randbytes(1 << 20)
#: Numbers from here on are what is written into an image; whatever it lost, they are new.
_LATER = 1 << 32
_WORKERS = 2
_KINDS = (
    *("flip", "flip", "flip", "flips", "cut", "cut page", "zero", "zero end", "noise", "swap"),
    *("old page", "old end", "missing", "empty"),
)
_PATIENCE = 60.0


def payload_of(number: int) -> bytes:
    """Return the payload that every writer stores under this number."""
    size = (0, 100, 3000, 20_000, 70_000)[number * 7 % 5]
    at = number * 7919 % (len(_NOISE) - size)
    return (b"%d:" % number + _NOISE[at : at + size])[:size]


def header_of(number: int) -> bytes:
    """Its header."""
    return b"header %d " % number * (number % 40 + 1)


def snapshot_of(number: int) -> bytes:
    """The snapshot that covers the records up to this number."""
    return (b"state %d " % number) * (1000 + number % 3000)


def pieces_of(number: int) -> Iterator[bytes]:
    """The snapshot in pieces."""
    data = snapshot_of(number)
    return (data[at : at + 7000] for at in range(0, len(data), 7000))


# ---------------------------------------------------------------------------- the writer


def write(directory: Path, seed: int, last: int) -> None:
    """Put, snapshot and drop, up to a number."""
    rng = random.Random(seed)
    store = DiskStore(directory, capacity_bytes=CAPACITY)
    live: list[int] = []
    number = covered = 0
    while number < last:
        futures = []
        for _ in range(rng.randrange(1, 12)):
            number += 1
            live.append(number)
            futures.append(store.append(Record(number, header_of(number), payload_of(number))))
        for future in futures:
            future.result()
        if len(live) > _LIVE or rng.random() < 0.05:
            rng.shuffle(live)
            live, drop = live[: _LIVE // 2], live[_LIVE // 2 :]
            if rng.random() < 0.8:
                covered = rng.randrange(covered, number + 1)
                store.compact((covered, pieces_of(covered)), drop)
            else:
                store.compact(None, drop)
    store.close()


class Writer:
    """A process that writes until it is killed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "faults.scenarios.images", "--write", str(directory)]
        self._process = subprocess.Popen(
            [*command, "--seed", str(seed)], cwd=Path(__file__).parents[2]
        )

    @property
    def running(self) -> bool:
        """False once it has written all it had to."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------------------- the damage


def damage(directory: Path, old: Path | None, rng: random.Random) -> str:
    """Damage files of a directory; return what was done."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    file = rng.choice([path for path in files if path.stat().st_size] or files)
    data = bytearray(file.read_bytes())
    kind = rng.choice(_KINDS)
    at = rng.randrange(max(1, len(data)))
    page = at // 4096 * 4096
    other = rng.randrange(max(1, len(data))) // 4096 * 4096
    before = b""
    if old is not None:
        with suppress(OSError):
            before = (old / file.relative_to(directory)).read_bytes()
    if kind == "missing":
        file.unlink()
        return f"{kind} {file.name}"
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "cut page":
        del data[page:]
    elif kind == "zero":
        data[page : page + 4096] = bytes(len(data[page : page + 4096]))
    elif kind == "zero end":
        data[page:] = bytes(len(data) - page)
    elif kind == "noise":
        data[page : page + 4096] = rng.randbytes(len(data[page : page + 4096]))
    elif kind == "swap":
        one, two = data[page : page + 4096], data[other : other + 4096]
        data[page : page + len(two)], data[other : other + len(one)] = two, one
    elif kind == "old page":
        data[page : page + 4096] = before[page : page + 4096]
    elif kind == "old end":
        data[page:] = before[page:]
    else:
        data.clear()
    file.write_bytes(data)
    return f"{kind} {file.name} at {at}"


# ---------------------------------------------------------------------------- opening


def open_and_read(directory: Path, *, again: bool) -> Counter[str]:
    """Do what a server does when it starts, read all that ever was, and count."""
    counts: Counter[str] = Counter()
    store = DiskStore(directory, capacity_bytes=CAPACITY)
    counts["set aside"] = sum("damaged-" in path.name for path in directory.iterdir())
    snapshot = store.load_snapshot()
    covered = 0
    if snapshot is not None:
        covered, pieces = snapshot
        try:
            wrong = b"".join(pieces) != snapshot_of(covered)
            counts["wrong"] += wrong
        except Corrupt:
            counts["damaged"] += 1
    after = covered
    for number, header in store.headers():
        if header is None:
            counts["gaps"] += 1
            counts["wrong"] += number != after
            continue
        counts["wrong"] += header != header_of(number) or number <= after
        after = number
        counts["headers"] += 1
    last = store.last_number()
    for number in [*range(1, min(last, _LAST + 20) + 1), *range(_LATER, max(last, _LATER) + 2)]:
        payload = payload_of(number)
        try:
            wrong = store.read(number, [(0, len(payload))]) != [payload]
            counts["wrong"] += wrong
            counts["right"] += not wrong
        except NotFound:
            counts["not stored"] += 1
        except Corrupt:
            counts["damaged"] += 1
    counts["reported"] = store.stats().damaged_records
    if again:
        number = max(last, _LATER)
        fresh = range(number + 1, number + 16)
        for future in [store.append(Record(n, header_of(n), payload_of(n))) for n in fresh]:
            future.result(_PATIENCE)
        store.compact((fresh[5], pieces_of(fresh[5])), range(1, _LAST, 3))
    store.close()
    return counts


def check(spec: dict[str, Any]) -> dict[str, Any]:
    """Copy a directory, damage the copy, open it, and open it again.

    Returns:
        What was counted, and `error` if something went wrong.
    """
    seed, source = spec["seed"], Path(spec["source"])
    rng = random.Random(f"image {seed}")
    directory = Path(spec["scratch"])
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("reserve"))
    done = "nothing"
    if spec["damage"]:
        done = damage(directory, Path(spec["old"]) if spec["old"] else None, rng)
    again = rng.random() < 0.2
    counts = open_and_read(directory, again=again)
    if again:
        more = open_and_read(directory, again=False)
        counts["wrong"] += more["wrong"]
        counts["opened again"] += 1
        if more["headers"] != 9:
            return {"error": f"{done}: {more['headers']} headers of 9", "counts": counts}
    error = ""
    if counts["wrong"]:
        error = f"{done}: {counts['wrong']} wrong"
    elif "whole" in spec and done.startswith("flip "):
        # One flipped bit of a directory that was closed: what it cost is told.
        found = [counts["right"], counts["headers"]]
        if found != spec["whole"] and not counts["reported"]:
            error = f"{done}: {found} of {spec['whole']} and nobody says so"
    return {"error": error, "counts": counts}


def serve() -> None:
    """Open what it is told to, one after the other."""
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        try:
            answer = check(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "counts": {}}
        print(json.dumps(answer), flush=True)


class Opener:
    """A process that opens directories; another takes its place when it dies."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._process: subprocess.Popen[str] | None = None

    def open(self, **spec: Any) -> dict[str, Any]:
        """Return the result of `check`; `crash` if the process ended or hung."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.scenarios.images", "--serve"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin
        assert process.stdout
        timer = threading.Timer(_PATIENCE, process.kill)
        timer.start()
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**spec, "scratch": str(self._scratch)}) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        process.wait()
        self._process = None
        name = signal.Signals(-process.returncode).name if process.returncode < 0 else "exit"
        return {"error": f"the process ended: {name}", "counts": {"crashes": 1}}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


# ---------------------------------------------------------------------------- the campaign


class Campaign:
    """Counts, over all openers."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._next = 0

    def run(self, specs: Iterator[dict[str, Any]]) -> None:
        """Open all of them, on all openers."""
        lock = threading.Lock()

        def work(opener: Opener) -> None:
            while True:
                with lock:
                    spec = next(specs, None)
                if spec is None:
                    return
                done: Callable[[], None] = spec.pop("done", lambda: None)
                self._count(spec, opener.open(**spec))
                done()

        openers = [Opener(self.root / f"scratch-{i}") for i in range(_WORKERS)]
        try:
            with ThreadPoolExecutor(_WORKERS) as pool:
                list(pool.map(work, openers))
        finally:
            for opener in openers:
                opener.close()

    def _count(self, spec: dict[str, Any], answer: dict[str, Any]) -> None:
        with self._lock:
            counts = answer["counts"]
            self.counts.update(counts)
            self.counts["opened"] += 1
            self.counts["with something set aside"] += bool(counts.get("set aside"))
            if answer["error"]:
                self.errors.append(f"seed {self.seed}, {spec['seed']}: {answer['error']}")

    def images(self, count: int, end: float) -> Iterator[dict[str, Any]]:
        """Copies of a directory in use."""
        rng = random.Random(f"images {self.seed}")
        writer: Writer | None = None
        last: Path | None = None
        try:
            for i in range(count):
                if time.monotonic() > end:
                    return
                if writer is None or not writer.running:
                    writer = Writer(self.root / f"live-{i}", rng.randrange(1 << 30))
                    last = None
                    while not list(writer.directory.glob("store-3/snapshot-*")):
                        time.sleep(0.01)  # nothing to see yet
                time.sleep(rng.random() * 0.1)
                image = self.root / f"image-{i}"
                _copy(writer.directory, image, rng)
                yield {"seed": 2 * i, "source": str(image), "damage": False, "old": None}
                old = str(last) if last else None
                yield {"seed": 2 * i + 1, "source": str(image), "damage": True, "old": old}
                last = image
        finally:
            if writer is not None:
                writer.kill()

    def flips(self, count: int, end: float) -> Iterator[dict[str, Any]]:
        """Damage to directories that nobody uses."""
        rng = random.Random(f"flips {self.seed}")
        sources: list[dict[str, Any]] = []
        for i in range(4):
            directory = self.root / f"closed-{i}"
            write(directory, rng.randrange(1 << 30), rng.randrange(100, 400))
            whole = open_and_read(_copied(directory, self.root / "whole"), again=False)
            assert not whole["wrong"] + whole["damaged"] + whole["reported"], whole
            found = [whole["right"], whole["headers"]]
            sources.append({"source": str(directory), "whole": found})
        for i in range(2):
            writer = Writer(self.root / f"killed-{i}", rng.randrange(1 << 30))
            while len(list(writer.directory.glob("store-3/snapshot-*"))) < 2:
                time.sleep(0.01)
            old = _copy(writer.directory, self.root / f"killed-{i}-old", rng)
            time.sleep(rng.random() * 0.5)
            writer.kill()
            sources.append({"source": str(writer.directory), "old": str(old)})
        for i in range(count):
            if time.monotonic() > end:
                return
            yield {"old": None, **rng.choice(sources), "seed": f"flip {i}", "damage": True}


def _copy(source: Path, target: Path, rng: random.Random) -> Path:
    """Copy file by file, in any order, from under a writer."""
    names = [path.relative_to(source) for path in source.rglob("*")]
    rng.shuffle(names)
    for name in names:
        if (source / name).is_dir():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(source / name, target / name)
    return target


def _copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def run(seed: int, *, images: int = 300, flips: int = 10_000, seconds: float = 0) -> dict[str, int]:
    """Return what was counted.

    Args:
        seed: of everything but the moments at which images are taken.
        images: copies taken under load; each is opened twice, the second time damaged.
        flips: damaged directories.
        seconds: stop after so long; 0 for all.

    Raises:
        AssertionError: if a process ended, a wrong byte was served, or a loss was not told.
    """
    end = time.monotonic() + (seconds or 1e9)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="images-", dir=base) as root:
        campaign = Campaign(Path(root), seed)
        campaign.run(campaign.images(images, end))
        campaign.run(campaign.flips(flips, end))
    if campaign.errors:
        raise AssertionError("\n".join(campaign.errors[:20]))
    names = ("opened", "opened again", "with something set aside", "right", "damaged", "reported")
    return {name: campaign.counts[name] for name in (*names, "wrong", "crashes")}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsIs)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.write:
        write(options.write, options.seed, _LAST)
    else:
        print(f"seed {options.seed}", flush=True)
        begin = time.monotonic()
        found = run(
            options.seed,
            images=options.images,
            flips=options.flips,
            seconds=options.seconds,
        )
        took = time.monotonic() - begin
        print(", ".join(f"{name} {count:,}" for name, count in found.items()), f"in {took:.0f} s")


_AsIs = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
