"""Keep records and payloads: the interface, memory and disk."""
