"""Stand-ins for engines and their agents, which send chosen chunks."""
