"""Metrics, scrapes, telemetry and logs."""
