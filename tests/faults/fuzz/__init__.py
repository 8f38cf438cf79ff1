"""Fuzzing of every decoder: `python -m faults.fuzz`."""
