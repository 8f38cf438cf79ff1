"""Simulated engines, their loads and a comparer, for `bench load` and tests."""
