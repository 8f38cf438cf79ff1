"""Records of the log and snapshots, as they are stored."""
