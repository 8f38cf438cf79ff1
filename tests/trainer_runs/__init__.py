"""What trainers do with rows, in their own code; see `python -m trainer_runs`."""
