"""Fixtures and settings of all tests."""

import os
import signal
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

from routetrace.server.testing import ServerProcess
from support.servers import forked

# A shell starts a command in the background with SIGINT ignored, and children would inherit that:
# tests that press Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ServerProcess.popen = forked.start

# No test fails for being slow: machines are busy. The examples of a property follow from its
# source, so that every run of a commit has the same; `--hypothesis-profile=new` draws others, and
# prints how to repeat one that fails.
settings.register_profile(
    "committed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
settings.register_profile(
    "new", settings.get_profile("committed"), derandomize=False, database=None, print_blob=True
)
settings.load_profile("committed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, a share on each worker, so that none is left alone with one.

    `--dist worksteal` gives each worker an equal part of the list, and moves only what others have
    at the end of theirs. Tests of a module stay together, as they share its fixtures.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    others: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("slow"):
            modules[item.nodeid.partition("::")[0]].append(item)
        else:
            others.append(item)
    if workers < 2 or not modules or not others:
        return
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for module in sorted(modules.values(), key=len, reverse=True):
        min(shares, key=len).extend(module)
    left = len(items)
    arranged: list[pytest.Item] = []
    for worker, share in enumerate(shares):
        size = left // (workers - worker)
        left -= size
        fill = max(0, size - len(share))
        arranged += [*share, *others[:fill]]
        del others[:fill]
    items[:] = arranged + others
