"""Measure and estimate the capacity of a deployment."""
