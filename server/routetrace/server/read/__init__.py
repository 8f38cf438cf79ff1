"""Serve the calls of readers: reads, look-ups, followers, deletion, status."""
