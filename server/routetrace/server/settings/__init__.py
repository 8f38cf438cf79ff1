"""Settings of the server, from flags, environment and file."""
