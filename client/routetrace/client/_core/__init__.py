"""Decide without I/O: calls, retries and results as read plans, checks of messages."""
