"""Faults that were found once, brought back on purpose."""
