"""Logging of the daemon: console lines on a terminal, else one JSON object a line.

Libraries log through `logging.getLogger("routetrace.server...")`; only the daemon calls `set_up`.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from routetrace.server.config import LogFormat, LogLevel


def set_up(level: LogLevel, log_format: LogFormat) -> None:
    """Sends everything that is logged to stderr, with the keys event, level, ts and logger."""
    console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("routetrace").setLevel(level.upper())
