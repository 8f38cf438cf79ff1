"""The `routetrace-server` command; see daemon.py."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the daemon; return its exit code, which is 2 where the extra is not installed."""
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
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
