"""The command `routetrace experts`: load of experts, simulated caches and placements."""
