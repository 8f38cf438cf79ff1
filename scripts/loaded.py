"""Run a command beside busy loops, one for each core: `scripts/loaded.py make test`."""

from __future__ import annotations

import os
import subprocess
import sys

_LOOP = "while True: pass"


def main() -> int:
    """Return the exit code of the command."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(sys.argv[1:], check=False).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
