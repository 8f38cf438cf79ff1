"""Version of the installed package."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Return the version of routetrace, "unknown" where its metadata cannot be read.

    A tree on PYTHONPATH has none, and no engine is to fail for that.
    """
    try:
        return metadata.version("routetrace") or "unknown"
    except Exception:  # of metadata without a file or a field as well, by version of Python
        return "unknown"
