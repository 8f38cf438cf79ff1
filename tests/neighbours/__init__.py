"""Attacks of one tenant, beside another one that writes and reads; see docs/security.md.

`make test-neighbours`, or `python -m neighbours` with tests/ in PYTHONPATH.
"""
