"""Pack rows: frames, their compiled loops, and the packed columns of messages."""
