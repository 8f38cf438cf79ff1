"""Keep records in plain files with checksummed blocks and a log."""
