"""Version of a scheduler's weights, from SGLang's calls that update them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?[0-9]{1,19}")


@dataclass(slots=True)
class _Call:
    """A call that replaces weights, until it returns or raises."""

    reported: bool = False
    """SGLang has reported that the weights are loaded."""
    number: int | None = None


@dataclass(slots=True)
class _Session:
    """Several calls that replace the weights part by part."""

    number: int | None = None
    """The last version that was given as a number."""
    failed: bool = False
    """A part, or the end, failed."""
    ended: bool = False
    """The end failed: SGLang may have closed the session, or not."""


class Weights:
    """Version of the weights that compute the passes from now on.

    It is a number that a trainer gave, or unknown: updates are not counted, since a count of one
    engine says nothing about the weights of another.

    The weights are torn while a session is open, and after a failed call, when some of them may be
    new: until all of them are replaced by a whole update or a session, or a trainer names them.

    Args:
        engine_id: for the warning.
        version: version that SGLang was started with, as for `report`.
    """

    def __init__(self, engine_id: str = "", version: object = None) -> None:
        self._engine_id = engine_id
        self._newest = _number(version)
        self._torn = False  # a call failed, and weights of it may still be there
        self._call: _Call | None = None
        self._session: _Session | None = None
        self._changed = self._warned = self._distrusted = False

    @property
    def torn(self) -> bool:
        """Whether some weights may be of another update than the others."""
        return self._torn or self._session is not None

    @property
    def version(self) -> int | None:
        """The version; None while it is unknown, or the weights are torn."""
        return None if self.torn or self._distrusted else self._newest

    def check_told(self) -> None:
        """Warn, once, if a pass is computed by new weights whose version nobody gave."""
        if self._warned or not self._changed or self._newest is not None or self.torn:
            return
        self._warned = True
        _log.warning(
            "routetrace: the weights of engine %r changed, and their version is unknown: rows of "
            "them are served, but stand in for no others; give `weight_version`, a 64-bit "
            "integer, in the update request",
            self._engine_id,
        )

    def begin_call(self) -> None:
        """Begin a call that replaces weights."""
        self._call = _Call()

    def report(self, version: object) -> None:
        """Record that SGLang has loaded weights.

        Args:
            version: version given to SGLang. If it spells no 64-bit integer, it is a label, and
                the version is unknown; in a session the last number that a part was given stands.
        """
        number = _number(version)
        if self._call is not None:
            self._call.reported, self._call.number = True, number
        else:
            self._replace(number, whole=False)

    def end_call(self, version: object, *, success: bool, whole: bool) -> None:
        """End a call that replaces weights.

        SGLang 0.5.23 reports the weights before it flushes its cache, and returns a failure where
        the flush is refused: such a failure is ignored.

        Args:
            version: as for `report`.
            success: whether the call returned success.
            whole: whether such a call replaces all weights, and not a part of them.
        """
        call, self._call = self._call or _Call(), None
        if success or call.reported:
            self._replace(call.number if call.reported else _number(version), whole=whole)
            return
        if self._session is None:
            self._torn = True
        else:
            self._session.failed = True
        _warn("a weight update")

    def rename(self, version: object) -> None:
        """Record the version that a trainer gives to the present weights.

        The weights are known again after a failed call: the trainer vouches for them. In a session
        it is the version of its end.

        Args:
            version: as for `report`.
        """
        self._replace(_number(version), whole=True)

    def lose(self) -> None:
        """Record that the memory of the weights was given back without a copy of them."""
        if self._session is not None:
            self._session.number = None
        self._newest, self._changed = None, True

    def distrust(self) -> None:
        """Make the version unknown: another process may write the weights without notice."""
        self._distrusted = True

    def begin_session(self) -> None:
        """Begin a session of calls that replace the weights part by part."""
        self._session = _Session()

    def end_session(self, *, success: bool) -> None:
        """End the session. If it had no call, other processes wrote the weights (P2P, RDMA).

        Args:
            success: whether SGLang returned success and kept the parts.
        """
        session = self._session
        if session is None:
            return
        if not success:
            session.failed = session.ended = True
            _warn("the end of a session of weight updates")
            return
        self._session = None
        if session.failed:
            self._torn = True
            _warn("a part of a session of weight updates")
        else:
            self._replace(session.number, whole=True)

    def _replace(self, number: int | None, *, whole: bool) -> None:
        session = self._session
        if session is not None and whole and session.ended:
            session = self._session = None
        if session is not None:
            session.number = session.number if number is None else number
            return
        self._newest, self._changed = number, True
        self._torn = self._torn and not whole


def _warn(failed: str) -> None:
    _log.warning(
        "routetrace: %s failed: rows are missing (not_captured) until an update from disk or a "
        "session is complete, or /update_weight_version names the weights",
        failed,
    )


def _number(version: object) -> int | None:
    """Return the integer that a version spells; None if it is none of 64 bits.

    The least one is none either: it stands for an unknown version on the wire.
    """
    text = str(version)
    if _NUMBER.fullmatch(text) and -(1 << 63) < int(text) < 1 << 63:
        return int(text)
    return None
