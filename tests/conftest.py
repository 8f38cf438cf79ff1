"""Fixtures and settings of all tests."""

from hypothesis import HealthCheck, settings

# No test fails for being slow: machines are busy.
settings.register_profile("routetrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("routetrace")
