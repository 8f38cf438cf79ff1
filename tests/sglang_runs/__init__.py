"""Runs of SGLang as it is published, on the CPU."""
