"""Runs commands of the command line in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from routetrace.cli.commands import app


def commands(monkeypatch: pytest.MonkeyPatch, target: str, run: str) -> Callable[..., Any]:
    """Return a function that runs a command against a server and checks its exit code.

    Nothing of the environment's own ROUTETRACE_* settings is seen.
    """
    for name in [name for name in os.environ if name.startswith("ROUTETRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROUTETRACE_TARGET", target)
    monkeypatch.setenv("ROUTETRACE_RUN", run)
    return partial(_call, CliRunner())


def _call(runner: CliRunner, *words: str, code: int = 0) -> Any:
    done = runner.invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    return done
