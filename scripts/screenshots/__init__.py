"""Pictures of the web page, of a real run: `make screenshots`."""
