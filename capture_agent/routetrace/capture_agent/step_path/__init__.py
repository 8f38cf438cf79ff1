"""Check the calls of an engine and write them to the ring, without a wait for the background."""
