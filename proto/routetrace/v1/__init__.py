"""Contract of agents, server and clients: routetrace.proto and its stubs."""
