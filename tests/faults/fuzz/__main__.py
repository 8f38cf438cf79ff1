"""`python -m faults.fuzz`: fuzzing of every decoder."""

import sys

from faults.fuzz.runner import main

if __name__ == "__main__":
    sys.exit(main())
