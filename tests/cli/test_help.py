"""Help texts at 80 columns, of every command there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from routetrace.cli.commands import app
from routetrace.client import TraceState


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command and those below it, with their names."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


COMMANDS = dict(commands(get_command(app)))
#: Commands that connect to a server.
CONNECTED = [
    words for words, command in COMMANDS.items() if not hasattr(command, "commands")
    if words != ("bench", "capacity")
]  # fmt: skip


def said(*words: str, columns: int = 80) -> str:
    """Return the help of a command; typer's own runner has a width of its own."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            app([*words, "--help"], prog_name="routetrace")
    assert end.value.code == 0
    return out.getvalue()


def test_all_commands_are_looked_at():
    assert {(), ("get",), ("bench",), ("bench", "load"), ("bench", "capacity")} <= {*COMMANDS}
    assert len(CONNECTED) >= 15


@pytest.mark.parametrize("words", COMMANDS)
def test_help_fits_and_shows_nothing_of_python(words):
    text = said(*words)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("<", ">", "{", "}", "list[", "factory", "bool", "None", "Path"):
        assert word not in text, word
    assert not re.search(r"\d{7}", text)
    assert not re.search(r"default: default\b|\[default|\[env", text)
    assert "--version" in text
    assert "-h, --help" in text


@pytest.mark.parametrize("words", COMMANDS)
def test_each_value_has_a_name_and_each_option_a_text(words):
    text = said(*words)
    for param in COMMANDS[words].params:
        name = max(param.opts, key=len)
        if getattr(param, "rich_help_panel", None) == "Connection" and words:
            continue
        assert param.help, name
        if param.param_type_name == "argument":
            assert re.search(r"^  [A-Z]+  ", text, re.MULTILINE)
            continue
        pattern = r"(  |$)" if param.is_flag else r" [A-Z]+([:=][A-Z]+)?(  |$)"
        assert re.search(rf"^  (-\w, )?{name}{pattern}", text, re.MULTILINE), name


@pytest.mark.parametrize("words", COMMANDS)
def test_choices_are_whole_words_each_with_an_explanation(words):
    text = said(*words)
    for choice in choices_of_command(words):
        assert re.search(rf"^ +{choice}: \S", text, re.MULTILINE), choice


def choices_of_command(words: tuple[str, ...]) -> list[str]:
    parameters = inspect.signature(COMMANDS[words].callback, eval_str=True).parameters
    return [value for param in parameters.values() for value in choices_of(param.annotation)]


def choices_of(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [one.value for one in kind]
    return [choice for inner in get_args(kind) for choice in choices_of(inner)]


def test_choices_are_found():
    assert choices_of_command(("list",)) == [state.value for state in TraceState]
    assert {"chat", "quick", "rank"} <= {*choices_of_command(("bench", "load"))}


@pytest.mark.parametrize("words", CONNECTED)
def test_a_command_says_where_the_options_of_the_connection_are(words):
    text = said(*words)
    assert "--target, --run" in text
    assert text.endswith("see routetrace --help\n")
    assert "ROUTETRACE_" not in text


def test_the_options_of_the_connection_are_in_one_text():
    text = " ".join(said().split())
    assert "--target HOST:PORT Server (env: ROUTETRACE_TARGET; default: 127.0.0.1:7411)." in text
    assert '(env: ROUTETRACE_RUN; default: the run "default").' in text
    for param in COMMANDS["list",].params:
        if param.rich_help_panel == "Connection":
            assert f"--{param.name.replace('_', '-')} " in text
            assert re.search(rf"[(; ]env: ROUTETRACE_{param.name.upper()}[;)]", text) or (
                param.name == "timeout"
            )


def test_help_wraps_paragraphs_and_not_lines():
    (line,) = [x for x in said("bench", "load", columns=100).splitlines() if "Every row read" in x]
    assert len(line) > 90


def test_a_default_is_not_broken():
    assert any("(default: 1,000,000)" in x for x in said("bench", "capacity").splitlines())


def test_usage_names_arguments_plainly():
    assert said("tail").startswith("Usage: routetrace tail [OPTIONS] ID\n")
    assert said("get").startswith("Usage: routetrace get [OPTIONS] [ID...]\n")
    assert said("delete").startswith("Usage: routetrace delete [OPTIONS] ID...\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("list", "--state", "aborted"),
            "Invalid value for '--state': 'aborted' is not one of 'running', 'complete', "
            "'incomplete'.",
        ),
        (("list", "--limit", "x"), "Invalid value for '--limit': "),
        (("bench", "load", "--agents", "4000"), "Invalid value for '--agents': "),
    ],
)
def test_a_value_that_is_refused_is_no_error_of_another_library(words, error):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"\nError: {error}" in result.output
    assert "Value error" not in result.output
    assert "Input should" not in result.output
