"""Load and rivals of ingest."""
