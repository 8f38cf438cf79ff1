"""Contract of agents, server and clients: messages, frames, layouts and records."""
