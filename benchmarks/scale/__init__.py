"""Mixed load of a server, and how long it holds the event loop."""
