"""Traces: sources of rows, joins and prefixes."""
