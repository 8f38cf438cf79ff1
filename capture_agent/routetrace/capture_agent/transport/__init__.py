"""Send chunks to the server and keep them until they are acknowledged."""
