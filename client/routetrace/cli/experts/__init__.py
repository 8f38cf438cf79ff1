"""Report the load of experts, in tables and pictures."""
