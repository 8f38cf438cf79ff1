"""Fixtures of what is deployed."""

from __future__ import annotations

import os

import pytest

from support.composed import stage_of


@pytest.fixture
def server_environment(monkeypatch):
    """The environment that the image gives to the server."""
    for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
        monkeypatch.delenv(name)
    for name, value in stage_of("server").pairs("ENV").items():
        if name.startswith("ROUTETRACE_"):
            monkeypatch.setenv(name, value)
