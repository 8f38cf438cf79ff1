"""Logging of the daemon: console lines on a terminal, else one JSON object a line.

Libraries log through `logging.getLogger("routetrace.server...")`; only the daemon calls `set_up`.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from routetrace.server.settings.config import LogFormat, LogLevel

#: Names of the keys, by the attributes of `logging.LogRecord`.
_KEYS = {"message": "event", "levelname": "level", "name": "logger", "exc_info": "exception"}


class _Json(JsonFormatter):
    """One JSON object a line."""

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Give the level as the setting spells it."""
        return {**log_data, "level": log_data["level"].lower()}


def set_up(level: LogLevel, log_format: LogFormat, worker: int | None = None) -> None:
    """Configure logging to stderr, with the keys event, level, ts and logger.

    Args:
        level: minimum level.
        log_format: form of a line.
        worker: number of the worker that logs, for the key worker; None: a server without others.
    """
    console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"
    formatter: logging.Formatter
    if console:
        number = "" if worker is None else f" worker={worker}"
        formatter = logging.Formatter(
            f"%(asctime)s %(levelname)-8s %(message)s [%(name)s]{number}", "%Y-%m-%dT%H:%M:%SZ"
        )
        formatter.converter = time.gmtime
    else:
        formatter = _Json(
            "%(message)s %(levelname)s %(name)s",
            rename_fields=_KEYS,
            rename_fields_keep_missing=False,
            timestamp="ts",
            static_fields=None if worker is None else {"worker": worker},
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_not_a_hang_up)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("routetrace").setLevel(level.upper())


def _not_a_hang_up(record: logging.LogRecord) -> bool:
    """Leave out that gRPC could not send to a caller that had just hung up, which any may do."""
    error = record.exc_info[1] if record.exc_info else None
    return not (
        record.name == "grpc._cython.cygrpc" and type(error).__name__ == "ExecuteBatchError"
    )
