"""Deliberate faults of access control and of the isolation of tenants."""
