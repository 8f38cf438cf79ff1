"""Announcements of the process to its process manager: a ready file, and systemd."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)


def ready(file: Path | None, addresses: Sequence[str]) -> None:
    """Announce that the server is ready.

    Args:
        file: gets the addresses, one a line; None: no file.
        addresses: of the server, and of its metrics if they are served.
    """
    if file:
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text("\n".join(addresses))
        part.replace(file)
    _notify_systemd("READY=1")
    _log.info("ready")


def stopping() -> None:
    """Announce that the server drains."""
    _notify_systemd("STOPPING=1")


def _notify_systemd(state: str) -> None:
    """Report a state to systemd, for units of Type=notify."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(state.encode(), address)
        except OSError as error:
            _log.warning("cannot notify systemd of %s: %s", state, error)
