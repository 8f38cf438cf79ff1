"""Version of a scheduler's weights, as SGLang's updates tell it."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Weights:
    """Version of the weights that compute the passes from now on.

    An update is one call, or a session of several that each bring a part. Where one fails, some
    weights may be new: the version is unknown until an update succeeds.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._known = True
        self._in_session = False
        self._changed = False  # in the session

    @property
    def version(self) -> int | None:
        """The version; None while it is unknown."""
        return self._newest if self._known and not self._in_session else None

    def told(self, version: object) -> None:
        """Note that weights are new.

        Args:
            version: as SGLang was given it; another one is made up unless it is a number.
        """
        text = str(version)
        number = text.lstrip("-").isdigit() and -(1 << 63) <= int(text) < 1 << 63
        self._newest = int(text) if number else self._newest + 1
        self._known = self._changed = True

    def update_begun(self) -> None:
        """Note that an update begins."""
        self._known = False

    def update_ended(self, version: object, *, success: bool) -> None:
        """Note the end of an update.

        SGLang also calls one failed where all weights are new, of which it told before, and its
        cache could not be flushed.

        Args:
            version: see `told`.
            success: whether SGLang calls it one.
        """
        if self._known:
            return
        if success:
            self.told(version)
            return
        _log.warning(
            "routetrace: an update of the weights failed; rows are missing until one succeeds"
        )

    def session_begun(self) -> None:
        """Note that weights change part by part from now on."""
        self._in_session, self._changed = True, False

    def session_ended(self) -> None:
        """Note that all parts are there; those that no update brought were written by others."""
        if self._in_session and self._known and not self._changed:
            self.told(None)
        self._in_session = False
