"""Runs that lie in all workers: parts of their traces, gathered where they are read."""
