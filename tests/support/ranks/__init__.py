"""Rows of trainer ranks, and processes that hold them."""
