"""Ways of rows from an engine to a trainer, and the processes at their ends."""
