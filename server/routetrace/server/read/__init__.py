"""Serve traces: views, cuts and answers."""
