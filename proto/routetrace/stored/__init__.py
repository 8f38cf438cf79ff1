"""Messages of a data directory: records of the journal, and snapshots."""
