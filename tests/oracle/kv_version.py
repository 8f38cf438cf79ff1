"""The weight version of KV that an engine could reuse, as far as its calls prove it.

Section 6 of docs/rows.md, in the order in which an engine calls. It knows nothing of the KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Version = int | None
"""None: of no version that anybody knows."""


@dataclass
class _Since:
    """What an engine was told to have computed since a store was emptied."""

    versions: set[Version] | None = None
    """None: it never was emptied, or requests were live then."""

    def emptied(self, live: bool) -> None:
        self.versions = None if live else set()

    def made(self, version: Version) -> None:
        if self.versions is not None:
            self.versions.add(version)

    def all_of(self, version: Version) -> bool:
        return self.versions is not None and self.versions <= {version}


@dataclass
class KvVersion:
    """Follows the calls of one boot of an engine."""

    declared: bool
    """Whether each store outside is emptied at every update."""
    version: Version = None
    _inside: _Since = field(default_factory=_Since)
    _outside: _Since = field(default_factory=_Since)

    def reset_prefix_cache(self, *, live: bool) -> None:
        self._inside.emptied(live)

    def reset_external_kv(self, *, live: bool) -> None:
        """KV in the engine's blocks may get there afterwards."""
        self._outside.emptied(live or not self._inside.all_of(self.version))

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
        if cached and not self._inside.all_of(self.version):
            return None
        return self.version if self._outside_holds or not external else None

    @property
    def _outside_holds(self) -> bool:
        return self.declared or self._outside.all_of(self.version)

    def _made(self, version: Version) -> None:
        for since in (self._inside, self._outside):
            since.made(version)
