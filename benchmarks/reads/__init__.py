"""Load and rivals of reads."""
