"""Requests to an S3-compatible object store, with typed errors and bounded waits.

All that excludes a second writer rests on one conditional request: `create` writes an object only
if its key is free. Replacing an object by its ETag is not used: SeaweedFS 4.48 and moto 5.2.5 let
two of eight racers win there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from routetrace.common.errors import InvalidArgument, NotFound, Unavailable
from routetrace.server.common.addresses import split_object_url

T = TypeVar("T")

#: Seconds for which a request that may be repeated is repeated.
RETRY_SECONDS = 60.0
_PAUSES = (0.05, 2.0)
_DEFAULT_REGION = "us-east-1"


class Listed(NamedTuple):
    """An object in a listing."""

    key: str
    size: int


class Bucket:
    """A prefix of a bucket. Thread-safe.

    Args:
        store: an obstore store, such as S3Store or MemoryStore.
        name: URL for messages.
        retry_seconds: time for the repetition of one request.
    """

    def __init__(self, store: Any, name: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        import obstore
        from obstore import exceptions

        self.name = name
        self._api: Any = obstore
        self._store = store
        self._retry_seconds = retry_seconds
        self._taken = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        self._refused = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            PermissionError,
        )

    # ------------------------------------------------------------------ conditional

    def create(self, key: str, body: bytes) -> bool:
        """Write an object if its key is free; return False if it is taken. One attempt.

        Raises:
            Unavailable: the outcome is not known.
        """
        try:
            self._api.put(self._store, key, body, mode="create", use_multipart=False)
        except self._taken:
            return False
        except Exception as error:
            raise self._failure("put", key, error) from error
        return True

    # ------------------------------------------------------------------ harmless to repeat

    def put(self, key: str, body: bytes) -> None:
        """Write an object that no other writer has a key for."""
        self._repeated(
            "put", key, lambda: self._api.put(self._store, key, body, use_multipart=False)
        )

    def get(self, key: str) -> bytes | None:
        """Return an object; None if there is none. One attempt."""
        try:
            return bytes(self._api.get(self._store, key).bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure("get", key, error) from error

    def range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of an object, fewer at its end.

        Raises:
            NotFound: if there is no such object.
        """

        def read() -> bytes:
            return bytes(self._api.get_range(self._store, key, start=start, length=length))

        return self._repeated("get", key, read)

    def list(self, prefix: str) -> list[Listed]:
        """Return the objects below a prefix that ends in a slash."""

        def listed() -> list[Listed]:
            pages = self._api.list(self._store, prefix.rstrip("/"), chunk_size=1000)
            return [Listed(str(m["path"]), int(m["size"])) for page in pages for m in page]

        return self._repeated("list", prefix, listed)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are fine."""
        if not keys:
            return
        try:
            self._repeated("delete", keys[0], lambda: self._api.delete(self._store, [*keys]))
        except NotFound:  # most stores do not say so
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])

    def _repeated(self, verb: str, key: str, call: Callable[[], T]) -> T:
        until = time.monotonic() + self._retry_seconds
        pause, most = _PAUSES
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFound(f"{self.name}: no object {key}") from error
            except Exception as error:
                failure = self._failure(verb, key, error)
                if isinstance(failure, InvalidArgument) or time.monotonic() + pause > until:
                    raise failure from error
            time.sleep(pause)
            pause = min(most, 2 * pause)

    def _failure(self, verb: str, key: str, error: Exception) -> Unavailable | InvalidArgument:
        text = " ".join(str(error).split())[:300]
        if isinstance(error, self._refused):
            expected = "credentials that may read, write, list and delete there (AWS_* variables)"
            return InvalidArgument(
                f"the object store refuses to {verb} {key} in {self.name}: {text}: "
                f"expected {expected}",
                field="object_url",
                value=self.name,
                expected=expected,
            )
        return Unavailable(
            f"the object store does not {verb} {key} in {self.name}: {text}", retry_after=1.0
        )


def open_bucket(
    url: str, endpoint: str = "", *, timeout: float = 30.0, retry_seconds: float = RETRY_SECONDS
) -> Bucket:
    """Return the bucket of an S3 URL; credentials come from the AWS_* variables.

    Args:
        url: s3://bucket/prefix.
        endpoint: URL of the service, if it is not that of AWS or of $AWS_ENDPOINT_URL.
        timeout: seconds of one request.
        retry_seconds: time for the repetition of one request.

    Raises:
        InvalidArgument: if obstore is not installed, or does not take the settings.
    """
    bucket, prefix = split_object_url(url)
    try:
        from obstore.store import S3Store
    except ImportError as error:
        expected = "obstore (pip install obstore)"
        raise InvalidArgument(
            f"store is 'object', and obstore is not installed: expected {expected}",
            field="store",
            value="object",
            expected=expected,
        ) from error
    given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if not ({"AWS_REGION", "AWS_DEFAULT_REGION"} & {*os.environ}):
        given["region"] = _DEFAULT_REGION
    plain = (endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": plain,
                "timeout": timedelta(seconds=timeout),
                "connect_timeout": timedelta(seconds=min(5.0, timeout)),
            },
            # A repetition after an answer that was lost finds its own object; the callers of
            # conditional requests must see that.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
            **given,
        )
    except Exception as error:
        raise InvalidArgument(
            f"object_url is {url!r}: {error}", field="object_url", value=url, expected=str(error)
        ) from error
    return Bucket(store, url, retry_seconds=retry_seconds)
