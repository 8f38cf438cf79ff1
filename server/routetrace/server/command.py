"""The `routetrace-server` command; see daemon.py."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the daemon, and end the process with its exit code; return 2 without the extra."""
    if sys.argv[1:2] == ["health"]:
        # gRPC reads this as it is imported. Its own lines would come before the one that says it.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from routetrace.server import daemon
    except ImportError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking in ("", "routetrace"):
            raise
        print(
            f"routetrace-server: {lacking} is not installed: pip install '.[server]' in a checkout",
            file=sys.stderr,
        )
        return 2
    return daemon.end_process(daemon.main())


if __name__ == "__main__":
    sys.exit(main())
