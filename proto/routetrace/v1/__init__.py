"""The contract: messages, frames, layouts and errors that agents, server and clients share."""
