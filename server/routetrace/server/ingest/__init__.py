"""Take chunks in: streams, sessions and acknowledgements."""
