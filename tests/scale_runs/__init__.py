"""Servers without disks over a real object store, and all that can happen to them."""
