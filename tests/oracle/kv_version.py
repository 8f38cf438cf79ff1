"""The weight version of KV that an engine could reuse, as far as its calls prove it.

Section 6 of docs/rows.md, in the order in which an engine calls. It knows nothing of the KV.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = int | None
"""None: of no version that anybody knows."""


@dataclass
class KvVersion:
    """Follows the calls of one boot of an engine."""

    declared: bool
    """Whether each store outside is emptied at every update."""
    hosts: bool = False
    """Whether KV comes from a store outside without being external: by copies."""
    version: Version = None
    inside: set[Version] | None = None
    """Of all KV in the engine's blocks that can be reused; None: nobody can say."""
    outside: set[Version] | None = None
    """Of all KV elsewhere."""

    def reset_prefix_cache(self, *, live: bool) -> None:
        self.inside = None if live else set()

    def reset_external_kv(self, *, live: bool) -> None:
        """KV that is in the engine's blocks may get there afterwards."""
        self.outside = None if live or self.inside is None else {*self.inside}

    def ran(self, *, captured: bool) -> None:
        """A pass was told; one that was not captured is of no version."""
        self._made(self.version if captured else None)

    def loaded(self) -> None:
        """KV came from outside, into blocks that others hit."""
        self._made(self.version if self._outside_holds else None)

    def of(self, cached: int, external: int) -> Version:
        """That of a request that begins with so many cached tokens, and so many from outside."""
        if self.version is None:
            return None
        if cached and self.inside not in ({self.version}, set()):
            return None
        outside = external or (cached and self.hosts)
        return self.version if self._outside_holds or not outside else None

    @property
    def _outside_holds(self) -> bool:
        return self.declared or self.outside in ({self.version}, set())

    def _made(self, version: Version) -> None:
        for versions in (self.inside, self.outside):
            if versions is not None:
                versions.add(version)
