"""`python -m routetrace.server`: the `routetrace-server` command."""

import sys

from routetrace.server.command import main

if __name__ == "__main__":
    sys.exit(main())
