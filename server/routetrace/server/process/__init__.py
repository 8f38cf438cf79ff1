"""Server process: workers, ownership of its store, readiness."""
