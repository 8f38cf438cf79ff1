"""Log lines about a server that cannot be reached."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from routetrace.client._core.config import Config
from routetrace.client._core.steps import Sleep, Step
from routetrace.common.errors import ERROR_METADATA_KEY, Unavailable

_log = logging.getLogger(__name__)


class Outage:
    """Outage as the calls of one client see it: one line per cause, and one at its end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._logged: set[str] = set()

    def before(self, step: Step[object]) -> None:
        """Note a step that is about to be carried out."""
        if not isinstance(step, Sleep) or not isinstance(step.failure, Unavailable):
            return
        text = self._config.explained(step.failure).message
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("routetrace: %s (retrying for %.0f s)", text, step.left)

    def failed(self, failure: grpc.RpcError) -> None:
        """Note a failed call: an error of the server itself is an answer, too."""
        call: Any = failure  # failed calls are errors and calls at once
        if any(key == ERROR_METADATA_KEY for key, _ in call.trailing_metadata() or ()):
            self._config.reached.set()
        self._config.route.failed(failure)

    def answered(self) -> None:
        """Note an answer of the server."""
        self._config.reached.set()
        if self._logged:
            self._logged.clear()
            _log.warning("routetrace: connected to %s again", self._config.target)
