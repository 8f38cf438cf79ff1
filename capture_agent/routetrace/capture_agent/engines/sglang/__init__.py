"""Capture in SGLang by its own plugin entry point; see docs/sglang.md."""
