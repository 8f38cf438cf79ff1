"""Weight version of the KV that an engine can reuse (docs/rows.md, section 6)."""

from __future__ import annotations

from routetrace.codec.records import UNKNOWN_VERSION


class KvVersion:
    """Weight version of all KV in the blocks of an engine, and of all KV outside of them.

    Each is one number: that of all KV since the store was emptied, None if there is none since, and
    UNKNOWN_VERSION if it is of several versions, or not known. Steps are noted when the version
    changes or is asked for, so that a step itself costs nothing.

    Args:
        declared: whether each store outside of the blocks is emptied at every weight update.
    """

    def __init__(self, declared: bool) -> None:
        self._declared = declared
        self._blocks: int | None = UNKNOWN_VERSION
        self._outside: int | None = UNKNOWN_VERSION
        self._step = 0

    def ran(self, step: int, version: int) -> None:
        """Note that the steps since those noted before, up to this one, were of a version."""
        if step != self._step:
            self._step = step
            self.add(version)

    def add(self, version: int) -> None:
        """Note a pass; UNKNOWN_VERSION: of no version, or of one that is not known."""
        self._blocks = _joined(self._blocks, version)
        self._outside = _joined(self._outside, version)

    def load(self, version: int) -> None:
        """Note that KV came into blocks from outside, while `version` is the present one."""
        known = self._is_outside(version)
        self._blocks = _joined(self._blocks, version if known else UNKNOWN_VERSION)

    def empty_blocks(self, *, live: bool) -> None:
        """Note that no block holds KV that can be reused; `live`: but for running requests."""
        self._blocks = UNKNOWN_VERSION if live else None

    def empty_outside(self, *, live: bool) -> None:
        """Note that no store outside of the blocks holds KV, but for running requests if `live`."""
        self._outside = UNKNOWN_VERSION if live else None

    def is_of(self, version: int, *, cached: bool, external: bool) -> bool:
        """Whether all KV that a request could reuse is of the present version.

        Args:
            version: the present one.
            cached: whether the request has cached tokens that are not external.
            external: whether it has external tokens.
        """
        return (
            version != UNKNOWN_VERSION
            and (not cached or self._blocks in (None, version))
            and (not external or self._is_outside(version))
        )

    def _is_outside(self, version: int) -> bool:
        return version != UNKNOWN_VERSION and (self._declared or self._outside in (None, version))


def _joined(before: int | None, version: int) -> int:
    """Return the one version of the KV before and of new KV."""
    return version if before in (None, version) else UNKNOWN_VERSION
