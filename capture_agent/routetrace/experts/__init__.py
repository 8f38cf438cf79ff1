"""Expert weights served from host memory, and policies learned from traces."""
