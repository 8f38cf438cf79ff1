"""Turn records of the ring into chunks: intake, framing, chunks. No I/O, no clock."""
