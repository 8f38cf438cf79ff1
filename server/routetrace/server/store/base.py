"""Part that all stores share: the lock, the numbers of the records, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from routetrace.common.errors import Closed
from routetrace.server.store.interface import Ascending, Ownership


class StoreBase:
    """Base of the stores. `_changed` guards all attributes but those of a store's own threads."""

    #: See `Store.ownership`.
    ownership: Ownership | None = None

    def __init__(self, last: int = 0) -> None:
        self._changed = threading.Condition()
        self._numbers = Ascending(last)
        self._closing = False

    def _stored(self) -> Iterable[int]:
        """Return the records with a stored payload."""
        raise NotImplementedError

    def numbers(self) -> list[int]:
        """See `Store.numbers`."""
        with self._changed:
            self._check_open()
            return list(self._stored())

    def last_number(self) -> int:
        """See `Store.last_number`."""
        with self._changed:
            self._check_open()
            return self._numbers.last

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("the store is closed")
