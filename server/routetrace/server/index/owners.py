"""Owners of stored parts and of calls: tokens, or runs on a server without tokens."""


def owner_of(token: str, run: str) -> str:
    """Return the owner of a call or a stored part: its token, or its run where it has none."""
    return f"token {token}" if token else f"run {run}"
