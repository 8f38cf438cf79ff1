"""Fixtures and settings of all tests."""

import signal

from hypothesis import HealthCheck, settings

# A shell starts a command in the background with SIGINT ignored, and children would inherit that:
# tests that press Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails for being slow: machines are busy.
settings.register_profile("routetrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("routetrace")
