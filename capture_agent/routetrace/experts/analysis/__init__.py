"""Analyze recorded routing: statistics, simulated caches, placements, reports."""
