"""Race probe: whether an object store does put-if-absent atomically.

Stores that check the condition and write afterwards have several winners where S3 has one. On such
a store two servers could both acknowledge, and one of them would lose what it acknowledged.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier

from routetrace.common.errors import InvalidArgument, Unavailable
from routetrace.server.store.object.bucket import Bucket

#: Keys that are raced for at the same time.
KEYS = 4
#: Writers of a key. SeaweedFS 4.48 holds losers for a second each where there are more than two,
#: and two show a store that is not atomic as surely. All writers have connections of their own,
#: which may lead to different machines of the store.
RACERS = 2
#: Races for each number of keys.
ROUNDS = 6


def check_conditions(bucket: Bucket) -> None:
    """Race writers of one key against each other; return if each race has one winner.

    Raises:
        InvalidArgument: if the store does not do conditional writes atomically.
        Unavailable: if it does not answer.
    """
    keys: list[str] = []
    try:
        with ThreadPoolExecutor(KEYS * RACERS) as pool:
            for _ in range(ROUNDS):
                keys += (raced := [f"probe/{os.urandom(8).hex()}" for _ in range(KEYS)])
                _race(bucket, raced, pool)
    finally:
        bucket.delete(keys)


def _race(bucket: Bucket, keys: list[str], pool: ThreadPoolExecutor) -> None:
    start = Barrier(len(keys) * RACERS)

    def racer(key: str, number: int) -> bytes | None:
        body = f"racer {number}".encode() + b"." * 4096
        start.wait()
        return body if bucket.create(key, body) else None

    racers = {key: [pool.submit(racer, key, n) for n in range(RACERS)] for key in keys}
    won = {key: _winners(found) for key, found in racers.items()}
    decided = [key for key in keys if won[key] is not None]
    if not decided:
        racers[keys[0]][0].result()  # raises
    for checked in [pool.submit(_check, bucket, key, won[key] or []) for key in decided]:
        checked.result()


def _winners(racers: list[Future[bytes | None]]) -> list[bytes] | None:
    """Return the bodies of those that succeeded; None if all failed."""
    won, failed = [], 0
    for racer in racers:
        try:
            body = racer.result()
        except Unavailable:
            # Some stores answer a conflict of writers with an error; it must not have written.
            failed += 1
            continue
        if body is not None:
            won.append(body)
    return None if failed == len(racers) else won


def _check(bucket: Bucket, key: str, won: list[bytes]) -> None:
    if len(won) != 1 or bucket.get(key) != won[0]:
        raise _refused(bucket, f"{len(won)} of {RACERS} writers of one key succeeded, expected 1")
    if bucket.create(key, b"late"):
        raise _refused(bucket, "a second put of one key succeeded")


def _refused(bucket: Bucket, fact: str) -> InvalidArgument:
    expected = "a store with atomic put-if-absent, such as Amazon S3 or SeaweedFS"
    return InvalidArgument(
        f"the object store at {bucket.name} does not do conditional puts atomically (If-None-Match:"
        f" {fact}), and two servers could both acknowledge: expected {expected}",
        field="object_url",
        value=bucket.name,
        expected=expected,
    )
