"""The `routetrace` command; see docs/cli.md."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command and exit.

    The exit code is 0 on success, 1 if something is missing, wrong or unreachable, 2 on a usage
    error.
    """
    # Errors of gRPC are reported as ours; its log lines are for developers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from routetrace.cli.commands import app
    except ImportError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking not in ("typer", "rich"):
            raise
        print(
            f"routetrace: {lacking} is not installed: pip install '.[cli]' in a checkout",
            file=sys.stderr,
        )
        sys.exit(2)
    # Unfinished files are removed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
