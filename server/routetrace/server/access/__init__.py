"""Authenticate callers, and bound the load that is admitted."""
