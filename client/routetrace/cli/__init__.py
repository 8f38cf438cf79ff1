"""The `routetrace` command: gets, lists, checks and forgets traces; docs/cli.md."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs the command that the arguments name, and exits.

    With 0 if all went well, 1 if something is missing, wrong or out of reach, 2 if the command is
    not one.
    """
    # What gRPC has to say comes as an error; its own log lines are for programmers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from routetrace.cli.commands import app
    except ImportError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking not in ("typer", "rich"):
            raise
        print(
            f"routetrace: {lacking} is not installed: pip install 'routetrace[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    # What is half written goes, as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
