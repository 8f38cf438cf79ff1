"""Servers to test against, and stand-ins for the services around them."""
