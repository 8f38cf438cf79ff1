"""`make test-gpu`: everything that needs a CUDA device."""
