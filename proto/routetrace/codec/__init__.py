"""Encode, check and decode frames of rows, and the packed columns of messages."""
