"""Division of a bucket's prefix into partitions, which its first server notes for good."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from routetrace.common.errors import InvalidArgument
from routetrace.server.store.object.bucket import Bucket

_KEY = "layout"


def partition_url(url: str, number: int) -> str:
    """Return the URL of a partition's log."""
    return f"{url.rstrip('/')}/{partition_path(number)}"


def partition_path(number: int) -> str:
    """Return the path of a partition below the prefix of all."""
    return f"part/{number}"


def check_layout(
    bucket: Bucket, workers: int, run_workers: Mapping[str, int], spread_runs: Sequence[str] = ()
) -> None:
    """Check that a prefix is divided as the settings of this server say, or new.

    Rows never move: servers that placed a run differently would each have a part of it.

    Raises:
        InvalidArgument: if it is divided otherwise.
        Unavailable: if the object store does not answer.
    """
    given: dict[str, Any] = {"workers": workers, "run_workers": dict(sorted(run_workers.items()))}
    if spread_runs:  # not there in the prefixes of older servers
        given["spread_runs"] = sorted(spread_runs)
    body = json.dumps(given).encode()
    if bucket.create(_KEY, body):
        return
    content = bucket.get(_KEY) or b""
    try:
        found = {"spread_runs": [], **json.loads(content)}
        given = {"spread_runs": [], **given}
        differing = next((name for name in given if found[name] != given[name]), "")
    except (ValueError, TypeError, KeyError):
        raise _refused(bucket, "object_url", bucket.name, "a prefix of this store") from None
    if differing:
        expected = f"{json.dumps(found[differing])}, with which its first server started"
        raise _refused(bucket, differing, json.dumps(given[differing]), expected)


def _refused(bucket: Bucket, field: str, value: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is {value} for {bucket.name}: expected {expected}; another division needs a new "
        "prefix",
        field=field,
        value=value,
        expected=expected,
    )
