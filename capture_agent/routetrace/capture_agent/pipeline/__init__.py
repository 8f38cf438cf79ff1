"""Turn the calls of an engine into chunks: ring, framing, chunks. No I/O, no clock."""
