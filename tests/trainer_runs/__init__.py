"""Rows in trainers' own code; see `python -m trainer_runs`."""
