"""Keep the log in an S3-compatible object store, owned by one server at a time."""
