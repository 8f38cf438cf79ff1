"""Modules that all rooms of the server use."""
