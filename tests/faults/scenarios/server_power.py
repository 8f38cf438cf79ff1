"""Power loss under real servers: every legal crash image opens, and serves what was acknowledged.

    python -m faults.scenarios.server_power [--images 1000] [--worlds 10] [--seed N]   (in tests/)

Servers in processes of their own take chunks and deletions of real streams, sweep, snapshot and
give space back, while each change of their directory is noted (`recorded.py`). They kill themselves
at any change, and start again, on what the kernel still knows or on what a loss of power may leave.
Writes are cut short now and then, or find no room. Images of any moment are opened by the server's
own code in this process, some by a server.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import psutil

from faults.check import Known, check, known_at, read_all
from faults.power_disk import Disk, Event, contents_of, numbers_of
from faults.recorded import Recording, events_of, program
from faults.scenarios.kill import SETTINGS, scripts
from faults.scenarios.order import Inline
from faults.script import RUN, Script
from faults.serving import Server
from faults.writers import Job, Report, Run, Writers, no_violations
from routetrace.client import RouteClient
from routetrace.server.access.partition import place
from routetrace.server.process.partitions import (
    check_partitions,
    make_partitions,
    partitions_of,
    worker_address,
)
from routetrace.server.store.disk.copying import survey
from routetrace.server.store.disk.store import DiskStore
from support.waiting import wait_for

_BOUND_S = 60.0
_FOREVER = 1 << 30
_CAPACITY = 1 << 30
#: Of the servers' directory below the one whose changes are noted: neither is there at first.
_DATA_DIR = Path("new", "data")
_CHUNKS = "routetrace_ingest_chunks_total"


@dataclass(frozen=True)
class Epoch:
    """Servers between two losses of power."""

    disk: Disk
    """As it was before."""
    events: list[Event]
    end: float
    """Time at which the last one had ended."""


@dataclass(frozen=True)
class World:
    """What servers did, and what their writers were told."""

    workers: int
    epochs: list[Epoch]
    reports: list[Report]

    def known(self, at: float) -> list[tuple[Script, Known]]:
        """Return how far each writer was at a time."""
        known = [known_at(report.steps, at) for report in self.reports]
        return list(zip(scripts(self.reports), known, strict=True))


# ---------------------------------------------------------------------------- servers


def live(root: Path, seed: int, writers: Writers, *, workers: int, lives: int) -> World:
    """Let some servers live and die over one directory.

    Args:
        root: an empty directory.
        seed: of what they take, and when they die.
        writers: what feeds them.
        workers: processes of each server; servers of several do not die.
        lives: so many servers; the last one is stopped.
    """
    directory = root / "live"
    directory.mkdir()
    python = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable]
    server = Server(directory / _DATA_DIR, python=python, workers=workers, **SETTINGS)
    owner = place(RUN, workers)
    server.metrics_port += owner
    writers.jobs([Job(seed, f"e{i}", window=4, deletes=True, longest=20) for i in range(2)])
    writers.run(Run(worker_address(server.target, owner), _FOREVER, again=True, pace_s=0.02))
    try:
        epochs = _epochs(root, directory, server, random.Random(f"server power {seed}"), lives)
    except AssertionError:
        no_violations(writers.stop())  # says more
        raise
    reports = writers.stop()
    no_violations(reports)
    return World(workers, epochs, reports)


def _epochs(
    root: Path, directory: Path, server: Server, rng: random.Random, lives: int
) -> list[Epoch]:
    """Let a server live several times; now and then it finds what a loss of power left."""
    epochs: list[Epoch] = []
    begins = True
    for life in range(lives):
        if begins:
            disk, names, file = Disk(directory), numbers_of(directory), root / f"events-{life}"
        last = life == lives - 1
        recording = Recording(
            str(directory),
            str(file),
            names,
            seed=rng.randrange(1 << 30),
            die_at=0 if last else rng.choice((rng.randint(1, 30), rng.randint(30, 500))),
            die_at_sync=rng.random() < 0.5,
            full=rng.choice((0.0, 0.1)),
            no_room=rng.choice((0.0, 0.5)),
        )
        server.program = program(recording)
        _serve(server, dies=not last)
        # Those of two workers are not in their order.
        events = sorted(events_of(file), key=lambda event: event.begun)
        now = deepcopy(disk)
        for event in events:
            check(now.apply(event), f"an event {event.kind}")
        found, noted = contents_of(directory), now.contents()
        other = [name for name in {*found, *noted} if found.get(name, 0) != noted.get(name, 0)]
        check(not other, f"changed in a way that was not noted: {other}")
        begins = last or rng.random() < 0.5
        if begins:
            epochs.append(Epoch(disk, events, time.monotonic()))
        if begins and not last:
            shutil.rmtree(directory)
            now.image(directory, rng)
    return epochs


def _serve(server: Server, *, dies: bool) -> None:
    """Let a server live until it kills itself, or stop it once it has taken some chunks."""
    try:
        server.start()
    except RuntimeError as error:
        check(dies and "ended with code -9" in str(error), str(error))
        return
    try:
        if dies:
            wait_for(lambda: server.process.status() == psutil.STATUS_ZOMBIE, _BOUND_S)
        else:
            wait_for(lambda: server.metrics().get(_CHUNKS, 0) > 20, _BOUND_S)
            check(server.stop() == 0, "no clean end")
    finally:
        if server.running:
            server.kill()


# ---------------------------------------------------------------------------- images


def judge(data_dir: Path, world: World, at: float) -> int:
    """Open an image, and compare all that it serves; return the rows.

    Args:
        data_dir: of a server; need not be there.
        world: what happened.
        at: time of the loss of power.

    Raises:
        AssertionError: if a promise was broken.
    """
    if world.workers > 1:
        check_partitions(data_dir, world.workers)
        make_partitions(data_dir, world.workers)
    rows = 0
    for number, part in enumerate(partitions_of(data_dir)):
        store = DiskStore(part, capacity_bytes=_CAPACITY)
        try:
            if number == place(RUN, world.workers):
                rows = _read(store, world, at)
        finally:
            store.close()
        check((damaged := survey(part).damaged) == 0, f"{damaged} parts of {part} are damaged")
    aside = [path.name for path in data_dir.rglob("*damaged*")]
    check(not aside, f"set aside as damaged: {aside}")
    return rows


def _read(store: DiskStore, world: World, at: float) -> int:
    known = world.known(at)
    target = Inline(store)
    try:
        rows = read_all(target.client, known, prefetch=0).rows
        for report, (script, told) in zip(world.reports, known, strict=True):
            if told.acked:
                # What the server has of the writer's chunks, it does not ask for again.
                welcome = target.open(script.hello(report.epoch)).welcome
                check(welcome.epoch == report.epoch, f"epoch {report.epoch} is unknown")
                has = welcome.next_sequence - 1
                check(told.acked <= has <= told.sent, f"it has {has} chunks of {told}")
    finally:
        target.close()
    return rows


def _judge_server(data_dir: Path, world: World, at: float) -> None:
    """Open an image by a server, and compare all that it serves."""
    with Server(data_dir, workers=world.workers) as server:
        with RouteClient(server.target, run=RUN) as client:
            read_all(client, world.known(at))
        check(server.stop() == 0, "no clean end")


def open_images(
    root: Path, world: World, rng: random.Random, images: int, by_server: int
) -> Counter[str]:
    """Open images of random moments by this process, and some more by servers; return counts."""
    counts: Counter[str] = Counter()
    places = [(e, i) for e, epoch in enumerate(world.epochs) for i in range(len(epoch.events))]
    wanted = Counter(rng.choices(places, k=images))
    served = Counter(rng.choices(places, k=by_server))
    for number, epoch in enumerate(world.epochs):
        disk = epoch.disk
        for at, event in enumerate(epoch.events):
            disk.apply(event)
            counts[event.kind] += 1
            # The next change had not begun.
            last = at + 1 == len(epoch.events)
            until = epoch.end if last else epoch.events[at + 1].begun
            for image in range(wanted[number, at] + served[number, at]):
                path = root / "image"
                disk.image(path, rng)
                try:
                    if image < wanted[number, at]:
                        counts["images"] += 1
                        counts["rows"] += judge(path / _DATA_DIR, world, until)
                    else:
                        counts["images opened by servers"] += 1
                        _judge_server(path / _DATA_DIR, world, until)
                except Exception as error:
                    where = f"event {at} of {len(epoch.events)} ({event.kind}) of epoch {number}"
                    error.args = (f"{where}: {error}",)
                    raise
                shutil.rmtree(path)
    return counts


def run(seed: int, *, images: int = 1000, worlds: int = 10, lives: int = 5) -> dict[str, int]:
    """Return counts.

    Args:
        seed: of all that happens; the machine decides the rest.
        images: opened in all.
        worlds: directories; every third is that of a server with two workers.
        lives: servers of each directory.

    Raises:
        AssertionError: if a promise was broken.
    """
    counts: Counter[str] = Counter()
    shared = Path("/dev/shm")
    with Writers(2) as writers:
        for i in range(worlds):
            rng = random.Random(f"images {seed + i}")
            workers = 2 if i % 3 == 2 else 1
            try:
                with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as root:
                    world = live(
                        Path(root),
                        seed + i,
                        writers,
                        workers=workers,
                        lives=1 if workers > 1 else lives,
                    )
                    logging.disable(logging.CRITICAL)
                    counts += open_images(Path(root), world, rng, images // worlds, 1)
            except Exception as error:
                error.args = (f"seed {seed + i}, {workers} workers: {error}",)
                raise
            finally:
                logging.disable(logging.NOTSET)
            counts["servers"] += 1 if workers > 1 else lives
            counts["losses of power"] += len(world.epochs) - 1
            counts["chunks"] += sum(report.known.acked for report in world.reports)
            counts["deleted"] += sum(len(report.known.deleted) for report in world.reports)
    names = ("images", "images opened by servers", "rows", "servers", "losses of power")
    calls = {"holes punched": counts["punch"], "files allocated": counts["allocate"]}
    return {name: counts[name] for name in (*names, "chunks", "deleted")} | calls


def main() -> int:
    """Open images; the exit status is 0, or an error is raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--worlds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(run(args.seed, images=args.images, worlds=args.worlds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
