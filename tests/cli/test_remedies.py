"""Remedies of errors speak in options of the command line, not in keywords of Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from routetrace.cli.commands import app
from routetrace.cli.errors import describe, error_json, in_options
from routetrace.common.errors import NotFound, RouteTraceError

ROOT = Path(__file__).parents[2]
#: Packages whose errors reach commands.
SOURCES = ("proto/routetrace/common", "client/routetrace/client", "server/routetrace/server")
KEYWORD = re.compile(r"\b[a-z_]+=")

#: Remedies with keywords of calls that no command makes.
NOT_OF_COMMANDS = {
    'pass errors="return" to go on with the other traces',
    "use dataclasses.replace(config, x=...)",
    "use Security(token=...), or a mapping of its fields",
    "use the nonce of the answer's handle, or incarnation=x",
}


def _text(node: ast.AST | None) -> Iterator[str]:
    """Yield the texts of an expression, with x in place of values."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(v.value if isinstance(v, ast.Constant) else "x" for v in values)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_text(body), *_text(orelse))


def _remedies(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="remedy", value=value):
                yield from _text(value)
            case ast.Assign(targets=[ast.Name(id="remedy")], value=value):
                yield from _text(value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if any(
                isinstance(name, ast.Name) and name.id == "remedy" for name in names
            ):
                for name, value in zip(names, values, strict=True):
                    if isinstance(name, ast.Name) and name.id == "remedy":
                        yield from _text(value)


def remedies() -> set[str]:
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py"))
    return {text for file in files for text in _remedies(ast.parse(file.read_text("utf-8")))}


def _options() -> set[str]:
    def of(command: object) -> Iterator[str]:
        for param in command.params:  # type: ignore[attr-defined]
            yield from param.opts
        for one in getattr(command, "commands", {}).values():
            yield from of(one)

    return {*of(typer.main.get_command(app))}


def test_every_remedy_with_keywords_becomes_one_with_options():
    found = {text for text in remedies() if KEYWORD.search(text)}
    assert found >= NOT_OF_COMMANDS
    translated = {in_options(text) for text in found - NOT_OF_COMMANDS}
    assert translated == {
        "check --run, or --wait-for end if it has not begun",
        "check the handle, or --wait-for end if the request has not begun",
        "use --wait-for end or --missing mask",
        "use --missing mask",
        "the server may be busy: raise --timeout",
        "pass --target or set ROUTETRACE_TARGET",
    }
    options = {option for text in translated for option in re.findall(r"--[a-z-]+", text)}
    assert options <= _options()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"run"}, "check --run"),
        ({"run", "wait_for"}, "check --run, or --wait-for end if it has not begun"),
        ((), ""),
    ],
)
def test_an_alternative_with_options_of_other_commands_is_left_out(parameters, text):
    assert in_options('check run=, or wait_for="end" if it has not begun', parameters) == text


def test_an_id_that_looks_like_a_keyword_stays():
    remedy = 'check run=, or wait_for="end"'
    error = NotFound(f"trace 'run=3' is not in run 'b'; {remedy}", field="trace_id", remedy=remedy)
    message = "trace 'run=3' is not in run 'b'; check --run, or --wait-for end"
    assert describe(error) == message
    assert error_json(error) == {
        "error": "NotFound",
        "message": message,
        "field": "trace_id",
        "remedy": "check --run, or --wait-for end",
    }


def test_words_behind_a_remedy_stay():
    error = RouteTraceError(
        'has not ended; use wait_for="end"; missing [1, 2)', remedy='use wait_for="end"'
    )
    assert describe(error) == "has not ended; use --wait-for end; missing [1, 2)"
