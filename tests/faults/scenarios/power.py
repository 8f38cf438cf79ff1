"""Power loss: every legal crash image of the disk store opens, and holds what was acknowledged.

    python -m faults.scenarios.power [--images 5000] [--seed N]     (in tests/)

A writer puts, snapshots, drops, closes and opens again while its changes of the disk are recorded
(`power_disk.py`). Images of any moment are opened; now and then the start itself, and the writes
after it, are recorded, and lose power again.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from faults.check import check
from faults.power_disk import Disk, Event, Recorder
from faults.scenarios.images import header_of, payload_of, pieces_of, snapshot_of
from routetrace.common.errors import Corrupt, NotFound
from routetrace.server.store.disk.store import DiskStore
from routetrace.server.store.interface import Record

CAPACITY = 2 << 20
_LIVE = 20


@dataclass
class Promised:
    """What a store may and must hold, by what its caller was answered."""

    acknowledged: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    """Records that were handed in."""
    dropped: set[int] = field(default_factory=set)
    """Records whose drop was answered."""
    dropping: set[int] = field(default_factory=set)
    """Records whose drop was asked for."""
    covered: int = 0
    """Last record of the last snapshot that was answered."""
    covering: list[int] = field(default_factory=lambda: [0])
    """Last records of all snapshots that were asked for."""

    def note(self, event: Event) -> None:
        """Take a mark of the workload."""
        kind, args, _ = event
        if kind == "asked":
            self.asked.update(args)
        elif kind == "acknowledged":
            self.acknowledged.update(args)
        elif kind == "compacting":
            self.covering.append(args[0])
            self.dropping.update(args[1])
        elif kind == "compacted":
            self.covered = args[0]
            self.dropped.update(args[1])

    def copy(self) -> Promised:
        """Return an independent copy."""
        sets = [set(s) for s in (self.acknowledged, self.asked, self.dropped, self.dropping)]
        return Promised(*sets, self.covered, list(self.covering))


def work(directory: Path, recorder: Recorder, rng: random.Random, rounds: int, after: int) -> None:
    """Put, snapshot and drop; close and open now and then. Numbers are above `after`."""
    store = DiskStore(directory, capacity_bytes=CAPACITY)
    number, covered = after, store.load_snapshot()
    last = covered[0] if covered else 0
    live: list[int] = []
    for _ in range(rounds):
        numbers = range(number + 1, number + 1 + rng.randrange(1, 8))
        number = numbers[-1]
        recorder.mark("asked", *numbers)
        futures = [store.append(Record(n, header_of(n), payload_of(n))) for n in numbers]
        for n, future in zip(numbers, futures, strict=True):
            future.result()
            recorder.mark("acknowledged", n)
        live += numbers
        if len(live) > _LIVE or rng.random() < 0.1:
            rng.shuffle(live)
            live, drop = live[: _LIVE // 2], live[_LIVE // 2 :]
            snapshot = rng.random() < 0.6
            if snapshot:
                last = rng.randrange(max(last, number - 8), number + 1)
            recorder.mark("compacting", last, drop)
            store.compact((last, pieces_of(last)) if snapshot else None, drop)
            recorder.mark("compacted", last, drop)
        if rng.random() < 0.05:
            store.close()
            store = DiskStore(directory, capacity_bytes=CAPACITY)
    store.close()


def judge(directory: Path, promised: Promised) -> list[str]:
    """Open an image; return the promises that it breaks."""
    broken = []
    store = DiskStore(directory, capacity_bytes=CAPACITY)
    try:
        if any("damaged" in path.name for path in directory.rglob("*")):
            broken.append("a part is set aside as damaged")
        if store.stats().damaged_records:
            broken.append(f"{store.stats().damaged_records} damaged records")
        found = store.load_snapshot()
        covered = found[0] if found else 0
        if covered < promised.covered or covered not in promised.covering:
            broken.append(f"the snapshot covers {covered}, expected {promised.covered} or later")
        if found and b"".join(found[1]) != snapshot_of(covered):
            broken.append(f"the snapshot of {covered} is another one")
        headers = dict(store.headers())
        for number, header in headers.items():
            if number not in promised.asked or header != header_of(number):
                broken.append(f"record {number} has another header")
        missing = {n for n in promised.acknowledged if n > covered} - headers.keys()
        if missing:
            broken.append(f"acknowledged records {sorted(missing)} are gone")
        for number in promised.asked:
            broken += _judge_payload(store, number, promised, number in headers)
    finally:
        store.close()
    return broken


def _judge_payload(store: DiskStore, number: int, promised: Promised, named: bool) -> list[str]:
    payload = payload_of(number)
    if not payload:
        return []
    try:
        if store.read(number, [(0, len(payload))]) != [payload]:
            return [f"record {number} has another payload"]
    except Corrupt:
        return [f"the payload of record {number} cannot be read"]
    except NotFound:
        if (number in promised.acknowledged or named) and number not in promised.dropping:
            return [f"the payload of record {number} is gone"]
        return []
    return [f"record {number} was dropped and is back"] if number in promised.dropped else []


def run(seed: int, *, images: int = 5000) -> dict[str, int]:
    """Open so many images; return counts.

    Raises:
        AssertionError: if one breaks a promise.
    """
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    rng = random.Random(f"power {seed}")
    shared = Path("/dev/shm")
    try:
        while counts["images"] < images:
            with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as root:
                _lose_power(Path(root), rng, counts, images)
    finally:
        logging.disable(logging.NOTSET)
    return dict(counts)


def _lose_power(root: Path, rng: random.Random, counts: Counter[str], images: int) -> None:
    """Record one writer, and open images of its moments."""
    seed = rng.randrange(1 << 30)
    events, disk = _record(root / "live", random.Random(seed), rounds=40, after=0)
    promised = Promised()
    for at, event in enumerate(events):
        if not disk.apply(event):
            promised.note(event)
        if rng.random() > 0.5 or counts["images"] >= images:
            continue
        counts["images"] += 1
        image = root / "image"
        disk.image(image, rng)
        again = shutil.copytree(image, root / "again") if rng.random() < 0.05 else None
        where = f"writer {seed}, event {at} of {len(events)} ({event.kind})"
        check(not (broken := judge(image, promised)), f"{where}: {broken}")
        shutil.rmtree(image)
        if again:
            _lose_power_again(again, root / "image", rng, promised, counts, where)
            shutil.rmtree(again)


def _lose_power_again(
    directory: Path,
    image: Path,
    rng: random.Random,
    promised: Promised,
    counts: Counter[str],
    where: str,
) -> None:
    """Record a start after a crash and some writes, and open images of their moments."""
    after = max([0, *promised.asked]) + 1
    events, disk = _record(directory, rng, rounds=3, after=after)
    promised = promised.copy()
    for event in events:
        if not disk.apply(event):
            promised.note(event)
        if rng.random() < 0.3:
            counts["images"] += 1
            counts["of a start"] += 1
            disk.image(image, rng)
            broken = judge(image, promised)
            check(not broken, f"{where}, then {event.kind} after a start: {broken}")
            shutil.rmtree(image)


def _record(
    directory: Path, rng: random.Random, *, rounds: int, after: int
) -> tuple[list[Event], Disk]:
    """Return the events of a writer, and the disk as it was before them."""
    directory.mkdir(exist_ok=True)
    events: list[Event] = []
    recorder, disk = Recorder(directory, events.append), Disk(directory)
    with recorder.recording():
        work(directory, recorder, rng, rounds, after)
    return events, disk


def main() -> int:
    """Open images; the exit status is 0, or an error is raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(run(args.seed, images=args.images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
