"""Race probe: whether an object store does put-if-absent atomically.

Stores that check the condition and write afterwards have several winners where S3 has one. On such
a store two servers could both acknowledge, and one of them would lose what it acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from routetrace.common.errors import InvalidArgument, Unavailable
from routetrace.server.store.object.bucket import Bucket

#: Writers of one key at the same time.
RACERS = 8

#: Races of each kind.
ROUNDS = 3


def check_conditions(bucket: Bucket) -> None:
    """Race writers of one key against each other; return if each race has one winner.

    Raises:
        InvalidArgument: if the store does not do conditional writes atomically.
        Unavailable: if it does not answer.
    """
    keys: list[str] = []
    try:
        for _ in range(ROUNDS):
            key = f"probe/{os.urandom(8).hex()}"
            keys.append(key)
            _race(bucket, key)
    finally:
        bucket.delete(keys)


def _race(bucket: Bucket, key: str) -> None:
    won = _winners(lambda body: bucket.create(key, body))
    found = bucket.get(key)
    if len(won) != 1 or found != won[0]:
        raise _refused(bucket, f"{len(won)} of {RACERS} writers of one key succeeded, expected 1")
    if bucket.create(key, b"late"):
        raise _refused(bucket, "a second put of one key succeeded")


def _winners(write: Callable[[bytes], bool]) -> list[bytes]:
    start = Barrier(RACERS)

    def racer(number: int) -> bytes | None:
        body = f"racer {number}".encode() + b"." * 4096
        start.wait()
        return body if write(body) else None

    with ThreadPoolExecutor(RACERS) as pool:
        racers = [pool.submit(racer, number) for number in range(RACERS)]
    won: list[bytes] = []
    for done in racers:
        try:
            outcome = done.result()
        except Unavailable:
            # Some stores answer a conflict of writers with an error; it must not have written.
            if all(other.exception() is not None for other in racers):
                raise
            continue
        if outcome is not None:
            won.append(outcome)
    return won


def _refused(bucket: Bucket, fact: str) -> InvalidArgument:
    expected = "a store with atomic put-if-absent, such as Amazon S3 or SeaweedFS"
    return InvalidArgument(
        f"the object store at {bucket.name} does not do conditional puts atomically (If-None-Match:"
        f" {fact}), and two servers could both acknowledge: expected {expected}",
        field="object_url",
        value=bucket.name,
        expected=expected,
    )
