"""Read messages and checksums as they cross the wire."""
