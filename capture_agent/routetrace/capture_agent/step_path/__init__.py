"""Take the calls of an engine into the ring: checks, steady steps, handles. No I/O, no locks."""
