"""Break access control and the isolation of tenants, one promise at a time; its test must fail.

python -m isolation.mutations           in tests/
python -m isolation.mutations --none    the same tests in a copy that is not broken: all must pass

The promises are those of docs/security.md, and of "Shares" in docs/operations.md.
"""

from __future__ import annotations

import sys

from isolation.access import ACCESS
from isolation.shares import SHARES
from regressions.judging import run

FAULTS = (*ACCESS, *SHARES)

MUTATIONS = tuple(fault.mutation for fault in FAULTS)


if __name__ == "__main__":
    sys.exit(run(FAULTS, "isolation.mutations", __doc__))
