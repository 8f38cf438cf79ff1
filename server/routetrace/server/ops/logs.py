"""Logging of the daemon: console lines on a terminal, else one JSON object a line.

Libraries log through `logging.getLogger("routetrace.server...")`; only the daemon calls `set_up`.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from routetrace.server.settings.config import LogFormat, LogLevel


def set_up(level: LogLevel, log_format: LogFormat, worker: int | None = None) -> None:
    """Configure logging to stderr, with the keys event, level, ts and logger.

    Args:
        level: minimum level.
        log_format: form of a line.
        worker: number of the worker that logs, for the key worker; None: a server without others.
    """
    console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    if worker is not None:
        shared.append(partial(_add, {"worker": worker}))
    last: list[Processor]
    if console:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), timestamp_key="ts")]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
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


def _add(keys: dict[str, Any], _: Any, __: str, event: EventDict) -> EventDict:
    return {**event, **keys}
