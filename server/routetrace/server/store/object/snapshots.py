"""Objects of snapshots, and the deletion of what a compaction leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from routetrace.common.errors import Corrupt, NotFound
from routetrace.server.store.object import format as fmt
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.format import Compaction

#: Bytes of one object of a snapshot, about.
PART_BYTES = 16 << 20
# More than any part of a snapshot has.
_WHOLE = 1 << 40


def write(bucket: Bucket, index: int, pieces: Iterable[bytes]) -> tuple[str, int]:
    """Write a snapshot; return its prefix and the number of its parts.

    Args:
        bucket: of the log.
        index: of the log's next object, which the prefix names.
        pieces: of the snapshot.
    """
    directory = f"snap/{index:016d}-{os.urandom(8).hex()}"
    parts, part = 0, bytearray()
    for piece in pieces:
        part += fmt.pack_piece(piece)
        if len(part) >= PART_BYTES:
            bucket.put(f"{directory}/{parts:05d}", bytes(part))
            parts, part = parts + 1, bytearray()
    if part:
        bucket.put(f"{directory}/{parts:05d}", bytes(part))
        parts += 1
    return directory, parts


def read(bucket: Bucket, found: Compaction) -> Iterator[bytes]:
    """Yield the pieces of a snapshot.

    Raises:
        Corrupt: if a part of it is missing or damaged.
    """
    for number in range(found.parts):
        key = f"{found.directory}/{number:05d}"
        try:
            part = bucket.range(key, 0, _WHOLE)
        except NotFound as error:
            raise Corrupt(f"{key}, a part of the snapshot, is missing") from error
        yield from fmt.unpack_pieces(part, key)


def outdated(bucket: Bucket, base: int, current: str) -> list[str]:
    """Return the keys of marks and snapshots of compactions before the one at `base`.

    Keys of other writers are never among these: their indexes are above a fence that is above
    this compaction.
    """
    old = [f.key for f in bucket.list("mark/") if 0 <= fmt.index_of(f.key) < base]
    for found in bucket.list("snap/"):
        name = found.key.split("/")[1]
        if f"snap/{name}" != current and 0 <= fmt.index_of(name.partition("-")[0]) < base:
            old.append(found.key)
    return old
